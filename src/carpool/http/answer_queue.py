"""Keeps the order of answers on one connection. Sans-IO: it says which is next and writes nothing.

Answers leave in the order of their requests, and the app gets only so many of a connection's
requests at a time. So a request in the queue is in one of three states, and passes through them in
this order:

* *waiting*: it was read, and the app does not have it yet;
* *given*: the app has it, and no response is there yet;
* *answered*: its response is there, and waits for those before it to be written.

The requests that are given or answered always come before those that are waiting. They are two
deques and not one with a counter, so that there is no counter which could disagree with the
requests.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from carpool.http.exchange import HttpResponse


class Owed(Protocol):
    """A request that is owed an answer.

    Attributes:
        response: The answer; None until it is there. A refused request enters the queue with it.
    """

    response: HttpResponse | None


T = TypeVar("T", bound=Owed)


class AnswerQueue(Generic[T]):
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
        self.given: deque[T] = deque()
        self.waiting: deque[T] = deque()
        self._most_given = most_given

    def __len__(self) -> int:
        return len(self.given) + len(self.waiting)

    @property
    def room(self) -> int:
        """How many more requests may be read; one more than the app may have are held at most."""
        return self._most_given + 1 - len(self)

    def add(self, request: T) -> None:
        """Let a request that was read wait for its turn."""
        self.waiting.append(request)

    def next_to_give(self) -> T | None:
        """Return the request that the app may have now, or None; it stays waiting until `give`."""
        if self.waiting and len(self.given) < self._most_given:
            return self.waiting[0]
        return None

    def give(self) -> None:
        """Note that the app gets the first waiting request."""
        self.given.append(self.waiting.popleft())

    def pop_answered(self) -> T | None:
        """Take out the request whose response is to be written now, or return None."""
        if self.given and self.given[0].response is not None:
            return self.given.popleft()
        return None

    def clear(self) -> list[T]:
        """Take out all requests, since nobody is there to take their answers."""
        owed = [*self.given, *self.waiting]
        self.given.clear()
        self.waiting.clear()
        return owed
