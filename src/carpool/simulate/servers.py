"""The stages of a simulated service: their costs, batch limits and workers; and their capacity.

Workers may come and go during a run, by a rule that looks once a second. A worker that is added
takes requests `start_s` seconds later; it counts from the moment when it is asked for, since it is
paid for from then on. All rules go up at once, and down when they have wanted fewer workers for a
while, as `core/scaler.py` has it; they differ in how many they want.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, cast

from carpool.engine.core.batch import Batch
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.scaler import EVERY_S, Scaler, Steady
from carpool.engine.drive.virtual import VirtualDriver
from carpool.service.checks import at_least
from carpool.simulate import specs
from carpool.simulate.costs import USUAL_COST, Cost, cost_of
from carpool.simulate.features import lengths_of, sample_of
from carpool.simulate.graphs import SimulatedGraph

USUAL_LIMIT, USUAL_WORKERS = 64, 1
_BATCHES = 100  # drawn to find out what a batch costs on average


@dataclass(frozen=True)
class WorkerRange:
    """How many workers a stage has.

    Attributes:
        least: The fewest, with which it begins.
        most: The most.
    """

    least: int
    most: int

    @classmethod
    def of(cls, workers: Any) -> WorkerRange:
        """Return the range of a number, or of a text such as "1-8". Raises ValueError."""
        if not isinstance(workers, str):
            return cls(*[at_least("workers", workers, 1)] * 2)
        least, dash, most = workers.partition("-")
        if not (least.strip().isdigit() and (most.strip().isdigit() or not dash)):
            raise ValueError(f"workers must be a number, or a range such as 1-8, not {workers!r}")
        found = cls(at_least("workers", int(least), 1), at_least("workers", int(most if dash else least), 1))
        if found.least > found.most:
            raise ValueError(f"workers={workers} has more workers at least than at most: write {most}-{least}")
        return found


@dataclass(frozen=True)
class Servers:
    """Stages, in a row or in a graph; every attribute has one entry for each of them.

    Attributes:
        workers: How many workers there are, at most if they come and go.
        ranges: How many there are at least, and at most.
        visits: How often a request comes to it, on average.
    """

    costs: tuple[Cost, ...]
    limits: tuple[int, ...]
    workers: tuple[int, ...]
    ranges: tuple[WorkerRange, ...]
    visits: tuple[float, ...]

    @classmethod
    def of(cls, cost: Any, max_batch_size: Any, workers: Any, graph: SimulatedGraph | None = None) -> Servers:
        """Make stages from one value for all of them, or from lists; an error is a ValueError."""
        if graph is not None:
            if (max_batch_size, workers) != (USUAL_LIMIT, USUAL_WORKERS):
                raise ValueError("max_batch_size and workers are those of the graph's stages: leave them out")
            cost, max_batch_size, workers = graph.costs(cost), graph.limits, graph.workers
        costs = tuple(cost_of(part) for part in (cost if isinstance(cost, list | tuple) else [cost]))
        limits = per_stage("max_batch_size", max_batch_size, len(costs))
        for limit in limits:
            at_least("max_batch_size", limit, 1)
        ranges = tuple(map(WorkerRange.of, per_stage("workers", workers, len(costs))))
        visits = (1.0,) * len(costs) if graph is None else graph.visits
        return cls(costs, limits, tuple(each.most for each in ranges), ranges, visits)

    def capacity(self, mean_weight: float = 1.0, *, weights_known: bool = False, lengths: Sequence[int] = ()) -> float:
        """Return the most requests per second that can be served for ever.

        This is workers · max n/t(n) of the slowest stage, and where requests have lengths that of
        batches whose requests are all of one length. No policy can serve more.

        Args:
            weights_known: Whether batch limits count weights instead of requests.
            lengths: The lengths of requests that are like those to be served; empty where they have
                none.
        """
        unit = 1.0 if weights_known else mean_weight
        rates = [
            workers / _least_seconds(cost, limit, unit, lengths) / visits
            for cost, limit, workers, visits in zip(self.costs, self.limits, self.workers, self.visits, strict=True)
            if visits
        ]
        return min(rates) / mean_weight * unit

    def plain_costs(self, lengths: Sequence[int]) -> tuple[Callable[[float], float], ...]:
        """Return for each stage the mean seconds of a batch of n in order of arrival.

        Args:
            lengths: The lengths of requests that are like those to be served; empty where they have
                none.
        """
        return tuple(_in_plain_order(cost, lengths) for cost in self.costs) if lengths else self.costs


def _least_seconds(cost: Cost, limit: int, unit: float, lengths: Sequence[int]) -> float:
    """Return the least seconds of a worker for each unit served, for the mean of the lengths."""
    counts = Counter(lengths) or {1: 1}
    total = sum(
        count * min(cost(n * unit, length) / n for n in range(1, limit + 1)) for length, count in counts.items()
    )
    return total / sum(counts.values())


def _in_plain_order(cost: Cost, lengths: Sequence[int]) -> Callable[[float], float]:
    """Return the mean seconds of a batch of n whose requests are drawn from the lengths."""
    dice = Random(0)

    @functools.cache
    def seconds(n: float) -> float:
        drawn = (max(dice.choices(lengths, k=max(1, round(n)))) for _ in range(_BATCHES))
        return sum(cost(n, longest) for longest in drawn) / _BATCHES

    return seconds


def capacity(cost: Any = USUAL_COST, max_batch_size: Any = 64, workers: Any = 1, lengths: Any = None) -> float:
    """Return the most requests per second that can be served for ever.

    This is workers · max n/t(n) for n up to `max_batch_size`. A list of costs stands for stages in
    a row, of which the slowest counts; the other arguments may then be lists too. Where requests
    have `lengths`, each batch is of one length, so that nothing is padded.
    """
    drawn = () if lengths is None else sample_of(lengths_of(lengths))
    return Servers.of(cost, max_batch_size, workers).capacity(lengths=drawn)


def per_stage(name: str, value: Any, stages: int) -> tuple[Any, ...]:
    """Return one value for each stage; a single value counts for all of them. Raises ValueError."""
    if not isinstance(value, list | tuple):
        return (value,) * stages
    if len(value) != stages:
        raise ValueError(f"{name} has {len(value)} entries for {stages} stages: give one value, or one for each cost")
    return tuple(value)


_BUSY_OVER = 10  # looks over which the share of time is taken in which workers are busy


@dataclass(frozen=True)
class Load:
    """As many as the load needs, by arrivals and the costs of batches: the rule of services."""


@dataclass(frozen=True)
class Ongoing:
    """One for each `target` requests that are inside: the rule of Ray Serve, with its default.

    Args:
        target: Requests that wait or run, for each worker.
    """

    target: float = 2.0


@dataclass(frozen=True)
class Busy:
    """As many as keep workers busy for this share of the time: the rule of most autoscalers.

    Args:
        share: The share of time in which a worker runs a batch.
    """

    share: float = 0.7


Rule = Load | Ongoing | Busy | Callable[[float], float]
"""A function returns how many workers there should be for so many requests a second."""

_RULES: dict[str, Callable[..., Rule]] = {"load": Load, "ongoing": Ongoing, "busy": Busy}
"""The names that a spec can have."""

USUAL_RULE = "load"


def rule_of(rule: Rule | str) -> Rule:
    """Return a rule, from itself or its spec. Raises ValueError."""
    return specs.build(rule, _RULES, "rule of scaling", "ongoing:2") if isinstance(rule, str) else rule


class StageScaling:
    """The workers of one stage in a run.

    At first it has the least.

    Attributes:
        worker_s: The sum over the workers of the seconds for which they were there or on their way.
        over_time: By the second, how many there were.
    """

    def __init__(
        self,
        driver: VirtualDriver,
        stage: int,
        workers: WorkerRange,
        rule: Rule,
        *,
        start_s: float,
        limit: int,
        slo_s: float,
    ) -> None:
        self.worker_s = 0.0
        self.over_time: dict[float, float] = {}
        self._driver = driver
        self._stage = stage
        self._rule = rule
        self._start_s = start_s
        self._batcher = cast(Batcher, driver.core.crews[stage])  # the workers of steps are not scaled
        self._places = list(range(workers.least))  # of those that are there or on their way, and are to stay
        self._leaving: set[int] = set()
        self._batcher.learn_costs()
        self._scaler = Scaler(workers.least, workers.most, limit, slo_s, self._batcher.cost_s)
        self._steady = Steady(workers.least, workers.most)
        self._busy_s = 0.0
        self._looks: deque[tuple[float, float]] = deque(maxlen=_BUSY_OVER)  # the seconds that workers had, and used
        self._counted_until = 0.0
        self._is_over = False

    def completed(self, batch: Batch, busy_s: float) -> None:
        """Count the time of a batch."""
        self._busy_s += busy_s

    def drained(self, place: int) -> None:
        """Note that a worker that was to go has gone."""
        self._account()
        self._leaving.discard(place)

    def look(self) -> None:
        """Add or take away workers, as the rule says."""
        now = self._driver.clock.now
        self._account()
        have = len(self._places)
        self.over_time[now] = have
        wanted = self._wanted(now, have)
        for _ in range(wanted - have):
            self._places.append(self._driver.add(self._stage, self._start_s))
        for _ in range(have - wanted):
            place = self._places.pop()
            self._leaving.add(place)
            self._driver.drain(self._stage, place)

    def end(self) -> None:
        """Account for the time since the last look, and for nothing after that."""
        self._account()
        self._is_over = True

    def _wanted(self, now: float, have: int) -> int:
        rule, batcher = self._rule, self._batcher
        offered = self._driver.core.offered(self._stage)
        if isinstance(rule, Load):
            wait_s = batcher.predicted_wait_s(now, batcher.queue.size)
            return self._scaler.wanted(now, offered, batcher.times.unit, wait_s, have)
        if callable(rule):
            self._scaler.count(now, offered)
            return self._steady.settled(now, math.ceil(rule(self._scaler.rate)), have)
        if isinstance(rule, Ongoing):
            return self._steady.settled(now, math.ceil((batcher.queue.count + batcher.running) / rule.target), have)
        self._looks.append((have * EVERY_S, self._busy_s))
        had_s = sum([seconds for seconds, _ in self._looks]) - self._looks[0][0]
        used_s = self._looks[-1][1] - self._looks[0][1]
        return self._steady.settled(now, math.ceil(have * used_s / had_s / rule.share) if had_s else have, have)

    def settle(self) -> None:
        """Count the seconds of workers from now on."""
        self._account()
        self.worker_s = 0.0

    def _account(self) -> None:
        """Count the seconds of all workers since something changed."""
        now = self._driver.clock.now
        if not self._is_over:
            self.worker_s += (len(self._places) + len(self._leaving)) * (now - self._counted_until)
        self._counted_until = now


class Scaling:
    """The workers of all stages in a run; where their number is fixed, they are only counted.

    Args:
        slo_s: The longest SLO of requests, in seconds.
        duration_s: How long requests arrive; worker-seconds are counted for that long, ...
        settle_s: ... but not so long at the beginning.
    """

    def __init__(
        self,
        driver: VirtualDriver,
        workers: Sequence[WorkerRange],
        rule: Rule,
        *,
        start_s: float,
        limits: Sequence[int],
        slo_s: float,
        duration_s: float,
        settle_s: float = 0.0,
    ) -> None:
        self._stages = {
            i: StageScaling(driver, i, each, rule, start_s=start_s, limit=limits[i], slo_s=slo_s)
            for i, each in enumerate(workers)
            if each.least < each.most
        }
        self._fixed_s = {
            i: each.least * (duration_s - settle_s) for i, each in enumerate(workers) if i not in self._stages
        }
        if not self._stages:
            return
        driver.completed = self._completed
        driver.drained = self._drained
        for stage in self._stages.values():
            for second in range(math.ceil(duration_s / EVERY_S)):
                driver.at(second * EVERY_S, stage.look)
            driver.at(settle_s, stage.settle)
            driver.at(duration_s, stage.end)

    @property
    def worker_s(self) -> tuple[float, ...]:
        """For each stage the sum over its workers of the seconds for which they were there."""
        known = {**self._fixed_s, **{i: stage.worker_s for i, stage in self._stages.items()}}
        return tuple(known[i] for i in sorted(known))

    @property
    def over_time(self) -> dict[float, float]:
        """By the second, how many workers there were in the first stage where they come and go."""
        return next((stage.over_time for stage in self._stages.values()), {})

    def _completed(self, batch: Batch, busy_s: float) -> None:
        if batch.stage in self._stages:
            self._stages[batch.stage].completed(batch, busy_s)

    def _drained(self, stage: int, place: int) -> None:
        self._stages[stage].drained(place)
