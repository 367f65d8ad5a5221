"""The numbers of a service and of its stages at one moment, as `stats()` returns and shows them.

`StreamStats` counts answers in parts. A part costs a subtraction and a comparison, in one loop for
all the parts that are handed on together; all else is counted once for each step or stream.
`Durations` costs a few integer operations for one duration, or for many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from carpool.engine.core.running_set import Order, SetReport
from carpool.engine.core.stepper import Stepper
from carpool.engine.observe.shown import Row, as_html, as_text, counted, milliseconds
from carpool.engine.request import DONE, Request, Stream


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
            In a stage with `length=` that is a count times a longest length.
        policy: Why the policy decides as it does, see `Policy.explain`.
        early_answers: How many answers its model has given early (`Done`).
        places: How many requests have come to each place of the service's graph at which the stage
            stands.
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
    early_answers: int = 0
    places: tuple[int, ...] = ()

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
        overloads: How many of those that were `overloaded` were refused for each reason, see
            `Overloaded`; a reason that there was not is left out.
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
    overloads: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join([self._summary(), as_text(_rows(self.stages)), *self._lines()])

    def _repr_html_(self) -> str:
        return as_html(self._summary(), _rows(self.stages), self._lines())

    def _lines(self) -> list[str]:
        return [*([] if self.streams is None else self.streams.lines), *_notes(self.stages)]

    def _summary(self) -> str:
        parts = [f"{self.outcomes['ok']:,} ok"]
        parts += [self._told(name, n) for name, n in self.outcomes.items() if n and name != "ok"]
        parts.append(f"{self.in_flight:,} in flight")
        parts.append(f"mean latency {milliseconds(self.mean_latency_s)} ms")
        if self.slo_attainment is not None:
            parts.append(f"{self.slo_attainment:.1%} within the SLO")
        return f"{self.name}: {', '.join(parts)}"

    def _told(self, outcome: str, count: int) -> str:
        text = f"{count:,} {outcome.replace('_', ' ')}"
        if outcome != "overloaded" or not self.overloads:
            return text
        return f"{text} ({', '.join(reason.replace('_', ' ') for reason in self.overloads)})"


_HEADINGS = ("stage", "queued", "running", "calls", "mean size", "queue ms", "compute ms", "workers")


def _rows(stages: Sequence[StageSnapshot]) -> list[Row]:
    rows: list[Row] = [_HEADINGS]
    for stage in stages:
        counts = [f"{n:,}" for n in (stage.queued, stage.running, stage.batches)]
        times = [milliseconds(seconds) for seconds in (stage.mean_queue_s, stage.mean_compute_s)]
        workers = ", ".join(f"{n} {state}" for state, n in stage.workers.items()) or "none"
        rows.append((stage.name, *counts, f"{stage.mean_batch_size:.1f}", *times, workers))
    return rows


def _notes(stages: Sequence[StageSnapshot]) -> list[str]:
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


ENDS = ("complete", "model_error", "expired", "worker_lost", "unavailable", "refused", "invalid", "cancelled")
"""How a stream can end: a closed set, fit to be a metric label. The last two are clients' doing."""

_END_OF = {
    "ok": "complete",
    "model_error": "model_error",
    "expired": "expired",
    "unavailable": "unavailable",
    "invalid_item": "invalid",
    "invalid_request": "invalid",
    "cancelled": "cancelled",
}


class StreamStats:
    """Counters of the streams of one service, whose last stage answers in parts; see
    `StreamSnapshot`.

    Times are those at which parts came from their workers.

    Args:
        stepper: The last stage, which keeps some counts itself.
        slo_s: How soon after its admission a stream should have its first part; None for no goal.
        part_slo_s: How far apart its parts should be; None for no goal.

    Attributes:
        first_part: From admission to the first part, per stream.
        part: The mean distance of the parts, per stream that has had two.
        longest_gap: The longest distance of two parts, per stream that has had two.
        step: The time of a step.
        start: The time of a call of `start` or `resume`.
        ends: How many streams had each of `ENDS`.
        good: How many were complete, and within both goals.
        broken: How many ended with an error after their first part.
        pauses: How often a caller did not want parts for a while.
        has_goals: Whether there is a goal, so that `good` means something.
    """

    def __init__(self, stepper: Stepper, slo_s: float | None, part_slo_s: float | None) -> None:
        self.stepper = stepper
        self.first_part = Durations()
        self.part = Durations()
        self.longest_gap = Durations()
        self.step = Durations()
        self.start = Durations()
        self.ends = dict.fromkeys(ENDS, 0)
        self.good = self.broken = self.pauses = 0
        self.has_goals = slo_s is not None or part_slo_s is not None
        self._slo_s = inf if slo_s is None else slo_s
        self._part_slo_s = inf if part_slo_s is None else part_slo_s
        self._resumed = 0  # of which the log has had a line

    def reported(self, report: SetReport) -> None:
        """Count the times of a report; its parts are counted when they are handed on."""
        if report.rows:
            self.step.add(report.step_s)
        if report.length:
            self.start.add(report.start_s)

    def handed_on(self, parts: Sequence[tuple[Request, object]]) -> None:
        """Note when these parts came, at most one of each stream."""
        for request, _ in parts:
            stream = request.stream
            assert stream is not None
            came = stream.part_at
            gap_s = came - stream.last_at
            stream.last_at = came
            if gap_s > stream.longest_gap_s:
                if gap_s < inf:
                    stream.longest_gap_s = gap_s
                else:  # it is the first part
                    stream.first_at = came
                    self.first_part.add(came - request.admitted)

    def newly_resumed(self, orders: Sequence[Order]) -> int:
        """Return how many streams go on from their parts by these orders, each once."""
        if self.stepper.resumed == self._resumed:
            return 0
        self._resumed = self.stepper.resumed
        return sum([bool(request.stream and request.stream.kept) for order in orders for request in order.join])

    def paused(self, now: float, request: Request, is_paused: bool) -> None:
        stream = request.stream
        if stream is None or request.state == DONE or is_paused == (stream.paused_at < inf):
            return
        if is_paused:
            self.pauses += 1
            stream.paused_at = now
            return
        if stream.first_at < inf:  # as if it had been made without the pause
            pause_s = now - max(stream.paused_at, stream.last_at)
            stream.first_at += pause_s
            stream.last_at += pause_s
        stream.paused_at = inf

    def ended(self, now: float, request: Request, outcome: str) -> None:
        """Count the end of a request, if it is a stream."""
        stream = request.stream
        if stream is None or stream.is_collected:
            return
        has_failed = request.error is not None
        if has_failed and stream.first_at < inf:
            self.broken += 1
            if stream.paused_at == inf:  # the silence before the failure is a gap, too
                stream.longest_gap_s = max(stream.longest_gap_s, now - stream.last_at)
        part_s = self._count_distances(stream)
        if outcome == "unavailable" and getattr(request.error, "code", "") == "worker_lost":
            end = "worker_lost"
        else:
            end = _END_OF.get(outcome, "refused")
        self.ends[end] += 1
        if end == "complete" and part_s <= self._part_slo_s:
            self.good += first_part_s(request, now) <= self._slo_s

    def _count_distances(self, stream: Stream) -> float:
        """Count how far apart the parts of a stream were that has ended, and return the mean."""
        if stream.parts < 2 or stream.first_at == inf:
            return 0.0
        part_s = (stream.last_at - stream.first_at) / (stream.parts - 1)
        self.part.add(part_s)
        self.longest_gap.add(stream.longest_gap_s)
        return part_s

    @property
    def size(self) -> int:
        return sum([running.size for running in self.stepper.sets.values()])

    @property
    def pausing(self) -> int:
        sets = self.stepper.sets.values()
        return sum([request.stream is not None and request.stream.is_paused for each in sets for request in each])

    def snapshot(self) -> StreamSnapshot:
        stepper = self.stepper
        ended = sum(self.ends.values()) - self.ends["invalid"] - self.ends["cancelled"]
        return StreamSnapshot(
            mean_first_part_s=self.first_part.mean_s,
            mean_part_s=self.part.mean_s,
            mean_longest_gap_s=self.longest_gap.mean_s,
            parts=stepper.parts,
            rows=stepper.running,
            size=self.size,
            steps=self.step.count,
            mean_step_s=self.step.mean_s,
            starts=self.start.count,
            mean_start_s=self.start.mean_s,
            resumed=stepper.resumed,
            paused=self.pausing,
            pauses=self.pauses,
            stray_parts=stepper.stray_parts,
            ends=dict(self.ends),
            broken=self.broken,
            goodput=self.good / ended if self.has_goals and ended else None,
        )


def first_part_s(request: Request, now: float) -> float:
    """Return the seconds from a request's admission to its first part, or to an answer without."""
    stream = request.stream
    if stream is None or stream.first_at == inf:
        return now - request.admitted
    return stream.first_at - request.admitted


@dataclass(frozen=True, slots=True)
class StreamSnapshot:
    """The numbers of a service's answers in parts at one moment. `print` shows the main ones.

    A stream is an answer that its caller takes part by part. Between parts, the time for which a
    caller wanted none does not count.

    Attributes:
        mean_first_part_s: The mean seconds from the admission of a stream to its first part.
        mean_part_s: The mean distance of parts in seconds: the mean of the means of the streams.
        mean_longest_gap_s: The longest distance of two parts in seconds, as a mean of the streams.
        parts: How many parts were handed on.
        rows: How many requests are in running sets now, collected ones included.
        size: How many units these may come to hold, see `Stage(size=...)`.
        steps: How many steps were made.
        mean_step_s: The mean seconds of a step.
        starts: How many steps had requests started or resumed before them.
        mean_start_s: The mean seconds of that.
        resumed: How often a stream went on from its parts after its worker had gone, or its memory.
        paused: How many streams pause now, since their callers do not read.
        pauses: How often a stream has paused.
        stray_parts: How many parts were dropped, since their caller had gone or their time was up.
        ends: How many streams had each of `ENDS`.
        broken: How many streams ended with an error after their first part.
        goodput: The share of the streams that were complete and within `slo_s` to the first part
            and `part_slo_s` between parts, where those are left out that were invalid or that
            their callers have left; None without goals.
    """

    mean_first_part_s: float
    mean_part_s: float
    mean_longest_gap_s: float
    parts: int
    rows: int
    size: int
    steps: int
    mean_step_s: float
    starts: int
    mean_start_s: float
    resumed: int
    paused: int
    pauses: int
    stray_parts: int
    ends: dict[str, int]
    broken: int
    goodput: float | None

    def __str__(self) -> str:
        return "\n".join(self.lines)

    @property
    def lines(self) -> list[str]:
        """The main numbers, in lines."""
        times = [
            f"first part {milliseconds(self.mean_first_part_s)} ms",
            f"parts {milliseconds(self.mean_part_s)} ms apart",
            f"longest gap {milliseconds(self.mean_longest_gap_s)} ms",
        ]
        if self.goodput is not None:
            times.append(f"{self.goodput:.1%} good")
        work = [
            counted(self.steps, "step"),
            f"{milliseconds(self.mean_step_s)} ms each",
            counted(self.starts, "start"),
            f"{milliseconds(self.mean_start_s)} ms each",
            counted(self.parts, "part"),
        ]
        ends = [f"{n:,} {end.replace('_', ' ')}" for end, n in self.ends.items() if n]
        events = [(self.broken, "broken"), (self.resumed, "resumed"), (self.paused, "paused now")]
        ends += [f"{n:,} {what}" for n, what in events if n]
        if self.stray_parts:
            ends.append(f"{counted(self.stray_parts, 'part')} came too late")
        told = {"streams": times, "work": work, "ends": ends}
        return [f"{what}: {', '.join(each)}" for what, each in told.items() if each]


_SMALLEST_S = 0.00025
_DURATION_BUCKETS = 17
DURATION_BOUNDS = tuple(_SMALLEST_S * 2**k for k in range(_DURATION_BUCKETS))
"""The upper bounds of the buckets of duration histograms: from 250 µs, doubling, to 16 s."""


class Durations:
    """A histogram of durations in doubling buckets."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (_DURATION_BUCKETS + 1)
        self.sum_s = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        # Bucket k holds (0.25 ms·2^(k-1), 0.25 ms·2^k]. Truncation puts a duration that is just on
        # a bound one bucket too high, which does not matter.
        k = int(seconds / _SMALLEST_S).bit_length()
        self.counts[k if k < _DURATION_BUCKETS else _DURATION_BUCKETS] += times
        self.sum_s += seconds * times

    def add_since(self, now: float, starts: Sequence[float]) -> None:
        before = starts[0]
        times = starts.count(before)
        if times == len(starts):  # as for requests that came in one turn of the loop
            self.add(now - before, times)
            return
        times = 0
        for start in starts:
            if start != before:  # mostly there are few different values
                self.add(now - before, times)
                before = start
                times = 0
            times += 1
        self.add(now - before, times)

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean_s(self) -> float:
        return self.sum_s / self.count if self.count else 0.0
