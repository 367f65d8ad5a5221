"""The HTTP/1.1 front: one client connection, its order and flow. `reader.py` reads for it.

* Answers leave in the order of their requests; while too many are owed, nothing more is read.
* A request that is refused before its body was read is answered, and then the connection is closed.
* A client that ends its side still gets its answers; if it is gone, its queued requests are
  cancelled.
* A client that does not take its answers is not read from either, and is cut off after a while.

Five state machines meet here; each moves by itself:

* *The request being received* (`RequestReader`): at the start of a request (`at_request_start`:
  only there may a known head be looked up) -> in its head (`in_headers`) -> in its body (`head` is
  set), or in a large body (`_LargeBody` is the transport's protocol in the place of this one) -> at
  the start of the next. From anywhere `refuse`, a request that says `Connection: close` and the
  loss of the connection lead to `ignoring_input`, which is final.
* *Each request that was received* (`AnswerQueue`): waiting -> given to the app -> answered ->
  written.
* *Reading*: on <-> paused (`is_reading_paused`). `_regulate` pauses it while there is no room in
  the queue, or bytes that were received have to be kept until there is.
* *Writing*: on <-> paused (`_is_writing_paused`), by the transport, while much waits for the
  client. While it is paused, nothing is read and nothing is given to the app.
* *The connection*: open -> its client has ended its side (`_is_half_closed`) -> closing (the
  transport's `is_closing`) -> lost. The second step may be left out.

Time is not among them: see `timers.py`.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from http import HTTPStatus
from math import inf
from typing import Any, cast

from carpool.clock import monotonic
from carpool.errors import InvalidRequest
from carpool.http.answer_queue import AnswerQueue
from carpool.http.bulk import feed_bulk, wants_more_of_bulk
from carpool.http.codec import Refusal
from carpool.http.exchange import REQUEST_ID, Exchange, HttpResponse
from carpool.http.reader import LARGE_BODY, MOST_AT_ONCE, RequestReader
from carpool.http.server_state import HttpHead, ServerState
from carpool.http.streaming import SILENCE_S, HttpStream
from carpool.http.timers import Timers
from carpool.request import Request
from carpool.wire.response import CheckedResponse

_LONGEST_LOOKED_UP = 16 * 1024  # more in one piece is a large body, or many requests at once
_LONG_PAGE = 4 * 1024  # bytes: the figures of /metrics have more, a line that says "ok" has not
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_NOTHING = memoryview(b"")
_LONGEST_GATHERED = 4 * 1024  # bytes of a part that may wait for others of the same turn
_RESET_S = 0.001  # a client on the same machine that is gone has reset the connection by then
_LAST_CHUNK = b"0\r\n\r\n"
_IN_PARTS = HttpResponse(200, b"")  # stands for an answer whose parts are all there
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


class HttpExchange(Exchange):
    """An exchange whose answer is written to a connection when its turn has come.

    Attributes:
        connection: where the request came from.
        response: the answer; None until it is there, or until all of its parts are.
        is_broken: whether an answer in parts is broken off; set at its end.
    """

    __slots__ = ("connection", "is_broken", "response")

    head: HttpHead
    is_broken: bool

    def __init__(self, connection: Connection, head: HttpHead, body: bytes | bytearray = b"") -> None:
        Request.__init__(self, body, inf, None, len(body))  # as `Exchange` does, but one call less
        self.head = head
        self.connection = connection
        self.response: HttpResponse | None = None

    @property
    def client_host(self) -> str | None:
        return self.connection.client_host

    def respond(self, response: HttpResponse) -> None:
        if self.response is None:
            self.response = response
            self.connection.flush()

    def tell(self) -> None:
        if self.error is not None or not self.connection.answer_now(self):
            super().tell()

    def watch_silence(self) -> None:
        self.connection.watch_silence(self)

    def tell_part(self, part: object) -> None:
        if not self.connection.write_part_now(self, part):
            super().tell_part(part)

    def write_part(self, data: bytes) -> None:
        self.connection.write_part(self, data)

    def end_parts(self, data: bytes, *, is_whole: bool) -> None:
        self.connection.end_parts(self, data, is_whole)

    def want_more(self) -> None:
        self.connection.want_more()

    def end_of_input_unread(self) -> None:
        self.connection.end_of_input_unread()


class Connection(asyncio.Protocol):
    """One client.

    Args:
        state: has what the connections of one server share.

    Attributes:
        app: answers the requests.
        ignoring_input: whether everything that still comes is thrown away.
        is_reading_paused: whether the transport has been told not to read.
    """

    def __init__(self, state: ServerState) -> None:
        self.app = state.app
        self._observer = state.app.observer
        self._state = state
        self._limits = state.limits
        self._known_heads = state.heads
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = cast(asyncio.Transport, None)

        # Receiving. A request is counted where its head is read: here if it is known, else by the
        # reader.
        self.ignoring_input = False
        self._reader = RequestReader(state, self)
        self._timers = Timers(self, self._reader, self._limits)
        self._large_body: _LargeBody | None = None  # while it stands in for us
        self._bulk: HttpExchange | None = None  # the request whose body is being handed on as it comes
        self._looked_up = 0
        self._is_half_closed = False

        # Flow. Kept bytes were received, and must not be read before there is room.
        self._kept = b""
        self._will_read_kept = False  # `_read_kept` is about to be called
        self.is_reading_paused = False
        self._is_writing_paused = False

        # Answering.
        self._queue: AnswerQueue[HttpExchange] = AnswerQueue(self._limits.pipelined)
        self._is_giving = False  # `_give` is at work
        self._gathered: list[bytes] = []  # parts of the answer whose turn it is, written at the end of this turn

    # -- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        self._state.connections.add(self)
        self._timers.start()
        n_open, most = len(self._state.connections), self._limits.connections
        if n_open > 2 * most:
            self.abort()
        elif n_open > most:
            self.refuse(self.app.refuse(None, Refusal(503, "too_many_connections")))

    def connection_lost(self, error: Exception | None) -> None:
        self._state.remove(self)
        self._timers.cancel()
        self.ignoring_input = True
        self._kept = b""
        self._reader.forget()
        if self._large_body is not None:
            self._large_body.let_go()
        for exchange in self._queue.clear():
            self.app.cancel(exchange)
            if type(exchange.stream) is HttpStream:
                exchange.stream.unwatch()

    def data_received(self, data: bytes) -> None:
        if self.ignoring_input:
            return
        if self._reader.at_request_start and len(data) <= _LONGEST_LOOKED_UP:
            self._look_up(data)
        elif rest := self._reader.feed(data):
            self._keep(rest)
        if self._bulk is not None:
            self._timers.reading_resumed()  # such a body may take any time, as long as something comes
        elif self._timers.receiving is not None or not self._reader.at_request_start:
            self._timers.bytes_received()

    def eof_received(self) -> bool:
        """Note that the client sends no more. It is still owed the answers to what it has asked."""
        self._is_half_closed = True
        if self._bulk is not None:
            self.refuse(self.app.refuse(self._bulk.head, InvalidRequest("the body ended before it was complete")))
        self._forget_request()
        is_owed = len(self._queue) > 0
        if is_owed:
            self._timers.probe()
            self._probe_reader_of_events()
        return is_owed and self._transport.can_write_eof()  # TLS knows no half-closed connections

    def pause_writing(self) -> None:
        self._is_writing_paused = True
        self._timers.writing_paused()
        self._regulate()
        if (exchange := self._streaming) is not None:
            self.app.pause(exchange, True)

    def resume_writing(self) -> None:
        self._is_writing_paused = False
        self._timers.writing_resumed()
        if (exchange := self._streaming) is not None:
            self.app.pause(exchange, False)
        self._give()

    # -- receiving

    def _look_up(self, data: bytes) -> None:
        """Read requests that begin with `data`: look up known heads, and give the reader the rest.

        Fast path of `RequestReader.feed` and `App.admit`, and where nothing is owed of `_give`: the
        same requests reach the app and the same bytes the client, see
        tests/http/test_known_heads.py.
        """
        queue, heads, most = self._queue, self._known_heads, self._looked_up + MOST_AT_ONCE
        while data:
            if self._looked_up == most:
                self._keep(data)
                return
            raw, blank_line, rest = data.partition(b"\r\n\r\n")
            head = heads.get(raw)
            if head is None or head.length > len(rest) or not blank_line:
                if rest := self._reader.feed(data, raw + blank_line):
                    self._keep(rest)
                return
            body, data = rest[: head.length], rest[head.length :]
            self._looked_up += 1
            exchange = HttpExchange(self, head, body)
            if (
                queue.given
                or queue.waiting
                or self._is_writing_paused
                or (head.ask is None and self._state.long_page_written)
            ):
                queue.add(exchange)
                self._give()
                if data and self.room <= 0:
                    self._keep(data)
                    return
            else:
                queue.given.append(exchange)
                try:
                    head.route(exchange)
                except BaseException as error:
                    self.app.route_raised(exchange, error)
                if head.ask is None:
                    self._note_page(exchange)

    def request_received(self, head: HttpHead, body: bytes | bytearray, refusal: HttpResponse | None) -> None:
        """Take a whole request from the reader, and the response if the app refused its head."""
        exchange = HttpExchange(self, head, body)
        exchange.response = refusal
        self.ignoring_input = not head.keep_alive
        self._queue.add(exchange)
        self._give()

    def bulk_started(self, head: HttpHead) -> None:
        """Take a bulk request from the reader, and let the app have it in its turn."""
        self._bulk = HttpExchange(self, head)
        self._bulk.item = []  # pieces that come before the app has it
        self._queue.add(self._bulk)
        self._give()

    def bulk_received(self, data: bytes) -> None:
        """Hand a piece of the body on, and read no more while there is no room for it."""
        if self._bulk is not None:
            feed_bulk(self._bulk, data)
            if self.room <= 0:
                self._regulate()

    def bulk_ended(self) -> None:
        """Take note that the body of the bulk request is complete."""
        exchange, self._bulk = self._bulk, None
        if exchange is not None:
            self.ignoring_input = not exchange.head.keep_alive
            feed_bulk(exchange, None)
            self._regulate()

    def want_more(self) -> None:
        """Read on, as there is room for more of a bulk request."""
        if self.is_reading_paused:
            self._regulate()

    def end_of_input_unread(self) -> None:
        """Read no further: the rest of a body cannot be told from what follows it."""
        if self._bulk is not None:
            self._bulk.head.keep_alive = False
            self._bulk.head.is_cut_short = True
            self._bulk = None
            self._kept = b""
            self.ignoring_input = True
            self._loop.call_soon(self._forget_request)  # the parser may be at work

    def large_body_started(self, memory: memoryview) -> None:
        """Have the transport receive what comes next straight into `memory`."""
        self._large_body = _LargeBody(self, memory)
        self._set_protocol(self._large_body)

    def large_body_received(self, nbytes: int, is_full: bool) -> None:
        """Tell the reader that more is in the memory of its large body."""
        if is_full:
            self._large_body_ended()
        self._reader.large_body_received(nbytes)
        if is_full:
            self._timers.bytes_received()

    def _large_body_ended(self) -> None:
        """Have the transport deliver what comes next to this protocol again."""
        if self._large_body is not None:
            self._large_body.let_go()
            self._large_body = None
            self._set_protocol(self)

    def _set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        transport = self._transport
        transport.set_protocol(protocol)
        if not self.is_reading_paused and not transport.is_closing():
            # uvloop looks at how a protocol receives only when it starts to read
            transport.pause_reading()
            transport.resume_reading()

    def send_continue(self) -> None:
        """Tell the client, which waits for that, to send its body."""
        self._transport.write(_CONTINUE)

    def refuse(self, response: HttpResponse) -> None:
        """Answer the present request in its turn, read no further, and then close."""
        if self._bulk is not None:
            feed_bulk(self._bulk, response)
            self.end_of_input_unread()
            return
        present = self._reader.head
        head = HttpHead(present.method if present else b"", b"", {})  # the request's own may be shared
        head.keep_alive = False
        head.is_cut_short = True
        exchange = HttpExchange(self, head)
        exchange.response = response
        self._forget_request()
        self.ignoring_input = True
        self._kept = b""
        self._queue.add(exchange)
        self._give()

    def received_too_slowly(self) -> None:
        """Refuse the request that is half received."""
        self.refuse(self.app.refuse(self._reader.head, Refusal(408, "request_timeout")))

    def _forget_request(self) -> None:
        """Let go of a request that is half received."""
        self._reader.forget()
        self._large_body_ended()

    @property
    def requests(self) -> int:
        """How many requests were begun."""
        return self._looked_up + self._reader.requests

    # -- flow

    @property
    def room(self) -> int:
        """How many more requests may be read for now."""
        if self._is_writing_paused or (self._bulk is not None and not wants_more_of_bulk(self._bulk)):
            return 0
        return self._queue.room

    def _keep(self, data: bytes) -> None:
        """Keep requests that wait for those before them, a slow client or other connections."""
        self._kept = data
        self._regulate()

    def _read_kept(self) -> None:
        """Read some of what was kept, now that there may be room for it."""
        self._will_read_kept = False
        if self._kept and self.room > 0:
            data, self._kept = self._kept, b""
            self.data_received(data)
            self._regulate()

    def _regulate(self) -> None:
        """Read only while there is room for what would come, and read first what was kept."""
        if self._transport.is_closing():
            return
        if self._kept and self.room > 0 and not self._will_read_kept:
            self._will_read_kept = True
            self._loop.call_soon(self._read_kept)
        is_full = self.room <= 0 or bool(self._kept)
        if is_full != self.is_reading_paused:
            self.is_reading_paused = is_full
            if is_full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()
                self._timers.reading_resumed()

    # -- answering

    def _give(self) -> None:
        """Give the app the requests that it may have, and write refusals whose turn it is."""
        if self._is_giving:
            return  # called by an answer given at once: the loop below goes on
        queue = self._queue
        self._is_giving = True
        try:
            while not self._is_writing_paused and (exchange := queue.next_to_give()) is not None:
                if exchange.response is not None:
                    queue.give()
                    self.flush()
                elif exchange.head.ask is not None:
                    queue.give()
                    self.app.handle(exchange)  # may answer at once, and shorten the queue
                elif self._state.may_ask_for_page(self):
                    queue.give()
                    self.app.handle(exchange)
                    self._note_page(exchange)
                else:
                    break
        finally:
            self._is_giving = False
        if self.is_reading_paused or queue.room <= 0:
            self._regulate()

    def turn_has_come(self) -> None:
        """Ask for the page for which the connection has waited."""
        if not self._transport.is_closing():
            self._give()

    def _note_page(self, exchange: HttpExchange) -> None:
        """Let other clients have their turn after a long page, which takes milliseconds."""
        if exchange.response is not None and len(exchange.response.body) >= _LONG_PAGE:
            self._state.note_long_page()

    @property
    def client_host(self) -> str | None:
        """The address of the client; empty on a Unix socket, None if it is not known any more."""
        peer: object = self._transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else "" if isinstance(peer, str | bytes) else None

    def flush(self) -> None:
        """Write the answers whose turn it is."""
        queue, transport = self._queue, self._transport
        while (exchange := queue.pop_answered()) is not None:
            if type(exchange.stream) is HttpStream:
                exchange.stream.unwatch()
            if not transport.is_closing():
                self._write(exchange, cast(HttpResponse, exchange.response))
        if queue.given and type(queue.given[0].stream) is HttpStream:
            self._turn_of_parts(queue.given[0], queue.given[0].stream)
        if queue.waiting:
            self._give()
        elif not queue.given:
            if self.is_reading_paused:
                self._regulate()
            if self._is_half_closed or (self._state.is_draining and self._has_nothing_to_read):
                transport.close()

    def _write(self, exchange: HttpExchange, response: HttpResponse) -> None:
        """Write an answer, and close if it is the last one."""
        if response is _IN_PARTS:
            self._write_end(exchange)
            return
        if self._observer is not None:
            response = self._observer.answering(exchange, response, monotonic())
        head, body, was_paused = exchange.head, response.body, self._is_writing_paused
        is_last = not head.keep_alive or (self._state.is_draining and self.is_quiet)
        start = self._start_of(response, head, is_last)
        if head.method == b"HEAD":
            self._transport.write(start)
        else:
            self._transport.writelines([start, body])
        if was_paused:
            self._timers.written_while_paused(len(start) + len(body))
        if head.is_cut_short:
            self._end_politely()
        elif is_last:
            self._transport.close()

    def answer_now(self, exchange: HttpExchange) -> bool:
        """Write a good answer at once if that is all there is to do; return False if it is not.

        Fast path of `Exchange.tell`, `flush` and `_write`: the same outcome, see
        tests/http/test_known_heads.py.
        """
        queue, head, state, transport = self._queue, exchange.head, self._state, self._transport
        ask = head.ask
        body: Any = exchange.result
        more = head.good_headers
        if (
            len(queue.given) != 1
            or queue.waiting
            or ask is None
            or ask.framing is not None
            or type(body) is CheckedResponse
            or more is None
            or self._is_half_closed
            or state.is_draining
            or len(body) >= LARGE_BODY
            or self._is_writing_paused
            or transport.is_closing()
        ):
            return False
        queue.given.clear()
        prefix = state.ok_prefixes.get(ask.content_type) or state.ok_prefix(ask.content_type)
        if more:
            transport.write(b"%b%d\r\n%b\r\n%b" % (prefix, len(body), more, body))
        else:
            transport.write(b"%b%d\r\n\r\n%b" % (prefix, len(body), body))
        return True

    # -- answers in parts

    @property
    def _streaming(self) -> HttpExchange | None:
        """The request whose turn it is, if it is answered in parts."""
        given = self._queue.given
        return given[0] if given and type(given[0].stream) is HttpStream else None

    def write_part(self, exchange: HttpExchange, data: bytes) -> None:
        """Write a part of an answer, or keep it until those before it are written."""
        stream = cast(HttpStream, exchange.stream)
        given = self._queue.given
        if given and given[0] is exchange:
            self._write_in_parts(exchange, self._head_if_missing(exchange, stream) + _chunk(exchange.head, data))
        elif stream.hold(data):
            stream.is_held_back = True
            self.app.pause(exchange, True)

    def write_part_now(self, exchange: HttpExchange, part: object) -> bool:
        """Write a part behind others if that is all there is to do; return False if it is not.

        It goes at the end of this turn of the loop, with those that come in the same turn: each
        write is a call of the system.

        Fast path of `Exchange.tell_part` and `write_part`: the same bytes, see
        tests/http/test_streaming.py.
        """
        stream, head, given = cast(HttpStream, exchange.stream), exchange.head, self._queue.given
        if (
            not stream.is_head_written
            or not given
            or given[0] is not exchange
            or self._is_writing_paused
            or head.is_http_1_0
            or self._transport.is_closing()
        ):
            return False
        data = head.ask.framing.part % (part,)  # type: ignore[union-attr] # parts are told to those who asked for them
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        if len(data) > _LONGEST_GATHERED:
            self._write_in_parts(exchange, chunk)
        else:
            if not self._gathered:
                self._state.write_soon(self)
            self._gathered.append(chunk)
        return True

    def write_gathered(self) -> None:
        """Write the parts that have come in this turn of the loop."""
        gathered, self._gathered = self._gathered, []
        if gathered and not self._transport.is_closing():
            self._transport.write(b"".join(gathered))

    def end_parts(self, exchange: HttpExchange, data: bytes, is_whole: bool) -> None:
        """End an answer in parts, in its turn."""
        stream = cast(HttpStream, exchange.stream)
        stream.held.append(data)
        if exchange.response is None:
            exchange.response = _IN_PARTS
            exchange.is_broken = not is_whole
            self.flush()

    def _turn_of_parts(self, exchange: HttpExchange, stream: HttpStream) -> None:
        """Write what was held of an answer whose turn has come."""
        if not stream.held:
            return
        self._write_in_parts(
            exchange, self._head_if_missing(exchange, stream) + _chunk(exchange.head, stream.take_held())
        )
        if stream.is_held_back and not self._is_writing_paused:
            stream.is_held_back = False
            self.app.pause(exchange, False)

    def _write_end(self, exchange: HttpExchange) -> None:
        """Write the end of an answer in parts, and close if it is the last one."""
        stream, head = cast(HttpStream, exchange.stream), exchange.head
        data = self._head_if_missing(exchange, stream) + _chunk(head, stream.take_held())
        if not head.is_http_1_0 and not exchange.is_broken:
            data += _LAST_CHUNK
        self._write_in_parts(exchange, data)
        if self._observer is not None:
            self._observer.answered(exchange, 200, len(data), monotonic())
        if head.is_cut_short:
            self._end_politely()
        elif exchange.is_broken or _ends_with_answer(head) or (self._state.is_draining and self.is_quiet):
            self._transport.close()

    def _write_in_parts(self, exchange: HttpExchange, data: bytes) -> None:
        if self._transport.is_closing():
            return
        if self._is_writing_paused:
            self._timers.written_while_paused(len(data))
            self.app.pause(exchange, True)  # its turn has come while the client was slow already
        self._gathered.append(data)
        self.write_gathered()

    def _head_if_missing(self, exchange: HttpExchange, stream: HttpStream) -> bytes:
        """Return the head of an answer in parts, unless it was written before."""
        if stream.is_head_written:
            return b""
        stream.is_head_written = stream.has_begun = True
        head = exchange.head
        assert head.ask is not None and head.ask.framing is not None
        framing = head.ask.framing
        lines = [
            b"HTTP/1.1 200 OK\r\n",
            self._state.common_headers(),
            b"content-type: %b\r\n" % framing.content_type,
        ]
        headers = head.echoed(framing.headers) if head.extra or REQUEST_ID in head.headers else framing.headers
        if self._observer is not None:
            given = {name for name, _ in headers}
            added = self._observer.headers(exchange, monotonic(), has_ended=False)
            headers += tuple(header for header in added if header[0] not in given)
        lines += [b"%b: %b\r\n" % header for header in headers]
        lines.append(b"" if head.is_http_1_0 else b"transfer-encoding: chunked\r\n")
        lines.append(b"connection: close\r\n\r\n" if _ends_with_answer(head) else b"\r\n")
        return b"".join(lines)

    def watch_silence(self, exchange: HttpExchange) -> None:
        """See to it that the client of an answer in parts hears something now and then."""
        cast(HttpStream, exchange.stream).unwatch = self._loop.call_later(
            SILENCE_S, self._look_if_silent, exchange
        ).cancel

    def _look_if_silent(self, exchange: HttpExchange) -> None:
        """Tell a client that has heard nothing for a while that the connection is alive."""
        stream, ask = exchange.stream, exchange.head.ask
        if exchange.response is not None or type(stream) is not HttpStream or self._transport.is_closing():
            return
        assert ask is not None and ask.framing is not None
        silent_s = stream.silent_s(monotonic())
        alive = ask.framing.alive
        if silent_s >= SILENCE_S and alive and self._streaming is exchange and not self._is_writing_paused:
            self._write_in_parts(exchange, self._head_if_missing(exchange, stream) + _chunk(exchange.head, alive))
            silent_s = 0.0
        again_s = SILENCE_S - silent_s
        stream.unwatch = self._loop.call_later(
            again_s if again_s > 0 else SILENCE_S, self._look_if_silent, exchange
        ).cancel

    def _probe_reader_of_events(self) -> None:
        """Find out at once whether a client that has ended its side has left an answer in parts, so
        that its place is free: `probe` finds that the connection was reset by what is sent here.
        """
        exchange = self._streaming
        if exchange is None or self._is_writing_paused or self._transport.is_closing():
            return
        ask, stream = exchange.head.ask, cast(HttpStream, exchange.stream)
        assert ask is not None and ask.framing is not None
        if stream.is_head_written and exchange.response is None and ask.framing.alive:
            self._write_in_parts(exchange, _chunk(exchange.head, ask.framing.alive))
            self._loop.call_later(_RESET_S, self.probe, False)

    def _start_of(self, response: HttpResponse, head: HttpHead, is_last: bool) -> bytes:
        """Return everything of an answer that comes before its body."""
        status, body, content_type, headers = response
        if head.extra or REQUEST_ID in head.headers:
            headers = head.echoed(headers)
        lines = [b"HTTP/1.1 %d %b\r\n" % (status, _REASONS.get(status, b"")), self._state.common_headers()]
        if response.describes_its_body:
            lines.append(b"content-type: %b\r\ncontent-length: %d\r\n" % (content_type, len(body)))
        lines += [b"%b: %b\r\n" % header for header in headers]
        if is_last:
            lines.append(b"connection: close\r\n")
        elif head.is_http_1_0:
            lines.append(b"connection: keep-alive\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    # -- the end

    @property
    def _has_nothing_to_read(self) -> bool:
        """Whether no request is half received or waits to be read."""
        return self._reader.is_idle and not self._kept

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
        has_begun = type(first_owed.stream) is HttpStream and first_owed.stream.is_head_written
        if is_first and not first_owed.head.is_http_1_0 and not has_begun:
            self._transport.write(_CONTINUE)
        return True


def _chunk(head: HttpHead, data: bytes) -> bytes:
    """Return a piece of a body whose length is not known, as the client's version has it."""
    if head.is_http_1_0 or not data:
        return data
    return b"%x\r\n%b\r\n" % (len(data), data)


def _ends_with_answer(head: HttpHead) -> bool:
    """Report whether the connection closes after an answer in parts."""
    return head.is_http_1_0 or not head.keep_alive


class _LargeBody(asyncio.BufferedProtocol):
    """Stands in for a connection while a large body is received into place.

    Args:
        connection: the connection on which the body comes.
        rest: the memory that is still to be filled.
    """

    def __init__(self, connection: Connection, rest: memoryview) -> None:
        self._connection = connection
        self._rest = rest

    def let_go(self) -> None:
        """Let go of the memory, since uvloop keeps its last buffered protocol.

        Even an empty part of the memory would keep all of it.
        """
        self._rest = _NOTHING

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._rest

    def buffer_updated(self, nbytes: int) -> None:
        self._rest = self._rest[nbytes:]
        self._connection.large_body_received(nbytes, is_full=not self._rest)

    def connection_lost(self, error: Exception | None) -> None:
        self._connection.connection_lost(error)

    def eof_received(self) -> bool:
        return self._connection.eof_received()

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
