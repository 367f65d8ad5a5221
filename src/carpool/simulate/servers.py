"""What serves the requests: stages with costs, batch limits and workers; and its capacity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from carpool.service.checks import at_least
from carpool.simulate.costs import USUAL_COST, Cost, cost_of


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
    """Stages in a row; every attribute has one entry for each of them.

    Attributes:
        costs: What batches cost.
        limits: The largest batch.
        workers: How many workers there are, at most if they come and go.
        ranges: How many there are at least, and at most.
    """

    costs: tuple[Cost, ...]
    limits: tuple[int, ...]
    workers: tuple[int, ...]
    ranges: tuple[WorkerRange, ...]

    @classmethod
    def of(cls, cost: Any, max_batch_size: Any, workers: Any) -> Servers:
        """Make stages from one value for all of them, or from lists with one value for each.

        There are as many stages as costs. Raises ValueError.
        """
        costs = tuple(cost_of(part) for part in (cost if isinstance(cost, list | tuple) else [cost]))
        limits = per_stage("max_batch_size", max_batch_size, len(costs))
        for limit in limits:
            at_least("max_batch_size", limit, 1)
        ranges = tuple(map(WorkerRange.of, per_stage("workers", workers, len(costs))))
        return cls(costs, limits, tuple(each.most for each in ranges), ranges)

    def capacity(self, mean_weight: float = 1.0, *, weights_known: bool = False) -> float:
        """Return the most requests per second that can be served for ever.

        This is workers · max n/t(n) of the slowest stage.

        Args:
            mean_weight: The mean weight of a request; a batch costs what the sum of its weights
                costs.
            weights_known: Whether batch limits count weights instead of requests.
        """
        unit = 1.0 if weights_known else mean_weight
        rates = [
            workers * max(n / cost(n * unit) for n in range(1, limit + 1))
            for cost, limit, workers in zip(self.costs, self.limits, self.workers, strict=True)
        ]
        return min(rates) / mean_weight * unit


def capacity(cost: Any = USUAL_COST, max_batch_size: Any = 64, workers: Any = 1) -> float:
    """Return the most requests per second that can be served for ever.

    This is workers · max n/t(n) for n up to `max_batch_size`. A list of costs stands for stages in
    a row, of which the slowest counts; the other arguments may then be lists too.
    """
    return Servers.of(cost, max_batch_size, workers).capacity()


def per_stage(name: str, value: Any, stages: int) -> tuple[Any, ...]:
    """Return one value for each stage; a single value counts for all of them. Raises ValueError."""
    if not isinstance(value, list | tuple):
        return (value,) * stages
    if len(value) != stages:
        raise ValueError(f"{name} has {len(value)} entries for {stages} stages: give one value, or one for each cost")
    return tuple(value)
