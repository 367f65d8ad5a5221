"""What others do where requests join and leave at every step: rules to set beside carpool's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from random import Random
from typing import Any

from carpool.engine.clock import VirtualClock
from carpool.engine.policy import SetView, StepPolicy
from carpool.engine.policy.steps import Stepped
from carpool.engine.request import Request
from carpool.simulate.steps import Reading, StepCost, StepReport, report_on, run_steps, traffic_of


class Counters(StepPolicy):
    """The rule of Hugging Face's text-generation-inference, with its defaults.

    Those that wait join if they are 0.3 times as many as those that run, or if 20 steps have been
    made since any joined; 4096 units of input at once at most.
    Source: `router/src/infer/v3`, `--waiting-served-ratio`, `--max-waiting-tokens` and
    `--max-batch-prefill-tokens`.
    """

    served_ratio = 0.3
    most_steps = 20
    most_units = 4096

    def __init__(self, rows: int | None = None, part_slo_s: float | None = None) -> None:
        super().__init__(rows, part_slo_s)
        self._steps = 0

    def learn(self, now: float, done: Stepped) -> None:  # type: ignore[override]
        super().learn(now, done)
        if done.length:
            self._steps = 0
        if done.rows:
            self._steps += 1

    def join(self, now: float, heads: Sequence[Request], running: SetView) -> int:
        if self._steps < self.most_steps and len(heads) < ceil(self.served_ratio * len(running)):
            return 0
        joined = units = 0
        for request in heads:
            units += request.stream.length if request.stream else 1
            if joined and units > self.most_units:
                break
            joined += 1
        return joined


@dataclass(frozen=True)
class Padded(StepCost):
    """The cost of static batches: a step costs as many rows as the batch had at first."""

    def seconds(self, dice: Random) -> tuple[Callable[[int], float], Callable[[int], float]]:
        start_s, step_s = super().seconds(dice)
        rows = 0

        def start(length: int) -> float:
            nonlocal rows
            rows = 0  # only an empty set is joined
            return start_s(length)

        def step(n: int) -> float:
            nonlocal rows
            rows = max(rows, n)
            return step_s(rows)

        return start, step


def static(**settings: Any) -> StepReport:
    """Static batches: a set that runs is joined by nobody, and padded to its first size."""
    return run_steps("static", **{**settings, "cost": Padded(**asdict(settings["cost"]))})


@dataclass(slots=True, eq=False)
class _Chunked:
    """One request, and how much of its input is still to be read."""

    reading: Reading
    left: int
    length: int


def chunked(
    chunk: int,
    *,
    arrivals: Any,
    cost: StepCost,
    lengths: Any,
    slo_s: float,
    part_slo_s: float,
    rows: int,
    duration_s: float,
    seed: int,
    most_requests: int | None = None,
) -> StepReport:
    """Inputs in chunks, as in Sarathi-Serve and vLLM: a step reads `chunk` units at most in all.

    Each stream that runs is one of them; the others are inputs, first come, first served. A step
    of n streams and u units of input takes c + d·n + b·u, so that a start has no cost of its own,
    which is kinder to this rule than to the others. A request is refused once its input cannot be
    read in time any more, as chunks read it.
    """
    traffic = deque(traffic_of(arrivals, lengths, cost, rows, 1, duration_s, seed, most_requests))
    clock = VirtualClock()
    waiting: deque[_Chunked] = deque()
    reading: deque[_Chunked] = deque()
    running: list[_Chunked] = []
    readings: list[Reading] = []
    steps = stepped = 0
    while True:
        while traffic and traffic[0][0] <= clock.now:
            when, length = traffic.popleft()
            readings.append(Reading(clock, when, length.output))
            waiting.append(_Chunked(readings[-1], length.input, length.input))
        step_s = cost.c_s + cost.d_s * len(running)
        for each in list(waiting):
            read_s = ceil(each.length / chunk) * step_s + cost.b_s * each.length
            if clock.now + read_s > each.reading.arrived + slo_s:
                each.reading.is_refused = True
                waiting.remove(each)
        units, read = max(1, chunk - len(running)), 0
        while units and (reading or waiting):
            if not reading:
                if len(running) + len(reading) >= rows:
                    break
                reading.append(waiting.popleft())
            piece = min(units, reading[0].left)
            reading[0].left -= piece
            units, read = units - piece, read + piece
            if reading[0].left:
                break
            running.append(reading.popleft())
        n = sum(1 for each in running if each.reading.times)
        if not running and not reading:
            if not traffic:
                break
            clock.advance_to(traffic[0][0])
            continue
        clock.advance_to(clock.now + cost.c_s + cost.d_s * n + cost.b_s * read)
        steps, stepped = steps + 1, stepped + len(running)
        for each in running:
            each.reading.times.append(clock.now)
        running = [each for each in running if len(each.reading.times) < each.reading.output]
    return report_on(f"chunks of {chunk}", readings, slo_s, part_slo_s, stepped / max(1, steps))
