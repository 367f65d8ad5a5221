"""Static: a batch goes when it is full or when its oldest request has waited long enough.

The classic rule of TensorFlow Serving and Triton, with the timer where it belongs: the delay counts from the oldest
*arrival*, so time spent behind busy workers is part of it, and a request that has already waited is not held again.
"""

from __future__ import annotations

from carpool.policy.base import NOTHING, Decision, Policy, QueueView


class Static(Policy):
    """Full, or `max_queue_delay_s` since the oldest arrival. With a delay of 0 (the default) nothing waits."""

    def decide(self, now: float, queue: QueueView, free: int, busy: int) -> Decision:
        waiting = queue.size
        if not free or not waiting:
            return NOTHING
        limit = self.limit
        if waiting >= limit:
            return Decision(take=limit, reason="full")
        due = queue.oldest_arrival + (self.max_queue_delay_s or 0.0)
        if now >= due:
            return Decision(take=waiting, reason="delay")
        return Decision(wake_at=due)
