"""The record of a run, in columns that take a few bytes for each request."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import compress, repeat

from carpool.engine.core.batch import Batch
from carpool.engine.request import Request

UNFINISHED = -1.0
DROPPED = -2.0


class StageRecord:
    """What happened in one stage.

    Attributes:
        batch_sizes: How many batches there were, by the number of requests in them.
        busy_s: The seconds for which its workers were busy, in the time that counts.
        computed: How many units of length its workers computed, padding included.
        of_requests: How many of these belonged to requests and were not padding.
        switches: How many batches had another key than the one before on their worker.
    """

    def __init__(self) -> None:
        self.batch_sizes: Counter[int] = Counter()
        self.busy_s = 0.0
        self.computed = 0.0
        self.of_requests = 0.0
        self.switches = 0


class Record:
    """What happened in a whole run. It is the `Watcher` of the driver.

    The request that arrives n-th, counted from 0, has index n in every column.

    Attributes:
        duration_s: The seconds in which the requests that count arrive.
        settle_s: The seconds before that, whose requests do not count.
        slos: The SLOs that requests may have.
        arrived: When each request arrived.
        finished: When each request was served; or DROPPED or UNFINISHED.
        slo_s: The SLO of each request. The column is empty if there is only one SLO.
        client: The client that sent each request, or -1 for requests of open processes. The column
            is empty if there is no closed loop.
        weights: The weight of each request. The column is empty if they all weigh the same.
        lengths: The length of each request. The column is empty if they have none.
        stages: One record for each stage.
    """

    def __init__(self, duration_s: float, stages: int, slos: Sequence[float], settle_s: float = 0.0) -> None:
        self.duration_s = duration_s - settle_s
        self.settle_s = settle_s
        self.slos = slos
        self.arrived = array("d")
        self.finished = array("d")
        self.slo_s = array("d")
        self.client = array("l")
        self.weights = array("d")
        self.lengths = array("l")
        self.stages = [StageRecord() for _ in range(stages)]

    @property
    def slo_of_each(self) -> Iterable[float]:
        """The SLO of each request, in the order of the columns."""
        return self.slo_s if len(self.slos) > 1 else repeat(self.slos[0], len(self.arrived))

    def started(self, now: float, batch: Batch, busy_s: float) -> None:
        """Count a batch, and the seconds of it that are within the time that counts."""
        stage = self.stages[batch.stage]
        stage.batch_sizes[batch.n] += 1
        begin, end = max(now, self.settle_s), self.settle_s + self.duration_s
        stage.busy_s += max(0.0, min(now + busy_s, end) - begin)

    def settled(self) -> Record:
        """Return the record without the requests that do not count; batches all count."""
        if not self.settle_s:
            return self
        kept = Record(self.duration_s, 0, self.slos)
        kept.stages = self.stages
        counts = [arrived >= self.settle_s for arrived in self.arrived]
        for name in ("arrived", "finished", "slo_s", "client", "weights", "lengths"):
            column = getattr(self, name)
            setattr(kept, name, array(column.typecode, compress(column, counts)))
        return kept

    def answered(self, now: float, requests: Sequence[Request]) -> None:
        """Note when requests were answered. The item of a request is its index, in every stage."""
        finished = self.finished
        for request in requests:
            finished[request.item] = now if request.error is None else DROPPED  # type: ignore[call-overload]
