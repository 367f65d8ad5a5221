"""Static: a batch goes when it is full or when its oldest request has waited long enough.

The rule of TensorFlow Serving (`batching_util/shared_batch_scheduler.h`; Triton's is the same but for the queue limit),
with the timer where it belongs: the delay counts from the oldest *arrival*, so time spent behind busy workers is part
of it, and a request that has already waited is not held again. Also theirs: a queue limit in batches, and models that
want one of a few batch sizes. Unlike theirs, a batch is not sealed before a worker takes it.

It loses where the delay does not fit the load: at low load every request pays it although the worker is idle, at high
load it does nothing, and no delay suits both. It knows no SLO: in overload it serves late requests first, and a queue
limit that is longer than the SLO leaves it with a goodput near nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from carpool.policy.base import FULL, NOTHING, TOO_LATE, Decision, Policy, QueueView
from carpool.request import Request


class Static(Policy):
    """Full, or `max_queue_delay_s` since the oldest arrival. With a delay of 0 (the default) nothing waits.

    Args:
        max_batch_size: as for every policy.
        max_queue_delay_s: as for every policy.
        max_queued_batches: how many full batches may wait, those for idle workers not counted; of those beyond that
            the lowest priority is refused, its newest requests first. None for no limit (TensorFlow Serving's
            `max_enqueued_batches` is 10).
        allowed_batch_sizes: the sizes that the model takes, rising; the largest is also the batch limit. None means the
            stage's.
        padding: what to do with a batch that has none of these sizes: "up" takes all that wait and has the stage pad
            them to the next size, "down" takes the largest size that can be filled and leaves the rest, whose delay
            goes on counting from their arrivals (TensorFlow Serving interpolates it). What is short of the smallest
            size is padded in any case.

    Raises:
        ValueError: one of these cannot be.
    """

    def __init__(
        self,
        max_batch_size: int | None = None,
        max_queue_delay_s: float | None = None,
        max_queued_batches: int | None = None,
        allowed_batch_sizes: Sequence[int] | None = None,
        padding: str = "up",
    ) -> None:
        super().__init__(max_batch_size, max_queue_delay_s)
        _check(max_queued_batches, allowed_batch_sizes, padding)
        self.max_queued_batches = max_queued_batches
        self.allowed_batch_sizes = allowed_batch_sizes
        self.padding = padding

    @property
    def limit(self) -> int:
        limit = self.max_batch_size or 1
        return min(limit, self._round_down(limit))

    def decide(self, now: float, queue: QueueView, free: int, busy: int) -> Decision:
        waiting = queue.size
        if not waiting:
            return NOTHING
        drop = self._beyond_limit(queue, free)
        if not free:
            return Decision(drop, drop_reason=FULL) if drop else NOTHING
        limit = self.limit
        if waiting >= limit:
            return Decision(drop, limit, "full", drop_reason=FULL if drop else TOO_LATE)
        due = queue.oldest_arrival + (self.max_queue_delay_s or 0.0)
        if now < due:
            return Decision(wake_at=due)
        take = min(waiting, self._round_down(waiting)) if self.padding == "down" else waiting
        return Decision(take=take, reason="delay")

    def decide_ahead(self, now: float, queue: QueueView, free_in_s: float) -> Decision:
        return self._full_ahead(queue)

    def _beyond_limit(self, queue: QueueView, free: int) -> Sequence[Request]:
        """The newest requests of the lowest priority, as far as they are wholly beyond what may wait."""
        if self.max_queued_batches is None:
            return ()
        excess = queue.size - self.limit * (self.max_queued_batches + free)
        if excess <= 0:
            return ()
        drop: list[Request] = []
        for request in sorted(queue, key=lambda request: (-request.lane[0], request.arrived))[::-1]:
            excess -= request.size
            if excess < 0:
                break
            drop.append(request)
        return drop

    def _round_down(self, n: int) -> int:
        """The largest allowed size that is not above `n`; the smallest one if all are."""
        allowed = self.allowed_batch_sizes or (n,)
        return allowed[max(0, bisect_right(allowed, n) - 1)]


def _check(max_queued_batches: int | None, allowed_batch_sizes: Sequence[int] | None, padding: str) -> None:
    if max_queued_batches is not None and max_queued_batches < 1:
        raise ValueError(f"max_queued_batches must be at least 1, or None for no limit, not {max_queued_batches!r}")
    if padding not in ("up", "down"):
        raise ValueError(f"padding must be 'up' or 'down', not {padding!r}")
    if allowed_batch_sizes is not None:
        sizes = list(allowed_batch_sizes)
        if not sizes or sizes[0] < 1 or sorted(set(sizes)) != sizes:
            raise ValueError(f"allowed_batch_sizes must be rising numbers of at least 1, not {allowed_batch_sizes!r}")
