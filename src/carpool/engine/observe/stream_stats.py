"""What answers in parts have come to so far, in numbers. Drivers report to it.

A part costs a subtraction and a comparison, in one loop for all the parts that are handed on
together; all else is counted once for each step, or for each stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from carpool.engine.core.running_set import Order, SetReport
from carpool.engine.core.stepper import Stepper
from carpool.engine.observe.durations import Durations
from carpool.engine.observe.shown import counted, milliseconds
from carpool.engine.request import DONE, Request, Stream

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
    """Counters of the streams of one service, whose last stage answers in parts.

    A stream is an answer that its caller takes part by part. Times are those at which parts came
    from their workers. Between parts, the time for which a caller wanted none does not count.

    Args:
        stepper: The last stage.
        slo_s: How soon after its admission a stream should have its first part; None for no goal.
        part_slo_s: How far apart its parts should be; None for no goal.

    Attributes:
        stepper: The last stage, which keeps some counts itself.
        first_part: The time from admission to the first part, per stream.
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
        self._resumed = 0  # of these the log has been told

    def reported(self, report: SetReport) -> None:
        """Count the times of a report, whose parts are counted when they are handed on."""
        if report.rows:
            self.step.add(report.step_s)
        if report.length:
            self.start.add(report.start_s)

    def handed_on(self, parts: Sequence[tuple[Request, object]]) -> None:
        """Note when the parts came that are handed on now, at most one of each stream."""
        for request, _ in parts:
            stream = request.stream
            assert stream is not None
            came = stream.heard
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
        """Note that a caller wants no more parts for now, or wants them again."""
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
        """Count the end of a request, if it is a stream.

        Args:
            now: The time.
            request: The request.
            outcome: What became of it.
        """
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
        """How many units the running sets may come to hold."""
        return sum([running.size for running in self.stepper.sets.values()])

    @property
    def pausing(self) -> int:
        """How many streams of the running sets pause now, since their callers do not read."""
        sets = self.stepper.sets.values()
        return sum([request.stream is not None and request.stream.is_paused for each in sets for request in each])

    def snapshot(self) -> StreamSnapshot:
        """Return a copy of the numbers."""
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
