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

from collections import deque
from math import ceil, inf

from carpool.policy.cost import CostModel

EVERY_S = 1.0
"""How often a scaler is to be asked."""

_HEADROOM = 0.8  # the share of a worker's capacity that is planned with
_RATE_OVER_S = 5.0  # the time over which arrivals are averaged
_DOWN_AFTER_S = 20.0
_PER_SLO = 2  # batches that a request spends within the SLO
_LEARN_EVERY_S = 0.01  # of work of one worker
_MEAN_KEEP = 0.95  # of the smoothed size of a request, at each batch


class Steady:
    """Follows a wanted number of workers: up at once, down only when fewer were wanted for a while.

    Args:
        least: The fewest workers.
        most: The most workers.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least = least
        self._most = most
        self._wants: deque[tuple[float, int]] = deque()  # when a number was wanted; the numbers fall

    def settled(self, now: float, wanted: int, workers: int) -> int:
        """Return how many workers there should be.

        Args:
            now: The time.
            wanted: How many are wanted now.
            workers: How many there are or will be soon.
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
    """How many workers one stage should have.

    Args:
        least: The fewest workers.
        most: The most workers.
        limit: The largest batch, in units of the requests' sizes.
        slo_s: The SLO; infinity for none.

    Attributes:
        rate: How many requests come per second, as far as is known.
        needed: How many workers that load needs, as a fraction.
    """

    def __init__(self, least: int, most: int, limit: int, slo_s: float = inf) -> None:
        self.rate = self.needed = 0.0
        self._slo_s = slo_s
        self._cost = CostModel(limit)
        self._unit = 1.0  # the smoothed size of a request
        self._to_skip = 0  # how many of the next batches are not learned from
        self._arrivals: deque[tuple[float, int]] = deque()  # when they were counted, and how many there were
        self._steady = Steady(least, most)

    def completed(self, n: int, size: int, busy_s: float) -> None:
        """Learn from a batch of `n` requests, the sizes of which sum to `size`.

        Of short batches not all are learned from, as that takes a share of their time.
        """
        if self._to_skip:
            self._to_skip -= 1
            return
        self._to_skip = int(_LEARN_EVERY_S / max(busy_s, 1e-6))
        self._cost.add(size, busy_s)
        self._unit += (1.0 - _MEAN_KEEP) * (size / n - self._unit)

    def wanted(self, now: float, arrivals: int, wait_s: float, workers: int) -> int:
        """Return how many workers the stage should have.

        Args:
            now: The time.
            arrivals: How many requests have come so far, those included that were refused.
            wait_s: How long a request that comes now is expected to wait.
            workers: How many there are or will be soon.
        """
        self._count(now, arrivals)
        self.needed = self.rate * self._unit / (_HEADROOM * self.capacity)
        return self._steady.settled(now, ceil(self.needed) + (wait_s > self._slo_s), workers)

    @property
    def capacity(self) -> float:
        """Units per second that a worker serves within the SLO; infinity while nothing is known."""
        cost = self._cost
        if not cost.samples:
            return inf
        n = cost.limit if self._slo_s == inf else max(1, cost.largest_within(self._slo_s / _PER_SLO))
        return n / cost.seconds(n)

    def _count(self, now: float, arrivals: int) -> None:
        """Note how many requests have come, and by that how many come per second."""
        counted = self._arrivals
        counted.append((now, arrivals))
        while len(counted) > 2 and counted[1][0] <= now - _RATE_OVER_S:
            counted.popleft()
        (since, before), (until, after) = counted[0], counted[-1]
        self.rate = (after - before) / (until - since) if until > since else 0.0
