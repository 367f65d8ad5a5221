"""What a service has done so far, in numbers. Drivers report to it; the core knows nothing of it.

`observe/stage_stats.py` counts for each stage, `observe/stream_stats.py` answers in parts, and
`observe/snapshot.py` is the copy of all numbers that users get.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import inf

from carpool.engine.core.core import Core
from carpool.engine.core.roster import Roster
from carpool.engine.core.running_set import Order, SetReport
from carpool.engine.observe.durations import Durations
from carpool.engine.observe.outcomes import OUTCOMES, outcome_of, reason_of
from carpool.engine.observe.refusals import Refusals
from carpool.engine.observe.snapshot import ServiceSnapshot
from carpool.engine.observe.stage_stats import StageStats
from carpool.engine.observe.stream_stats import StreamStats, first_part_s
from carpool.engine.request import Request
from carpool.errors import OVERLOAD_REASONS

_runs = itertools.count()


class Stats:
    """Counters of one service.

    Args:
        name: The name of the service.
        core: The core with the requests to count.
        rosters: The roster of each stage; None for a stage that has none.
        singles: Whether the model of each stage takes single items.
        slo_s: The SLO in seconds, if there is one.
        part_slo_s: The SLO between the parts of an answer in seconds, if there is one.

    Attributes:
        name: The name of the service.
        core: The core with the requests to count.
        slo_s: The SLO in seconds, if there is one.
        streams: The counters of answers in parts; None where the last stage answers whole.
        outcomes: How many requests had each of `OUTCOMES`.
        overloads: How many requests ended as `overloaded` for each of `OVERLOAD_REASONS`.
        refusals: Sums up for the log what was refused or late.
        cancelled: How many requests were cancelled by their callers.
        within_slo: How many answers without an error came within the SLO; of those that are taken
            in parts, the first part.
        latency: The time from admission to the answer, for answers without an error.
        last_ok_at: When the last answer without an error was given.
        run: A number of these counters, which begin at 0, of their own in this process.
        stages: The counters of each stage.
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
            for i, (stage, roster, single) in enumerate(zip(core.batchers, rosters, singles, strict=True))
        ]
        self.streams = streams

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
        """Count a request by what became of it, and return that."""
        outcome = outcome_of(error)
        self.outcomes[outcome] += 1
        if outcome == "overloaded":
            self.overloads[reason_of(error)] += 1
        return outcome

    def ordered(self, orders: Sequence[Order], now: float) -> None:
        """Count the requests that join running sets by these orders."""
        for order in orders:
            if order.join:
                self.stages[order.stage].joined(now, order.join)
        if self.streams is not None:
            self.refusals.went_on(self.streams.newly_resumed(orders))

    def handed_on(self, parts: Sequence[tuple[Request, object]]) -> None:
        """Count parts that are handed on to their callers now."""
        if self.streams is not None:
            self.streams.handed_on(parts)

    def paused(self, now: float, request: Request, is_paused: bool) -> None:
        """Note that a caller wants no more parts for now, or wants them again."""
        if self.streams is not None:
            self.streams.paused(now, request, is_paused)

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
            overloads={reason: count for reason, count in self.overloads.items() if count},
            in_flight=self.core.unanswered,
            mean_latency_s=self.latency.mean_s,
            slo_attainment=None if self.slo_s is None or not total else self.within_slo / total,
            stages=tuple(stage.snapshot(now) for stage in self.stages),
            streams=None if self.streams is None else self.streams.snapshot(),
        )
