"""Counts the work of a service and of its stages. Drivers report to it; the core imports nothing of
it.

Counting is a handful of integer additions per request; means are computed when somebody asks
(`observe/snapshot.py`).

`SentMetrics` holds the models' own metrics that workers of one stage have sent over the network. Of
a worker that is there the last message is kept as it is, at most `MAX_METRICS_BYTES` long; of those
that have gone only one sum of what they have counted. A new series is kept only if it fits into
what is left of `MOST_TEXT`.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, Protocol

import msgspec

from carpool.engine.call.results import Trouble
from carpool.engine.call.retry import padded_size
from carpool.engine.core.batch import Batch
from carpool.engine.core.core import Core
from carpool.engine.core.graph import Node
from carpool.engine.core.roster import PlaceState, Roster
from carpool.engine.core.running_set import Order, SetReport
from carpool.engine.core.stepper import Crew
from carpool.engine.foreign import text_of
from carpool.engine.logger import logger
from carpool.engine.observe.picture import PlaceInGraph, picture, places
from carpool.engine.observe.refusals import OUTCOMES, Refusals, outcome_of, reason_of
from carpool.engine.observe.snapshot import Durations, ServiceSnapshot, StageSnapshot, StreamStats, first_part_s
from carpool.engine.policy import Policy
from carpool.engine.policy.base import name_of
from carpool.engine.policy.length_cost import padded
from carpool.engine.request import Request
from carpool.engine.wire.handshake import Hello
from carpool.engine.worker.own_metrics import OF_NOW, Family, OwnSample
from carpool.errors import OVERLOAD_REASONS

_EXPLAIN_EVERY_S = 10.0  # how often a stage logs why its batches go

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
    """Is called at the start and the end of each batch of a stage."""

    def batch_started(self, stage: StageStats, batch: Batch) -> None:
        """Note that a worker has got to a batch."""

    def batch_completed(self, stage: StageStats, place: int) -> None:
        """Note that a worker has answered its batch."""


class StageStats:
    """Counters of one stage.

    Args:
        core: The core to which the stage belongs.
        index: The position of the stage in the core.
        roster: Of the stage's workers; None for a stage that has none.
        single: Whether its model takes single items. Then each item is a batch of its own in all
            counts and times, however many of them travel to the worker together.

    Attributes:
        crew: That of the stage, which keeps some counts itself.
        batch_sizes: How many calls of the model had each size.
        waited: How long requests waited at each place of a stage that stands at several places of
            its service; empty for others, as those have `queue_time`.
        in_graph: Where each place of its service's graph is; empty where stages stand in a row.
        reasons: How many batches were sent for each of `REASONS`.
        queue_time: From arrival in the stage to the start of the batch, per request.
        compute_time: The time that a worker spent on a batch, per batch.
        idle_gap: How long a worker waited between two batches although requests were waiting.
        split_batches: How many batches raised an error and were run again in parts.
        unsplit_batches: How many were not, because too many had been.
        out_of_memory: How many batches had a call that ran out of memory.
        elsewhere: By place, what workers that run somewhere else have said of themselves.
        sent_metrics: The metrics of the model's own that these have sent.
        protocol_errors: How many workers were ended because they sent something wrong.
        items: How many requests the batches of a stage with `allowed_batch_sizes` held.
        padding: How many items were added to these to reach an allowed size.
        positions: In a stage with `length`, how many positions (tokens, frames, ...) the model has
            computed, padding included.
        length_padding: How many of these were padding.
        watcher: Is called for each batch; None unless requests are logged or traced one by one.
    """

    def __init__(self, name: str, core: Core, index: int, roster: Roster | None, single: bool) -> None:
        self.name = name
        self.batch_sizes: dict[int, int] = {}
        self.reasons = dict.fromkeys(REASONS, 0)
        self.queue_time = Durations()
        self.compute_time = Durations()
        self.idle_gap = Durations()
        self.roster = roster
        self.crew = core.crews[index]
        self.items = self.padding = self.positions = self.length_padding = 0
        self.split_batches = self.unsplit_batches = self.out_of_memory = self.protocol_errors = 0
        self._single = single
        self._last_reason = ""
        self._explain_at = -inf
        self.elsewhere: dict[int, Hello] = {}
        self.sent_metrics = SentMetrics()
        nodes = self.crew.lobby.nodes
        self.waited = {node: Durations() for node in nodes} if len(nodes) > 1 else {}
        self.in_graph: Mapping[Node, PlaceInGraph] = {}
        self.watcher: BatchWatcher | None = None
        self._wanted: set[int] = set()  # places of workers that became free while requests waited

    def started(self, batch: Batch) -> None:
        n = len(batch.requests)
        size, calls = (1, n) if self._single else (n, 1)
        self.batch_sizes[size] = self.batch_sizes.get(size, 0) + calls
        sizes = self.crew.lobby.policy.allowed_batch_sizes
        if sizes is not None:
            self.items += n
            self.padding += padded_size(n, sizes) - n
        if batch.longest:
            self._count_positions(batch)
        if batch.reason != self._last_reason:
            self._log_reason(batch)
        self.reasons[batch.reason if batch.reason in self.reasons else "other"] += calls
        self.queue_time.add_since(batch.started, [request.arrived for request in batch.requests])
        if self.waited:
            self._count_places(batch.started, batch.requests)
        if self.watcher is not None:
            self.watcher.batch_started(self, batch)

    def completed(self, place: int, n: int, busy_s: float, waited_s: float) -> None:
        """Count a batch that is done, before the worker gets its next one, unless that went ahead.

        Args:
            place: The place of the worker.
            n: How many requests it answered.
            busy_s: How long the worker spent on the batch.
            waited_s: How long the worker had waited before it.
        """
        if self._single and n > 1:
            self.compute_time.add(busy_s / n, n)  # one time for all is measured: each gets its share
        else:
            self.compute_time.add(busy_s)
        if self.watcher is not None:
            self.watcher.batch_completed(self, place)
        if place in self._wanted:
            self.idle_gap.add(waited_s)
        if self.crew.queue or place in self.crew.in_flight:
            self._wanted.add(place)
        else:
            self._wanted.discard(place)

    def went_alone(self, place: int, busy_s: float, waited_s: float) -> None:
        """Count a batch of one request that found everything idle, and is done.

        A part of the fast path `lent_worker`: the same counts as those of `started` and `completed`
        (tests/engine/drive/test_lending.py), but for the reason, which is that of the last batch.
        """
        self.batch_sizes[1] = self.batch_sizes.get(1, 0) + 1
        sizes = self.crew.lobby.policy.allowed_batch_sizes
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
            if self.waited:
                self._count_places(now, requests)

    def stepped(self, rows: int, step_s: float) -> None:
        self.batch_sizes[rows] = self.batch_sizes.get(rows, 0) + 1
        self.compute_time.add(step_s)

    def troubled(self, trouble: Sequence[Trouble]) -> None:
        self.split_batches += any(each.split for each in trouble)
        self.unsplit_batches += any(each.unsplit for each in trouble)
        self.out_of_memory += any(each.out_of_memory for each in trouble)

    def _count_places(self, now: float, requests: Sequence[Request]) -> None:
        for request in requests:
            if (waited := self.waited.get(request.node)) is not None:  # else it has ended meanwhile
                waited.add(now - request.arrived)

    def waited_at(self, node: Node) -> Durations:
        return self.waited.get(node, self.queue_time)

    def _count_positions(self, batch: Batch) -> None:
        allowed = self.crew.lobby.policy.allowed_lengths
        longest = batch.longest if allowed is None else padded(batch.longest, allowed)
        positions = len(batch.requests) * longest
        self.positions += positions
        self.length_padding += positions - sum([min(request.length, longest) for request in batch.requests])

    @property
    def length_padding_share(self) -> float:
        return self.length_padding / self.positions if self.positions else 0.0

    @property
    def safe_batch_size(self) -> int | None:
        limit = self.crew.safe_size.limit
        return None if limit == inf else int(limit)

    def _log_reason(self, batch: Batch) -> None:
        self._last_reason = batch.reason
        if batch.started >= self._explain_at and logger.isEnabledFor(logging.DEBUG):
            self._explain_at = batch.started + _EXPLAIN_EVERY_S
            why = explained(self.crew.lobby.policy, batch.started, self.crew)
            logger.debug("stage %s: a batch of %d goes (%s); %s", self.name, batch.n, batch.reason, why)

    @property
    def mean_batch_size(self) -> float:
        calls = sum(self.batch_sizes.values())
        return sum(n * count for n, count in self.batch_sizes.items()) / calls if calls else 0.0

    @property
    def padding_share(self) -> float:
        return self.padding / (self.items + self.padding) if self.padding else 0.0

    @property
    def workers(self) -> dict[PlaceState, int]:
        states = dict.fromkeys(PlaceState, 0)
        for record in self.roster.places.values() if self.roster is not None else ():
            states[record.state] += 1
        return states

    def worker_name(self, place: int) -> str:
        record = None if self.roster is None else self.roster.places.get(place)
        return f"{self.name}/{place if record is None else record.index}"

    def gone(self, place: int) -> None:
        self._wanted.discard(place)

    @property
    def places(self) -> tuple[int, ...]:
        """How many requests have come to each place of the graph at which the stage stands."""
        return tuple(node.entered for node in self.crew.lobby.nodes if node is not None)

    def snapshot(self, now: float) -> StageSnapshot:
        return StageSnapshot(
            name=self.name,
            queued=len(self.crew.queue),
            running=self.crew.running,
            batches=sum(self.batch_sizes.values()),
            mean_batch_size=self.mean_batch_size,
            batch_sizes=dict(sorted(self.batch_sizes.items())),
            padding_share=self.padding_share,
            length_padding_share=self.length_padding_share,
            reasons=dict(self.reasons),
            mean_queue_s=self.queue_time.mean_s,
            mean_compute_s=self.compute_time.mean_s,
            mean_idle_gap_s=self.idle_gap.mean_s,
            workers={str(state): n for state, n in self.workers.items() if n},
            restarts=0 if self.roster is None else self.roster.restarts,
            late_results=self.crew.late_results,
            stray_replies=self.crew.stray_replies,
            protocol_errors=self.protocol_errors,
            split_batches=self.split_batches,
            unsplit_batches=self.unsplit_batches,
            out_of_memory=self.out_of_memory,
            safe_batch_size=self.safe_batch_size,
            policy=explained(self.crew.lobby.policy, now, self.crew),
            elsewhere={place: hello.whereabouts for place, hello in sorted(self.elsewhere.items())},
            early_answers=self.crew.lobby.early,
            places=self.places,
        )


def explained(policy: Policy, now: float, crew: Crew | None = None) -> dict[str, Any]:
    """Return what a policy says about its decisions, or the error that it raises when asked; `crew`
    adds what it has learned of its batches' way and of the coordinator's work.
    """
    try:
        why = dict(policy.explain(now))
    except BaseException as error:  # the policy may be the user's; a look at it must do no harm
        return {"policy": name_of(policy), "error": f"{type(error).__name__}: {text_of(error)}"}
    if "policy" in why:
        why.setdefault("hop_s", 0.0 if crew is None else crew.times.hop_s)
        view = None if crew is None else crew.lobby.view
        if view is not None and (view.request_work_s or view.batch_work_s):
            why.setdefault("request_work_s", view.request_work_s)
            why.setdefault("batch_work_s", view.batch_work_s)
    return why


_runs = itertools.count()


class Stats:
    """Counters of one service.

    Args:
        rosters: The roster of each stage; None for a stage that has none.
        singles: Whether the model of each stage takes single items.
        slo_s: The SLO, if there is one.
        part_slo_s: The SLO between the parts of an answer, if there is one.

    Attributes:
        streams: The counters of answers in parts; None where the last stage answers whole.
        outcomes: How many requests had each of `OUTCOMES`.
        overloads: How many requests ended as `overloaded` for each of `OVERLOAD_REASONS`.
        refusals: Sums up for the log what was refused or late.
        cancelled: How many requests were cancelled by their callers.
        within_slo: How many answers without an error came within the SLO; of those that are taken
            in parts, the first part.
        latency: From admission to the answer, for answers without an error.
        last_ok_at: When the last of these was given.
        run: A number of these counters, which begin at 0, of their own in this process.
        places: Where each place of a graph is; empty where stages stand in a row.
        picture: How a graph is drawn; None where stages stand in a row.
    """

    stage_stats = StageStats
    """The class of the counters of one stage."""

    def __init__(
        self,
        name: str,
        core: Core,
        rosters: Sequence[Roster | None],
        singles: Sequence[bool],
        slo_s: float | None = None,
        streams: StreamStats | None = None,
    ) -> None:
        self.name = name
        self.core = core
        self.slo_s = slo_s
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self.overloads = dict.fromkeys(OVERLOAD_REASONS, 0)
        self.refusals = Refusals()
        self.cancelled = 0
        self.within_slo = 0
        self.latency = Durations()
        self.last_ok_at = -inf
        self.run = next(_runs)
        self.stages = [
            self.stage_stats(stage.name, core, i, roster, single)
            for i, (stage, roster, single) in enumerate(zip(core.crews, rosters, singles, strict=True))
        ]
        self.streams = streams
        graph = None if core.flow.is_line else core.flow.graph
        self.places = {} if graph is None else places(graph)
        self.picture = None if graph is None else picture(graph)
        for stage in self.stages:
            stage.in_graph = self.places

    def answered(self, requests: Sequence[Request], now: float) -> None:
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
        for request in requests:
            error, stream = request.error, request.stream
            if error is None:
                streams.ended(now, request, "ok")
                if self.slo_s is not None:
                    self.within_slo += first_part_s(request, now) <= self.slo_s
            else:
                outcome = self._note_outcome(error)
                streams.ended(now, request, outcome)
                if stream is not None and stream.parts:
                    self.refusals.broke_off(error)
                else:
                    self.refusals.count(error)

    def refused(self, error: Exception) -> None:
        """Count a request that ended with `error`, or was not admitted because of it."""
        self._note_outcome(error)
        self.refusals.count(error)

    def _note_outcome(self, error: Exception) -> str:
        outcome = outcome_of(error)
        self.outcomes[outcome] += 1
        if outcome == "overloaded":
            self.overloads[reason_of(error)] += 1
        return outcome

    def ordered(self, orders: Sequence[Order], now: float) -> None:
        for order in orders:
            if order.join:
                self.stages[order.stage].joined(now, order.join)
        if self.streams is not None:
            self.refusals.went_on(self.streams.newly_resumed(orders))

    def handed_on(self, parts: Sequence[tuple[Request, object]]) -> None:
        if self.streams is not None:
            self.streams.handed_on(parts)

    def paused(self, now: float, request: Request, is_paused: bool) -> None:
        if self.streams is not None:
            self.streams.paused(now, request, is_paused)

    def reported(self, report: SetReport) -> None:
        """Count what a worker says after a step; its parts are counted by `StreamStats`."""
        if report.rows:
            self.stages[report.stage].stepped(report.rows, report.step_s)
        if self.streams is not None:
            self.streams.reported(report)

    def cancelled_by_caller(self, request: Request, now: float) -> None:
        self.cancelled += 1
        if self.streams is not None:
            self.streams.ended(now, request, "cancelled")

    def snapshot(self, now: float) -> ServiceSnapshot:
        """Return the numbers at `now`. Call this in the driver's thread."""
        total = sum(self.outcomes.values()) - self.outcomes["invalid_request"] - self.outcomes["invalid_item"]
        return ServiceSnapshot(
            name=self.name,
            outcomes={**self.outcomes, "cancelled": self.cancelled},
            overloads={reason: count for reason, count in self.overloads.items() if count},
            in_flight=self.core.unanswered,
            mean_latency_s=self.latency.mean_s,
            slo_attainment=None if self.slo_s is None or not total else self.within_slo / total,
            stages=tuple(stage.snapshot(now) for stage in self.stages),
            streams=None if self.streams is None else self.streams.snapshot(),
        )


MOST_TEXT = 4 * 2**20
"""How many characters of names, labels and texts are kept of workers that have gone."""

_PER_SERIES = 200  # what one costs besides its text
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")

_Key = tuple[str, str, frozenset[str]]
_Series = tuple[str, frozenset[tuple[str, str]]]


class Counted:
    """Sums of what workers have counted that have ended; `most_text` limits the characters of
    names, labels and texts.
    """

    def __init__(self, most_text: int = MOST_TEXT) -> None:
        self._left = most_text
        self._texts: dict[_Key, str] = {}  # by name, kind and bounds
        self._numbers: dict[_Key, dict[_Series, float]] = {}
        self._is_full = False

    def add(self, families: Iterable[Family]) -> None:
        """Add what a worker has counted; its gauges are void."""
        for family in families:
            if family.kind in OF_NOW or not family.samples:
                continue
            key = (family.name, family.kind, family.bounds)
            if key not in self._numbers:
                if not self._has_room(len(family.name) + len(family.text) + sum(map(len, family.bounds))):
                    continue
                self._texts[key], self._numbers[key] = family.text, {}
            numbers = self._numbers[key]
            for sample in family.samples:
                series = (sample.name, frozenset(sample.labels.items()))
                text = sum(len(label) + len(value) for label, value in sample.labels.items())
                if series in numbers or self._has_room(len(sample.name) + text):
                    numbers[series] = numbers.get(series, 0.0) + sample.value

    def families(self) -> list[Family]:
        return [
            Family(name, text, kind, [OwnSample(n, dict(labels), value) for (n, labels), value in numbers.items()])
            for ((name, kind, _), numbers), text in zip(self._numbers.items(), self._texts.values(), strict=True)
        ]

    def _has_room(self, text: int) -> bool:
        cost = _PER_SERIES + text
        if cost > self._left:
            if not self._is_full:
                self._is_full = True
                logger.warning("the models' own metrics have too many series: new ones of workers that end are lost")
            return False
        self._left -= cost
        return True


class SentMetrics:
    """The metrics that the workers of a stage have sent, by place; `past` has the counts of those
    that have gone.
    """

    def __init__(self) -> None:
        self.past = Counted()
        self._messages: dict[int, bytes] = {}

    def sent(self, place: int, message: bytes) -> None:
        self._messages[place] = message

    def ended(self, place: int) -> None:
        message = self._messages.pop(place, None)
        if message is not None:
            self.past.add(_read(message))

    def living(self) -> list[list[Family]]:
        return [_read(message) for message in self._messages.values()]


def _read(message: bytes) -> list[Family]:
    """Return the metrics of a message; those that could not stand on the page are left out."""
    try:
        families = msgspec.msgpack.decode(message, type=list[Family])
    except msgspec.DecodeError:
        return []
    return [each for each in families if _is_plain(each.name) and all(map(_has_plain_names, each.samples))]


def _has_plain_names(sample: OwnSample) -> bool:
    return _is_plain(sample.name) and all(map(_is_plain, sample.labels))


def _is_plain(name: str) -> bool:
    return _NAME.fullmatch(name) is not None
