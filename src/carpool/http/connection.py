"""The HTTP/1.1 front: one client connection, its order and flow.

* Answers leave in the order of their requests; while too many are owed, nothing more is read.
* A request that is refused before its body was read is answered, and then the connection is closed.
* A client that ends its side still gets its answers; if it is gone, its queued requests are
  cancelled.
* A client that does not take its answers is not read from either, and is cut off after a while.

Five state machines meet here; each moves by itself:

* *The request being received* (`RequestReader`): at the start of a request (`at_request_start`:
  only there may a known head be looked up) -> in its head (`in_headers`) -> in its body (`head` is
  set), or in a large body (`LargeBody` is the transport's protocol in the place of this one) -> at
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
"""

from __future__ import annotations

import asyncio
from typing import cast

from carpool.errors import InvalidRequest
from carpool.http.answer_writer import CONTINUE, AnswerWriter, HttpExchange
from carpool.http.bulk import feed_bulk, wants_more_of_bulk
from carpool.http.codec import Refusal, too_many_connections
from carpool.http.exchange import Exchange, HttpResponse, ServedModel
from carpool.http.reader import MOST_AT_ONCE, RequestReader
from carpool.http.server_state import HttpHead, ServerState
from carpool.http.shares import Body
from carpool.http.timers import Timers

_LONGEST_LOOKED_UP = 16 * 1024  # more in one piece is a large body, or many requests at once
_LONG_PAGE = 4 * 1024  # bytes: the figures of /metrics have more, a line that says "ok" has not


class Connection(AnswerWriter):
    """One client.

    Attributes:
        ignoring_input: Whether everything that still comes is thrown away.
    """

    def __init__(self, state: ServerState) -> None:
        super().__init__(state)
        self._known_heads = state.heads

        # Receiving. A request is counted where its head is read: here if it is known, else by the
        # reader.
        self.ignoring_input = False
        self._reader = RequestReader(state, self)
        self._timers = Timers(self, self._reader, self._limits)
        self._large_body: LargeBody | None = None  # while it stands in for us
        self._bulk: HttpExchange | None = None  # the request whose body is being handed on as it comes
        self._looked_up = 0

        # Flow. Kept bytes were received, and must not be read before there is room.
        self._kept = b""
        self._will_read_kept = False  # `_read_kept` is about to be called
        self._is_giving = False  # `_give` is at work

    # -- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        self._timers.start()
        self.ignoring_input = not self._state.add(self)

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
            if exchange.delivery is not None:
                exchange.delivery.unwatch()

    def data_received(self, data: bytes) -> None:
        if self.ignoring_input:
            if self in self._state.beyond:
                self._read_first_line(data)
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
        """Note that the client sends no more. It is still owed the answers to its requests."""
        self._is_half_closed = True
        if self._bulk is not None:
            self.refuse(self.app.refuse(self._bulk.head, InvalidRequest("the body ended before it was complete")))
        self._forget_request()
        is_owed = len(self._queue) > 0
        if is_owed:
            self._timers.probe()
            self._probe_client_of_parts()
        return is_owed and self._transport.can_write_eof()  # TLS has no half-closed connections

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

        What cannot be read now is kept.

        A part of the fast path `known_heads`, as of `RequestReader.feed` and `App.admit`, and where
        nothing is owed of `_give`: the same requests reach the app and the same bytes the client,
        see tests/http/test_known_heads.py.
        """
        queue, heads, most = self._queue, self._known_heads, self._looked_up + MOST_AT_ONCE
        while data:
            if self._looked_up == most:
                break
            raw, blank_line, rest = data.partition(b"\r\n\r\n")
            head = heads.get(raw)
            if (
                head is None  # it is not known
                or head.length > len(rest)  # its body is not all there
                or not blank_line
                or (head.model is not self.counted_for and not self.has_room_at(head.model))  # it is refused
            ):
                data = self._reader.feed(data, raw + blank_line)
                break
            body, data = rest[: head.length], rest[head.length :]
            self._looked_up += 1
            exchange = HttpExchange(self, head, body)
            if (
                queue.given
                or queue.waiting
                or self._is_writing_paused
                or (head.ask is None and self._state.long_page_written)  # a page: one long one in a turn
            ):
                queue.add(exchange)
                self._give()
                if data and self.room <= 0:
                    break
            else:  # nothing is before it: it goes at once
                queue.given.append(exchange)
                try:
                    head.route(exchange)  # that of `HeadAdmission`, mostly `PredictRoutes.predict` alone
                except BaseException as error:
                    self.app.route_raised(exchange, error)
                if head.ask is None:
                    self._note_page(exchange)
                if data and self.ignoring_input:
                    return  # the rest is thrown away
        if data:
            self._keep(data)

    def has_room_at(self, model: ServedModel | None, owed: int = 0) -> bool:
        """Count this connection for the model that it asks now, and report whether there is room.

        It counts for one model at a time, and goes on doing so until it asks another one. So those
        that are idle count, too, and an answer costs nothing.

        Args:
            model: The model; None for pages, for which it goes on counting as before.
            owed: How many answers the request itself is owed. If others are owed besides, the
                connection goes on counting for their model.
        """
        if model is None or model is self.counted_for or len(self._queue) > owed:
            return True
        has_room = self._state.shares.take(self, model)
        self.counted_for = model if has_room else None
        if owed and not has_room:
            self.ignoring_input = True  # it ends with the answer to this request
        return has_room

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
        self._bulk.held = 0
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

    def hold(self, exchange: Body, nbytes: int) -> None:
        """Count how many bytes of the body of a bulk request are in memory."""
        self._state.bodies.hold(exchange, nbytes)

    def break_off_as_slow(self, exchange: Exchange) -> None:
        """End a bulk request that comes too slowly."""
        feed_bulk(exchange, self.app.refuse(exchange.head, Refusal(408, "request_timeout")))

    def leave_body_unread(self) -> None:
        """Read no further: the end of the bulk request cannot be found."""
        if self._bulk is not None:
            self._bulk.head.keep_alive = False
            self._bulk.head.is_cut_short = True
            self._bulk = None
            self._kept = b""
            self.ignoring_input = True
            self._loop.call_soon(self._forget_request)  # the parser may be at work

    def large_body_started(self, memory: memoryview) -> None:
        """Have the transport receive the next bytes straight into `memory`."""
        self._large_body = LargeBody(self, memory)
        self._set_protocol(self._large_body)

    def large_body_received(self, nbytes: int, is_full: bool) -> None:
        """Take note that more is in the memory of the large body."""
        if is_full:
            self._large_body_ended()
        self._reader.large_body_received(nbytes)
        if is_full:
            self._timers.bytes_received()

    def _large_body_ended(self) -> None:
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
        """Send a 100 (Continue) to a client that waits for it before it sends its body."""
        self._transport.write(CONTINUE)

    def refuse(self, response: HttpResponse) -> None:
        """Answer the present request in its turn, read no further, and then close."""
        if self._bulk is not None:
            feed_bulk(self._bulk, response)
            self.leave_body_unread()
            return
        present = self._reader.head
        method, path = (present.method, present.path) if present else (b"", b"")
        last = HttpHead(method, path, {})  # the request's own head may be shared
        if present is not None:  # for the access log
            last.model, last.caller = present.model, present.caller
        self._answer_last(last, response)

    def _answer_last(self, head: HttpHead, response: HttpResponse | None) -> None:
        """Answer a request, without a response with the answer of the app, and then close."""
        head.keep_alive = False
        head.is_cut_short = True
        exchange = HttpExchange(self, head)
        exchange.response = response
        self._forget_request()
        self.ignoring_input = True
        self._kept = b""
        self._queue.add(exchange)
        self._give()

    def _read_first_line(self, data: bytes) -> None:
        """Answer a connection for which there is no room: is this process alive, or 503.

        A supervisor restarts a server that does not answer the first, however busy it is.
        """
        if self._queue:
            return
        method, _, rest = (self._kept + data).lstrip(b"\r\n").partition(b" ")
        path, space, _ = rest.partition(b" ")
        if not space and len(method) + len(path) <= self._limits.target_bytes:
            self._kept += data  # there may be more of it
        elif space and method in (b"GET", b"HEAD") and path.partition(b"?")[0] in self._state.livez:
            head = HttpHead(method, path.partition(b"?")[0], {})
            self._answer_last(head, self.app.admit(head))
        else:
            self._refuse_for_room()

    def _refuse_for_room(self) -> None:
        self._state.note_refused()
        self.refuse(self.app.refuse(None, too_many_connections()))

    def close(self) -> None:
        """Close once everything has been written; without room for it, not without an answer."""
        if self in self._state.beyond and not self._queue:
            self._refuse_for_room()
        else:
            super().close()

    def received_too_slowly(self) -> None:
        """Refuse the request that is half received."""
        self.refuse(self.app.refuse(self._reader.head, Refusal(408, "request_timeout")))

    def _forget_request(self) -> None:
        self._reader.forget()
        self._large_body_ended()

    @property
    def requests(self) -> int:
        """How many requests were begun."""
        return self._looked_up + self._reader.requests

    # -- flow

    @property
    def _has_nothing_to_read(self) -> bool:
        """Whether no request is half received or waits to be read."""
        return self._reader.is_idle and not self._kept

    @property
    def is_quiet(self) -> bool:
        """Whether no request is owed an answer, half received, or waiting to be read."""
        return not self._queue and self._has_nothing_to_read

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
        """Read some of the kept bytes, now that there may be room for them."""
        self._will_read_kept = False
        if self._kept and self.room > 0:
            data, self._kept = self._kept, b""
            self.data_received(data)
            self._regulate()

    def _regulate(self) -> None:
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

    # -- writing answers in their turn

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

    def drain(self) -> None:
        """Close now if the connection is quiet; otherwise the last answer closes it."""
        if self.is_quiet:
            self._transport.close()

    # -- giving requests to the app

    def _give(self) -> None:
        if self._is_giving or self._transport.is_closing():
            return  # called by an answer given at once: the loop below goes on; or nothing can be answered any more
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


_NOTHING = memoryview(b"")


class LargeBody(asyncio.BufferedProtocol):
    """Stands in for a connection while a large body is received into place.

    Args:
        rest: The memory that is still to be filled.
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
