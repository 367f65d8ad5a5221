"""What a service has done so far, in numbers. Drivers report to it; the core knows nothing of it.

Counting is a handful of integer additions per request; means are computed when somebody asks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from carpool.call.results import Trouble
from carpool.call.retry import padded_size
from carpool.core.batch import Batch
from carpool.core.pipeline import Pipeline
from carpool.core.roster import PlaceState, Roster
from carpool.core.running_set import Order, SetReport
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
from carpool.http_response import HTTPError
from carpool.logger import logger
from carpool.observe.durations import Durations
from carpool.observe.refusals import Refusals
from carpool.observe.shown import Row, as_html, as_text, counted, milliseconds
from carpool.observe.stream_stats import StreamSnapshot, StreamStats, first_part_s
from carpool.policy import Policy
from carpool.policy.length_cost import padded
from carpool.request import Request
from carpool.wire.handshake import Hello

_EXPLAIN_EVERY_S = 10.0  # how often a stage logs why its batches go

OUTCOMES = ("ok", "invalid_request", "invalid_item", "overloaded", "expired", "unavailable", "model_error")
"""What can become of a request, besides `cancelled`: a closed set, fit to be a metric label."""

_OUTCOME_OF: dict[type[Exception], str] = {
    InvalidRequest: "invalid_request",
    ValidationError: "invalid_item",
    Overloaded: "overloaded",
    DeadlineExceeded: "expired",
    Unavailable: "unavailable",
    ModelError: "model_error",
}

REASONS = (
    "full",
    "free",
    "length",
    "delay",
    "size",
    "tight",
    "shed",
    "probe",
    "cold",
    "closing",
    "quarantine",
    "other",
)
"""Why a batch was sent to its worker. Whatever else a policy says is counted as `other`."""


class BatchWatcher(Protocol):
    """Whoever is told of each batch of a stage."""

    def batch_started(self, stage: StageStats, batch: Batch) -> None:
        """Note that a worker has got to a batch."""

    def batch_completed(self, stage: StageStats, place: int) -> None:
        """Note that a worker has answered its batch."""


class StageStats:
    """Counters of one stage.

    Args:
        name: The name of the stage.
        pipeline: The pipeline to which the stage belongs.
        index: The position of the stage in the pipeline.
        roster: The roster of the stage's workers; None for a stage that has none.
        single: Whether its model takes single items. Then each item is a batch of its own in all
            counts and times, however many of them travel to the worker together.

    Attributes:
        name: The name of the stage.
        batcher: The batcher of the stage, which keeps some counts itself.
        roster: The roster of the stage's workers, if it has one.
        batch_sizes: How many calls of the model had each size.
        reasons: How many batches were sent for each of `REASONS`.
        queue_time: The time from arrival in the stage to the start of the batch, per request.
        compute_time: The time that a worker spent on a batch, per batch.
        idle_gap: How long a worker waited between two batches although requests were waiting.
        split_batches: How many batches raised an error and were run again in parts.
        unsplit_batches: How many raised an error and were not, because too many had been.
        out_of_memory: How many batches had a call that ran out of memory.
        elsewhere: What the workers that run somewhere else have said of themselves, by place.
        protocol_errors: How many workers were ended because they sent something wrong.
        items: How many requests the batches of a stage with `allowed_batch_sizes` held.
        padding: How many items were added to these to reach an allowed size.
        positions: In a stage with `length`, how many positions (tokens, frames, ...) the model has
            computed for the items, those included that it has padded them with.
        length_padding: How many of these were padding.
        watcher: Is told of each batch; None unless requests are logged or traced one by one.
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
        self.items = self.padding = self.positions = self.length_padding = 0
        self.split_batches = self.unsplit_batches = self.out_of_memory = self.protocol_errors = 0
        self._single = single
        self._last_reason = ""
        self._explain_at = -inf
        self.elsewhere: dict[int, Hello] = {}
        self.watcher: BatchWatcher | None = None
        self._wanted: set[int] = set()  # places of workers that became free while requests waited

    def started(self, batch: Batch) -> None:
        """Count a batch that goes to its worker."""
        n = len(batch.requests)
        size, calls = (1, n) if self._single else (n, 1)
        self.batch_sizes[size] = self.batch_sizes.get(size, 0) + calls
        sizes = self.batcher.policy.allowed_batch_sizes
        if sizes is not None:
            self.items += n
            self.padding += padded_size(n, sizes) - n
        if batch.longest:
            self._count_positions(batch)
        if batch.reason != self._last_reason:
            self._log_reason(batch)
        self.reasons[batch.reason if batch.reason in self.reasons else "other"] += calls
        self.queue_time.add_since(batch.started, [request.arrived for request in batch.requests])
        if self.watcher is not None:
            self.watcher.batch_started(self, batch)

    def completed(self, place: int, n: int, busy_s: float, waited_s: float) -> None:
        """Count a batch that is done.

        This must be called before the worker gets its next batch, unless that one went ahead.

        Args:
            place: The place of the worker.
            n: How many requests it answered.
            busy_s: How long the worker spent on the batch, in seconds.
            waited_s: How long the worker had waited before it, in seconds.
        """
        if self._single and n > 1:
            self.compute_time.add(busy_s / n, n)  # one time for all is measured: each gets its share
        else:
            self.compute_time.add(busy_s)
        if self.watcher is not None:
            self.watcher.batch_completed(self, place)
        if place in self._wanted:
            self.idle_gap.add(waited_s)
        if self.batcher.queue or place in self.batcher.in_flight:
            self._wanted.add(place)
        else:
            self._wanted.discard(place)

    def went_alone(self, place: int, busy_s: float, waited_s: float) -> None:
        """Count a batch of one request that found everything idle, and is done.

        Fast path of `started` and `completed`: the same counts, see tests/drive/test_lending.py.
        Only the reason is that of the last batch, as nobody has asked the policy.
        """
        self.batch_sizes[1] = self.batch_sizes.get(1, 0) + 1
        sizes = self.batcher.policy.allowed_batch_sizes
        if sizes is not None:
            self.items += 1
            self.padding += padded_size(1, sizes) - 1
        self.reasons[self._last_reason if self._last_reason in self.reasons else "other"] += 1
        self.queue_time.add(0.0)
        self.compute_time.add(busy_s)
        if place in self._wanted:
            self.idle_gap.add(waited_s)
            self._wanted.discard(place)

    def joined(self, now: float, requests: Sequence[Request]) -> None:
        """Count requests that join a running set, unless they have been in one before."""
        arrivals = [r.arrived for r in requests if not (r.losses or (r.stream and r.stream.parts))]
        if arrivals:
            self.queue_time.add_since(now, arrivals)

    def stepped(self, rows: int, step_s: float) -> None:
        """Count a step of a running set, which is a call of the model with so many requests."""
        self.batch_sizes[rows] = self.batch_sizes.get(rows, 0) + 1
        self.compute_time.add(step_s)

    def troubled(self, trouble: Sequence[Trouble]) -> None:
        """Count what happened to a batch besides its results."""
        self.split_batches += any(each.split for each in trouble)
        self.unsplit_batches += any(each.unsplit for each in trouble)
        self.out_of_memory += any(each.out_of_memory for each in trouble)

    def _count_positions(self, batch: Batch) -> None:
        """Count how much of the items' lengths is padding up to the longest, or an allowed one."""
        allowed = self.batcher.policy.allowed_lengths
        longest = batch.longest if allowed is None else padded(batch.longest, allowed)
        positions = len(batch.requests) * longest
        self.positions += positions
        self.length_padding += positions - sum([min(request.length, longest) for request in batch.requests])

    @property
    def length_padding_share(self) -> float:
        """The share of the positions computed for items that was padding; 0 before the first."""
        return self.length_padding / self.positions if self.positions else 0.0

    @property
    def safe_batch_size(self) -> int | None:
        """The largest batch known to fit into memory; None while none has run out of it."""
        limit = self.batcher.safe_size.limit
        return None if limit == inf else int(limit)

    def _log_reason(self, batch: Batch) -> None:
        """Note that a batch goes for another reason than the last one, and log why now and then."""
        self._last_reason = batch.reason
        if batch.started >= self._explain_at and logger.isEnabledFor(logging.DEBUG):
            self._explain_at = batch.started + _EXPLAIN_EVERY_S
            why = explained(self.batcher.policy, batch.started)
            logger.debug("stage %s: a batch of %d goes (%s); %s", self.name, batch.n, batch.reason, why)

    @property
    def mean_batch_size(self) -> float:
        """The mean number of requests in a call of the model; 0 before the first call."""
        calls = sum(self.batch_sizes.values())
        return sum(n * count for n, count in self.batch_sizes.items()) / calls if calls else 0.0

    @property
    def padding_share(self) -> float:
        """The share of the items that the model was called with which was padding, from 0 to 1."""
        return self.padding / (self.items + self.padding) if self.padding else 0.0

    @property
    def workers(self) -> dict[PlaceState, int]:
        """The number of workers in each state."""
        states = dict.fromkeys(PlaceState, 0)
        for record in self.roster.places.values() if self.roster is not None else ():
            states[record.state] += 1
        return states

    def worker_name(self, place: int) -> str:
        """Return what the log calls the worker in a place."""
        record = None if self.roster is None else self.roster.places.get(place)
        return f"{self.name}/{place if record is None else record.index}"

    def gone(self, place: int) -> None:
        """Forget a worker that is gone for good."""
        self._wanted.discard(place)


class Stats:
    """Counters of one service.

    Args:
        name: The name of the service.
        pipeline: The pipeline with the requests to count.
        rosters: The roster of each stage; None for a stage that has none.
        singles: Whether the model of each stage takes single items.
        slo_s: The SLO in seconds, if there is one.
        part_slo_s: The SLO between the parts of an answer in seconds, if there is one.

    Attributes:
        name: The name of the service.
        pipeline: The pipeline with the requests to count.
        slo_s: The SLO in seconds, if there is one.
        streams: The counters of answers in parts; None where the last stage answers whole.
        outcomes: How many requests had each of `OUTCOMES`.
        refusals: Sums up for the log what was refused or late.
        cancelled: How many requests were cancelled by their callers.
        within_slo: How many answers without an error came within the SLO; of those that are taken
            in parts, the first part.
        latency: The time from admission to the answer, for answers without an error.
        last_ok_at: When the last answer without an error was given.
        stages: The counters of each stage.
    """

    stage_stats = StageStats
    """The class of the counters of one stage."""

    def __init__(
        self,
        name: str,
        pipeline: Pipeline,
        rosters: Sequence[Roster | None],
        singles: Sequence[bool],
        slo_s: float | None = None,
        part_slo_s: float | None = None,
    ) -> None:
        self.name = name
        self.pipeline = pipeline
        self.slo_s = slo_s
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self.refusals = Refusals()
        self.cancelled = 0
        self.within_slo = 0
        self.latency = Durations()
        self.last_ok_at = -inf
        self.stages = [
            self.stage_stats(stage.name, pipeline, i, roster, single)
            for i, (stage, roster, single) in enumerate(zip(pipeline.batchers, rosters, singles, strict=True))
        ]
        stepper = pipeline.stepper
        self.streams = None if stepper is None else StreamStats(stepper, slo_s, part_slo_s)

    def answered(self, requests: Sequence[Request], now: float) -> None:
        """Count requests that have got their answers."""
        starts = [request.admitted for request in requests if request.error is None]
        if starts:
            self.outcomes["ok"] += len(starts)
            self.last_ok_at = now
            self.latency.add_since(now, starts)
            if self.slo_s is not None and self.streams is None:
                self.within_slo += sum([now - start <= self.slo_s for start in starts])
        if self.streams is not None:
            self._streams_answered(self.streams, requests, now)
        elif len(starts) < len(requests):
            for request in requests:
                if request.error is not None:
                    self.refused(request.error)

    def _streams_answered(self, streams: StreamStats, requests: Sequence[Request], now: float) -> None:
        """Count the ends of requests of a service that answers in parts."""
        for request in requests:
            error, stream = request.error, request.stream
            if error is None:
                streams.ended(now, request, "ok")
                if self.slo_s is not None:
                    self.within_slo += first_part_s(request, now) <= self.slo_s
            else:
                outcome = outcome_of(error)
                streams.ended(now, request, outcome)
                self.outcomes[outcome] += 1
                if stream is not None and stream.parts:
                    self.refusals.broke_off(error)
                else:
                    self.refusals.count(error)

    def refused(self, error: Exception) -> None:
        """Count a request that ended with `error`, or was not admitted because of it."""
        self.outcomes[outcome_of(error)] += 1
        self.refusals.count(error)

    def ordered(self, orders: Sequence[Order], now: float) -> None:
        """Count the requests that join running sets by these orders."""
        for order in orders:
            if order.join:
                self.stages[order.stage].joined(now, order.join)
        if self.streams is not None:
            self.refusals.went_on(self.streams.newly_resumed(orders))

    def reported(self, report: SetReport) -> None:
        """Count what a worker says after a step; its parts are counted by `StreamStats`."""
        if report.rows:
            self.stages[report.stage].stepped(report.rows, report.step_s)
        if self.streams is not None:
            self.streams.reported(report)

    def cancelled_by_caller(self, request: Request, now: float) -> None:
        """Count an admitted request that was cancelled."""
        self.cancelled += 1
        if self.streams is not None:
            self.streams.ended(now, request, "cancelled")

    def snapshot(self, now: float) -> ServiceSnapshot:
        """Return a copy of the numbers at `now`. Call this in the driver's thread."""
        total = sum(self.outcomes.values()) - self.outcomes["invalid_request"] - self.outcomes["invalid_item"]
        return ServiceSnapshot(
            name=self.name,
            outcomes={**self.outcomes, "cancelled": self.cancelled},
            in_flight=self.pipeline.unanswered,
            mean_latency_s=self.latency.mean_s,
            slo_attainment=None if self.slo_s is None or not total else self.within_slo / total,
            stages=tuple(_stage_snapshot(stage, now) for stage in self.stages),
            streams=None if self.streams is None else self.streams.snapshot(),
        )


@dataclass(frozen=True, slots=True)
class StageSnapshot:
    """The numbers of one stage at one moment. `print` shows the main ones as a table.

    Attributes:
        name: The name of the stage.
        queued: How many requests wait.
        running: How many requests are with workers.
        batches: How many calls of the model have been made; in a stage of steps, how many steps.
        mean_batch_size: The mean number of requests in a call.
        batch_sizes: How many calls had each size.
        padding_share: The share of the items that the model was called with which was padding, see
            `Stage(allowed_batch_sizes=...)`.
        length_padding_share: The share of the positions (tokens, frames, ...) that the model
            computed for its items which was padding, see `Stage(length=...)`.
        reasons: How many of these went to a worker for each reason.
        mean_queue_s: The mean seconds that a request spent in the queue.
        mean_compute_s: The mean seconds that a worker spent on a batch, reading and writing it
            included. In a stage of single items that is one item; several that travel together
            count with equal shares of their time.
        mean_idle_gap_s: The mean seconds that a worker waited for its next batch although requests
            were waiting.
        workers: How many workers are in each state.
        restarts: How many workers have been replaced.
        late_results: How many results were dropped because their request had been answered or
            cancelled before.
        stray_replies: How many results were dropped because their worker was not running the
            request.
        protocol_errors: How many workers were ended because they sent something wrong.
        split_batches: How many batches raised an error and were run again in parts.
        unsplit_batches: How many raised an error and were not, because too many had been.
        out_of_memory: How many batches ran out of memory.
        safe_batch_size: The largest batch known to fit into memory; None while none has run out.
        policy: Why the policy decides as it does, see `Policy.explain`.
        elsewhere: Where the workers run that are not on this machine, or have joined by themselves,
            in words, by their index.
    """

    name: str
    queued: int
    running: int
    batches: int
    mean_batch_size: float
    batch_sizes: dict[int, int]
    padding_share: float
    length_padding_share: float
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
    elsewhere: dict[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join([as_text(_rows([self])), *_notes([self])])

    def _repr_html_(self) -> str:
        return as_html(self.name, _rows([self]), _notes([self]))


@dataclass(frozen=True, slots=True)
class ServiceSnapshot:
    """The numbers of a service at one moment. `print` shows the main ones as a table.

    Attributes:
        name: The name of the service.
        outcomes: How many requests had each of `OUTCOMES`, and how many were `cancelled`.
        in_flight: How many admitted requests have no answer yet.
        mean_latency_s: The mean seconds from admission to an answer without an error.
        slo_attainment: The share of the requests that had an answer without an error within
            `slo_s`, where those that were invalid are left out; None if there is no SLO. Of answers
            in parts, the first part counts.
        stages: The numbers of each stage.
        streams: The numbers of answers in parts; None where the last stage answers whole.
    """

    name: str
    outcomes: dict[str, int]
    in_flight: int
    mean_latency_s: float
    slo_attainment: float | None
    stages: tuple[StageSnapshot, ...]
    streams: StreamSnapshot | None = None

    def __str__(self) -> str:
        return "\n".join([self._summary(), as_text(_rows(self.stages)), *self._lines()])

    def _repr_html_(self) -> str:
        return as_html(self._summary(), _rows(self.stages), self._lines())

    def _lines(self) -> list[str]:
        """Return what stands below the table."""
        return [*([] if self.streams is None else self.streams.lines), *_notes(self.stages)]

    def _summary(self) -> str:
        """Return what became of the requests, in one line."""
        parts = [f"{self.outcomes['ok']:,} ok"]
        parts += [f"{n:,} {name.replace('_', ' ')}" for name, n in self.outcomes.items() if n and name != "ok"]
        parts.append(f"{self.in_flight:,} in flight")
        parts.append(f"mean latency {milliseconds(self.mean_latency_s)} ms")
        if self.slo_attainment is not None:
            parts.append(f"{self.slo_attainment:.1%} within the SLO")
        return f"{self.name}: {', '.join(parts)}"


_HEADINGS = ("stage", "queued", "running", "calls", "mean size", "queue ms", "compute ms", "workers")


def _rows(stages: Sequence[StageSnapshot]) -> list[Row]:
    """Return a table of stages: what a look at a service is mostly for."""
    rows: list[Row] = [_HEADINGS]
    for stage in stages:
        counts = [f"{n:,}" for n in (stage.queued, stage.running, stage.batches)]
        times = [milliseconds(seconds) for seconds in (stage.mean_queue_s, stage.mean_compute_s)]
        workers = ", ".join(f"{n} {state}" for state, n in stage.workers.items()) or "none"
        rows.append((stage.name, *counts, f"{stage.mean_batch_size:.1f}", *times, workers))
    return rows


def _notes(stages: Sequence[StageSnapshot]) -> list[str]:
    """Return a line for each stage in which something went wrong."""
    notes = []
    for stage in stages:
        troubles = [
            (stage.restarts, "restart", "restarts"),
            (stage.split_batches, "split batch", "split batches"),
            (stage.unsplit_batches, "unsplit batch", "unsplit batches"),
            (stage.out_of_memory, "batch out of memory", "batches out of memory"),
            (stage.protocol_errors, "protocol error", "protocol errors"),
            (stage.late_results, "late result", "late results"),
            (stage.stray_replies, "stray reply", "stray replies"),
        ]
        told = [counted(*trouble) for trouble in troubles if trouble[0]]
        if told:
            notes.append(f"{stage.name}: {', '.join(told)}")
    return notes


def outcome_of(error: Exception) -> str:
    """Return the outcome as which an error is counted."""
    for kind in type(error).__mro__:
        if kind in _OUTCOME_OF:
            return _OUTCOME_OF[kind]
    if not isinstance(error, CarpoolError):
        return "model_error"
    if isinstance(error, HTTPError):
        return "invalid_item" if error.status < 500 else "model_error"
    return "invalid_request" if error.status < 500 else "unavailable"


def explained(policy: Policy, now: float) -> dict[str, Any]:
    """Return what a policy says about its decisions, or the error that it raises when asked."""
    try:
        return dict(policy.explain(now))
    except BaseException as error:  # the policy may be the user's; a look at it must do no harm
        return {"policy": type(policy).__name__.lower(), "error": f"{type(error).__name__}: {text_of(error)}"}


def _stage_snapshot(stage: StageStats, now: float) -> StageSnapshot:
    """Return the numbers of a stage at `now`."""
    return StageSnapshot(
        name=stage.name,
        queued=len(stage.batcher.queue),
        running=stage.batcher.running,
        batches=sum(stage.batch_sizes.values()),
        mean_batch_size=stage.mean_batch_size,
        batch_sizes=dict(sorted(stage.batch_sizes.items())),
        padding_share=stage.padding_share,
        length_padding_share=stage.length_padding_share,
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
        elsewhere={place: hello.whereabouts for place, hello in sorted(stage.elsewhere.items())},
    )
