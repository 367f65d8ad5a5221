"""Writes the answers of one connection in their turn, and ends the connection after the last one.

`HttpExchange` is a request of our own HTTP/1.1 front. `AnswerQueue` keeps the order of answers on
one connection: it says which is next and writes nothing. Answers leave in the order of their
requests, and the app gets only so many of a connection's requests at a time. So a request in the
queue is in one of three states, and passes through them in this order:

* *waiting*: it was read, and the app does not have it yet;
* *given*: the app has it, and no response is there yet;
* *answered*: its response is there, and waits for those before it to be written.

The requests that are given or answered always come before those that are waiting. They are two
deques, as a counter could disagree with the requests.

`AnswerWriter` is the half of a `Connection` that writes. It is its base class, as an object of its
own would cost a request an attribute or a call more.
"""

from __future__ import annotations

import asyncio
import copy
import socket
from collections import deque
from contextlib import suppress
from http import HTTPStatus
from math import inf
from typing import Any, Final, cast

from carpool.engine.clock import monotonic
from carpool.engine.fast_paths import fast_path
from carpool.engine.request import Request
from carpool.engine.wire.outcome import CheckedResponse
from carpool.http.exchange import Exchange, HttpResponse, RequestIds, ServedModel
from carpool.http.reader import LARGE_BODY
from carpool.http.server_state import ClientConnection, HttpHead, ServerState
from carpool.http.streaming import SILENCE_S, Delivery
from carpool.http.timers import Timers


class HttpExchange(Exchange):
    """An exchange whose answer is written to a connection when its turn has come.

    Attributes:
        held: How many bytes of the body of a bulk request are in memory; only there.
        is_broken: Whether an answer in parts is broken off; set at its end.
    """

    __slots__ = ("connection", "held", "is_broken", "response")

    head: HttpHead
    held: int
    is_broken: bool

    def __init__(self, connection: AnswerWriter, head: HttpHead, body: bytes | bytearray = b"") -> None:
        Request.__init__(self, body, inf, None, len(body))  # as `Exchange` does, but one call less
        self.head = head
        self.delivery = None
        self.connection = connection
        self.response: HttpResponse | None = None

    @property
    def client_host(self) -> str | None:
        return self.connection.client_host

    def has_room_at(self, model: ServedModel) -> bool:
        has_room = self.connection.has_room_at(model, owed=1)
        if not has_room:  # the connection ends with the answer
            self.head = copy.copy(self.head)  # others may have it, too
            self.head.keep_alive = False
        return has_room

    def respond(self, response: HttpResponse) -> None:
        if self.response is None:
            self.response = response
            self.connection.flush()

    def tell(self) -> None:
        if self.error is not None or not self.connection.answer_now(self):
            super().tell()

    def watch_silence(self) -> None:
        self.connection.watch_silence(self)

    def write_part(self, data: bytes) -> None:
        self.connection.write_part(self, data)

    def end_parts(self, data: bytes, *, is_broken: bool = False) -> None:
        _delivery_of(self).held.append(data)
        if self.response is None:
            self.response = IN_PARTS
            self.is_broken = is_broken
            self.connection.flush()

    def want_more(self) -> None:
        self.connection.want_more()

    def hold(self, nbytes: int) -> None:
        self.connection.hold(self, nbytes)

    @property
    def service(self) -> ServedModel | None:
        return self.head.model

    def refuse_as_slow(self) -> None:
        """Break a bulk request off: its body comes so slowly that others need its memory."""
        self.connection.break_off_as_slow(self)

    def leave_body_unread(self) -> None:
        self.connection.leave_body_unread()


class AnswerQueue:
    """The requests of one connection that are owed an answer, in order.

    Attributes:
        given: Requests that the app has or has answered. While the queue is empty, a request may be
            appended here directly, as `add` and `give` would do.
    """

    __slots__ = ("_most_given", "given", "waiting")

    def __init__(self, most_given: int) -> None:
        self.given: deque[HttpExchange] = deque()
        self.waiting: deque[HttpExchange] = deque()
        self._most_given = most_given

    def __len__(self) -> int:
        return len(self.given) + len(self.waiting)

    @property
    def room(self) -> int:
        """How many more requests may be read; one more than the app may have are held at most."""
        return self._most_given + 1 - len(self)

    def add(self, request: HttpExchange) -> None:
        """Let a request that was read wait for its turn."""
        self.waiting.append(request)

    def next_to_give(self) -> HttpExchange | None:
        """Return the request that the app may have now, or None; it stays waiting until `give`."""
        if self.waiting and len(self.given) < self._most_given:
            return self.waiting[0]
        return None

    def give(self) -> None:
        self.given.append(self.waiting.popleft())

    def pop_answered(self) -> HttpExchange | None:
        """Take out the request whose response is to be written now, or return None."""
        if self.given and self.given[0].response is not None:
            return self.given.popleft()
        return None

    def clear(self) -> list[HttpExchange]:
        owed = [*self.given, *self.waiting]
        self.given.clear()
        self.waiting.clear()
        return owed


CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
IN_PARTS: Final = HttpResponse(200, b"")
"""Stands for an answer whose parts are all there."""


_LONGEST_GATHERED = 4 * 1024  # bytes of a part that may wait for others of the same turn
_RESET_S = 0.001  # a client near by that is gone has reset the connection by then


class AnswerWriter(asyncio.Protocol, ClientConnection):
    """The half of a connection that writes to the client."""

    _timers: Timers

    def __init__(self, state: ServerState) -> None:
        self.app = state.app
        self._observer = state.app.observer
        self._state = state
        self._limits = state.limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._queue = AnswerQueue(self._limits.pipelined)
        self._is_writing_paused = False
        self.is_reading_paused = False
        self.counted_for: ServedModel | None = None
        self._is_half_closed = False
        self._streamed_bytes = 0  # of the body of the present answer in parts
        self._gathered: list[bytes] = []  # parts of the answer whose turn it is, written at the end of this turn

    # -- whole answers

    @property
    def client_host(self) -> str | None:
        """The address of the client; empty on a Unix socket, None if it is not known any more."""
        peer: object = self._transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else "" if isinstance(peer, str | bytes) else None

    def _write(self, exchange: HttpExchange, response: HttpResponse) -> None:
        if response is IN_PARTS:
            self._write_end(exchange)
            return
        if self._observer is not None:
            response = self._observer.answering(exchange, response, monotonic())
        head, body, was_paused = exchange.head, response.body, self._is_writing_paused
        is_last = not head.keep_alive or (self._state.is_draining and self.is_quiet)
        start = start_of_answer(response, head, self._state.common_headers(), self.app.request_ids, is_last=is_last)
        if head.method == b"HEAD":
            self._transport.write(start)
        elif len(body) < LARGE_BODY:
            self._transport.writelines([start, body])
        else:  # asyncio's own transports copy all that they join, and of a view only the bytes that the socket leaves
            self._transport.write(start)
            self._transport.write(memoryview(body))
        if was_paused:
            self._timers.written_while_paused(len(start) + len(body))
        if head.is_cut_short:
            self._end_politely()
        elif is_last:
            self._transport.close()

    @fast_path("answer_now", declined=False)
    def answer_now(self, exchange: HttpExchange) -> bool:
        """Write a good answer at once if that is all there is to do; return False if it is not.

        Fast path of `Exchange.tell`, `flush` and `_write`: the same outcome, see
        tests/http/test_known_heads.py.
        """
        queue, head, state, transport = self._queue, exchange.head, self._state, self._transport
        body: Any = exchange.result
        more = head.extra_ok_headers
        if (
            len(queue.given) != 1
            or queue.waiting
            or more is None
            or type(body) is CheckedResponse
            or self._is_half_closed
            or state.is_draining
            or len(body) >= LARGE_BODY
            or self._is_writing_paused
            or transport.is_closing()
        ):
            return False
        queue.given.clear()
        assert head.ask is not None  # or it had no good headers
        content_type = head.ask.content_type
        prefix = state.ok_prefixes.get(content_type) or state.ok_prefix(content_type)
        if not more:
            transport.write(b"%b%d\r\ncontent-length: %d\r\n\r\n%b" % (prefix, state.next_number(), len(body), body))
        elif head.brings_id:
            bare = state.ok_start(content_type)
            transport.write(b"%b%bcontent-length: %d\r\n\r\n%b" % (bare, more, len(body), body))
        else:
            n = state.next_number()
            transport.write(b"%b%d\r\n%bcontent-length: %d\r\n\r\n%b" % (prefix, n, more, len(body), body))
        return True

    # -- the end

    @property
    def unsent(self) -> int:
        """How many bytes wait for the client."""
        return self._transport.get_write_buffer_size()

    def close(self) -> None:
        """Close once everything has been written."""
        self._transport.close()

    def abort(self) -> None:
        """Close now, although some bytes may not have been written."""
        self._transport.abort()

    def _end_politely(self) -> None:
        """End our side and listen for a moment: a reset would destroy the answer on its way."""
        if not self._transport.is_closing():
            self._state.note_ending(self)
            if self._transport.can_write_eof():
                with suppress(OSError):  # asyncio's own transports raise if the client has just left
                    self._transport.write_eof()
            self._timers.linger()

    def probe(self, is_first: bool) -> bool:
        """Find out whether a client that has ended its side is gone; return whether to try again.

        Both look the same until something is sent: a client that is gone resets the connection. An
        interim response is something that any HTTP/1.1 client which still waits has to skip.
        """
        if not self._queue or self._transport.is_closing():
            return False
        sock = self._transport.get_extra_info("socket")
        if sock is not None and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._transport.abort()
            return False
        first_owed = (self._queue.given or self._queue.waiting)[0]
        has_begun = first_owed.delivery is not None and first_owed.delivery.is_head_written
        if is_first and not first_owed.head.is_http_1_0 and not has_begun:
            self._transport.write(CONTINUE)
        return True

    # -- answers in parts: each when it comes, and something now and then if none comes

    @property
    def _streaming(self) -> HttpExchange | None:
        """The request whose turn it is, if it is answered in parts."""
        given = self._queue.given
        return given[0] if given and given[0].delivery is not None else None

    def write_part(self, exchange: HttpExchange, data: bytes) -> None:
        """Write a part of an answer, or keep it until those before it are written.

        One behind others goes at the end of this turn of the loop, as each write is a call of the
        system.
        """
        delivery, head, given = _delivery_of(exchange), exchange.head, self._queue.given
        if not given or given[0] is not exchange:
            if delivery.hold(data):
                self.app.pause(exchange, True)
            return
        data = chunk(head, data)
        if not delivery.is_head_written or len(data) > _LONGEST_GATHERED or self._is_writing_paused or head.is_http_1_0:
            self._write_in_parts(exchange, self._head_if_missing(exchange, delivery) + data)
            return
        if not self._gathered:
            self._state.write_soon(self)
        self._gathered.append(data)

    def write_gathered(self) -> None:
        """Write the parts that have come in this turn of the loop."""
        gathered, self._gathered = self._gathered, []
        if gathered and not self._transport.is_closing():
            data = b"".join(gathered)
            self._streamed_bytes += len(data)
            self._transport.write(data)
            if self._is_half_closed:
                self._loop.call_soon(self.probe, False)  # one on the same machine that is gone has reset already

    def _turn_of_parts(self, exchange: HttpExchange, delivery: Delivery) -> None:
        if not delivery.held:
            return
        self._write_in_parts(
            exchange, self._head_if_missing(exchange, delivery) + chunk(exchange.head, delivery.take_held())
        )
        if not self._is_writing_paused and delivery.unread.go_on():
            self.app.pause(exchange, False)

    def _write_end(self, exchange: HttpExchange) -> None:
        delivery, head = _delivery_of(exchange), exchange.head
        data = self._head_if_missing(exchange, delivery) + chunk(head, delivery.take_held())
        if not head.is_http_1_0 and not exchange.is_broken:
            data += LAST_CHUNK
        self._write_in_parts(exchange, data)
        if self._observer is not None:
            self._observer.answered(exchange, 200, self._streamed_bytes, monotonic())
        if head.is_cut_short:
            self._end_politely()
        elif exchange.is_broken or ends_with_answer(head) or (self._state.is_draining and self.is_quiet):
            self._transport.close()

    def _write_in_parts(self, exchange: HttpExchange, data: bytes) -> None:
        if self._transport.is_closing():
            return
        if self._is_writing_paused:
            self._timers.written_while_paused(len(data))
            self.app.pause(exchange, True)  # its turn has come while the client was slow already
        _delivery_of(exchange).written_at = monotonic()
        self._gathered.append(data)
        self.write_gathered()

    def _head_if_missing(self, exchange: HttpExchange, delivery: Delivery) -> bytes:
        if delivery.is_head_written:
            return b""
        delivery.is_head_written = delivery.has_begun = True
        head = exchange.head
        assert head.ask is not None and head.ask.framing is not None
        framing = head.ask.framing
        lines = [
            b"HTTP/1.1 200 OK\r\n",
            self._state.common_headers(),
            b"content-type: %b\r\n" % framing.content_type,
        ]
        headers = head.echoed(framing.headers, self.app.request_ids if self._observer is None else None)
        if self._observer is not None:
            given = {name for name, _ in headers}
            added = self._observer.headers(exchange, monotonic(), has_ended=False)
            headers += tuple(header for header in added if header[0] not in given)
        lines += [b"%b: %b\r\n" % header for header in headers]
        lines.append(b"" if head.is_http_1_0 else b"transfer-encoding: chunked\r\n")
        lines.append(b"connection: close\r\n\r\n" if ends_with_answer(head) else b"\r\n")
        start = b"".join(lines)
        self._streamed_bytes = -len(start)  # of the body alone
        return start

    def watch_silence(self, exchange: HttpExchange) -> None:
        _delivery_of(exchange).unwatch = self._loop.call_later(SILENCE_S, self._look_if_silent, exchange).cancel

    def _look_if_silent(self, exchange: HttpExchange) -> None:
        """Send a keep-alive to a client that has received nothing for a while."""
        delivery, stream, ask = exchange.delivery, exchange.stream, exchange.head.ask
        if exchange.response is not None or delivery is None or self._transport.is_closing():
            return
        assert ask is not None and ask.framing is not None
        last_at = delivery.written_at if stream is None else max(delivery.written_at, stream.part_at)
        silent_s = monotonic() - last_at
        alive = ask.framing.alive
        if silent_s >= SILENCE_S and alive and self._streaming is exchange and not self._is_writing_paused:
            self._write_in_parts(exchange, self._head_if_missing(exchange, delivery) + chunk(exchange.head, alive))
            silent_s = 0.0
        again_s = SILENCE_S - silent_s
        delivery.unwatch = self._loop.call_later(
            again_s if again_s > 0 else SILENCE_S, self._look_if_silent, exchange
        ).cancel

    def _probe_client_of_parts(self) -> None:
        """Find out at once whether a client that gets parts, and has ended its side, is gone.

        What is sent here has its system reset the connection, which `probe` notices.
        """
        exchange = self._streaming
        if exchange is None or self._is_writing_paused or self._transport.is_closing():
            return
        ask, delivery = exchange.head.ask, exchange.delivery
        assert ask is not None and ask.framing is not None and delivery is not None
        if delivery.is_head_written and exchange.response is None and ask.framing.alive:
            self._write_in_parts(exchange, chunk(exchange.head, ask.framing.alive))
            self._loop.call_later(_RESET_S, self.probe, False)


def _delivery_of(exchange: HttpExchange) -> Delivery:
    assert exchange.delivery is not None
    return exchange.delivery


LAST_CHUNK: Final = b"0\r\n\r\n"
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


def start_of_answer(response: HttpResponse, head: HttpHead, common: bytes, ids: RequestIds, *, is_last: bool) -> bytes:
    """Return everything of an answer that comes before its body."""
    status, body, content_type, headers = response
    headers = head.echoed(headers, ids)
    lines = [b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, b"")), common]
    if response.describes_its_body:
        lines.append(b"content-type: %b\r\n" % content_type)
    lines += [b"%b: %b\r\n" % header for header in headers]
    if response.describes_its_body:
        lines.append(b"content-length: %d\r\n" % len(body))
    if is_last:
        lines.append(b"connection: close\r\n")
    elif head.is_http_1_0:
        lines.append(b"connection: keep-alive\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)


def chunk(head: HttpHead, data: bytes) -> bytes:
    """Return a piece of a body whose length is not known, as the client's version has it."""
    if head.is_http_1_0 or not data:
        return data
    return b"%x\r\n%b\r\n" % (len(data), data)


def ends_with_answer(head: HttpHead) -> bool:
    """Report whether the connection closes after an answer in parts."""
    return head.is_http_1_0 or not head.keep_alive
