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
from typing import Any, NamedTuple

from carpool.engine.policy import Greedy
from carpool.engine.policy.base import DoneBatch
from carpool.service.graph import ForEach, Line, Parallel, Route
from carpool.service.overrides import changed
from carpool.service.service import Service
from carpool.service.stage import Stage
from carpool.simulate.costs import StageCosts

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
            what comes to it of them.
        runs: How many batches of each size are timed; the median counts.
        most_s: The longest time for one size, in seconds, once it has been timed three times.
        threads: How many threads BLAS and OpenMP have in the worker, where the stage's `env` or
            the environment does not say so.
        progress: Called before each size.

    Raises:
        ValueError: A model has no examples or answers in parts, or none comes to some stage.
        StartupError: A stage does not start.
        CarpoolError: A model raised an error.
    """
    items: Sequence[Any] = service.takes.examples
    if not items:
        name = service.stages[0].name if service.first is None else service.first.name
        raise ValueError(
            f"stage {name} has no examples to measure it with: write its model as a class with examples = (...)"
        )
    if any(stage.traits.in_parts for stage in service.stages):
        raise ValueError("a model that answers in parts has no cost of a batch: see carpool simulate --steps")
    profiler = _Profiler(service.graph[-1], runs, most_s, threads, progress)
    await profiler.through(service.graph, dict(enumerate(items)))
    for stage in service.stages:
        if stage.name not in profiler.costs:
            raise ValueError(f"no example comes to stage {stage.name}: give the first model one that takes its branch")
    return [profiler.costs[stage.name] for stage in service.stages]


class _Went(NamedTuple):
    """A result that goes on, by a branch if it has named one."""

    name: str | None
    value: Any


class _Profiler:
    """Has examples go through a graph, stage by stage, and measures each stage when they first come
    to it.

    Attributes:
        costs: What the batches of each stage cost, by its name.
    """

    def __init__(self, last: object, runs: int, most_s: float, threads: int, progress: Progress | None) -> None:
        self._last = last
        self._runs = runs
        self._most_s = most_s
        self._threads = threads
        self._progress = progress
        self.costs: dict[str, StageCosts] = {}

    async def through(self, line: Line, items: dict[Any, Any]) -> dict[Any, Any]:
        """Return what a line makes of items; both by what identifies an item.

        Items that are answered early (`Done`) are not in it.
        """
        went = {key: _Went(None, value) for key, value in items.items()}
        for i, element in enumerate(line):
            if not went:
                break
            if isinstance(element, Stage):
                follows = line[i + 1] if i + 1 < len(line) else None
                names = [*follows.branches] if isinstance(follows, Route) and follows.choose is None else []
                went = await self._stage(element, went, names, is_alone=element is self._last and follows is None)
            elif isinstance(element, Route):
                went = await self._route(element, went)
            else:
                values = {key: each.value for key, each in went.items()}
                if isinstance(element, ForEach):
                    joined = await self._list(element, values)
                else:
                    joined = await self._parallel(element, values)
                went = {key: _Went(None, value) for key, value in joined.items()}
        return {key: each.value for key, each in went.items()}

    async def _route(self, route: Route, went: dict[Any, _Went]) -> dict[Any, _Went]:
        found: dict[Any, _Went] = {}
        for name, branch in route.branches.items():
            taken = {
                key: each.value
                for key, each in went.items()
                if name == (each.name if route.choose is None else route.choose(each.value))
            }
            found |= {key: _Went(None, value) for key, value in (await self.through(branch, taken)).items()}
        return found

    async def _parallel(self, parallel: Parallel, items: dict[Any, Any]) -> dict[Any, Any]:
        results = [await self.through(branch, items) for branch in parallel.branches]
        whole = [key for key in items if all(key in found for found in results)]
        joined = {key: tuple(found[key] for found in results) for key in whole}
        if parallel.names is None:
            return joined
        return {key: dict(zip(parallel.names, values, strict=True)) for key, values in joined.items()}

    async def _list(self, each: ForEach, items: dict[Any, Any]) -> dict[Any, Any]:
        inside = {(key, i): x for key, value in items.items() for i, x in enumerate(value)}
        found = await self.through(each.body, inside)
        keys = {key: [(key, i) for i in range(len(value))] for key, value in items.items()}
        return {key: [found[one] for one in own] for key, own in keys.items() if all(one in found for one in own)}

    async def _stage(
        self, stage: Stage, went: dict[Any, _Went], names: Sequence[str], *, is_alone: bool
    ) -> dict[Any, _Went]:
        """Return what a stage makes of items, and measure it unless it has been."""
        noting = _Noting()
        items = [each.value for each in went.values()]
        async with _alone(stage, noting, self._threads, None if is_alone else names).run_async() as s:
            results = [await s.predict(item) for item in items]
            if stage.name not in self.costs:
                self.costs[stage.name] = await self._measured(stage, s, noting, items)
        if is_alone:
            return {key: _Went(None, result) for key, result in zip(went, results, strict=True)}
        return {key: result for key, result in zip(went, results, strict=True) if isinstance(result, _Went)}

    async def _measured(self, stage: Stage, s: Any, noting: _Noting, items: list[Any]) -> StageCosts:
        """Return what batches of a stage that runs alone cost."""
        seconds: dict[int, float] = {}
        sizes = sizes_of(stage)
        for done, size in enumerate(sizes):
            if self._progress is not None:
                self._progress(stage.name, done, len(sizes))
            took = await _times_of(s.predict, noting, list(islice(cycle(items), size)), self._runs, self._most_s)
            if stage.max_batch_size is None:
                took = [s.stats().stages[0].mean_compute_s]
            if took:
                seconds[size] = median(took)
        if self._progress is not None:
            self._progress(stage.name, len(sizes), len(sizes))
        return StageCosts(stage.name, stage.max_batch_size or 1, seconds)


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


def _alone(stage: Stage, noting: _Noting, threads: int, names: Sequence[str] | None) -> Service:
    """Return a service of one stage with one worker.

    Args:
        stage: The stage.
        noting: Its policy.
        threads: As for `profile`.
        names: Of the branches that its results may name; None if nothing follows, else results that
            go on are `_Went`, and early answers are not.
    """
    settings: dict[str, Any] = {"workers": 1, "cpus": stage.cpus[0] if stage.cpus else None}
    if stage.max_batch_size is not None:
        settings["policy"] = noting
    env = dict(stage.env[0]) if stage.env and stage.env[0] else {}
    if stage.run_in == "process" and _THREADS not in os.environ:
        env.setdefault(_THREADS, str(threads))
    settings["env"] = env or None
    follows: list[Any] = []
    if names is not None:
        follows = [_noted(None)]
        if names:
            follows = [Route({name: _noted(name) for name in names})]
    (service,) = changed([Service(stage, *follows, timeout_s=None)], {}, {stage.name: settings})
    return service


def _noted(name: str | None) -> Stage:
    """Return a stage in this process that notes which branch results have taken."""

    def went(value: Any) -> Any:
        return _Went(name, value)

    return Stage(went, name=f"went {name}", run_in="thread")
