"""BATCH: a static policy that tunes itself by a model of its traffic.

The original fits a Markov-modulated process and computes the latencies of each pair of limit and
delay. Here the last arrivals are played through a model of the static rule with the true cost,
which is what that computation approximates. The pair with the most answers in time is taken, and of
those the one with the least mean latency. (The original takes the cheapest whose tail is in time.)
Until the first tuning batches wait for 10 ms at most.
Source: Ali et al., "BATCH: Machine Learning Inference Serving on Serverless Platforms with Adaptive
Batching", SC 2020.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapreplace
from math import inf

from carpool.engine.policy.base import Decision, View
from carpool.engine.policy.static import Static
from carpool.engine.request import Request

DELAYS = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the seconds of a full batch
_REMEMBERED = 4000  # arrivals
_FIRST_DELAY_S = 0.01
_ROUNDING = 1e-9  # an SLO of exactly three batches has no time for a third one that waits


class SelfTuned(Static):
    """Static, with the limit and the delay that would have been best for the latest arrivals.

    Args:
        every_s: The seconds between two tunings.
        cost_s: Seconds of a batch of `n`, from an offline profile.
        slo_s: The seconds within which requests should be answered; None for no limit.
    """

    def __init__(
        self,
        max_batch_size: int | None = None,
        every_s: float | None = None,
        *,
        cost_s: Callable[[int], float],
        slo_s: float | None = None,
    ) -> None:
        super().__init__(max_batch_size, _FIRST_DELAY_S, max_queued_batches=10)
        self._cost_s = cost_s
        self._slo_s = inf if slo_s is None else slo_s
        self._every_s = every_s or 2.0
        self._most = self.limit
        self._times: deque[float] = deque(maxlen=_REMEMBERED)
        self._tune_at = self._every_s

    def arrived(self, now: float, requests: Sequence[Request]) -> None:
        self._times += [now] * len(requests)

    def decide(self, view: View) -> Decision:
        if view.now >= self._tune_at and self._times:
            self._tune_at = view.now + self._every_s
            self._tune(view.free + view.busy)
        return super().decide(view)

    def _tune(self, workers: int) -> None:
        """Choose the best limit and delay for the latest arrivals."""
        sizes = sorted({max(1, self._most >> k) for k in range(7)})
        pairs = [(n, share * self._cost_s(self._most)) for n in sizes for share in DELAYS]
        times = list(self._times)
        worth = {pair: _played(times, *pair, max(1, workers), self._cost_s, self._slo_s) for pair in pairs}
        limit, delay_s = max(worth, key=worth.__getitem__)
        self.max_batch_size, self.max_queue_delay_s = limit, delay_s
        self.max_queued_batches = queued_within(self._slo_s, self._cost_s(limit))


def queued_within(slo_s: float, seconds: float) -> int | None:
    """Return how many batches may wait, so that all of them can be in time; None for any number."""
    return None if slo_s == inf else max(1, int(slo_s / seconds - _ROUNDING) - 1)


def _played(
    times: Sequence[float], limit: int, delay_s: float, workers: int, cost_s: Callable[[int], float], slo_s: float
) -> tuple[float, float]:
    """Return how many of these a static policy answers in time, and minus their mean latency."""
    seconds = [0.0, *(cost_s(n) for n in range(1, limit + 1))]
    free_at = [times[0]] * workers
    i, good, total, end = 0, 0, 0.0, len(times)
    while i < end:
        full = times[i + limit - 1] if i + limit <= end else inf
        start = max(free_at[0], min(times[i] + delay_s, full))
        j = i
        while j < end and j - i < limit and times[j] <= start:
            j += 1
        done = start + seconds[j - i]
        for arrived in times[i:j]:
            good += done - arrived <= slo_s
            total += done - arrived
        heapreplace(free_at, done)
        i = j
    return good, -total / end
