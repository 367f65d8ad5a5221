"""What serves the requests: stages with costs, batch limits and workers; and its capacity."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from carpool.service.checks import at_least
from carpool.simulate.costs import USUAL_COST, Cost, cost_of
from carpool.simulate.graphs import SimulatedGraph
from carpool.simulate.lengths import lengths_of, sample_of

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
        costs: What batches cost.
        limits: The largest batch.
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
        """Make stages from one value for all of them, or from lists with one value for each.

        There are as many stages as costs, and those of a graph have its limits and workers. Raises
        ValueError.
        """
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
            mean_weight: The mean weight of a request; a batch costs what the sum of its weights
                costs.
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
