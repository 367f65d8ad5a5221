"""A `Response` between processes: status, headers and content type as a head, and the body beside
it. Sans-IO.

The head comes from a worker, which runs the user's code, and its headers are written to a socket.
So it is checked once more where it is read.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from carpool.http_response import BODILESS, Response, check_content_type, check_headers, check_status
from carpool.wire.payload import Buffer, Payload


class CheckedResponse(NamedTuple):
    """A response that may be sent to a client.

    Attributes:
        status: The HTTP status.
        body: The body, already encoded.
        content_type: Empty for the content type of any good answer.
        headers: Further headers, with names in lower case.
    """

    status: int
    body: Buffer
    content_type: bytes
    headers: tuple[tuple[bytes, bytes], ...]


class _Head(msgspec.Struct, array_like=True):
    status: int
    content_type: str | None
    headers: tuple[tuple[str, str], ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Head)


def pack_response(response: Response, body: Buffer) -> Payload:
    """Return a response as a payload; its value has been written as `body`."""
    return [_encoder.encode(_Head(response.status, response.content_type, response.headers)), body]


def unpack_response(payload: Payload) -> CheckedResponse:
    """Read what `pack_response` has made.

    Raises:
        ValueError: The payload is not a response, or one that must not be sent to a client.
    """
    if type(payload) is not list or len(payload) != 2:
        raise ValueError("a response must consist of a head and a body")
    try:
        head = _decoder.decode(payload[0])
        check_status(head.status)
        check_headers(head.headers)
        if head.content_type is not None:
            check_content_type(head.content_type)
    except (msgspec.MsgspecError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"the head of a response cannot be read: {error}") from error
    if head.status in BODILESS and len(payload[1]):
        raise ValueError(f"a response with status {head.status} must not have a body")
    headers = tuple([(name.lower().encode(), value.encode("latin-1")) for name, value in head.headers])
    return CheckedResponse(head.status, payload[1], (head.content_type or "").encode(), headers)
