"""How a client waits: no longer than it may, nor once it is closed; and how its tasks end.

A `RetryBudget` decides what may be retried, after which wait, and how often in all. Retries make an
overload worse, so each request earns a tenth of one; a few are lent in the beginning, for a server
that is just starting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from random import random
from types import TracebackType
from typing import Any, Final

from carpool.errors import DeadlineExceeded, Unavailable


def closed() -> Unavailable:
    """Return the error of a call during which its client was closed."""
    return Unavailable("the client was closed during the call", code="closed", retry_after_s=None)


async def end(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait until it has ended, whatever it has raised.

    Whoever is cancelled meanwhile cancels the task once more and goes on waiting: what the task was
    using, the caller may close next.
    """
    task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            task.cancel()
            cancelled = error
    if not task.cancelled():
        task.exception()  # asyncio logs an exception that is never retrieved
    if cancelled is not None:
        raise cancelled


class Waits:
    """All waits of a client.

    Attributes:
        is_closed: Whether the client is closed.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self._waits: set[Wait] = set()

    def check(self) -> None:
        """Raise RuntimeError if the client is closed."""
        if self.is_closed:
            raise RuntimeError("this client has been closed: make a new one")

    def at_most(self, limit_s: float | None) -> Wait:
        """Return a wait, for `async with`, of at most so many seconds; None for no limit."""
        return Wait(self, self._waits, limit_s)

    def close(self) -> None:
        self.is_closed = True
        for wait in self._waits:
            wait.limit(0.0)


class Wait:
    """One wait for the server.

    Args:
        limit_s: How long it takes at most, in seconds; None for no limit.
    """

    def __init__(self, waits: Waits, running: set[Wait], limit_s: float | None) -> None:
        self._waits = waits
        self._running = running
        self._scope = asyncio.timeout(limit_s)

    def limit(self, limit_s: float) -> None:
        """Have it end in so many seconds from now, if it is under way."""
        if self in self._running and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time() + limit_s)

    async def __aenter__(self) -> Wait:
        if self._waits.is_closed:
            raise closed()
        await self._scope.__aenter__()
        self._running.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Raise `DeadlineExceeded` where its time was over, and `Unavailable` where the client was
        closed.
        """
        self._running.discard(self)
        try:
            await self._scope.__aexit__(kind, error, traceback)
        except TimeoutError as over:
            raise (
                closed() if self._waits.is_closed else DeadlineExceeded("the server did not answer in time")
            ) from over


SHARE: Final = 0.1
"""Retries per request."""

_LENT: Final = 3.0
_MOST_SAVED: Final = 100.0
_FIRST_WAIT_S: Final = 0.05
_LONGEST_WAIT_S: Final = 5.0
RETRIED: Final = frozenset({429, 503})
"""The statuses after which the same request may be sent once more: it was not run."""

_NOT_RUN_CODES: Final = frozenset({"overloaded", "starting", "draining", "too_many_connections", "not_ready", ""})


class RetryBudget:
    """How many retries a client has left.

    Attributes:
        requests: How many requests were made.
        retries: How many of them were sent again.
    """

    def __init__(self) -> None:
        self.requests = self.retries = 0
        self._saved = _LENT
        self._owed = _LENT  # of what was lent, which is paid back first

    def note_request(self) -> None:
        self.requests += 1
        if self._owed > 0:
            self._owed -= SHARE
        else:
            self._saved = min(self._saved + SHARE, _MOST_SAVED)

    def take(self) -> bool:
        """Take a retry out of the budget; report whether there was one."""
        if self._saved < 1:
            return False
        self._saved -= 1
        self.retries += 1
        return True


def is_retried(status: int, code: str) -> bool:
    """Report whether a request that was answered like this was not run, and may be sent again."""
    return status in RETRIED and code in _NOT_RUN_CODES


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return how long a server wants a client to wait; None if it does not say."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def wait_s(attempt: int, asked_s: float | None, dice: Callable[[], float] = random) -> float:
    """Return how long to wait before a retry: what the server asks, or twice as long each time,
    spread so that clients do not come back together.

    Args:
        asked_s: The wait that the server asks for; None for none.
        dice: A number from 0 to 1.
    """
    if asked_s is not None:
        return asked_s * (1 + 0.25 * dice())
    doubled_s: float = _FIRST_WAIT_S * 2.0 ** (attempt - 1)
    return min(doubled_s, _LONGEST_WAIT_S) * (0.5 + 0.5 * dice())
