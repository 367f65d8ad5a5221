"""The HTTP/1.1 door: one client connection. It knows order and time; what the bytes say is `reader.py`'s business.

* answers leave in the order of their requests; when too many wait, nothing more is read;
* a request that is refused before its body was read gets its answer, then the connection is closed;
* a client that half-closes still gets its answers; one that is gone has its queued requests cancelled;
* a client that does not read is not read from either, and is dropped after a while.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from contextlib import suppress
from http import HTTPStatus
from math import inf
from typing import Any, cast

from carpool.http.codec import Refusal
from carpool.http.exchange import Exchange, HttpResponse
from carpool.http.listener import HttpHead, Listener
from carpool.http.reader import LARGE_BODY, MOST_AT_ONCE, RequestReader
from carpool.wire.response import CheckedResponse

_LONGEST_LOOKED_UP = 16 * 1024  # more in one go is a large body, or many requests at once
_LONG_PAGE = 4 * 1024  # the figures of /metrics are; a line that says "ok" is not
_LINGER_S = 2.0  # so long a refused request's body is read and thrown away, so that the answer arrives
_PROBE_AFTER_S = 0.02
_PROBE_TRIES = 8


class HttpExchange(Exchange):
    """An exchange whose answer goes out on a connection, in its turn."""

    __slots__ = ("connection", "out")

    head: HttpHead

    def __init__(self, connection: Connection, head: HttpHead, body: bytes | bytearray = b"") -> None:
        Exchange.__init__(self, head, body)
        self.connection = connection
        self.out: HttpResponse | None = None

    def respond(self, response: HttpResponse) -> None:
        if self.out is None:
            self.out = response
            self.connection.flush()

    def tell(self) -> None:
        if self.error is not None or not self.connection.answer_now(self):
            super().tell()


class Connection(asyncio.Protocol):
    """One client.

    Attributes:
        deaf: whether what still comes is thrown away.
    """

    def __init__(self, listener: Listener) -> None:
        self.app = listener.app
        self.deaf = False
        self._listener = listener
        self._limits = listener.limits
        self._heads = listener.heads
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._loop = asyncio.get_running_loop()
        self._reader = RequestReader(listener, self)
        self._large: _LargeBody | None = None  # stands in for us
        self._kept = b""  # received, but not to be read before there is room
        # the requests that are owed an answer, in order; the first `_handled` have been given to the app
        self._owed: deque[HttpExchange] = deque()
        self._handled = 0
        self._handing_on = False  # `_hand_on` is at work
        self._half_closed = False
        self._paused_writing = False
        self._paused_reading = False
        self._reading_on = False  # `_read_on` is about to be called
        # time
        self._known = 0  # requests whose heads were looked up, which the reader has not seen
        self._quiet_since = 0  # how many requests there were at the last look; -1 if one was not over yet
        self._unread = 0  # bytes that waited for the client then
        self._idle_timer: asyncio.TimerHandle | None = None
        self._receive_timer: asyncio.TimerHandle | None = None
        self._receiving = (0, False)  # the request, and whether it is its body, that `_receive_timer` is for
        self._write_timer: asyncio.TimerHandle | None = None
        self._untaken = 0  # bytes that waited for the client when `_write_timer` was set, and those written since
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
            self.refuse(self.app.refuse(None, Refusal(503, "too_many_connections")))

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.remove(self)
        timers = (self._idle_timer, self._receive_timer, self._write_timer, self._end_timer, self._probe_timer)
        for timer in timers:
            if timer is not None:
                timer.cancel()
        self.deaf = True
        self._kept = b""
        self._reader.forget()
        if self._large is not None:
            self._large.let_go()
        for exchange in self._owed:
            self.app.gone(exchange)
        self._owed.clear()

    def data_received(self, data: bytes) -> None:
        if self.deaf:
            return
        if self._reader.fresh and len(data) <= _LONGEST_LOOKED_UP:
            self._look_up(data)
        elif rest := self._reader.feed(data):
            self._keep(rest)
        if self._receive_timer is not None or not self._reader.fresh:
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
        self._untaken = self._transport.get_write_buffer_size()
        self._write_timer = self._loop.call_later(self._limits.write_s, self._look_if_taken)
        self._regulate()

    def resume_writing(self) -> None:
        self._paused_writing = False
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._hand_on()

    # -- receiving

    def _look_up(self, data: bytes) -> None:
        """Requests that begin with `data`: known heads are looked up, the reader gets the rest."""
        heads, most = self._heads, self._known + MOST_AT_ONCE
        while data:
            if self._known == most:
                self._keep(data)
                return
            raw, blank_line, rest = data.partition(b"\r\n\r\n")
            head = heads.get(raw)
            if head is None or head.length > len(rest) or not blank_line:
                if rest := self._reader.feed(data, raw + blank_line):
                    self._keep(rest)
                return
            body, data = rest[: head.length], rest[head.length :]
            self._known += 1
            exchange = HttpExchange(self, head, body)
            self._owed.append(exchange)
            if self._handled or self._paused_writing or (head.endpoint is None and self._listener.turn_over):
                self._hand_on()
                if data and self.room <= 0:
                    self._keep(data)
                    return
            else:
                self._handled = 1
                try:
                    head.route(exchange)
                except BaseException as error:
                    self.app.route_raised(exchange, error)
                if head.endpoint is None:
                    self._end_turn(exchange)

    def take(self, head: HttpHead, body: bytes | bytearray, refusal: HttpResponse | None) -> None:
        """The reader has a whole request."""
        exchange = HttpExchange(self, head, body)
        exchange.out = refusal
        self.deaf = not head.keep_alive
        self._owed.append(exchange)
        self._hand_on()

    def take_large(self, rest: memoryview) -> None:
        """The reader wants what comes next in place."""
        self._large = _LargeBody(self, rest)
        self._set_protocol(self._large)

    def received_large(self, nbytes: int, full: bool) -> None:
        """So much more is in the memory of `take_large`."""
        if full:
            self._end_large()
        self._reader.received_large(nbytes)
        if full:
            self._time_receiving()

    @property
    def room(self) -> int:
        """How many more requests may be read for now: one more than the app may have at a time."""
        return 0 if self._paused_writing else self._limits.pipelined + 1 - len(self._owed)

    def _keep(self, data: bytes) -> None:
        """Requests that have to wait: for those before them, for a slow reader, or for others to have their turn."""
        self._kept = data
        self._regulate()

    def _read_on(self) -> None:
        """There is room again for some of what was kept."""
        self._reading_on = False
        if self._kept and self.room > 0:
            data, self._kept = self._kept, b""
            self.data_received(data)
            self._regulate()

    def encourage(self) -> None:
        """The client waits to be told that its body is welcome."""
        self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def refuse(self, response: HttpResponse) -> None:
        """The present request is not read any further: answer it, in its turn, and close."""
        present = self._reader.head
        head = HttpHead(present.method if present else b"", b"", {})  # the request's own may be shared
        head.keep_alive = False
        head.unread = True
        exchange = HttpExchange(self, head)
        exchange.out = response
        self._forget_request()
        self.deaf = True
        self._kept = b""
        self._owed.append(exchange)
        self._hand_on()

    def _forget_request(self) -> None:
        """Let go of a request that is half received."""
        self._reader.forget()
        if self._large is not None:
            self._end_large()

    def _end_large(self) -> None:
        """What comes next is not part of a large body any more."""
        if self._large is not None:
            self._large.let_go()
            self._large = None
            self._set_protocol(self)

    @property
    def _requests(self) -> int:
        """How many were begun."""
        return self._known + self._reader.requests

    def _set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        transport = self._transport
        transport.set_protocol(protocol)
        if not self._paused_reading and not transport.is_closing():
            transport.pause_reading()  # uvloop looks at how a protocol receives only when it starts to read
            transport.resume_reading()

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
                if exchange.head.endpoint is None and exchange.out is None and not self._listener.has_turn(self):
                    break
                self._handled += 1
                if exchange.out is None:
                    self.app.handle(exchange)  # may answer at once, and shorten the queue
                    if exchange.head.endpoint is None:
                        self._end_turn(exchange)
                else:
                    self.flush()
        finally:
            self._handing_on = False
        if self._paused_reading or len(owed) > self._limits.pipelined:
            self._regulate()

    def hand_on(self) -> None:
        """It has its turn."""
        if not self._transport.is_closing():
            self._hand_on()

    def _end_turn(self, exchange: HttpExchange) -> None:
        """It was a page of the app's own; a long one has taken milliseconds."""
        if exchange.out is not None and len(exchange.out.body) >= _LONG_PAGE:
            self._listener.end_turn()

    def answer_now(self, exchange: HttpExchange) -> bool:
        """Write a good answer at once if that is all there is to do; False if it is not."""
        owed, head, transport = self._owed, exchange.head, self._transport
        body: Any = exchange.result
        if (
            len(owed) != 1
            or type(body) is CheckedResponse
            or not head.is_plain
            or self._half_closed
            or self._listener.draining
            or len(body) >= LARGE_BODY
            or self._paused_writing
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
        if self._half_closed or (self._listener.draining and self._is_idle):
            transport.close()

    def _write(self, exchange: HttpExchange, response: HttpResponse) -> None:
        status, body, content_type, headers = response
        head, listener, was_paused = exchange.head, self._listener, self._paused_writing
        last = not head.keep_alive or (listener.draining and not self._owed and self._is_idle)
        lines = [
            b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, b"")),
            listener.common_headers(),
            b"content-type: %b\r\ncontent-length: %d\r\n" % (content_type, len(body))
            if response.says_its_body
            else b"",
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
        if was_paused:
            self._untaken += len(start) + len(body)
        if head.unread:
            self._end_politely()
        elif last:
            self._transport.close()

    @property
    def _is_idle(self) -> bool:
        """Whether no request is half received or has to wait to be read."""
        return self._reader.idle and not self._kept

    def _regulate(self) -> None:
        """Read only while there is room for what would come, and first what was kept."""
        if self._transport.is_closing():
            return
        if self._kept and self.room > 0 and not self._reading_on:
            self._reading_on = True
            self._loop.call_soon(self._read_on)
        full = self.room <= 0 or bool(self._kept)
        if full != self._paused_reading:
            self._paused_reading = full
            if full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()
                self._receiving = (0, False)  # what comes has its whole time from now on
                self._time_receiving()

    # -- the end

    def drain(self) -> None:
        """Close now if nothing is owed or being received."""
        if not self._owed and self._is_idle:
            self._transport.close()

    def abort(self) -> None:
        """Close now."""
        self._transport.abort()

    def _end_politely(self) -> None:
        """All is answered: say so, and listen for a moment, lest a reset destroys the answer on its way."""
        if not self._transport.is_closing():
            if self._transport.can_write_eof():
                with suppress(OSError):  # asyncio's own transports raise where the client has just gone
                    self._transport.write_eof()
            self._end_timer = self._loop.call_later(_LINGER_S, self._end)

    def _end(self, before: float = inf) -> None:
        """Be gone, unless there is something left that the client takes, however slowly."""
        left = self._transport.get_write_buffer_size()  # of earlier answers, on their way to a slow reader
        if 0 < left < before:
            self._end_timer = self._loop.call_later(self._limits.write_s, self._end, left)
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
        if self._reader.idle:
            if timer is not None and self._requests:
                timer.cancel()
                self._receive_timer = None
            return
        in_body = self._reader.head is not None
        if timer is not None:
            if self._receiving == (self._requests, in_body):
                return
            timer.cancel()
        self._receiving = (self._requests, in_body)
        seconds = self._limits.body_s if in_body else self._limits.header_s
        self._receive_timer = self._loop.call_later(seconds, self._received_too_slowly)

    def _received_too_slowly(self) -> None:
        self._receive_timer = None
        if self._reader.idle:  # not a byte since it was opened
            self._transport.close()
        elif self._paused_reading:  # it is we who do not read
            self._receive_timer = self._loop.call_later(self._limits.header_s, self._received_too_slowly)
        else:
            self.refuse(self.app.refuse(self._reader.head, Refusal(408, "request_timeout")))

    def _look_if_taken(self) -> None:
        """A reader is too slow if it takes nothing at all for so long."""
        before, self._untaken = self._untaken, self._transport.get_write_buffer_size()
        if self._untaken < before:
            self._write_timer = self._loop.call_later(self._limits.write_s, self._look_if_taken)
        else:
            self.abort()

    def _look_if_idle(self) -> None:
        """Looked at now and then only, so that a request costs nothing: idle means one to two periods."""
        before, self._unread = self._unread, self._transport.get_write_buffer_size()
        is_quiet = not self._owed and self._is_idle and not self._unread < before
        if is_quiet and self._requests == self._quiet_since:
            self.abort()  # also if an answer has not been taken
            return
        self._quiet_since = self._requests if is_quiet else -1
        self._idle_timer = self._loop.call_later(self._limits.idle_s, self._look_if_idle)


class _LargeBody(asyncio.BufferedProtocol):
    """Stands in for a connection while a large body is received into place.

    Args:
        connection: whose body it is.
        rest: what is still to be filled.
    """

    def __init__(self, connection: Connection, rest: memoryview) -> None:
        self._connection = connection
        self._rest = rest

    def let_go(self) -> None:
        """Let go of the memory: uvloop keeps its last buffered protocol, and even an empty part keeps the whole."""
        self._rest = _NOTHING

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._rest

    def buffer_updated(self, nbytes: int) -> None:
        self._rest = self._rest[nbytes:]
        self._connection.received_large(nbytes, not self._rest)

    def connection_lost(self, error: Exception | None) -> None:
        self._connection.connection_lost(error)

    def eof_received(self) -> bool:
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


_NOTHING = memoryview(b"")
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
