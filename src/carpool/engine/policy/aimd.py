"""AIMD: the batch cap creeps up while batches are fast, and backs off when one is slow.

Clipper's rule (Crankshaw et al., NSDI 2017, section 4.3.1), borrowed from TCP: after a full batch
whose *processing* time is within the latency objective the cap grows by one, after a batch that
took longer it shrinks to 0.9 of itself. Workers pull greedily: whatever waits, up to the cap, as
soon as one is free. What is late already is dropped then (`get_batch` in Clipper's `containers.cpp`
and `task_executor.hpp`).

It loses on the ramp (from 1, one step per full batch: a backlog from the first second is served
late) and in overload: processing time says nothing of the time spent waiting, and what it serves is
about to be late.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from math import inf

from carpool.engine.policy.base import NOTHING, Decision, DoneBatch, Policy, View, checked_slo
from carpool.engine.request import Request

GROWTH = 1.0
BACK_OFF = 0.9


class AIMD(Policy):
    """Greedy up to a cap that is learned by additive increase and multiplicative decrease.

    Args:
        max_batch_size: As for every policy.
        max_queue_delay_s: As for every policy; it has no effect, as nothing is held back.
        slo_s: The objective for one batch, in seconds; None to learn it from the requests: the
            shortest time of late from an arrival to its due time.
    """

    def __init__(
        self, max_batch_size: int | None = None, max_queue_delay_s: float | None = None, slo_s: float | None = None
    ) -> None:
        super().__init__(max_batch_size, max_queue_delay_s)
        self.slo_s = checked_slo(slo_s)
        self._budget_s = inf
        self._cap = 1.0

    @property
    def objective_s(self) -> float:
        """Seconds that a batch may take, as far as known; else infinity."""
        return self._budget_s if self.slo_s is None else self.slo_s

    @property
    def cap(self) -> int:
        """How much may share a batch now."""
        return min(int(self._cap), self.limit)

    def arrived(self, now: float, requests: Sequence[Request]) -> None:
        for request in requests:
            budget_s = request.due - request.arrived
            if budget_s < self._budget_s:
                self._budget_s = budget_s
            elif budget_s < inf:
                self._budget_s += 0.01 * (budget_s - self._budget_s)  # there has been no tighter one for a while

    def learn(self, now: float, done: DoneBatch) -> None:
        if not done.ok or done.is_warm_up:
            return
        if done.busy_s > self.objective_s:
            self._cap = max(1.0, self._cap * BACK_OFF)
        elif done.size >= self.cap:
            self._cap = min(self._cap + GROWTH, float(self.limit))

    def decide(self, view: View) -> Decision:
        queue, now = view.queue, view.now
        if not view.free or not len(queue):
            return NOTHING
        drop = list(takewhile(lambda request: request.due <= now, queue))
        waiting = queue.size - sum([request.size for request in drop])
        cap = self.cap
        if waiting >= cap:
            return Decision(drop, take=cap, reason="full")
        return Decision(drop, take=waiting, reason="free" if waiting else "")
