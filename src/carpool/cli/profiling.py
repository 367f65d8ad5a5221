"""Measures what batches of each size cost, with the examples of a service's own models.

Each stage runs alone, in one warm worker of the kind that it has in the service. A policy that only
notes what batches took stands in the place of the stage's own, so the times are those of a worker:
decoding and encoding belong to them, and the way there and back does not.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from statistics import median
from typing import Any

from carpool.engine.policy import Greedy
from carpool.engine.policy.base import DoneBatch
from carpool.service.overrides import changed
from carpool.service.service import Service
from carpool.service.stage import Stage
from carpool.simulate.cost_file import StageCosts

_LEAST_RUNS = 3
_THREADS = "OMP_NUM_THREADS"

Progress = Callable[[str, int, int], None]
"""Called with the name of a stage, how many of its batch sizes are done, and how many there are."""


class _Noting(Greedy):
    """Sends all that waits, and notes what each batch took.

    Attributes:
        batches: The number of requests and the seconds of each batch that went well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[int, float]] = []

    def __deepcopy__(self, memo: object) -> _Noting:
        return self  # a stage copies its policy, and this one is to be read afterwards

    def learn(self, now: float, done: DoneBatch) -> None:
        if done.ok and not done.is_warm_up:
            self.batches.append((done.n, done.busy_s))


async def profile(
    service: Service, *, runs: int = 9, most_s: float = 5.0, threads: int = 1, progress: Progress | None = None
) -> list[StageCosts]:
    """Return what the batches of each stage cost, first to last.

    Args:
        service: What is measured. The first stage gets its model's examples, and each later one
            what the stage before makes of them.
        runs: How many batches of each size are timed; the median counts.
        most_s: The longest time for one size, in seconds, once it has been timed three times.
        threads: How many threads BLAS and OpenMP have in the worker, where the stage's `env` or
            the environment does not say so.
        progress: Called before each size.

    Raises:
        ValueError: The service has branches, or a model has no examples or answers in parts.
        StartupError: A stage does not start.
        CarpoolError: A model raised an error.
    """
    if not service.is_line:
        raise ValueError(f"service {service.name} has branches, and only stages in a row can be profiled yet")
    items: Sequence[Any] = service.takes.examples
    if not items:
        name = service.stages[0].name
        raise ValueError(
            f"stage {name} has no examples to measure it with: write its model as a class with examples = (...)"
        )
    if any(stage.traits.in_parts for stage in service.stages):
        raise ValueError("a model that answers in parts has no cost of a batch: see carpool simulate --steps")
    found = []
    for stage in service.stages:
        costs, items = await _profile_stage(stage, items, runs, most_s, threads, progress)
        found.append(costs)
    return found


async def _profile_stage(
    stage: Stage, items: Sequence[Any], runs: int, most_s: float, threads: int, progress: Progress | None
) -> tuple[StageCosts, list[Any]]:
    """Return what batches of a stage cost, and what it makes of the items."""
    noting = _Noting()
    async with _alone(stage, noting, threads).run_async() as s:
        results = [await s.predict(item) for item in items]
        seconds: dict[int, float] = {}
        sizes = sizes_of(stage)
        for done, size in enumerate(sizes):
            if progress is not None:
                progress(stage.name, done, len(sizes))
            took = await _times_of(s.predict, noting, list(islice(cycle(items), size)), runs, most_s)
            if stage.max_batch_size is None:
                took = [s.stats().stages[0].mean_compute_s]
            if took:
                seconds[size] = median(took)
        if progress is not None:
            progress(stage.name, len(sizes), len(sizes))
    return StageCosts(stage.name, stage.max_batch_size or 1, seconds), results


async def _times_of(
    predict: Callable[[Any], Any], noting: _Noting, items: list[Any], runs: int, most_s: float
) -> list[float]:
    """Return the seconds of batches of all the items, after one that is not timed."""
    took: list[float] = []
    loop = asyncio.get_running_loop()
    began = loop.time()
    for run in range(runs + 1):
        noting.batches.clear()
        await asyncio.gather(*[predict(item) for item in items])
        if run:
            took += [busy_s for n, busy_s in noting.batches if n == len(items)]
        if run >= _LEAST_RUNS and loop.time() - began >= most_s:
            break
    return took


def sizes_of(stage: Stage) -> list[int]:
    """Return the batch sizes to measure: the allowed ones, or the powers of two and the largest."""
    most = stage.max_batch_size
    if most is None:
        return [1]
    if stage.allowed_batch_sizes:
        return [size for size in sorted(stage.allowed_batch_sizes) if size <= most]
    return sorted({*[2**k for k in range(most.bit_length()) if 2**k <= most], most})


def _alone(stage: Stage, noting: _Noting, threads: int) -> Service:
    """Return a service of one stage with one worker."""
    settings: dict[str, Any] = {"workers": 1, "cpus": stage.cpus[0] if stage.cpus else None}
    if stage.max_batch_size is not None:
        settings["policy"] = noting
    env = dict(stage.env[0]) if stage.env and stage.env[0] else {}
    if stage.run_in == "process" and _THREADS not in os.environ:
        env.setdefault(_THREADS, str(threads))
    settings["env"] = env or None
    (service,) = changed([Service(stage, timeout_s=None)], {}, {stage.name: settings})
    return service
