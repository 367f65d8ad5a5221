"""How a client waits: no longer than it may, nor once it is closed; and how its tasks end."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

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
        """End all waits."""
        self.is_closed = True
        for wait in self._waits:
            wait.limit(0.0)


class Wait:
    """One wait for the server.

    Args:
        waits: Of the client.
        running: The waits that are under way, of which this is one meanwhile.
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
