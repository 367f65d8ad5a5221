"""A `Response` between processes: its status, headers and content type as a head, and the body beside it. Sans-IO.

The head comes from a worker, in which anybody's code runs, and its headers are written to a socket: so it is checked
once more where it is read.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from carpool.http_response import BODILESS, Response, check_content_type, check_headers, check_status
from carpool.wire.payload import Buffer, Payload


class Answer(NamedTuple):
    """What a client is to get.

    Attributes:
        content_type: empty where it is that of any good answer.
    """

    status: int
    body: Buffer
    content_type: bytes
    headers: tuple[tuple[bytes, bytes], ...]


class _ResponseHead(msgspec.Struct, array_like=True):
    status: int
    content_type: str | None
    headers: tuple[tuple[str, str], ...]


def pack(response: Response, body: Buffer) -> Payload:
    """A response whose value has been written as `body`."""
    return [_encoder.encode(_ResponseHead(response.status, response.content_type, response.headers)), body]


def unpack(payload: Payload) -> Answer:
    """What `pack` has made. Raises ValueError: it is something else, or must not be sent to a client."""
    if type(payload) is not list or len(payload) != 2:
        raise ValueError("a response is a head and a body")
    try:
        head = _decoder.decode(payload[0])
        check_status(head.status)
        check_headers(head.headers)
        if head.content_type is not None:
            check_content_type(head.content_type)
    except (msgspec.MsgspecError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"the head of a response cannot be read: {error}") from error
    if head.status in BODILESS and len(payload[1]):
        raise ValueError(f"a response with status {head.status} and a body")
    headers = tuple([(name.lower().encode(), value.encode("latin-1")) for name, value in head.headers])
    return Answer(head.status, payload[1], (head.content_type or "").encode(), headers)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_ResponseHead)
