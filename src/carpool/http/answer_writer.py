"""Writes the answers of one connection in their turn, and ends the connection after the last one.

`AnswerWriter` is the part of a `Connection` that writes whole answers, and `PartWriter` adds those
in parts. They are base classes of it, and not objects that it has, as each would cost a request an
attribute or a call more.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, Final, cast

from carpool.engine.clock import monotonic
from carpool.engine.fast_paths import fast_path
from carpool.engine.wire.outcome import CheckedResponse
from carpool.http.answer_bytes import start_of_answer
from carpool.http.answer_queue import AnswerQueue
from carpool.http.exchange import HttpResponse, ServedModel
from carpool.http.http_exchange import HttpExchange
from carpool.http.reader import LARGE_BODY
from carpool.http.server_state import ServerState
from carpool.http.streaming import Delivery
from carpool.http.timers import Timers

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
IN_PARTS: Final = HttpResponse(200, b"")
"""Stands for an answer whose parts are all there."""


class AnswerWriter(asyncio.Protocol, ABC):
    """The half of a connection that writes to the client.

    Args:
        state: Has what the connections of one server share.

    Attributes:
        app: Answers the requests.
        is_reading_paused: Whether the transport has been told not to read.
        counted_for: The model for which it counts as a connection; None if there is none, or if
            there may be no room for it any more.
    """

    _timers: Timers

    def __init__(self, state: ServerState) -> None:
        self.app = state.app
        self._observer = state.app.observer
        self._state = state
        self._limits = state.limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._queue: AnswerQueue[HttpExchange] = AnswerQueue(self._limits.pipelined)
        self._is_writing_paused = False
        self.is_reading_paused = False
        self.counted_for: ServedModel | None = None
        self._is_half_closed = False

    @abstractmethod
    def turn_has_come(self) -> None:
        """Ask for the page for which the connection has waited."""

    @abstractmethod
    def write_gathered(self) -> None:
        """Write the parts that have come in this turn of the loop."""

    @abstractmethod
    def _give(self) -> None:
        """Give the app the requests that it may have, and write refusals whose turn it is."""

    @abstractmethod
    def _regulate(self) -> None:
        """Read only while there is room for what would come."""

    @property
    @abstractmethod
    def _has_nothing_to_read(self) -> bool:
        """Whether no request is half received or waits to be read."""

    @abstractmethod
    def _turn_of_parts(self, exchange: HttpExchange, delivery: Delivery) -> None:
        """Write what was held of an answer whose turn has come."""

    @abstractmethod
    def _write_end(self, exchange: HttpExchange) -> None:
        """Write the end of an answer in parts, and close if it is the last one."""

    # -- whole answers

    @property
    def client_host(self) -> str | None:
        """The address of the client; empty on a Unix socket, None if it is not known any more."""
        peer: object = self._transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else "" if isinstance(peer, str | bytes) else None

    def flush(self) -> None:
        """Write the answers whose turn it is."""
        queue, transport = self._queue, self._transport
        while (exchange := queue.pop_answered()) is not None:
            if exchange.delivery is not None:
                exchange.delivery.unwatch()
            if not transport.is_closing():
                self._write(exchange, cast(HttpResponse, exchange.response))
        if queue.given and queue.given[0].delivery is not None:
            self._turn_of_parts(queue.given[0], queue.given[0].delivery)
        if queue.waiting:
            self._give()
        elif not queue.given:
            if self.is_reading_paused:
                self._regulate()
            if self._is_half_closed or (self._state.is_draining and self._has_nothing_to_read):
                transport.close()

    def _write(self, exchange: HttpExchange, response: HttpResponse) -> None:
        """Write an answer, and close if it is the last one."""
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
        else:  # asyncio's own transports copy all that they join, and of a view only what the socket leaves
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
        more = head.good_headers
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
    def is_quiet(self) -> bool:
        """Whether no request is owed an answer, half received, or waiting to be read."""
        return not self._queue and self._has_nothing_to_read

    @property
    def unsent(self) -> int:
        """How many bytes wait for the client."""
        return self._transport.get_write_buffer_size()

    def drain(self) -> None:
        """Close now if the connection is quiet; otherwise the last answer closes it."""
        if self.is_quiet:
            self._transport.close()

    def close(self) -> None:
        """Close once everything has been written."""
        self._transport.close()

    def abort(self) -> None:
        """Close now, whatever has not been written."""
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
