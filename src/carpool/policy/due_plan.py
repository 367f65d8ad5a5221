"""Planning when the head of the queue cannot be served in time along with the others.

Two ways out are compared by how many requests they answer in time while the present queue drains,
less what the time is worth: (A) serve the head in the largest batch that is still in time, or (B)
give the head up, and all behind it up to the first request that a full batch can serve in time.
Small batches for late heads are what makes servers collapse under overload, so B wins there; with
capacity to spare, time is worth nothing and A wins. Both ends of the choice are known: A alone is
Clockwork's largest feasible batch (Gujarati et al., OSDI 2020), B alone the early drop of Nexus
(Shen et al., SOSP 2019).
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
        requests: The queue.
        size: The sum of their sizes.
        cost: Of batches.
        most: The largest batch made on purpose, in units of the requests' sizes.
        workers: How many drain the queue.
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
        """Return how much waits from request `start` on."""
        return self._before[self._end] - self._before[start]

    def first_in_time(self, start: int, at: float) -> int:
        """Return the first request from `start` on that is in time if a batch begins with it.

        The further back a request is, the later it is due and the smaller the batch can be, so this
        is a binary search.

        Args:
            start: The position of the first request to look at.
            at: When the batch begins.

        Returns:
            A position; the number of requests, if none is in time.
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
        """Return how many requests are in time with batches back to back, and when that ends.

        Args:
            start: The position of the first request of the first batch.
            at: When that batch begins.
        """
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
        """Plan way A.

        Args:
            now: The time.
            slack_s: How long the head's batch may take.

        Returns:
            The units of the batch for the head, how many requests are answered in time in all, and
            when the queue is drained.
        """
        units = max(1, min(self._cost.largest_within(slack_s / self._cost.margin), self._most, self.units(0)))
        following = max(1, bisect_right(self._before, units) - 1)
        in_time, at = self.drain(following, now + self._cost.seconds(units) / self._workers)
        return units, in_time + following, at

    def late_before(self, start: int, at: float) -> list[Request]:
        """Return the requests ahead of `start` that batches beginning with them would answer late.

        That is all of them, if requests are in the order of their dues; across priorities they need
        not be.
        """
        cost, most, margin = self._cost, self._most, self._cost.margin
        return [
            request
            for i, request in enumerate(self.requests[:start])
            if request.due - at < cost.seconds(min(self.units(i), most)) * margin
        ]
