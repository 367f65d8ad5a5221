"""Which connections may be proving themselves at a time: those that are to join, or to speak TLS.

Each has some time for sure. Once that is over, it makes room for one that comes later, if there are
as many as there may be. The one that goes is the oldest of the source that has most, so whoever
keeps many connections open pushes out its own, and neither keeps others out.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Strangers(Generic[T]):
    """Connections that have not proven themselves.

    Args:
        most: How many there may be.
        sure_s: For how long each may stay, however many come.
    """

    def __init__(self, most: int, sure_s: float) -> None:
        self._most = most
        self._sure_s = sure_s
        self._came: dict[T, tuple[str, float]] = {}
        self._of_source: dict[str, dict[T, None]] = {}

    def __len__(self) -> int:
        return len(self._came)

    def wait_s(self, now: float) -> float:
        """Return after how many seconds one more may come, unless one leaves before; 0 for now."""
        if len(self._came) < self._most:
            return 0.0
        return max(0.0, self._came[self._next_to_go()][1] + self._sure_s - now)

    def enter(self, stranger: T, source: str, now: float) -> T | None:
        """Let one in, and return the one that has to go for it."""
        going = self._next_to_go() if len(self._came) >= self._most else None
        if going is not None:
            self.leave(going)
        self._came[stranger] = source, now
        self._of_source.setdefault(source, {})[stranger] = None
        return going

    def leave(self, stranger: T) -> None:
        """Take note that one has proven itself, or has gone."""
        source, _ = self._came.pop(stranger, ("", 0.0))
        others = self._of_source.get(source, {})
        others.pop(stranger, None)
        if not others:
            self._of_source.pop(source, None)

    def _next_to_go(self) -> T:
        source = max(self._of_source, key=lambda each: len(self._of_source[each]))
        return next(iter(self._of_source[source]))
