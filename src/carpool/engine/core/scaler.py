"""How many workers a stage should have, by what comes and by what its batches cost. Sans-IO.

It is asked about once a second. The number of workers that the load needs is the least N with

    rate <= 0.8 · N · n / cost(n),

where n is the largest batch of the stage that is in time. N workers that start in turn start one
batch every cost(n)/N, for which a request waits before it is part of the next, so that is the
largest n with cost(n)·(1 + 1/N) within the SLO: the target size of Symphony (arXiv 2308.07470). As
workers do not stay in turn, 0.3 of the SLO is left over; but a batch that fits twice into the SLO
is always in time, as it is for one worker alone. If requests would wait for longer than the SLO
all the same, it is one more. Workers are added at once, and taken away only when fewer have been
wanted for a while, so that a dip does not cost a start.

Other rules mislead where batches form: free workers take small batches, so the share of time in
which workers are busy, and the number of requests inside, say little about how many are needed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from math import inf

EVERY_S = 1.0
"""How often a scaler is to be asked."""

_HEADROOM = 0.8  # the share of a worker's capacity that is planned with
_RATE_OVER_S = 5.0  # the time over which arrivals are averaged
_DOWN_AFTER_S = 20.0
_SLO_SHARE = 0.7  # that a request may spend on waiting for one of several workers, and in its batch


class Steady:
    """Follows a wanted number of workers: up at once, down when fewer were wanted for a while.

    Attributes:
        most: The most that there are.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least = least
        self.most = most
        self._wants: deque[tuple[float, int]] = deque()  # when a number was wanted; the numbers fall

    def settled(self, now: float, wanted: int, workers: int) -> int:
        """Return how many workers there should be, where so many are wanted now and so many are
        there or will be soon.
        """
        wanted = max(self._least, min(self.most, wanted))
        wants = self._wants
        if not wants:
            wants.append((now, min(workers, self.most)))
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
        needed: How many workers that load needs.
    """

    def __init__(self, least: int, most: int, limit: int, slo_s: float, cost_s: Callable[[int], float]) -> None:
        self.rate, self.needed = 0.0, 0
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
        self.count(now, arrivals)
        self.needed = bisect_left(range(self._steady.most), self.rate * unit / _HEADROOM, key=self.capacity)
        return self._steady.settled(now, self.needed + (wait_s > self._slo_s), workers)

    def capacity(self, workers: int) -> float:
        """Return the units per second that workers serve within the SLO; infinity while unknown."""
        within_s = self._slo_s * max(0.5, _SLO_SHARE * workers / (workers + 1))
        n = max(1, bisect_right(range(1, self._limit + 1), within_s, key=self._cost_s))
        seconds = self._cost_s(n)
        return workers * n / seconds if seconds else inf

    def count(self, now: float, arrivals: int) -> None:
        """Note how many requests have come so far."""
        counted = self._arrivals
        counted.append((now, arrivals))
        while len(counted) > 2 and counted[1][0] <= now - _RATE_OVER_S:
            counted.popleft()
        (since, before), (until, after) = counted[0], counted[-1]
        self.rate = (after - before) / (until - since) if until > since else 0.0
