"""Tuned: the best static policy in hindsight, out of a grid of limits and delays.

Nobody has it before the traffic has come. With an SLO no more batches may wait than it has time
for.
Source: the sweeps of limit and delay that Triton's Model Analyzer and TensorFlow Serving's guide to
batching (`batching/README.md`) advise.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import inf

from carpool.engine.policy.static import Static
from carpool.simulate.contestants.batch import queued_within

LIMITS = (1, 1 / 2, 1 / 4, 1 / 8)  # of the batch limit
DELAYS = (0, 1 / 16, 1 / 4, 1)  # of the seconds of a full batch


class Tuned(Static):
    """Static at one point of the grid.

    Args:
        limit_share: The share of it that is the batch limit.
        delay_share: The delay, as a share of the seconds of a batch of `max_batch_size`.
        cost_s: Seconds of a batch of `n`.
        slo_s: The seconds within which requests should be answered; None for no limit.
    """

    def __init__(
        self,
        max_batch_size: int | None = None,
        limit_share: float = 1.0,
        delay_share: float = 0.0,
        *,
        cost_s: Callable[[int], float],
        slo_s: float | None = None,
    ) -> None:
        most = max_batch_size or 1
        n = max(1, round(most * limit_share))
        queued = queued_within(slo_s or inf, cost_s(n))
        super().__init__(n, delay_share * cost_s(most), max_queued_batches=queued)

    @property
    def settings(self) -> dict[str, float]:
        settings = {"max_batch_size": self.limit, "max_queue_delay_s": self.max_queue_delay_s or 0.0}
        queued = self.max_queued_batches
        return settings if queued is None else {**settings, "max_queued_batches": queued}


GRID = [f"tuned:limit_share={n:g},delay_share={delay:g}" for n, delay in product(LIMITS, DELAYS)]
"""The specs of all points of the grid."""
