"""Symphony: a batch is deferred to the last moment at which it could still grow.

With the true cost t, and d for the due time of the first of a candidate batch of n: it may go from
d - t(n + 1) on, when no further request could join it in time, until d - t(n), and a worker that is
free by then takes it. What could be served only in batches below a target size is dropped. The
target is the largest n with t(n)·(1 + 1/N) <= SLO for the N workers that the load needs, so that
their batches are staggered. Without an SLO it is greedy.
Source: Chen et al., "Symphony: Optimized DNN Model Serving using Deferred Batch Scheduling" (arXiv
2308.07470), and its code, `nexus/dispatcher/rankmt/model_thread.cpp`, `batch_policy.cpp` and
`batch_size_estimator.cpp`. Of several models the one goes first whose last moment is first; here
each stage has one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import inf

from carpool.engine.policy.base import NOTHING, Decision, DoneBatch, Policy, View
from carpool.engine.policy.clients import Arrivals
from carpool.engine.policy.cost import CostModel
from carpool.engine.request import Request
from carpool.simulate.contestants.sealed import size_of

_ROUNDING_S = 1e-9
_AFTER_S = 1e-6  # after its last moment, what is too late by then is dropped


class Symphony(Policy):
    """Send each batch when it cannot grow any more, and drop what would keep batches small.

    Args:
        max_queue_delay_s: As for every policy; it has no effect.
        cost_s: Seconds of a batch of `n`, rising with `n`, from an offline profile.
        learns: Whether it learns the cost while serving, as `Adaptive` does, and is not given it.
    """

    def __init__(
        self,
        max_batch_size: int | None = None,
        max_queue_delay_s: float | None = None,
        *,
        cost_s: Callable[[int], float],
        learns: bool = False,
    ) -> None:
        super().__init__(max_batch_size, max_queue_delay_s)
        self._cost = CostModel(self.limit) if learns else None
        self._version = 0
        self._seconds = [0.0] * (self.limit + 1) if learns else self._all_seconds(cost_s)
        self._arrivals = Arrivals()

    def _all_seconds(self, cost_s: Callable[[int], float]) -> list[float]:
        return [0.0, *(cost_s(n) for n in range(1, self.limit + 1))]

    def learn(self, now: float, done: DoneBatch) -> None:
        cost = self._cost
        if cost is None or not done.ok:
            return
        cost.add(done.size, done.busy_s)
        if cost.version != self._version:
            self._version, self._seconds = cost.version, self._all_seconds(cost.seconds)

    def arrived(self, now: float, requests: Sequence[Request]) -> None:
        self._arrivals.add(now, len(requests))

    def decide(self, view: View) -> Decision:
        queue, free = view.queue, view.free
        if view.free_in_s is not None or not len(queue):
            return NOTHING
        waiting, limit = queue.peek(len(queue)), self.limit
        if waiting[0].due == inf:
            return Decision(take=size_of(waiting[:limit], limit), reason="free") if free else NOTHING
        way_s = view.hop_s + view.onward_s
        now = view.now + way_s
        first, n = self._candidate(now, waiting)
        drop = waiting[:first]
        if not n:
            head = drop.pop() if self._cost is not None and free else None
            if head is not None and head.due - head.arrived < self._seconds[1]:
                return Decision(drop, size_of([head], limit), "probe")  # what was learned may be wrong
            return Decision([*drop, head] if head is not None else drop)
        due = waiting[first].due
        opens_at = due - self._seconds[n + 1] if n < limit else -inf
        if now < opens_at - _ROUNDING_S:
            return Decision(drop, wake_at=opens_at - way_s)
        if free:
            return Decision(drop, size_of(waiting[first : first + n], limit), "window")
        return Decision(drop, wake_at=due - self._seconds[n] + _AFTER_S - way_s)

    def _candidate(self, now: float, waiting: Sequence[Request]) -> tuple[int, int]:
        """Return the first request that is kept, and the size of the batch that begins with it."""
        dues, seconds, limit = [request.due for request in waiting], self._seconds, self.limit
        end = len(dues)
        low, high = 0, end  # the longest rest of the queue that would be in time as one batch
        while low < high:
            middle = (low + high) // 2
            if dues[middle] >= now + seconds[min(end - middle, limit)]:
                high = middle
            else:
                low = middle + 1
        head = waiting[min(low, end - 1)]
        n = min(self._target(now, head.due - head.arrived), end - low, limit)
        if not n:
            return end, 0
        first = min(low, bisect_left(dues, now + seconds[n]))  # what is in time in a batch of the target size stays
        while n < min(limit, end - first) and dues[first] >= now + seconds[n + 1]:
            n += 1
        return first, n

    def _target(self, now: float, slo_s: float) -> int:
        """Return the size at which batches of the workers that the load needs are staggered."""
        rate, limit, seconds = max(self._arrivals.rate(now), 1e-9), self.limit, self._seconds
        n = 1
        while n < limit and seconds[n + 1] * (1.0 + 1.0 / max(1.0, rate * seconds[n + 1] / (n + 1))) <= slo_s:
            n += 1
        if rate * seconds[n] / n > 1.0:
            return n
        return max([k for k in range(1, limit + 1) if seconds[k] + k / rate <= slo_s], default=1)
