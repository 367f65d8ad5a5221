"""Cork: BentoML's rule. Hold the batch while one more request gains more than the queued ones lose.

Source: BentoML 1.4, `_internal/marshal/dispatcher.py` (`CorkDispatcher`, `Optimizer`). With n
    requests
queued, wn the age of the newest, dt a tick, a + b·n the learned seconds of a batch and `wait` the
mean time that the oldest request of recent batches had waited:

1. Requests whose predicted latency (age + a + b·n, n being the *whole* queue) reaches the maximum
   are dropped, oldest first, while more than one waits; a lone one only if it is that old by itself
   and no worker is free.
2. While n·(wn + dt + b) <= 0.95·wait the batch is held: a newcomer would delay n requests by about
   another gap and another item, but would itself not wait as long as requests usually do.
3. Else the oldest go, up to the limit.

An example: with wait = 8 ms, b = 1 ms and dt = 1 ms, two requests are held until the newest is
0.95·8/2 - 1 - 1 = 1.8 ms old; four are not held at all.

a and b come from least squares over the last 50 batches, refreshed every 5 s. Before that comes a
training of eleven batches, of which the last two wait for 2 and 3 requests; what is queued goes
along.

What differs from BentoML: instead of asking again every millisecond, the end of the hold is
computed (only wn grows, so it is 0.95·wait/n - dt - b after the newest arrival); dt remains as a
constant of the rule. So a batch that need not be held goes at once instead of up to a millisecond
late. That is better (2 % of the capacity for batches of 24 ms), except for clients in a closed
loop: those that come back within that millisecond missed nothing. Requests leave in the order of
    the queue, which is that of
arrival if all have the same SLO. With several workers a batch that overtakes another swaps their
waits. A request that is larger than a batch is not split.

It loses after a busy phase (`wait` contains the time behind busy workers, so lone requests are held
on an idle one for many seconds), with noise (what one slow batch teaches drops requests for five
seconds), with batches of about a millisecond, and for mixed SLOs, of which it knows one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from carpool.engine.policy.base import NOTHING, Decision, DoneBatch, Policy, QueueView, View, checked_slo
from carpool.engine.request import Request

TICK_S = 0.001
DECAY = 0.95
MAX_LATENCY_S = 60.0
SAMPLES = 50
SKIPPED = 2
REFRESH_S = 5.0
LEAST_ITEM_S = 1e-6


class _Lesson(NamedTuple):
    """A part of the training.

    Attributes:
        spare: Only requests beyond this number may be dropped.
        batches: How many batches the part has.
        size: How many requests each of them waits for.
    """

    spare: int
    batches: int
    size: int


LESSONS = (_Lesson(2, 8, 1), _Lesson(6, 1, 1), _Lesson(5, 1, 2), _Lesson(3, 1, 3))
TRAINING = sum(lesson.batches for lesson in LESSONS)


class Cork(Policy):
    """Hold a batch while it pays by BentoML's account; drop the oldest when it is too late.

    Args:
        max_batch_size: As for every policy.
        max_queue_delay_s: As for every policy.
        slo_s: The maximum latency in seconds; None for BentoML's default of 60.
    """

    def __init__(
        self, max_batch_size: int | None = None, max_queue_delay_s: float | None = None, slo_s: float | None = None
    ) -> None:
        super().__init__(max_batch_size, max_queue_delay_s)
        self.slo_s = checked_slo(slo_s)
        self._account: Account | None = None
        self._newest = -inf
        self._view: View | None = None
        self._trained = 0
        self._waits: list[float] = []  # of the batches that run, in the order in which they were sent

    @property
    def max_latency_s(self) -> float:
        """Seconds after which a request is too late."""
        return MAX_LATENCY_S if self.slo_s is None else self.slo_s

    @property
    def account(self) -> Account:
        """What has been learned."""
        if self._account is None:
            self._account = Account(self.max_latency_s)
        return self._account

    def arrived(self, now: float, requests: Sequence[Request]) -> None:
        self._newest = max(self._newest, *[request.arrived for request in requests])

    def learn(self, now: float, done: DoneBatch) -> None:
        if done.is_warm_up:
            return
        wait_s = self._waits.pop(0) if self._waits else 0.0
        if done.ok:
            hop_s = 0.0 if self._view is None else self._view.hop_s
            self.account.add(now, done.n, done.busy_s + hop_s, wait_s)
        if self._trained < TRAINING:
            self._trained += 1
            if self._trained >= LESSONS[0].batches + 1:
                self.account.refresh()

    def decide(self, view: View) -> Decision:
        if view.free_in_s is not None:
            return NOTHING
        self._view = view
        now, queue, free, busy = view.now, view.queue, view.free, view.busy
        self._forget_wait(busy)
        if not len(queue):
            return NOTHING
        lesson = self._lesson(busy)
        drop, oldest, drop_at = self._too_late(now, queue, free, lesson)
        size = queue.size - sum([request.size for request in drop])
        if not size or not free:
            return Decision(drop, wake_at=drop_at if drop_at < inf else None)
        wanted = self.limit if lesson is None else min(lesson.size, self.limit)
        hold_until = self._hold_until(len(queue) - len(drop), oldest, lesson)
        if size < wanted and now < hold_until:
            return Decision(drop, wake_at=min(hold_until, drop_at))
        self._waits.append(0.0 if lesson else now - oldest)
        return Decision(drop, min(size, self.limit), "full" if size >= self.limit else "free")

    def _forget_wait(self, busy: int) -> None:
        """Forget the wait that was noted for a batch which was decided on and has not gone.

        Only `learn` reads the waits, and only of batches that run, of which there are `busy`.
        So however often `decide` is asked before a batch goes, what it says and what is learned
        from the batch are the same.
        """
        del self._waits[busy:]

    def _lesson(self, busy: int) -> _Lesson | None:
        sent = self._trained + busy
        if sent >= TRAINING:
            return None
        for lesson in LESSONS:
            if sent < lesson.batches:
                return lesson._replace(spare=lesson.spare - sent)
            sent -= lesson.batches
        return None

    def _too_late(
        self, now: float, queue: QueueView, free: int, lesson: _Lesson | None
    ) -> tuple[Sequence[Request], float, float]:
        """Find the requests to drop.

        Returns:
            Those requests, when the oldest of the others arrived, and when that one is to be
            dropped.
        """
        n = len(queue)
        oldest = queue.oldest_arrival
        drop_at = self._drop_at(oldest, n, free, lesson)
        if now < drop_at:
            return (), oldest, drop_at
        drop: list[Request] = []
        for request in sorted(queue, key=lambda request: request.arrived):
            drop_at = self._drop_at(request.arrived, n, free, lesson)
            if now < drop_at:
                return drop, request.arrived, drop_at
            drop.append(request)
            n -= 1
        return drop, inf, inf

    def _drop_at(self, arrived: float, n: int, free: int, lesson: _Lesson | None) -> float:
        """Return when the oldest of `n` requests is to be dropped."""
        if lesson is not None:
            return arrived + self.max_latency_s if n > lesson.spare else inf
        if n > 1:
            return arrived + (self.max_latency_s - self.account.batch_s(n))
        return inf if free else arrived + self.max_latency_s

    def _hold_until(self, n: int, oldest: float, lesson: _Lesson | None) -> float:
        """Return when to stop holding `n` requests for company."""
        account = self.account
        if lesson is None:
            until = self._newest + (DECAY * account.wait_s / n - TICK_S - account.item_s)
        elif lesson.size == 1:
            return oldest
        else:
            longest_s = min(DECAY * self.max_latency_s, account.batch_s(2 * lesson.size + 1))
            until = oldest + (longest_s - account.batch_s(lesson.size))
        return until if self.max_queue_delay_s is None else min(until, oldest + self.max_queue_delay_s)


class Account:
    """The learned cost of a batch and the usual wait of its oldest request."""

    def __init__(self, max_latency_s: float) -> None:
        self.item_s = min(2.0, max_latency_s * 2 / 30)
        self.fixed_s = min(1.0, max_latency_s / 30)
        self.wait_s = 0.0
        self._samples: deque[tuple[int, float, float]] = deque(maxlen=SAMPLES)
        self._skipped = 0
        self._refresh_at = -inf

    def batch_s(self, n: int) -> float:
        """Return the predicted seconds of a batch of `n`."""
        return self.fixed_s + self.item_s * n

    def add(self, now: float, n: int, seconds: float, wait_s: float) -> None:
        """Learn from a batch of `n` that took `seconds` and whose oldest had waited `wait_s`."""
        if self._skipped < SKIPPED:
            self._skipped += 1
            return
        self._samples.append((n, seconds, wait_s))
        if now >= self._refresh_at:
            self._refresh_at = now + REFRESH_S
            self.refresh()

    def refresh(self) -> None:
        """Fit a line to what is remembered, by least squares, and take the mean of the waits.

        There is no margin and no care for outliers, as the original has none.
        """
        count = len(self._samples)
        if not count:
            return
        mean_n = sum([n for n, _, _ in self._samples]) / count
        mean_s = sum([s for _, s, _ in self._samples]) / count
        spread = sum([(n - mean_n) ** 2 for n, _, _ in self._samples])
        if spread > 0:
            slope = sum([(n - mean_n) * (s - mean_s) for n, s, _ in self._samples]) / spread
        else:
            slope = mean_s * mean_n / (mean_n**2 + 1)  # the shortest of all solutions, which numpy's lstsq returns
        self.item_s = max(LEAST_ITEM_S, slope)
        self.fixed_s = max(0.0, mean_s - slope * mean_n)
        self.wait_s = max(0.0, sum([w for _, _, w in self._samples]) / count)
