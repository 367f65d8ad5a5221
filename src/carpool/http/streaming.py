"""Answers in parts over HTTP: how parts, ends and failures are written. Sans-IO.

A client asks for parts by its `Accept` header. It can always distinguish a whole answer from a
broken one:

* `text/event-stream` (server-sent events): `data: PART` for each part, then `event: end` with
  `data: {"parts": N}`; or `event: error` with `data: {"error": {...}}` and no end;
* `application/x-ndjson`: a line `{"part": PART}` for each part, then `{"end": {"parts": N}}`; or a
  line `{"error": {...}}`;
* `application/octet-stream`, where parts are `bytes`: the parts one after the other. A failure
  breaks the body off, so the chunked coding does not end.

What fails before the first part is answered as for any request, with a status. So the head is
written with the first part, or once a client has received nothing for `SILENCE_S`. From then on it
gets something in each such silence that its reader skips: a comment among events, and before a line
the space that JSON allows there. Silence is measured where bytes go: of a part for which nothing is
written the client has received nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from carpool.engine.drive.callers import Unread
from carpool.engine.wire.payload import JSON, RAW

SILENCE_S: Final = 15.0
"""After how many seconds without a byte a client gets a keep-alive."""


class Framing(NamedTuple):
    """How an answer in parts is written.

    Attributes:
        content_type: Of the response.
        format: How parts are encoded, see `wire/payload.py`.
        part: The form of a part; `%b` is the part.
        end: The end of a whole answer; `%d` is the number of parts.
        error: The end of a broken one; `%b` is the body of an error response, with its status.
            Empty if only breaking off can show it.
        alive: The keep-alive; empty if there is none.
        headers: Those that the response has besides.
    """

    content_type: bytes
    format: int
    part: bytes
    end: bytes
    error: bytes
    alive: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def with_end(self, n: int) -> bytes:
        """Return the end of a whole answer of `n` parts."""
        return self.end % n if self.end else b""


_NOT_KEPT = ((b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))

SSE: Final = Framing(
    b"text/event-stream",
    JSON,
    b"data: %b\n\n",
    b'event: end\ndata: {"parts": %d}\n\n',
    b"event: error\ndata: %b\n\n",
    b": alive\n\n",
    _NOT_KEPT,
)
NDJSON: Final = Framing(
    b"application/x-ndjson", JSON, b'{"part": %b}\n', b'{"end": {"parts": %d}}\n', b"%b\n", b" ", _NOT_KEPT
)
PLAIN: Final = Framing(b"application/octet-stream", RAW, b"%b", b"", b"", b"", _NOT_KEPT)

BULK: Final = Framing(b"application/x-ndjson", JSON, b"%b\n", b"", b"%b\n", b" ", _NOT_KEPT)

BY_TYPE: Final = {framing.content_type: framing for framing in (SSE, NDJSON)}
"""The framings that every model has, by content type."""


class Delivery:
    """How far an answer in parts has come on its way to an HTTP client.

    Attributes:
        has_begun: Whether a part has been sent, or the head written: no status can report a failure
            any more.
        held: Pieces that wait for the answers before it, or for a slow client.
        unread: How much that is.
        written_at: When a part was written by itself last, else when the request was made; see
            `Stream.part_at` for those that were written as they came.
        unwatch: Called once nobody has to look for silences any more.
    """

    __slots__ = ("has_begun", "held", "is_head_written", "unread", "unwatch", "written_at")

    unwatch: Callable[[], None]

    def __init__(self, asked_at: float) -> None:
        self.written_at = asked_at
        self.has_begun = self.is_head_written = False
        self.held: list[bytes] = []
        self.unread = Unread()

    def hold(self, data: bytes) -> bool:
        """Keep bytes that cannot be written yet; report whether the stream must be paused now."""
        self.held.append(data)
        return self.unread.add(len(data))

    def take_held(self) -> bytes:
        data = b"".join(self.held)
        self.held.clear()
        self.unread.take_all()
        return data


def framed(framing: Framing, part: Any) -> bytes:
    return framing.part % (part,)
