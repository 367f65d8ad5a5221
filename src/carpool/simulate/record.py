"""What happened in a run, in columns: a few bytes per request."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import repeat

from carpool.core.batch import Batch
from carpool.request import Request

UNFINISHED = -1.0
DROPPED = -2.0


class StageRecord:
    """Of one stage.

    Attributes:
        sizes: how many batches there were of each number of requests.
        busy_s: seconds of its workers' time, up to the end of the arrivals.
    """

    def __init__(self) -> None:
        self.sizes: Counter[int] = Counter()
        self.busy_s = 0.0


class Record:
    """Of a whole run; it watches the driver. The n-th request that arrived has index n in every column.

    Attributes:
        arrived: when; finished: when it was served, or DROPPED or UNFINISHED.
        slo_s: within which it should be answered; a run with a single SLO has no such column, but `slos`.
        client: who sent it, -1 if not one of a closed loop; a run without such clients has no such column.
        weights: only if requests have weights.
    """

    def __init__(self, duration_s: float, stages: int, slos: Sequence[float]) -> None:
        self.duration_s = duration_s
        self.slos = slos
        self.arrived = array("d")
        self.finished = array("d")
        self.slo_s = array("d")
        self.client = array("l")
        self.weights = array("d")
        self.stages = [StageRecord() for _ in range(stages)]

    @property
    def slo_of_each(self) -> Iterable[float]:
        """The SLOs of all requests, in their order."""
        return self.slo_s if len(self.slos) > 1 else repeat(self.slos[0], len(self.arrived))

    def started(self, now: float, batch: Batch, busy_s: float) -> None:
        """Its worker is busy from now on; what is after the end of the arrivals does not count."""
        stage = self.stages[batch.stage]
        stage.sizes[batch.n] += 1
        if now < self.duration_s:
            stage.busy_s += min(busy_s, self.duration_s - now)

    def answered(self, now: float, requests: Sequence[Request]) -> None:
        """Requests carry their index as item, whatever stage they come from."""
        finished = self.finished
        for request in requests:
            finished[request.item] = now if request.error is None else DROPPED  # type: ignore[call-overload]
