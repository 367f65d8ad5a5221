"""Writes answers in parts: each part when it comes, and something now and then if none comes."""

from __future__ import annotations

from carpool.engine.clock import monotonic
from carpool.http.answer_bytes import LAST_CHUNK, chunk, ends_with_answer
from carpool.http.answer_writer import IN_PARTS, AnswerWriter
from carpool.http.http_exchange import HttpExchange
from carpool.http.server_state import ServerState
from carpool.http.streaming import SILENCE_S, Delivery

_LONGEST_GATHERED = 4 * 1024  # bytes of a part that may wait for others of the same turn
_RESET_S = 0.001  # a client near by that is gone has reset the connection by then


class PartWriter(AnswerWriter):
    """The half of a connection that writes to the client, with answers in parts.

    Args:
        state: Has what the connections of one server share.
    """

    def __init__(self, state: ServerState) -> None:
        super().__init__(state)
        self._streamed_bytes = 0  # of the body of the present answer in parts
        self._gathered: list[bytes] = []  # parts of the answer whose turn it is, written at the end of this turn

    @property
    def _streaming(self) -> HttpExchange | None:
        """The request whose turn it is, if it is answered in parts."""
        given = self._queue.given
        return given[0] if given and given[0].delivery is not None else None

    def write_part(self, exchange: HttpExchange, data: bytes) -> None:
        """Write a part of an answer, or keep it until those before it are written.

        One behind others goes at the end of this turn of the loop, with those that come in the same
        turn: each write is a call of the system.
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

    def end_parts(self, exchange: HttpExchange, data: bytes, is_whole: bool) -> None:
        """End an answer in parts, in its turn."""
        _delivery_of(exchange).held.append(data)
        if exchange.response is None:
            exchange.response = IN_PARTS
            exchange.is_broken = not is_whole
            self.flush()

    def _turn_of_parts(self, exchange: HttpExchange, delivery: Delivery) -> None:
        """Write what was held of an answer whose turn has come."""
        if not delivery.held:
            return
        self._write_in_parts(
            exchange, self._head_if_missing(exchange, delivery) + chunk(exchange.head, delivery.take_held())
        )
        if not self._is_writing_paused and delivery.unread.go_on():
            self.app.pause(exchange, False)

    def _write_end(self, exchange: HttpExchange) -> None:
        """Write the end of an answer in parts, and close if it is the last one."""
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
        """Return the head of an answer in parts, unless it was written before."""
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
        """See to it that the client of an answer in parts hears something now and then."""
        _delivery_of(exchange).unwatch = self._loop.call_later(SILENCE_S, self._look_if_silent, exchange).cancel

    def _look_if_silent(self, exchange: HttpExchange) -> None:
        """Tell a client that has heard nothing for a while that the connection is alive."""
        delivery, stream, ask = exchange.delivery, exchange.stream, exchange.head.ask
        if exchange.response is not None or delivery is None or self._transport.is_closing():
            return
        assert ask is not None and ask.framing is not None
        heard = delivery.written_at if stream is None else max(delivery.written_at, stream.heard)
        silent_s = monotonic() - heard
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

        What is sent here has its system reset the connection, which `probe` notices. So the stream
        does not take up room for nobody.
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
    """Return the delivery of an exchange that is answered in parts, which has one."""
    assert exchange.delivery is not None
    return exchange.delivery
