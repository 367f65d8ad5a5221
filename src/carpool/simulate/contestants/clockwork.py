"""Clockwork: the largest batch whose latest start has not passed, by the longest times of late.

Batches are of powers of two. The time of each size is the longest of its last ten, at first that of
an offline profile. What cannot be in time even alone is refused, and nothing is held back.
Source: Gujarati et al., "Serving DNNs like Clockwork", OSDI 2020, section 5.3 (arXiv 2006.02464).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from carpool.engine.policy.base import NOTHING, Decision, DoneBatch, Policy, View
from carpool.simulate.contestants.sealed import size_of

_REMEMBERED = 10  # batches of each size


class Clockwork(Policy):
    """Take the largest batch that its first request has time for.

    Args:
        max_queue_delay_s: As for every policy; it has no effect, as nothing is held back.
        cost_s: Seconds of a batch of `n`, from an offline profile.
    """

    def __init__(
        self,
        max_batch_size: int | None = None,
        max_queue_delay_s: float | None = None,
        *,
        cost_s: Callable[[int], float],
    ) -> None:
        super().__init__(max_batch_size, max_queue_delay_s)
        limit = self.limit
        sizes = sorted({2**k for k in range(limit.bit_length())} | {limit})
        self._seconds = {n: deque([cost_s(n)], maxlen=_REMEMBERED) for n in sizes}

    def learn(self, now: float, done: DoneBatch) -> None:
        if done.n in self._seconds and not done.is_warm_up:
            self._seconds[done.n].append(done.busy_s + done.hop_s)

    def decide(self, view: View) -> Decision:
        if view.free_in_s is not None or not view.free or not len(view.queue):
            return NOTHING
        now = view.now + view.onward_s
        longest = {n: max(seconds) for n, seconds in self._seconds.items()}
        waiting = view.queue.peek(len(view.queue))
        first = next((i for i, request in enumerate(waiting) if request.due >= now + longest[1]), len(waiting))
        left = waiting[first:]
        if not left:
            return Decision(waiting)
        slack_s = left[0].due - now
        n = max(n for n in longest if n == 1 or (n <= len(left) and longest[n] <= slack_s))
        return Decision(waiting[:first], size_of(left[:n], self.limit), "strategy")
