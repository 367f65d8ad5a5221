"""When a worker is replaced by a fresh one although nothing is wrong with it. Sans-IO.

For models that leak memory, or get slower with time: after a number of calls, above an amount of
memory, or at an age. One worker of a stage is replaced at a time, since its successor needs memory
while it is still there. If a successor cannot load, the old worker stays, and it is tried again
later. So it is where the successor itself holds too much memory as soon as it has loaded: then the
limit is too low for the model, and workers that come and go would be no cure.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

_FIRST_PAUSE_S = 5.0  # after a successor that could not load; twice that after each further one
_LONGEST_PAUSE_S = 300.0


class Worn(NamedTuple):
    """A worker that is to be replaced.

    Attributes:
        place: The position of the worker.
        why: For the log.
    """

    place: int
    why: str


class Recycling:
    """Which worker of a stage is to be replaced.

    Args:
        max_calls: How many calls a worker may have made; infinity for any number.
        max_memory_mb: How much memory its process may hold, in MiB; infinity for any amount.
        max_age_s: How long it may have been ready; infinity for ever.
    """

    def __init__(self, max_calls: float = inf, max_memory_mb: float = inf, max_age_s: float = inf) -> None:
        self._max_calls = max_calls
        self._max_memory_mb = max_memory_mb
        self._max_age_s = max_age_s
        self._since: dict[int, float] = {}  # when a worker was first seen to be ready, by place
        self._starts: dict[int, int] = {}  # which worker of its place that was
        self._calls: dict[int, int] = {}
        self._memory_mb: dict[int, float] = {}
        self._resume_at = -inf
        self._pause_s = _FIRST_PAUSE_S

    @property
    def measures_memory(self) -> bool:
        """Whether the memory of workers matters."""
        return self._max_memory_mb < inf

    def are_there(self, now: float, orders: dict[int, int]) -> None:
        """Note which workers are there.

        Args:
            now: The time.
            orders: By the place of each worker that is ready, its number among all workers.
        """
        for place in [place for place in self._since if orders.get(place) != self._starts[place]]:
            for by_place in (self._since, self._starts, self._calls, self._memory_mb):
                by_place.pop(place, None)
        for place, order in orders.items():
            if place not in self._since:
                self._since[place], self._starts[place] = now, order

    def called(self, place: int, calls: int) -> None:
        """Note that a worker has made some calls."""
        self._calls[place] = self._calls.get(place, 0) + calls

    def measured(self, place: int, memory_mb: float) -> None:
        """Note how much memory the process of a worker holds, in MiB."""
        self._memory_mb[place] = memory_mb

    def due(self, now: float) -> Worn | None:
        """Return the worker to replace now, if there is one: the one that is due for longest."""
        if now < self._resume_at:
            return None
        for place in sorted(self._since, key=self._since.__getitem__):
            why = self._why(now, place)
            if why:
                return Worn(place, why)
        return None

    def succeeded(self, now: float, memory_mb: float = 0.0) -> float:
        """Note that a worker was replaced; return after how many seconds another may be.

        Args:
            now: The time.
            memory_mb: How much memory its successor holds before it has done anything, in MiB.
        """
        if memory_mb > self._max_memory_mb:
            return self.failed(now)
        self._pause_s = _FIRST_PAUSE_S
        return 0.0

    def failed(self, now: float) -> float:
        """Note that a successor is no better; return after how many seconds another is tried."""
        pause_s = self._pause_s
        self._resume_at = now + pause_s
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
        return pause_s

    def _why(self, now: float, place: int) -> str:
        """Return why a worker is to be replaced; empty if it is not."""
        calls, memory_mb = self._calls.get(place, 0), self._memory_mb.get(place, 0.0)
        if calls >= self._max_calls:
            return f"it has made {calls} calls (max_calls={self._max_calls:g})"
        if memory_mb > self._max_memory_mb:
            return f"it holds {memory_mb:.0f} MiB (max_memory_mb={self._max_memory_mb:g})"
        age_s = now - self._since[place]
        return f"it is {age_s:.0f} s old (max_age_s={self._max_age_s:g})" if age_s >= self._max_age_s else ""
