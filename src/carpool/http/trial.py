"""Tries a model as a client would: an example goes in as the body of a request, and the body of an
answer comes out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from carpool.engine.drive.callers import TaskCaller, error_of
from carpool.engine.hints import schema
from carpool.engine.request import Request
from carpool.engine.wire.outcome import CheckedResponse
from carpool.engine.wire.payload import JSON, MSGPACK, OBJECT, RAW
from carpool.http.codec import Formats

if TYPE_CHECKING:
    from carpool.model import Traits
    from carpool.service.handle import AsyncHandle

_READERS: dict[int, Callable[[Any], object]] = {JSON: msgspec.json.decode, MSGPACK: msgspec.msgpack.decode}


async def try_first_example(handle: AsyncHandle, traits: Traits, formats: Formats, timeout_s: float) -> None:
    """Have the first example answered in the format of a client that asks for none, or in msgpack,
    which can express more.

    Raises:
        Exception: Neither can be had.
    """
    example = traits.examples[0]
    format, body = _body_of(example, traits)
    usual = formats.usual(format)
    problem: Exception | None = None
    for accept in dict.fromkeys((usual,) if formats.owns_output else (usual, MSGPACK)):
        request = handle.new_request(example, timeout_s, 0)
        if format != OBJECT:
            request.format, request.item = format, body
        request.accept = accept
        try:
            await _answer(handle, request, accept)
            return
        except Exception as error:
            problem = problem or error
            if getattr(error, "code", None) != "bad_result":
                break
    assert problem is not None
    raise problem


async def _answer(handle: AsyncHandle, request: Request, accept: int) -> None:
    """Wait for the answer to a request and read it. Raises why that cannot be done."""
    driver = handle.running_driver
    request.caller = caller = TaskCaller(driver.loop)
    driver.submit(request)
    try:
        await caller.done
    except asyncio.CancelledError:
        driver.cancel(request)
        raise
    if request.error is not None:
        raise error_of(request)
    if type(request.result) is not CheckedResponse and accept in _READERS:
        _READERS[accept](request.result)


def _body_of(example: object, traits: Traits) -> tuple[int, bytes]:
    """Return an example as a client would send it, and the format of that.

    It is sent as the Python object that it is if no client could write it, and to a model with a
    `decode`, whose result it is.
    """
    kind = traits.input_type
    if traits.accepts:
        return OBJECT, b""
    if kind is bytes and isinstance(example, bytes | bytearray | memoryview):
        return RAW, bytes(example)
    for format, make in ((JSON, schema.json_writer), (MSGPACK, schema.msgpack_writer)):
        try:
            return format, make(kind)(example)
        except BaseException:  # writers of types may be user code
            continue
    return OBJECT, b""
