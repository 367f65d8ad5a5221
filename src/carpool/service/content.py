"""The content of a service's requests, which is bytes: opened only where its graph needs it.

What branches have come to is put together unread: as one payload for the next stage or for a Python
caller, and in JSON or msgpack as an array or an object around the branches' own bytes. Opened are
items for a `choose=` of the coordinator, and those that an empty branch hands on.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from carpool.engine.core.content import check_length, check_list
from carpool.engine.foreign import as_model_error, text_of
from carpool.engine.hints import schema
from carpool.engine.hints.plain import with_arrays
from carpool.engine.wire import payload
from carpool.engine.wire.outcome import portable
from carpool.engine.wire.payload import JSON, MSGPACK, OBJECT, OBJECTS, RAW
from carpool.engine.worker.own import chosen
from carpool.errors import CarpoolError, InvalidRequest, ModelError, too_large

_cut_json = msgspec.json.Decoder(list[msgspec.Raw]).decode
_cut_msgpack = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_name_in_json = msgspec.json.Encoder().encode
_name_in_msgpack = msgspec.msgpack.Encoder().encode
_SHOWN = {
    "model_error": "The model failed on this item.",
    "bad_result": "The model returned what does not fit.",
    "worker_lost": "The worker was lost.",
    "deadline_exceeded": "The model took too long.",
}


class Payloads:
    """Takes items and results apart that are payloads, and puts them together."""

    measure = staticmethod(payload.size_of)

    def __init__(self, takes: Any) -> None:
        self._takes = takes
        self._readers = schema.MadeWhenNeeded(
            {OBJECT: payload.load, RAW: schema.raw_reader(takes)},
            {JSON: lambda: schema.json_reader(takes), MSGPACK: lambda: schema.msgpack_reader(takes)},
        )

    def choose(self, choose: Callable[[Any], str], item: Any, format: int, known: str) -> str:
        """Return the name of an item's branch, by the user's function. Raises CarpoolError."""
        return chosen(choose, self._opened(item, format), known)

    def _opened(self, item: Any, format: int) -> Any:
        try:
            return self._readers[format](item)
        except BaseException as error:  # reading runs code of the item's types
            ours = schema.as_our_error(error, payload.format_name(format), self._takes, item)
            if isinstance(ours, CarpoolError) and format != OBJECT:
                raise ours from error
            raise ModelError(f"an item cannot be read: {text_of(error)}", type_name=type(error).__name__) from error

    def handed_on(self, item: Any, format: int, accept: int) -> Any:
        """Return an item as a payload, or as its caller wants the answer."""
        if accept in OBJECTS:
            return item if format == OBJECT else self._written(self._opened(item, format), OBJECT)
        return self._written(self._opened(item, format), accept)

    def items(self, item: Any, format: int, most: float) -> list[Any]:
        """Return the items of a list, each in the format of the list. Raises CarpoolError."""
        if format in (JSON, MSGPACK):
            try:
                cut = (_cut_json if format == JSON else _cut_msgpack)(item)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise schema.as_our_error(error, payload.format_name(format), list[Any], item) from error
            if len(cut) > most:
                raise too_large(f"the list has {len(cut)} items, and at most {most} are taken")
            return [bytes(each) for each in cut]
        if format != OBJECT:
            raise InvalidRequest("this service takes a list: send it as JSON or msgpack")
        try:
            parts = payload.parts_in(item)
        except ValueError as error:
            raise ModelError(f"a list cannot be read: {error}", code="bad_result") from error
        if parts is None:
            value = self._opened(item, OBJECT)
            check_list(value, most)
            parts = [self._written(each, OBJECT) for each in value]
        check_length(len(parts), most)
        return parts

    def joined(self, block: Any, results: Sequence[Any], accept: int) -> Any:
        """Return the results of branches as one payload, or as the caller wants the answer.

        Raises ModelError where a worker has not made it what it had to be.
        """
        try:
            if accept in OBJECTS:
                return payload.join(results, block.names, is_tuple=block.is_tuple)
            return _spliced(block.names, results, accept)
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"what branches have come to cannot be put together: {error}", code="bad_result"
            ) from error

    def as_value(self, error: Exception, accept: int) -> Any:
        """Return an error as a payload, or for a client as an object with its code and its text."""
        code = getattr(error, "code", "model_error")
        if accept not in OBJECTS:
            return self._written({"error": {"code": code, "message": _SHOWN.get(code, _SHOWN["model_error"])}}, accept)
        try:
            return payload.dump(portable(error))
        except BaseException:  # of a user's class that cannot be pickled
            return payload.dump(ModelError(text_of(error), code=code, type_name=type(error).__name__))

    def _written(self, value: Any, accept: int) -> Any:
        try:
            if accept in OBJECTS:
                return payload.dump(with_arrays(value) if accept != OBJECT else value)
            return schema.json_writer(Any)(value) if accept == JSON else schema.msgpack_writer(Any)(value)
        except MemoryError:
            raise
        except BaseException as error:  # the value's own code
            raise as_model_error(error, "an item that is handed on") from error


def _spliced(names: Sequence[str] | None, results: Sequence[bytes], accept: int) -> bytes:
    if accept == JSON:
        if names is None:
            return b"[%b]" % b",".join(results)
        return b"{%b}" % b",".join(
            [b"%b:%b" % (_name_in_json(name), each) for name, each in zip(names, results, strict=True)]
        )
    if accept != MSGPACK:
        raise TypeError("it can be written in JSON and msgpack only")
    if names is None:
        return _head(len(results), 0x90, 0xDC) + b"".join(results)
    pairs = zip(map(_name_in_msgpack, names), results, strict=True)
    return _head(len(results), 0x80, 0xDE) + b"".join([part for pair in pairs for part in pair])


def _head(n: int, short: int, long: int) -> bytes:
    """Return the head of an array or a map of msgpack."""
    if n < 16:
        return bytes([short | n])
    return struct.pack(">BH", long, n) if n < 2**16 else struct.pack(">BI", long + 1, n)
