"""Deadline: plans every batch for its first due time, and drops what would hold it up.

The sliding window of Nexus (Shen et al., SOSP 2019, "early drop"; `model_exec.cpp`, policy 0): a
batch aims at the largest size whose time, twice, fits into the SLO (a request that just misses a
batch waits for it and then for its own), or at all that waits if that is less. A head that would be
late in a batch of that size is dropped and the window slides on, because shrinking the batch to
save it would cost capacity, and so the next heads, in overload.

It loses where the curve has steps or a knee (the largest size is not the most efficient one), where
batches vary (a plan for the mean is late half of the time), for clients in a closed loop, and under
light load with a cost per item far above the cost per batch; and it is only as good as its profile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from carpool.engine.policy.base import NOTHING, Decision, DoneBatch, Policy, View
from carpool.engine.request import Request

FORGET = 0.95  # weight of the past at each new batch: about twenty batches count


class Deadline(Policy):
    """Take the largest batch that meets the earliest due time, and drop early for its sake.

    Args:
        max_batch_size: As for every policy.
        max_queue_delay_s: As for every policy; it has no effect, as nothing is held back.
        cost_s: Seconds of a batch of `n`, rising with `n`, from an offline profile; None to learn a
            line while serving.
    """

    def __init__(
        self,
        max_batch_size: int | None = None,
        max_queue_delay_s: float | None = None,
        cost_s: Callable[[int], float] | None = None,
    ) -> None:
        super().__init__(max_batch_size, max_queue_delay_s)
        self._learned = LineFit() if cost_s is None else None
        self._cost_s = self._learned or cost_s
        self._hop_s = 0.0

    def learn(self, now: float, done: DoneBatch) -> None:
        if self._learned is not None and done.ok and not (done.is_warm_up and done.longest):
            self._learned.add(done.size, done.busy_s)

    def decide(self, view: View) -> Decision:
        queue, now = view.queue, view.now
        size = queue.size
        if not view.free or not size:
            return NOTHING
        self._hop_s = view.hop_s
        drop: list[Request] = []
        take = 0
        for request in queue:
            due = request.due - view.onward_s
            take = min(size, self._most_within(due - request.arrived))
            if now + self.time_s(take) <= due:
                break
            if size == request.size and self._is_too_tight(due - request.arrived):
                break
            drop.append(request)
            size -= request.size
            take = 0
        return Decision(drop, take, ("full" if take == self.limit else "free") if take else "")

    def time_s(self, n: int) -> float:
        """Return the seconds from sending a batch of `n` to having its answers."""
        assert self._cost_s is not None
        return self._cost_s(n) + self._hop_s

    def _most_within(self, budget_s: float) -> int:
        """Return the largest batch of which two in a row fit into `budget_s`; at least 1."""
        return max(1, bisect_right(range(1, self.limit + 1), budget_s / 2, key=self.time_s))

    def _is_too_tight(self, budget_s: float) -> bool:
        """Report whether not even a newcomer could be in time, by what was learned.

        Then the last one is served all the same: dropping every request would be the end of
        learning, and the estimate may be wrong.
        """
        return self._learned is not None and self.time_s(1) > budget_s


class LineFit:
    """Seconds of a batch as a + b·n, by least squares with forgetting.

    When all batches have the same size the slope cannot be told: it stays near what it was, and the
    level is learned. Neither a nor b is ever negative. Before the first batch both are 0, so that
    everything is tried.
    """

    def __init__(self) -> None:
        self._weight = 0.0
        self._n = self._s = 0.0  # the means of sizes and seconds
        self._nn = self._ns = 0.0  # the centred moments
        self._slope = 0.0

    def __call__(self, n: int) -> float:
        return self._s + self._slope * (n - self._n)

    def add(self, n: int, seconds: float) -> None:
        """Learn from a batch of `n` that took `seconds`."""
        self._weight = self._weight * FORGET + 1
        off = n - self._n
        self._n += off / self._weight
        self._s += (seconds - self._s) / self._weight
        self._nn = self._nn * FORGET + off * (n - self._n)
        self._ns = self._ns * FORGET + off * (seconds - self._s)
        slope = (self._ns + self._slope) / (self._nn + 1)
        self._slope = min(max(slope, 0.0), self._s / self._n)
