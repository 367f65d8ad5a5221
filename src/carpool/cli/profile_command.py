"""`carpool profile`: measures the costs of batches of each size, with the examples of the models.

Each stage runs alone, in one warm worker of the kind that it has in the service. A policy that only
notes how long batches took stands in the place of the stage's own, so the times are those of a
worker: decoding and encoding belong to them, and the way there and back does not.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from carpool.cli.sources import FAILED, fail, find_service
from carpool.engine.observe import log
from carpool.engine.policy import Greedy
from carpool.engine.policy.base import DoneBatch
from carpool.errors import CarpoolError
from carpool.service.graph import ForEach, Line, Parallel, Route
from carpool.service.overrides import changed
from carpool.service.service import Service
from carpool.service.stage import Stage
from carpool.simulate.costs import StageCosts, costs_as_json, write_costs

_COLUMNS = (TextColumn("measuring stage {task.description}"), BarColumn(), MofNCompleteColumn())


def profile(
    target: str,
    /,
    *,
    out: Path | None = None,
    runs: int = 9,
    threads: int = 1,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Measure what batches of each size cost, for `carpool plan` and `carpool simulate`.

    Each stage of the service runs alone, in one worker, with the examples of its model or with what
    the stage before makes of them. A batch of each size is run a few times once it is warm.

    Example: carpool profile program:service --out costs.json

    Parameters
    ----------
    target:
        The service, as module:attribute.
    out:
        The file to write, which `carpool plan --cost` and `carpool simulate --cost` read.
    runs:
        How many batches of each size are timed; the median counts.
    threads:
        How many threads BLAS and OpenMP have in the worker. One is what each worker has where there
        are as many workers as cores. OMP_NUM_THREADS, exported or in `env=` of the stage, counts
        more.
    as_json:
        Print JSON instead of the table.
    """
    log.set_up("text", logging.WARNING)
    service = find_service(target)
    if runs < 1 or threads < 1:
        fail("--runs and --threads must be at least 1")
    if out is not None and not out.absolute().parent.is_dir():
        fail(f"{out}: there is no folder {out.parent}")
    try:
        found = _measured(service, runs, threads)
        if out is not None:
            write_costs(out, service.name, found, is_line=service.is_line)
    except (ValueError, OSError) as error:
        fail(str(error))
    except CarpoolError as error:
        fail(str(error), FAILED)
    if as_json:
        print(costs_as_json(service.name, found, is_line=service.is_line).decode())
        return
    _print(found)
    if out is not None:
        what = "plan" if service.is_line else f"simulate --service {target}"
        print(f"carpool {what} --cost {out} --arrivals poisson:rate=800 --slo 60ms")


def _measured(service: Service, runs: int, threads: int) -> list[StageCosts]:
    console = Console(stderr=True)
    with Progress(*_COLUMNS, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(service.stages[0].name)
        return asyncio.run(
            profiled(
                service,
                runs=runs,
                threads=threads,
                progress=lambda stage, done, of: bar.update(task, description=stage, completed=done, total=of),
            )
        )


def _print(found: list[StageCosts]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("stage", "batch", "ms", "ms each", "items/s"):
        table.add_column(name, justify="left" if name == "stage" else "right", no_wrap=True)
    for costs in found:
        for size, seconds in costs.seconds.items():
            times = [f"{seconds * 1000:.3g}", f"{seconds * 1000 / size:.3g}", f"{size / seconds:,.0f}"]
            table.add_row(costs.stage, str(size), *times)
    Console(highlight=False).print(table)


_LEAST_RUNS = 3
_THREADS = "OMP_NUM_THREADS"

MeasuringProgress = Callable[[str, int, int], None]
"""Called with the name of a stage, how many of its batch sizes are done, and how many there are."""


class _Noting(Greedy):
    """Sends all that waits, and notes the number of requests and the seconds of each batch that
    went well.
    """

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[tuple[int, float]] = []

    def __deepcopy__(self, memo: object) -> _Noting:
        return self  # a stage copies its policy, and this one is to be read afterwards

    def learn(self, now: float, done: DoneBatch) -> None:
        if done.ok and not done.is_warm_up:
            self.batches.append((done.n, done.busy_s))


async def profiled(
    service: Service, *, runs: int = 9, most_s: float = 5.0, threads: int = 1, progress: MeasuringProgress | None = None
) -> list[StageCosts]:
    """Return the costs of the batches of each stage, first to last.

    Args:
        runs: How many batches of each size are timed; the median counts.
        most_s: The longest time for one size, once it has been timed three times.
        threads: How many threads BLAS and OpenMP have in the worker, where the stage's `env` or the
            environment does not say so.
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
    name: str | None
    value: Any


class _Profiler:
    """Has examples go through a graph, and measures each stage when they first come to it."""

    def __init__(
        self, last: object, runs: int, most_s: float, threads: int, progress: MeasuringProgress | None
    ) -> None:
        self._last = last
        self._runs = runs
        self._most_s = most_s
        self._threads = threads
        self._progress = progress
        self.costs: dict[str, StageCosts] = {}

    async def through(self, line: Line, items: dict[Any, Any]) -> dict[Any, Any]:
        """Return the results of a line for items; both by the identity of an item.

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
        """Return the results of a stage for items, and measure it unless it has been."""
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
    """Return a stage in this process that notes the branches of results."""

    def went(value: Any) -> Any:
        return _Went(name, value)

    return Stage(went, name=f"went {name}", run_in="thread")
