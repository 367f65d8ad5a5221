"""What a service has done so far, in numbers. Drivers tell it; the core knows nothing of it.

Counting is a handful of integer additions per request; percentiles and means are worked out when somebody asks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from carpool.call.retry import Trouble, padded_size
from carpool.core.batcher import Batch
from carpool.core.pipeline import Pipeline
from carpool.core.roster import PlaceState, Roster
from carpool.errors import (
    CarpoolError,
    DeadlineExceeded,
    InvalidRequest,
    ModelError,
    Overloaded,
    Unavailable,
    ValidationError,
)
from carpool.foreign import text_of
from carpool.logger import logger
from carpool.policy import Policy
from carpool.request import Request

_EXPLAIN_EVERY_S = 10.0  # in the log, per stage

OUTCOMES = ("ok", "invalid_request", "invalid_item", "overloaded", "expired", "unavailable", "model_error")
"""What can become of a request, besides `cancelled`; a closed set, so it can be a metric label."""

_OUTCOME_OF: dict[type[Exception], str] = {
    InvalidRequest: "invalid_request",
    ValidationError: "invalid_item",
    Overloaded: "overloaded",
    DeadlineExceeded: "expired",
    Unavailable: "unavailable",
    ModelError: "model_error",
}

REASONS = ("full", "free", "delay", "size", "tight", "shed", "probe", "cold", "closing", "quarantine", "other")
"""Why a batch went when it did; what else a policy says is counted as `other`."""

_SMALLEST_S = 0.00025
_DURATION_BUCKETS = 17
DURATION_BOUNDS = tuple(_SMALLEST_S * 2**k for k in range(_DURATION_BUCKETS))
"""Upper bounds of the duration histograms' buckets: 250 µs, doubling, to 16 s."""


class Durations:
    """A histogram of durations in doubling buckets."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (_DURATION_BUCKETS + 1)
        self.sum_s = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count one duration, `times` over."""
        # bucket k holds (0.25 ms·2^(k-1), 0.25 ms·2^k]; truncation moves only what lies on a bound
        k = int(seconds / _SMALLEST_S).bit_length()
        self.counts[k if k < _DURATION_BUCKETS else _DURATION_BUCKETS] += times
        self.sum_s += seconds * times

    def add_since(self, now: float, starts: Sequence[float]) -> None:
        """Count the durations from each of `starts` to `now`."""
        before = starts[0]
        times = starts.count(before)
        if times == len(starts):  # as what comes from one turn of the loop
            self.add(now - before, times)
            return
        times = 0
        for start in starts:
            if start != before:  # mostly there are a few values
                self.add(now - before, times)
                before = start
                times = 0
            times += 1
        self.add(now - before, times)

    @property
    def count(self) -> int:
        """How many durations were counted."""
        return sum(self.counts)

    @property
    def mean_s(self) -> float:
        """Their mean; 0 if there are none."""
        return self.sum_s / self.count if self.count else 0.0


class StageStats:
    """Counters of one stage.

    Attributes:
        batch_sizes: how many calls had each size.
        reasons: why batches went when they did.
        queue_time: from arrival in the stage to the start of the batch, per request.
        compute_time: from the start of a batch in the worker to its end, per batch.
        idle_gap: how long a worker waited between two batches although work was there, per batch.
        split_batches: batches that raised and were run again in parts; unsplit_batches: those that were not, because
            too many had been.
        out_of_memory: batches of which some call ran out of memory.
        protocol_errors: workers that were ended for what they sent.
        items, padding: what batches held, and what was added to reach one of the stage's `allowed_batch_sizes`.
    """

    def __init__(self, name: str, pipeline: Pipeline, index: int, roster: Roster | None, single: bool) -> None:
        self.name = name
        self.batch_sizes: dict[int, int] = {}
        self.reasons = dict.fromkeys(REASONS, 0)
        self.queue_time = Durations()
        self.compute_time = Durations()
        self.idle_gap = Durations()
        self.roster = roster
        self.batcher = pipeline.batchers[index]
        self.items = self.padding = 0
        self.split_batches = self.unsplit_batches = self.out_of_memory = self.protocol_errors = 0
        self._single = single
        self._reason = ""  # of the last batch
        self._explain_at = float("-inf")
        self._hungry: set[int] = set()  # workers for whom work was waiting when they became free

    def started(self, batch: Batch) -> None:
        """A batch goes to its worker."""
        n = len(batch.requests)
        if self._single:
            self.batch_sizes[1] = self.batch_sizes.get(1, 0) + n
        else:
            self.batch_sizes[n] = self.batch_sizes.get(n, 0) + 1
        sizes = self.batcher.policy.allowed_batch_sizes
        if sizes is not None:
            self.items += n
            self.padding += padded_size(n, sizes) - n
        if batch.reason != self._reason:
            self._say_why(batch)
        self.reasons[batch.reason if batch.reason in self.reasons else "other"] += 1
        self.queue_time.add_since(batch.started, [request.arrived for request in batch.requests])

    def completed(self, place: int, busy_s: float, waited_s: float) -> None:
        """A batch is done; asked before the next one is handed out, if that was not done ahead of time."""
        self.compute_time.add(busy_s)
        if place in self._hungry:
            self.idle_gap.add(waited_s)
        if self.batcher.queue or place in self.batcher.in_flight:
            self._hungry.add(place)
        else:
            self._hungry.discard(place)

    def troubled(self, trouble: Sequence[Trouble]) -> None:
        """What a worker tells of a batch besides its results."""
        self.split_batches += any(each.split for each in trouble)
        self.unsplit_batches += any(each.unsplit for each in trouble)
        self.out_of_memory += any(each.out_of_memory for each in trouble)

    @property
    def safe_batch_size(self) -> int | None:
        """The most that is known to fit into memory; None while nothing has run out of it."""
        limit = self.batcher.safe_size.limit
        return None if limit == inf else int(limit)

    def _say_why(self, batch: Batch) -> None:
        """Another rule than for the last batch: a line in the log now and then, for those who want to follow."""
        self._reason = batch.reason
        if batch.started >= self._explain_at and logger.isEnabledFor(logging.DEBUG):
            self._explain_at = batch.started + _EXPLAIN_EVERY_S
            why = explained(self.batcher.policy, batch.started)
            logger.debug("stage %s: a batch of %d goes (%s); %s", self.name, batch.n, batch.reason, why)

    @property
    def mean_batch_size(self) -> float:
        """Requests per call; 0 before the first."""
        calls = sum(self.batch_sizes.values())
        return sum(n * count for n, count in self.batch_sizes.items()) / calls if calls else 0.0

    @property
    def padding_share(self) -> float:
        """How much of what the model was called with was padding, 0 to 1."""
        return self.padding / (self.items + self.padding) if self.padding else 0.0

    @property
    def workers(self) -> dict[PlaceState, int]:
        """How many workers are in each state."""
        states = dict.fromkeys(PlaceState, 0)
        for place in self.roster.places if self.roster is not None else ():
            states[place.state] += 1
        return states


class Stats:
    """Counters of one service.

    Args:
        name: the service's.
        pipeline: whose requests are counted.
        rosters: the stages' workers, None for a stage without processes.
        singles: for each stage whether its model takes single items.
        slo_s: the latency goal, if there is one.
    """

    stage_stats = StageStats  # what counts for one stage

    def __init__(
        self,
        name: str,
        pipeline: Pipeline,
        rosters: Sequence[Roster | None],
        singles: Sequence[bool],
        slo_s: float | None = None,
    ) -> None:
        self.name = name
        self.pipeline = pipeline
        self.slo_s = slo_s
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self.cancelled = 0
        self.within_slo = 0
        self.latency = Durations()
        self.last_ok_at = float("-inf")
        self.stages = [
            self.stage_stats(stage.name, pipeline, i, roster, single)
            for i, (stage, roster, single) in enumerate(zip(pipeline.batchers, rosters, singles, strict=True))
        ]

    def answered(self, requests: Sequence[Request], now: float) -> None:
        """Requests have their answers."""
        starts = [request.admitted for request in requests if request.error is None]
        if starts:
            self.outcomes["ok"] += len(starts)
            self.last_ok_at = now
            self.latency.add_since(now, starts)
            if self.slo_s is not None:
                self.within_slo += sum([now - start <= self.slo_s for start in starts])
        if len(starts) < len(requests):
            for request in requests:
                if request.error is not None:
                    self.refused(request.error)

    def refused(self, error: Exception) -> None:
        """A request ended with `error`, or never got in because of it."""
        self.outcomes[outcome_of(error)] += 1

    def snapshot(self, now: float) -> ServiceSnapshot:
        """The numbers at `now`, frozen. To be asked in the driver's thread, as policies are."""
        total = sum(self.outcomes.values())
        return ServiceSnapshot(
            name=self.name,
            outcomes={**self.outcomes, "cancelled": self.cancelled},
            in_flight=self.pipeline.unanswered,
            mean_latency_s=self.latency.mean_s,
            slo_attainment=None if self.slo_s is None or not total else self.within_slo / total,
            stages=tuple(_stage_snapshot(stage, now) for stage in self.stages),
        )


class _NoStageStats(StageStats):
    """Counts nothing, and still says in the log why batches go."""

    def started(self, batch: Batch) -> None:
        """A batch goes to its worker."""
        if batch.reason != self._reason:
            self._say_why(batch)

    def completed(self, place: int, busy_s: float, waited_s: float) -> None:
        """Nobody will ask."""


class NoStats(Stats):
    """Counts neither batches nor answers: for a driver whose numbers nobody can ask for."""

    stage_stats = _NoStageStats

    def __init__(self, name: str, pipeline: Pipeline) -> None:
        n = len(pipeline.batchers)
        super().__init__(name, pipeline, [None] * n, [False] * n)

    def answered(self, requests: Sequence[Request], now: float) -> None:
        """Nobody will ask."""


@dataclass(frozen=True, slots=True)
class StageSnapshot:
    """One stage at one moment.

    Attributes:
        queued, running: requests that wait, and that workers are busy with.
        batches: calls made so far; mean_batch_size: requests per call.
        batch_sizes: how many calls had each size.
        padding_share: how much of what the model was called with was padding, see `Stage(allowed_batch_sizes=...)`.
        reasons: why batches went when they did.
        mean_queue_s, mean_compute_s: per request in the queue, per batch in the worker.
        mean_idle_gap_s: how long a worker waited for its next batch although work was there.
        workers: how many are in each state; restarts: how many have been replaced.
        late_results, stray_replies: dropped answers: too late, and never asked for.
        protocol_errors: workers that were ended for what they sent.
        split_batches, unsplit_batches: batches that raised: run again in parts, or not because too many had been.
        out_of_memory: batches that ran out of memory; safe_batch_size: what fits, None while nothing ever did not.
        policy: why the policy decides as it does, see `Policy.explain`.
    """

    name: str
    queued: int
    running: int
    batches: int
    mean_batch_size: float
    batch_sizes: dict[int, int]
    padding_share: float
    reasons: dict[str, int]
    mean_queue_s: float
    mean_compute_s: float
    mean_idle_gap_s: float
    workers: dict[str, int]
    restarts: int
    late_results: int
    stray_replies: int
    protocol_errors: int
    split_batches: int
    unsplit_batches: int
    out_of_memory: int
    safe_batch_size: int | None
    policy: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ServiceSnapshot:
    """A service at one moment.

    Attributes:
        outcomes: what became of the requests so far, see `OUTCOMES` and `cancelled`.
        in_flight: admitted requests whose callers still wait.
        mean_latency_s: of the good answers, from admission.
        slo_attainment: share of all requests answered well within `slo_s`; None without one.
    """

    name: str
    outcomes: dict[str, int]
    in_flight: int
    mean_latency_s: float
    slo_attainment: float | None
    stages: tuple[StageSnapshot, ...]


def outcome_of(error: Exception) -> str:
    """The label under which an error is counted."""
    for kind in type(error).__mro__:
        if kind in _OUTCOME_OF:
            return _OUTCOME_OF[kind]
    if not isinstance(error, CarpoolError):
        return "model_error"
    return "invalid_request" if error.status < 500 else "unavailable"


def explained(policy: Policy, now: float) -> dict[str, Any]:
    """Why a policy decides as it does, in its own words; or why it cannot say."""
    try:
        return dict(policy.explain(now))
    except BaseException as error:  # policies may be the user's, and to look at them must harm nobody
        return {"policy": type(policy).__name__.lower(), "error": f"{type(error).__name__}: {text_of(error)}"}


def _stage_snapshot(stage: StageStats, now: float) -> StageSnapshot:
    return StageSnapshot(
        name=stage.name,
        queued=len(stage.batcher.queue),
        running=stage.batcher.running,
        batches=sum(stage.batch_sizes.values()),
        mean_batch_size=stage.mean_batch_size,
        batch_sizes=dict(sorted(stage.batch_sizes.items())),
        padding_share=stage.padding_share,
        reasons=dict(stage.reasons),
        mean_queue_s=stage.queue_time.mean_s,
        mean_compute_s=stage.compute_time.mean_s,
        mean_idle_gap_s=stage.idle_gap.mean_s,
        workers={str(state): n for state, n in stage.workers.items() if n},
        restarts=0 if stage.roster is None else stage.roster.restarts,
        late_results=stage.batcher.late_results,
        stray_replies=stage.batcher.stray_replies,
        protocol_errors=stage.protocol_errors,
        split_batches=stage.split_batches,
        unsplit_batches=stage.unsplit_batches,
        out_of_memory=stage.out_of_memory,
        safe_batch_size=stage.safe_batch_size,
        policy=explained(stage.batcher.policy, now),
    )
