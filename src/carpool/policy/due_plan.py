"""Planning when the head of the queue cannot be served in time along with the others.

Two ways out are compared by how many requests they answer in time while the present queue drains, less what the time
is worth: (A) serve the head in the largest batch that still makes it, or (B) give the head up, and all behind it up to
the first request that a full batch can serve in time. Small batches for late heads are what makes servers collapse
under overload, so B wins there; with capacity to spare, time is worth nothing and A wins.
Both ends of the choice are known: A alone is Clockwork's largest feasible batch, B alone the early drop of Nexus.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from carpool.policy.cost import CostModel
    from carpool.request import Request


class DuePlan:
    """What can be done for a queue of requests, in the order in which they would be taken.

    Args:
        requests: the queue.
        cost: of batches.
        most: the largest batch made on purpose, in units of the requests' sizes.
        workers: how many drain the queue.
    """

    def __init__(self, requests: Sequence[Request], size: int, cost: CostModel, most: int, workers: int) -> None:
        self.requests = requests
        self._dues = [request.due for request in requests]
        self._end = len(requests)
        self._before: Sequence[int] = (  # units ahead of each request
            range(self._end + 1)
            if size == self._end
            else list(accumulate((request.size for request in requests), initial=0))
        )
        self._cost = cost
        self._most = most
        self._workers = workers

    def units(self, start: int) -> int:
        """How much waits from request `start` on."""
        return self._before[self._end] - self._before[start]

    def first_in_time(self, start: int, at: float) -> int:
        """The first request from `start` on that is still in time if a batch begins with it at `at`; `len` if none.

        The further back, the later it is due and the smaller the batch can be, so this is a binary search.
        """
        dues, cost, most, margin = self._dues, self._cost, self._most, self._cost.margin
        low, high = start, self._end
        while low < high:
            middle = (low + high) >> 1
            if dues[middle] - at >= cost.seconds(min(self.units(middle), most)) * margin:
                high = middle
            else:
                low = middle + 1
        return low

    def drain(self, start: int, at: float) -> tuple[int, float]:
        """How many from `start` on are answered in time if batches go back to back from `at`, and when that ends."""
        cost, most, margin, before = self._cost, self._most, self._cost.margin, self._before
        in_time = 0
        while start < self._end:
            units = min(self.units(start), most)
            seconds = cost.seconds(units)
            if self._dues[start] - at < seconds * margin:
                start = self.first_in_time(start, at)
                continue
            following = max(start + 1, bisect_right(before, before[start] + units) - 1)
            in_time += following - start
            at += seconds / self._workers
            start = following
        return in_time, at

    def serve_head(self, now: float, slack_s: float) -> tuple[int, int, float]:
        """Way A: units of the batch for the head, and how many are answered in time by when."""
        units = max(1, min(self._cost.largest_within(slack_s / self._cost.margin), self._most, self.units(0)))
        following = max(1, bisect_right(self._before, units) - 1)
        in_time, at = self.drain(following, now + self._cost.seconds(units) / self._workers)
        return units, in_time + following, at

    def late_before(self, start: int, at: float) -> list[Request]:
        """Those ahead of `start` that a batch beginning with them at `at` would answer too late.

        All of them, if requests are in the order of their dues; across priorities they need not be.
        """
        cost, most, margin = self._cost, self._most, self._cost.margin
        return [
            request
            for i, request in enumerate(self.requests[:start])
            if request.due - at < cost.seconds(min(self.units(i), most)) * margin
        ]
