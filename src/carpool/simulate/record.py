"""What happened in a run, in columns: a few bytes per request."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from carpool.core.batcher import Batch
from carpool.request import Request

UNFINISHED = 0
SERVED = 1
DROPPED = 2


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
        arrived: when; finished: when it had its answer; outcome: which, or UNFINISHED.
        slo_s: within which it should be answered; client: who sent it, -1 if not one of a closed loop.
        weights: if requests have weights.
    """

    def __init__(self, duration_s: float, stages: int) -> None:
        self.duration_s = duration_s
        self.arrived = array("d")
        self.finished = array("d")
        self.outcome = bytearray()
        self.slo_s = array("d")
        self.client = array("l")
        self.weights = array("d")
        self.stages = [StageRecord() for _ in range(stages)]

    def add(self, when: float, slo_s: float, client: int) -> int:
        """A request arrives; returns its index."""
        index = len(self.arrived)
        self.arrived.append(when)
        self.finished.append(0.0)
        self.outcome.append(UNFINISHED)
        self.slo_s.append(slo_s)
        self.client.append(client)
        return index

    def started(self, now: float, batch: Batch, busy_s: float) -> None:
        """Its worker is busy from now on; what is after the end of the arrivals does not count."""
        stage = self.stages[batch.stage]
        stage.sizes[batch.n] += 1
        if now < self.duration_s:
            stage.busy_s += min(busy_s, self.duration_s - now)

    def answered(self, now: float, requests: Sequence[Request]) -> None:
        """Requests carry their index as item, whatever stage they come from."""
        finished, outcome = self.finished, self.outcome
        for request in requests:
            index: int = request.item  # type: ignore[assignment]
            finished[index] = now
            outcome[index] = SERVED if request.error is None else DROPPED
