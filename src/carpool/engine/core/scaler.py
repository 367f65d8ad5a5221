"""How many workers a stage should have, by what comes and by what its batches cost. Sans-IO.

It is asked about once a second. The number of workers that the load needs is

    rate / (0.8 · n* / cost(n*)),

where n* is the largest batch that fits twice into the SLO: a request waits for one batch and is
part of the next. Without an SLO it is the largest batch of the stage. If requests would wait for
longer than the SLO all the same, it is one more. Workers are added at once, and taken away only
when fewer have been wanted for a while, so that a dip does not cost a start.

Other rules mislead where batches form: free workers take small batches, so the share of time in
which workers are busy, and the number of requests inside, say little about how many are needed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from math import ceil, inf

EVERY_S = 1.0
"""How often a scaler is to be asked."""

_HEADROOM = 0.8  # the share of a worker's capacity that is planned with
_RATE_OVER_S = 5.0  # the time over which arrivals are averaged
_DOWN_AFTER_S = 20.0
_PER_SLO = 2  # batches that a request spends within the SLO


class Steady:
    """Follows a wanted number of workers: up at once, down when fewer were wanted for a while."""

    def __init__(self, least: int, most: int) -> None:
        self._least = least
        self._most = most
        self._wants: deque[tuple[float, int]] = deque()  # when a number was wanted; the numbers fall

    def settled(self, now: float, wanted: int, workers: int) -> int:
        """Return how many workers there should be, where so many are wanted now and so many are
        there or will be soon.
        """
        wanted = max(self._least, min(self._most, wanted))
        wants = self._wants
        if not wants:
            wants.append((now, min(workers, self._most)))
        while wants and wants[0][0] <= now - _DOWN_AFTER_S:
            wants.popleft()
        while wants and wants[-1][1] <= wanted:
            wants.pop()
        wants.append((now, wanted))
        return wants[0][1]


class Scaler:
    """How many workers one stage should have, from the fewest to the most.

    Args:
        limit: The largest batch, in units of the requests' sizes.
        slo_s: The SLO; infinity for none.
        cost_s: Returns what a batch of a size takes, its way included; 0 while that is not known.

    Attributes:
        rate: How many requests come per second, as far as is known.
        needed: How many workers that load needs, as a fraction.
    """

    def __init__(self, least: int, most: int, limit: int, slo_s: float, cost_s: Callable[[int], float]) -> None:
        self.rate = self.needed = 0.0
        self._slo_s = slo_s
        self._limit = limit
        self._cost_s = cost_s
        self._arrivals: deque[tuple[float, int]] = deque()  # when they were counted, and how many there were
        self._steady = Steady(least, most)

    def wanted(self, now: float, arrivals: int, unit: float, wait_s: float, workers: int) -> int:
        """Return how many workers the stage should have.

        Args:
            arrivals: How many requests have come so far, those included that were refused.
            unit: The mean size of a request.
            wait_s: How long a request that comes now is expected to wait.
        """
        self._count(now, arrivals)
        self.needed = self.rate * unit / (_HEADROOM * self.capacity)
        return self._steady.settled(now, ceil(self.needed) + (wait_s > self._slo_s), workers)

    @property
    def capacity(self) -> float:
        """Units per second that a worker serves within the SLO; infinity while nothing is known."""
        n = self._limit
        if self._slo_s < inf:
            n = max(1, bisect_right(range(1, n + 1), self._slo_s / _PER_SLO, key=self._cost_s))
        seconds = self._cost_s(n)
        return n / seconds if seconds else inf

    def _count(self, now: float, arrivals: int) -> None:
        counted = self._arrivals
        counted.append((now, arrivals))
        while len(counted) > 2 and counted[1][0] <= now - _RATE_OVER_S:
            counted.popleft()
        (since, before), (until, after) = counted[0], counted[-1]
        self.rate = (after - before) / (until - since) if until > since else 0.0
