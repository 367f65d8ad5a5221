"""A request of our own HTTP/1.1 front, whose answer a connection writes when its turn has come.

`AnswerQueue` keeps the order of answers on one connection: it says which is next and writes
nothing. Answers leave in the order of their requests, and the app gets only so many of a
connection's requests at a time. So a request in the queue is in one of three states, and passes
through them in this order:

* *waiting*: it was read, and the app does not have it yet;
* *given*: the app has it, and no response is there yet;
* *answered*: its response is there, and waits for those before it to be written.

The requests that are given or answered always come before those that are waiting. They are two
deques and not one with a counter, so that there is no counter which could disagree with the
requests.
"""

from __future__ import annotations

import copy
from collections import deque
from math import inf
from typing import Protocol

from carpool.engine.request import Request
from carpool.http.exchange import Exchange, HttpResponse, ServedModel
from carpool.http.server_state import HttpHead


class ExchangeConnection(Protocol):
    """A connection as the requests that came on it see it."""

    @property
    def client_host(self) -> str | None:
        """The address of the client."""

    def has_room_at(self, model: ServedModel | None, owed: int) -> bool:
        """Count the connection for a model, and report whether there is room."""

    def flush(self) -> None:
        """Write the answers whose turn it is."""

    def answer_now(self, exchange: HttpExchange) -> bool:
        """Write a good answer at once if that is all there is to do."""

    def watch_silence(self, exchange: HttpExchange) -> None:
        """Send keep-alives while no parts of an answer come."""

    def write_part(self, exchange: HttpExchange, data: bytes) -> None:
        """Write a part of an answer, or keep it until those before it are written."""

    def end_parts(self, exchange: HttpExchange, data: bytes, is_whole: bool) -> None:
        """End an answer in parts, in its turn."""

    def want_more(self) -> None:
        """Read on, as there is room for more of a bulk request."""

    def hold(self, exchange: HttpExchange, nbytes: int) -> None:
        """Count how many bytes of the body of a bulk request are in memory."""

    def break_off_as_slow(self, exchange: HttpExchange) -> None:
        """End a bulk request that comes too slowly."""

    def leave_body_unread(self) -> None:
        """Read nothing more of the body of a bulk request."""


class HttpExchange(Exchange):
    """An exchange whose answer is written to a connection when its turn has come.

    Attributes:
        connection: Where the request came from.
        held: How many bytes of the body of a bulk request are in memory; only there.
        response: The answer; None until it is there, or until all of its parts are.
        is_broken: Whether an answer in parts is broken off; set at its end.
    """

    __slots__ = ("connection", "held", "is_broken", "response")

    head: HttpHead
    held: int
    is_broken: bool

    def __init__(self, connection: ExchangeConnection, head: HttpHead, body: bytes | bytearray = b"") -> None:
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

    def end_parts(self, data: bytes, *, is_whole: bool) -> None:
        self.connection.end_parts(self, data, is_whole)

    def want_more(self) -> None:
        self.connection.want_more()

    def hold(self, nbytes: int) -> None:
        self.connection.hold(self, nbytes)

    @property
    def service(self) -> ServedModel | None:
        """The service that a bulk request is for."""
        return self.head.model

    def refuse_as_slow(self) -> None:
        """Break a bulk request off: its body comes so slowly that others need its memory."""
        self.connection.break_off_as_slow(self)

    def leave_body_unread(self) -> None:
        self.connection.leave_body_unread()


class AnswerQueue:
    """The requests of one connection that are owed an answer, in order.

    Args:
        most_given: How many requests the app may have at a time.

    Attributes:
        given: Requests that the app has or has answered. While the queue is empty, a request may be
            appended here directly, as `add` and `give` would do.
        waiting: Requests that the app does not have yet.
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
        """Note that the app gets the first waiting request."""
        self.given.append(self.waiting.popleft())

    def pop_answered(self) -> HttpExchange | None:
        """Take out the request whose response is to be written now, or return None."""
        if self.given and self.given[0].response is not None:
            return self.given.popleft()
        return None

    def clear(self) -> list[HttpExchange]:
        """Take out all requests, since nobody is there to take their answers."""
        owed = [*self.given, *self.waiting]
        self.given.clear()
        self.waiting.clear()
        return owed
