"""Static: a batch goes when it is full or when its oldest request has waited long enough.

The rule of TensorFlow Serving (`batching_util/shared_batch_scheduler.h`; Triton's is the same
except for the queue limit), with the timer where it belongs: the delay counts from the oldest
*arrival*, so time spent behind busy workers is part of it, and a request that has already waited is
not held again. Also
theirs: a queue limit in batches, and models that want one of a few batch sizes. Unlike theirs, a
    batch
is not sealed before a worker takes it.

It loses where the delay does not fit the load: at low load every request pays it although the
worker is idle, at high load it does nothing, and no delay suits both. It knows no SLO: in overload
it serves late requests first, and a queue limit that is longer than the SLO leaves it with a
goodput near nothing.

With `from_idle` the delay also counts from the moment when a worker fell idle: a worker that has
stood idle for as long as that has waited enough, and the first request after a silence goes at
once. Only requests that come soon after a batch are then held for company.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Any

from carpool.engine.policy.base import FULL, NOTHING, TOO_LATE, Decision, DoneBatch, Policy, QueueView, View
from carpool.engine.request import Request

_MOST_WORKERS = 1024  # with more of them, some delays count from too early, and less is held back


class Static(Policy):
    """Send a batch when it is full, or `max_queue_delay_s` after the oldest arrival.

    With a delay of 0 (the default) nothing waits for company.

    Args:
        max_batch_size: As for every policy.
        max_queue_delay_s: As for every policy.
        max_queued_batches: How many full batches may wait, those for idle workers not counted; of
            the requests beyond that the lowest priority is refused, the newest first. None for no
            limit (TensorFlow Serving's `max_enqueued_batches` is 10).
        allowed_batch_sizes: The sizes that the model takes, rising; the largest is also the batch
            limit. None means the stage's.
        padding: What to do with a batch that has none of these sizes: "up" takes all that wait and
            has the stage pad them to the next size, "down" takes the largest size that can be
            filled and leaves the rest, whose delay goes on counting from their arrivals (TensorFlow
            Serving interpolates it). What is short of the smallest size is padded in any case.
        from_idle: Whether the delay counts from the moment when a worker fell idle, where that was
            before the oldest arrival. A worker that has not run a batch yet counts as always idle.

    Raises:
        ValueError: An argument makes no sense; the text says which, and what it may be.
    """

    def __init__(
        self,
        max_batch_size: int | None = None,
        max_queue_delay_s: float | None = None,
        max_queued_batches: int | None = None,
        allowed_batch_sizes: Sequence[int] | None = None,
        padding: str = "up",
        from_idle: bool = False,
    ) -> None:
        super().__init__(max_batch_size, max_queue_delay_s)
        _check(max_queued_batches, allowed_batch_sizes, padding, from_idle)
        self.max_queued_batches = max_queued_batches
        self.allowed_batch_sizes = allowed_batch_sizes
        self.padding = padding
        self.from_idle = from_idle
        self._ended: deque[float] = deque(maxlen=_MOST_WORKERS)  # when the last batches ended; only with `from_idle`

    def learn(self, now: float, done: DoneBatch) -> None:
        if self.from_idle and not done.is_warm_up:
            self._ended.append(now)

    @property
    def limit(self) -> int:
        limit = self.max_batch_size or 1
        return min(limit, self._round_down(limit))

    def decide(self, view: View) -> Decision:
        queue, free = view.queue, view.free
        if view.free_in_s is not None:
            return self._full_ahead(queue)
        waiting = queue.size
        if not waiting:
            return NOTHING
        drop = self._beyond_limit(queue, free)
        if not free:
            return Decision(drop, drop_reason=FULL) if drop else NOTHING
        limit = self.limit
        if waiting >= limit:
            return Decision(drop, limit, "full", drop_reason=FULL if drop else TOO_LATE)
        since = queue.oldest_arrival
        if self.from_idle:
            since = min(since, self._idle_since(free))
        due = since + (self.max_queue_delay_s or 0.0)
        if view.now < due:
            return Decision(wake_at=due)
        take = min(waiting, self._round_down(waiting)) if self.padding == "down" else waiting
        return Decision(take=take, reason="delay")

    def explain(self, now: float) -> dict[str, Any]:
        counts_from = "a worker fell idle, or the oldest arrival" if self.from_idle else "the oldest arrival"
        told = {"max_queue_delay_s": self.max_queue_delay_s or 0.0, "delay_counts_from": counts_from}
        return super().explain(now) | told

    def _idle_since(self, free: int) -> float:
        """Return a time since which at least one of the `free` workers has been idle.

        Each of them fell idle when a batch ended, all at different ends: so the first of them did
        not do so after the end that was `free` ends ago. That is exact for one worker, and errs
        toward holding back for more of them.
        """
        ended = self._ended
        return ended[-free] if free <= len(ended) else -inf

    def _beyond_limit(self, queue: QueueView, free: int) -> Sequence[Request]:
        if self.max_queued_batches is None:
            return ()
        excess = queue.size - self.limit * (self.max_queued_batches + free)
        if excess <= 0:
            return ()
        drop: list[Request] = []
        for request in sorted(queue, key=lambda request: (-request.lane.priority, request.arrived))[::-1]:
            excess -= request.size
            if excess < 0:
                break
            drop.append(request)
        return drop

    def _round_down(self, n: int) -> int:
        allowed = self.allowed_batch_sizes or (n,)
        return allowed[max(0, bisect_right(allowed, n) - 1)]


def _check(
    max_queued_batches: int | None, allowed_batch_sizes: Sequence[int] | None, padding: str, from_idle: bool
) -> None:
    if max_queued_batches is not None and max_queued_batches < 1:
        raise ValueError(f"max_queued_batches must be at least 1, or None for no limit, not {max_queued_batches!r}")
    if padding not in ("up", "down"):
        raise ValueError(f"padding must be 'up' or 'down', not {padding!r}")
    if type(from_idle) is not bool:
        raise ValueError(f"from_idle must be True or False, not {from_idle!r}: the delay itself is max_queue_delay_s")
    if allowed_batch_sizes is not None:
        sizes = list(allowed_batch_sizes)
        if not sizes or sizes[0] < 1 or sorted(set(sizes)) != sizes:
            raise ValueError(f"allowed_batch_sizes must be rising numbers of at least 1, not {allowed_batch_sizes!r}")
