"""The HTTP/1.1 door: one client connection over httptools (llhttp), with limits and time-outs of our own.

llhttp parses and sets no limits; this file counts. It knows bytes, framing, order and time; what an address means is
the app's business. The rules:

* answers leave in the order of their requests; when too many wait, nothing more is read;
* a body of known, large length is received straight into memory of its own and never passes the parser;
* a request that is refused before its body was read gets its answer, then the connection is closed;
* a client that half-closes still gets its answers; one that is gone has its queued requests cancelled;
* a client that does not read is not read from either, and is dropped after a while.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import httptools

from carpool.errors import CarpoolError, Overloaded
from carpool.http.codec import Refusal, too_large
from carpool.http.exchange import WANTED_HEADERS, Exchange, Head, Response

if TYPE_CHECKING:
    from carpool.http.app import App

logger = logging.getLogger("carpool")

SCRATCH_BYTES = 256 * 1024
LARGE_BODY = 64 * 1024
_FRAMING_HEADERS = frozenset({b"host", b"expect", b"transfer-encoding"})
_KEPT_HEADERS = WANTED_HEADERS | _FRAMING_HEADERS
_NEVER_KNOWN = frozenset({b"expect", b"transfer-encoding", b"x-request-id"})
_LONGEST_KNOWN_HEAD = 2048
_MOST_KNOWN_HEADS = 1024
_LONGEST_LOOKED_UP = 16 * 1024  # more in one go is a large body, or many requests at once
_FORBIDDEN_TRAILERS = frozenset({b"content-length", b"host", b"transfer-encoding"})
_LINGER_S = 2.0  # so long a refused request's body is read and thrown away, so that the answer arrives
_PROBE_AFTER_S = 0.02
_PROBE_TRIES = 8
_FIELD_OVERHEAD = 4  # ": " and CRLF


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may take up.

    Attributes:
        connections: open at a time; one more is answered 503 and closed, without an answer from twice as many on.
        header_bytes: all header lines of a request; header_fields: how many; target_bytes: its address.
        chunks: parts of a chunked body.
        pipelined: requests of one connection in the app at a time.
        body_bytes_in_flight: bodies being received, over all connections.
        write_buffer_bytes: answers that wait for a slow reader before its connection is no longer read.
        header_s, body_s: time for the headers and for the body to arrive.
        idle_s: time between requests; write_s: time for a slow reader to take its answers.
    """

    connections: int = 1024
    header_bytes: int = 32 * 1024
    header_fields: int = 64
    target_bytes: int = 8 * 1024
    chunks: int = 65_536
    pipelined: int = 16
    body_bytes_in_flight: int = 256 * 2**20
    write_buffer_bytes: int = 256 * 1024
    header_s: float = 10.0
    body_s: float = 30.0
    idle_s: float = 75.0
    write_s: float = 30.0


class HttpHead(Head):
    """A head as this door sees it.

    Attributes:
        length: of the body, where the head says it.
        keep_alive: whether the connection goes on after the answer; old_version: whether it is HTTP/1.0.
        is_plain: whether a good answer needs nothing but the usual headers and its body.
        unread: whether the request was refused before all of it was read.
    """

    __slots__ = ("is_plain", "keep_alive", "length", "old_version", "unread")

    def __init__(self, method: bytes, path: bytes, headers: Mapping[bytes, bytes], old_version: bool = False) -> None:
        super().__init__(method, path, headers)
        self.length = int(headers.get(b"content-length", b"0"))
        self.keep_alive = True
        self.old_version = old_version
        self.is_plain = method != b"HEAD" and not old_version
        self.unread = False


class Listener:
    """What all connections of one server share.

    Attributes:
        scratch: where every connection receives; used up before the next one receives.
        connections: the open ones.
        heads: recent heads by their exact bytes. Clients repeat theirs, and equal bytes mean the same, so most
            requests need no parsing at all.
        good: by content type, a good answer as far as its length, for the present second.
        body_bytes: how many bytes of bodies are being received.
        draining: whether connections are to be closed after the answers that are owed.
    """

    def __init__(self, app: App, limits: Limits) -> None:
        self.app = app
        self.limits = limits
        self.scratch = bytearray(SCRATCH_BYTES)
        self.view = memoryview(self.scratch)
        self.connections: set[Connection] = set()
        self.heads: dict[bytes, HttpHead] = {}
        self.body_bytes = 0
        self.draining = False
        self._emptied: asyncio.Future[None] | None = None
        self.good: dict[bytes, bytes] = {}
        self._loop = asyncio.get_running_loop()
        self._common = b""

    def __call__(self) -> Connection:
        return Connection(self)

    def remember(self, raw: bytes, head: HttpHead) -> None:
        """Keep a parsed head, by its bytes without the blank line, for the next request that has the same."""
        if len(self.heads) >= _MOST_KNOWN_HEADS:
            self.heads.clear()
        self.heads[raw.removesuffix(b"\r\n\r\n")] = head

    def drain(self) -> None:
        """Close idle connections now, the others after the answers that are owed."""
        self.draining = True
        for connection in list(self.connections):
            connection.drain()

    def abort(self) -> None:
        """Close every connection, whatever it is doing."""
        for connection in list(self.connections):
            connection.abort()

    async def empty(self) -> None:
        """Wait until the last connection is closed."""
        if self.connections:
            self._emptied = asyncio.get_running_loop().create_future()
            await self._emptied

    def remove(self, connection: Connection) -> None:
        """A connection is closed."""
        self.connections.discard(connection)
        if self._emptied is not None and not self._emptied.done() and not self.connections:
            self._emptied.set_result(None)

    def common_headers(self) -> bytes:
        """Headers of every answer. They hold for the present second, since one of them is the date."""
        if not self._common:
            now = time.time()
            date = formatdate(now, usegmt=True).encode()
            self._common = b"date: %b\r\nx-content-type-options: nosniff\r\n" % date
            self._loop.call_later(1.0 - now % 1.0, self._forget_common)
        return self._common

    def start_of_good(self, content_type: bytes) -> bytes:
        """A good answer as far as its length."""
        start = b"HTTP/1.1 200 OK\r\n%bcontent-type: %b\r\ncontent-length: " % (self.common_headers(), content_type)
        self.good[content_type] = start
        return start

    def _forget_common(self) -> None:
        self._common = b""
        self.good.clear()


class HttpExchange(Exchange):
    """An exchange whose answer goes out on a connection, in its turn."""

    __slots__ = ("connection", "out")

    head: HttpHead

    def __init__(self, connection: Connection, head: HttpHead, body: bytes | bytearray = b"") -> None:
        Exchange.__init__(self, head, body)
        self.connection = connection
        self.out: Response | None = None

    def respond(self, response: Response) -> None:
        if self.out is None:
            self.out = response
            self.connection.flush()

    def tell(self) -> None:
        if self.error is not None or not self.connection.answer_now(self):
            super().tell()


class _Stop(Exception):
    """Raised inside the parser: the present request is not read any further."""

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


class Connection(asyncio.BufferedProtocol):
    """One client."""

    def __init__(self, listener: Listener) -> None:
        self.app = listener.app
        self._listener = listener
        self._limits = listener.limits
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._loop = asyncio.get_running_loop()
        self._parser: Any = httptools.HttpRequestParser(self)
        # the request that is being received
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._fields = 0
        self._header_bytes = 0
        self._unparsed_bytes = 0  # received since the parser last completed something
        self._in_headers = False
        self._raw_head = b""  # its bytes, if they are worth remembering
        self._head: HttpHead | None = None  # its body is being received
        self._refusal: Response | None = None  # what the app said to its head
        self._parts: list[bytes] = []
        self._body_bytes = 0
        self._chunks = 0
        self._own: memoryview | None = None  # a large body's own memory
        self._own_got = 0
        # the requests that are owed an answer, in order; the first `_handled` have been given to the app
        self._owed: deque[HttpExchange] = deque()
        self._handled = 0
        # the end, and what stands in the way
        self._handing_on = False  # `_hand_on` is at work
        self._deaf = False  # what still comes is thrown away
        self._half_closed = False
        self._paused_writing = False
        self._paused_reading = False
        # time
        self._requests = 0
        self._quiet_since = 0  # `_requests` when the idle timer last looked, -1 if one of them was not over yet
        self._idle_timer: asyncio.TimerHandle | None = None
        self._receive_timer: asyncio.TimerHandle | None = None
        self._receiving = (0, False)  # the request, and whether it is its body, that `_receive_timer` is for
        self._write_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None

    # -- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        self._listener.connections.add(self)
        self._receive_timer = self._loop.call_later(self._limits.header_s, self._received_too_slowly)
        self._idle_timer = self._loop.call_later(self._limits.idle_s, self._look_if_idle)
        open_ones, most = len(self._listener.connections), self._limits.connections
        if open_ones > 2 * most:
            self.abort()
        elif open_ones > most:
            self._refuse(self.app.refuse(None, Refusal(503, "too_many_connections")))

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.remove(self)
        timers = (self._idle_timer, self._receive_timer, self._write_timer, self._end_timer, self._probe_timer)
        for timer in timers:
            if timer is not None:
                timer.cancel()
        self._deaf = True
        self._forget_request()
        for exchange in self._owed:
            self.app.gone(exchange)
        self._owed.clear()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._own is not None:
            return self._own[self._own_got :]
        return self._listener.view

    def buffer_updated(self, nbytes: int) -> None:
        if self._deaf:
            return
        if self._own is not None:
            self._own_got += nbytes
            if self._own_got == len(self._own):
                # received beside the parser, which still waits for it and is replaced
                self._parser = httptools.HttpRequestParser(self)
                self.on_message_complete()
        elif self._in_headers or self._head is not None or self._unparsed_bytes:
            self._feed(0, nbytes)
        else:
            self._receive(nbytes)
        if self._in_headers or self._head is not None or self._receive_timer is not None:
            self._time_receiving()

    def eof_received(self) -> bool:
        """The client sends no more. What it has asked for is still answered, if it is there to take it."""
        self._half_closed = True
        self._forget_request()
        if self._owed and self._probe_timer is None:
            self._probe_timer = self._loop.call_later(_PROBE_AFTER_S, self._is_client_there, 0)
        return bool(self._owed)

    def pause_writing(self) -> None:
        self._paused_writing = True
        self._write_timer = self._loop.call_later(self._limits.write_s, self.abort)
        self._regulate()

    def resume_writing(self) -> None:
        self._paused_writing = False
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._hand_on()

    # -- receiving

    def _receive(self, end: int) -> None:
        """Requests from the start of the scratch on: known heads are looked up, the rest goes to the parser."""
        if end > _LONGEST_LOOKED_UP:
            self._feed(0, end)
            return
        rest = bytes(self._listener.view[:end])
        while rest:
            raw, blank_line, rest = rest.partition(b"\r\n\r\n")
            head = self._listener.heads.get(raw)
            if head is None or head.length > len(rest) or not blank_line:
                self._raw_head = raw + blank_line
                self._feed(end - len(raw) - len(blank_line) - len(rest), end)
                self._raw_head = b""
                return
            body, rest = rest[: head.length], rest[head.length :]
            self._requests += 1
            exchange = HttpExchange(self, head, body)
            self._owed.append(exchange)
            if self._handled or self._paused_writing:
                self._hand_on()
            else:
                self._handled = 1
                head.route(exchange)

    def _feed(self, start: int, end: int) -> None:
        """Let the parser have a piece of the scratch."""
        self._unparsed_bytes += end - start
        while start < end and not self._deaf:
            try:
                self._parser.feed_data(self._listener.view[start:end])
            except httptools.HttpParserUpgrade as upgrade:
                start = self._decline_upgrade(start + upgrade.args[0], end)
                continue
            except httptools.HttpParserCallbackError as error:
                self._refuse(self._response_to(error.__context__))
            except httptools.HttpParserError:
                if not self._deaf:
                    self._refuse(self.app.refuse(self._head, Refusal(400, "bad_http")))
            else:
                if self._unparsed_bytes > self._limits.header_bytes + SCRATCH_BYTES and self._own is None:
                    # swallowed without a word: an endless header line or blank lines
                    self._refuse(self.app.refuse(self._head, Refusal(431, "headers_too_large")))
            return

    def _decline_upgrade(self, start: int, end: int) -> int:
        """An offer to change protocols is ignored. The parser stops behind its head; returns where it may go on."""
        self._parser = httptools.HttpRequestParser(self)
        if self._own is not None:
            n = min(len(self._own) - self._own_got, end - start)
            self.on_body(self._listener.view[start : start + n])
            start += n
            if self._own_got == len(self._own):
                self.on_message_complete()
        return start

    def _remember(self, raw: bytes, head: HttpHead) -> None:
        """Keep the head that was just parsed, if its bytes are known and are all that it means."""
        headers = head.headers
        if (
            head.keep_alive
            and not head.old_version
            and head.length < LARGE_BODY
            and headers.keys().isdisjoint(_NEVER_KNOWN)
            and not self._parser.should_upgrade()
            and len(raw) <= _LONGEST_KNOWN_HEAD
            # the lines are those the parser has seen, and all end as they should
            and raw.count(b"\n") == raw.count(b"\r\n") == self._fields + 2
        ):
            self._listener.remember(raw, head)

    def on_message_begin(self) -> None:
        """The parser's call, like all `on_...` below."""
        self._requests += 1
        self._target = b""
        self._headers = {}
        self._fields = self._header_bytes = self._chunks = self._body_bytes = 0
        self._parts = []
        self._in_headers = True

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > self._limits.target_bytes:
            raise Refusal(414, "uri_too_long")

    def on_header(self, name: bytes, value: bytes) -> None:
        limits = self._limits
        self._fields += 1
        self._header_bytes += len(name) + len(value) + _FIELD_OVERHEAD
        if self._fields > limits.header_fields or self._header_bytes > limits.header_bytes:
            raise Refusal(431, "headers_too_large")
        name = name.lower()
        if not self._in_headers:  # a trailer
            if name in _FORBIDDEN_TRAILERS:
                raise Refusal(400, "bad_http")
        elif name in _KEPT_HEADERS:
            if name in _FRAMING_HEADERS and name in self._headers:
                raise Refusal(400, "bad_http")
            self._headers[name] = value.strip(b" \t")

    def on_headers_complete(self) -> None:
        self._in_headers = False
        raw, self._raw_head = self._raw_head, b""
        parser, headers = self._parser, self._headers
        version = parser.get_http_version()
        self._check_framing(version)
        path = self._target.partition(b"?")[0]
        self._head = head = HttpHead(parser.get_method(), path, headers, version == "1.0")
        head.keep_alive = parser.should_keep_alive()
        head.is_plain = head.is_plain and head.keep_alive
        self._refusal = self.app.admit(head)
        has_body = head.length > 0 or b"transfer-encoding" in headers
        if self._refusal is None:
            if has_body:
                self._expect_body(head)
            if raw:
                self._remember(raw, head)
        elif has_body:
            raise _Stop(self._refusal)

    def on_body(self, body: bytes | memoryview) -> None:
        if self._own is not None:
            self._own[self._own_got : self._own_got + len(body)] = body
            self._own_got += len(body)
            return
        self._unparsed_bytes = 0
        self._body_bytes += len(body)
        self._listener.body_bytes += len(body)
        self._parts.append(body)  # type: ignore[arg-type]
        if self._body_bytes > self.app.max_body_bytes:
            raise too_large(self.app.max_body_bytes)
        if self._listener.body_bytes > self._limits.body_bytes_in_flight:
            raise _too_many_bytes()

    def on_chunk_header(self) -> None:
        self._unparsed_bytes = 0
        self._chunks += 1
        if self._chunks > self._limits.chunks:
            raise Refusal(413, "too_large")

    def on_message_complete(self) -> None:
        head = self._head
        assert head is not None
        if self._own is not None and self._own_got < len(self._own):
            return  # the parser sees no body in an offer to upgrade
        exchange = HttpExchange(self, head, self._take_body())
        exchange.out = self._refusal
        self._head = None
        self._unparsed_bytes = 0
        self._deaf = not head.keep_alive
        self._owed.append(exchange)
        self._hand_on()

    def _response_to(self, cause: BaseException | None) -> Response:
        """The answer to a request at which a call of the parser raised."""
        if isinstance(cause, _Stop):
            return cause.response
        if isinstance(cause, CarpoolError):
            return self.app.refuse(self._head, cause)
        logger.error("a request could not be handled", exc_info=cause)
        return self.app.refuse(self._head, CarpoolError("internal error"))

    def _check_framing(self, version: str) -> None:
        """What llhttp lets pass and we do not."""
        headers = self._headers
        if version not in ("1.1", "1.0"):
            raise Refusal(505, "version_not_supported")
        host = headers.get(b"host")
        if (host is None and version == "1.1") or not self._target.startswith(b"/"):
            raise Refusal(400, "bad_http")
        if host is not None and any(c in host for c in b"/@ ,"):
            raise Refusal(400, "bad_http")
        coding = headers.get(b"transfer-encoding")
        if coding is not None:
            if version == "1.0":
                raise Refusal(400, "bad_http")
            if coding.lower() != b"chunked" or self._parser.should_upgrade():
                raise Refusal(501, "not_implemented")
        if version == "1.1" and headers.get(b"expect", b"100-continue").lower() != b"100-continue":
            raise Refusal(417, "expectation_failed")

    def _expect_body(self, head: HttpHead) -> None:
        """Make ready for the body of an admitted request."""
        listener, length = self._listener, head.length
        if listener.body_bytes + length > self._limits.body_bytes_in_flight:
            raise _too_many_bytes()
        if b"expect" in self._headers and not head.old_version:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if length >= LARGE_BODY or self._parser.should_upgrade():
            self._own = memoryview(bytearray(length))
            self._own_got = 0
            listener.body_bytes += length

    def _take_body(self) -> bytes | bytearray:
        """The body that has been received, and its bytes off the account."""
        if self._own is not None:
            body = cast(bytearray, self._own.obj)
            self._listener.body_bytes -= len(body)
            self._own = None
            return body
        parts = self._parts
        self._listener.body_bytes -= self._body_bytes
        self._body_bytes = 0
        self._parts = []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _forget_request(self) -> None:
        """Let go of a request that is half received."""
        self._take_body()
        self._head = None
        self._in_headers = False

    # -- answering

    def _hand_on(self) -> None:
        """Give the app what it may have; what is refused already only waits for its turn."""
        if self._handing_on:
            return  # called by an answer given at once; the loop below goes on with the next
        owed = self._owed
        self._handing_on = True
        try:
            while self._handled < len(owed) and self._handled < self._limits.pipelined and not self._paused_writing:
                exchange = owed[self._handled]
                self._handled += 1
                if exchange.out is None:
                    self.app.handle(exchange)  # may answer at once, and shorten the queue
                else:
                    self.flush()
        finally:
            self._handing_on = False
        if self._paused_reading or len(owed) > self._limits.pipelined:
            self._regulate()

    def answer_now(self, exchange: HttpExchange) -> bool:
        """Write a good answer at once if that is all there is to do; False if it is not."""
        owed, head, transport = self._owed, exchange.head, self._transport
        body = cast(bytes, exchange.result)
        if (
            len(owed) != 1
            or not head.is_plain
            or self._half_closed
            or self._listener.draining
            or len(body) >= LARGE_BODY
            or transport.is_closing()
        ):
            return False
        owed.clear()
        self._handled = 0
        content_type = head.content_type
        start = self._listener.good.get(content_type) or self._listener.start_of_good(content_type)
        transport.write(b"%b%d\r\n\r\n%b" % (start, len(body), body))
        return True

    def flush(self) -> None:
        """Write the answers whose turn it is."""
        owed, transport = self._owed, self._transport
        while owed and self._handled and (response := owed[0].out) is not None:
            exchange = owed.popleft()
            self._handled -= 1
            if not transport.is_closing():
                self._write(exchange, response)
        if owed:
            if self._handled < len(owed):
                self._hand_on()
            return
        if self._paused_reading:
            self._regulate()
        if self._half_closed or (self._listener.draining and self._nothing_coming):
            transport.close()

    def _write(self, exchange: HttpExchange, response: Response) -> None:
        status, body, content_type, headers = response
        head, listener = exchange.head, self._listener
        last = not head.keep_alive or (listener.draining and not self._owed and self._nothing_coming)
        lines = [
            b"HTTP/1.1 %d %b\r\n" % (status, _REASONS[status]),
            listener.common_headers(),
            b"content-type: %b\r\ncontent-length: %d\r\n" % (content_type, len(body)),
            *[b"%b: %b\r\n" % header for header in headers],
        ]
        if last:
            lines.append(b"connection: close\r\n")
        elif head.old_version:
            lines.append(b"connection: keep-alive\r\n")
        lines.append(b"\r\n")
        start = b"".join(lines)
        if head.method == b"HEAD":
            self._transport.write(start)
        else:
            self._transport.writelines([start, body])
        if head.unread:
            self._end_politely()
        elif last:
            self._transport.close()

    def _refuse(self, response: Response) -> None:
        """The present request is not read any further: answer it, in its turn, and close."""
        head = HttpHead(self._head.method if self._head else b"", b"", {})  # the request's own may be shared
        head.keep_alive = False
        head.unread = True
        exchange = HttpExchange(self, head)
        exchange.out = response
        self._forget_request()
        self._deaf = True
        self._owed.append(exchange)
        self._hand_on()

    def _regulate(self) -> None:
        """Read only while there is room for what would come."""
        full = len(self._owed) > self._limits.pipelined or self._paused_writing
        if full != self._paused_reading and not self._transport.is_closing():
            self._paused_reading = full
            if full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    @property
    def _nothing_coming(self) -> bool:
        return self._head is None and not self._in_headers

    # -- the end

    def drain(self) -> None:
        """Close now if nothing is owed or being received."""
        if not self._owed and self._nothing_coming:
            self._transport.close()

    def abort(self) -> None:
        """Close now."""
        self._transport.abort()

    def _end_politely(self) -> None:
        """All is answered: say so, and listen for a moment, lest a reset destroys the answer on its way."""
        if not self._transport.is_closing():
            if self._transport.can_write_eof():
                self._transport.write_eof()
            self._end_timer = self._loop.call_later(_LINGER_S, self._end)

    def _end(self) -> None:
        if self._transport.get_write_buffer_size():  # earlier answers are still on their way to a slow reader
            self._end_timer = self._loop.call_later(self._limits.write_s, self.abort)
        else:
            self.abort()

    def _is_client_there(self, tries: int) -> None:
        """Find out whether a client that has ended its side has gone altogether.

        Both look the same until something is sent: a client that has gone resets the connection. An interim
        response is something that any HTTP/1.1 client still waiting has to skip.
        """
        if not self._owed or self._transport.is_closing():
            return
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
            return
        if tries == 0 and not self._owed[0].head.old_version:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if tries < _PROBE_TRIES:
            wait_s = _PROBE_AFTER_S * 2**tries
            self._probe_timer = self._loop.call_later(wait_s, self._is_client_there, tries + 1)

    # -- time

    def _time_receiving(self) -> None:
        """The clock runs from a request's first byte, and anew from the end of its headers."""
        timer = self._receive_timer
        if self._nothing_coming:
            if timer is not None and self._requests:
                timer.cancel()
                self._receive_timer = None
            return
        in_body = self._head is not None
        if timer is not None:
            if self._receiving == (self._requests, in_body):
                return
            timer.cancel()
        self._receiving = (self._requests, in_body)
        seconds = self._limits.body_s if in_body else self._limits.header_s
        self._receive_timer = self._loop.call_later(seconds, self._received_too_slowly)

    def _received_too_slowly(self) -> None:
        self._receive_timer = None
        if self._nothing_coming:  # not a byte since it was opened
            self._transport.close()
        elif self._paused_reading:  # it is we who do not read
            self._receive_timer = self._loop.call_later(self._limits.header_s, self._received_too_slowly)
        else:
            self._refuse(self.app.refuse(self._head, Refusal(408, "request_timeout")))

    def _look_if_idle(self) -> None:
        """Looked at now and then only, so that a request costs nothing: idle means one to two periods."""
        is_quiet = not self._owed and self._nothing_coming
        if is_quiet and self._requests == self._quiet_since:
            self.abort()  # also if an answer has not been taken
            return
        self._quiet_since = self._requests if is_quiet else -1
        self._idle_timer = self._loop.call_later(self._limits.idle_s, self._look_if_idle)


def _too_many_bytes() -> Overloaded:
    return Overloaded("too many bytes of bodies are being received", retry_after_s=1.0)


_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
