"""Counts the work of a batch function.

A lone call in a thread adds to one sum, a batch to a few; everything else is computed when somebody
asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from carpool.engine.core.batch import Batch
from carpool.engine.core.core import Core
from carpool.engine.observe.stats import StageStats, Stats
from carpool.engine.request import Request


class CallCounts:
    """The sums of one driver's batches.

    Attributes:
        batch_sizes: How many batches had each size, without the calls that went alone.
        latency_s: The seconds from arrival to answer, summed over the answers without an error.
        queue_s: The seconds from arrival to the start of the batch, summed over the calls.
        compute_s: The seconds in the user's function, summed over the batches.
        alone_s: The seconds from arrival to answer, summed over the calls that went alone; the time
            in the function is but a few microseconds less.
        alone_failed_s: Those of them that ended with an error.
    """

    __slots__ = ("alone_failed_s", "alone_s", "batch_sizes", "compute_s", "latency_s", "queue_s")

    def __init__(self) -> None:
        self.batch_sizes: dict[int, int] = {}
        self.latency_s = self.queue_s = self.compute_s = self.alone_s = self.alone_failed_s = 0.0

    def ran(self, batch: Batch) -> None:
        requests = batch.requests
        n = len(requests)
        try:
            self.batch_sizes[n] += 1  # twice as fast as by `get`
        except KeyError:
            self.batch_sizes[n] = 1
        self.queue_s += n * batch.started - sum([request.arrived for request in requests])

    def answered(self, requests: Sequence[Request], now: float) -> None:
        admitted = [request.admitted for request in requests if request.error is None]
        self.latency_s += len(admitted) * now - sum(admitted)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSnapshot:
    """The numbers of a batch function at one moment, since it was made.

    In a forked child they begin with the fork.

    `print` shows them as a table.

    Attributes:
        name: The name of the function.
        calls: How many items callers have brought; those of calls that were refused count, too.
        ok: How many of them had an answer without an error.
        errors: How many of them ended with an error, of whatever kind.
        cancelled: How many were given up by their callers.
        waiting: How many wait now.
        running: How many are in batches that run now.
        batch_sizes: How many calls of the function had each number of items.
        latency_s: The seconds from arrival to answer, summed over the answers without an error.
        queue_s: The seconds from arrival to the start of the batch, summed over the items.
        compute_s: The seconds in the function, summed over its calls.
    """

    name: str
    calls: int
    ok: int
    errors: int
    cancelled: int
    waiting: int
    running: int
    batch_sizes: dict[int, int]
    latency_s: float
    queue_s: float
    compute_s: float

    @property
    def items(self) -> int:
        """How many items were in all calls of the function."""
        return sum(n * count for n, count in self.batch_sizes.items())

    @property
    def batches(self) -> int:
        """How many calls of the function there were."""
        return sum(self.batch_sizes.values())

    @property
    def mean_batch_size(self) -> float:
        """The mean number of items in a call of the function; 0 before the first."""
        return _mean(self.items, self.batches)

    @property
    def mean_latency_s(self) -> float:
        """The mean seconds from arrival to an answer without an error; 0 before the first."""
        return _mean(self.latency_s, self.ok)

    @property
    def mean_queue_s(self) -> float:
        """The mean seconds that an item waited for its batch to start."""
        return _mean(self.queue_s, self.items)

    @property
    def mean_compute_s(self) -> float:
        """The mean seconds of a call of the function."""
        return _mean(self.compute_s, self.batches)

    def __str__(self) -> str:
        sizes = ", ".join(f"{n}: {count}" for n, count in self.batch_sizes.items())
        rows = {
            "calls": f"{self.calls} ({self.errors} errors, {self.cancelled} cancelled)",
            "now": f"{self.waiting} waiting, {self.running} running",
            "batches": f"{self.batches}, of {self.mean_batch_size:.1f} items on average",
            "batch sizes": sizes or "none yet",
            "mean latency": f"{1e3 * self.mean_latency_s:.3f} ms",
            "mean queue": f"{1e3 * self.mean_queue_s:.3f} ms",
            "mean compute": f"{1e3 * self.mean_compute_s:.3f} ms",
        }
        return "\n".join([self.name, *[f"  {what:<14}{text}" for what, text in rows.items()]])


def snapshot(name: str, core: Core, counts: CallCounts, lone_running: int = 0) -> FunctionSnapshot:
    """Return the numbers of one driver; `lone_running` calls run now beside its core."""
    sizes = dict(counts.batch_sizes)
    if core.flow.alone:
        sizes[1] = sizes.get(1, 0) + core.flow.alone
    return FunctionSnapshot(
        name=name,
        calls=core.flow.admitted + core.flow.refused + lone_running,
        ok=max(0, core.flow.admitted - core.flow.failed - core.flow.cancelled - core.unanswered),
        errors=core.flow.failed + core.flow.refused,
        cancelled=core.flow.cancelled,
        waiting=core.waiting,
        running=core.unanswered - core.waiting + lone_running,
        batch_sizes=dict(sorted(sizes.items())),
        latency_s=counts.latency_s + counts.alone_s - counts.alone_failed_s,
        queue_s=counts.queue_s,
        compute_s=counts.compute_s + counts.alone_s,
    )


def together(name: str, parts: Sequence[FunctionSnapshot]) -> FunctionSnapshot:
    """Return the numbers of several drivers of one function, such as one for each event loop."""
    sizes: dict[int, int] = {}
    for part in parts:
        for n, count in part.batch_sizes.items():
            sizes[n] = sizes.get(n, 0) + count
    return FunctionSnapshot(
        name=name,
        calls=sum(part.calls for part in parts),
        ok=sum(part.ok for part in parts),
        errors=sum(part.errors for part in parts),
        cancelled=sum(part.cancelled for part in parts),
        waiting=sum(part.waiting for part in parts),
        running=sum(part.running for part in parts),
        batch_sizes=dict(sorted(sizes.items())),
        latency_s=sum(part.latency_s for part in parts),
        queue_s=sum(part.queue_s for part in parts),
        compute_s=sum(part.compute_s for part in parts),
    )


class _FunctionStage(StageStats):
    """Counts batches by little more than their sizes, and logs why they go."""

    counts: CallCounts

    def started(self, batch: Batch) -> None:
        if batch.reason != self._last_reason:
            self._log_reason(batch)
        self.counts.ran(batch)

    def completed(self, place: int, n: int, busy_s: float, waited_s: float) -> None:
        self.counts.compute_s += busy_s


class FunctionStats(Stats):
    stage_stats = _FunctionStage

    def __init__(self, name: str, core: Core) -> None:
        super().__init__(name, core, [None], [False])
        self.counts = CallCounts()
        (stage,) = self.stages
        assert isinstance(stage, _FunctionStage)
        stage.counts = self.counts

    def answered(self, requests: Sequence[Request], now: float) -> None:
        self.counts.answered(requests, now)


def _mean(total: float, n: int) -> float:
    return total / n if n > 0 else 0.0
