"""Simulated runs, spread over processes and remembered, so that none is made twice.

A run is known by its settings, its seed and the sources that it depends on: those of the simulator
and of the one policy. When a policy changes, its runs alone are made again; figures of different
sources never meet.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import importlib.util
import json
import math
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bench import CACHE
from bench.policies.optimal import Optimal, Optimum, optimal_mean_latency
from carpool.engine.core.batch import WarmUpBatch
from carpool.engine.policy import Policy
from carpool.simulate import capacity, run
from carpool.simulate.arrivals import Closed, Poisson, Scene, Trace, arrivals_of
from carpool.simulate.contestants import CONTESTANTS
from carpool.simulate.coordinator import coordinator_of
from carpool.simulate.costs import cost_of
from carpool.simulate.policies import SIMULATED, policy_of
from carpool.simulate.report import Report

SPECS = {
    "adaptive": "adaptive",
    "static": "static:10ms,max_queued_batches=10",
    "greedy": "greedy",
    "aimd": "aimd",
    "cork": "cork",
    "deadline": "deadline",
}
"""Who takes part: TensorFlow Serving's queue of ten batches for the static one, defaults for all
others. `deadline` is given the true cost, which no user has. The contestants of
`carpool.simulate.contestants` may be named besides."""

OPTIMAL = "optimal"
LAST_CALL = 200.0  # mean gaps after which the optimal policy believes that nobody comes any more
SKIP = ("carpool", "carpool.engine.policy", "carpool.simulate.contestants")  # these only collect others


@dataclass(frozen=True, slots=True)
class Case:
    """One run: who serves what.

    Attributes:
        policy: One of `SPECS`, any other spec, or one of these with ` warm` or ` known` behind it:
            after a warm-up as a service has it, or after having seen every batch size ten times. Or
            `optimal`, which has the least mean latency for Poisson arrivals.
        settings: What `carpool.simulate.run` takes, as JSON has it.
        seed: Of all chance.
    """

    policy: str
    settings: dict[str, Any]
    seed: int

    @property
    def key(self) -> str:
        spec = spec_of(self.policy.partition(" ")[0])
        module = Optimal.__module__ if spec == OPTIMAL else SIMULATED[spec.partition(":")[0]].__module__
        content = json.dumps([self.policy, spec, self.settings, self.seed, sources(module)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:24]

    @property
    def work(self) -> float:
        """About how many requests there will be."""
        return _requests(json.dumps(self.settings))


@dataclass(frozen=True, slots=True)
class Row:
    """What one run was worth, as `carpool.simulate.Report` has it; NaN where it has nothing."""

    policy: str
    load: float | None
    goodput: float
    attainment: float
    mean_s: float
    p99_s: float
    penalised_mean_s: float
    mean_batch_size: float
    worker_s_per_good: float
    fairness: float | None
    batch_sizes: dict[int, int]
    coordinator_utilisation: float | None = None
    length_p99_s: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, policy: str, figures: dict[str, Any]) -> Row:
        """A row of remembered figures."""
        numbers = (
            "goodput",
            "attainment",
            "mean_s",
            "p99_s",
            "penalised_mean_s",
            "mean_batch_size",
            "worker_s_per_good",
        )
        known = {name: math.nan if figures[name] is None else figures[name] for name in numbers}
        sizes = {int(n): count for n, count in figures["batch_sizes"].items()}
        plain = {name: figures[name] for name in ("load", "fairness", "coordinator_utilisation")}
        return cls(policy=policy, batch_sizes=sizes, **plain, **known)


class Runs:
    """Makes runs, or remembers them.

    Args:
        path: Of the file of remembered runs, one JSON object a line; it is made if need be and may
            go at any time.
        jobs: How many processes work.
    """

    def __init__(self, path: Path, jobs: int) -> None:
        self._path = path
        self._jobs = jobs
        self._known = {row["key"]: row["figures"] for row in _read(path)}

    def rows(self, cases: Sequence[Case], title: str) -> list[Row]:
        """The rows of the cases, in their order; a bar tells how far it is."""
        missing = {case.key: case for case in cases if case.key not in self._known}
        if missing:
            _must_be_unchanged()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file, bar("runs") as progress:
                task = progress.add_task(title, total=sum(case.work for case in missing.values()), runs=len(missing))
                for case, figures in _simulated(list(missing.values()), self._jobs):
                    self._known[case.key] = figures
                    file.write(json.dumps({"key": case.key, "policy": case.policy, "figures": figures}) + "\n")
                    file.flush()
                    progress.advance(task, case.work)
        return [Row.of(case.policy, self._known[case.key]) for case in cases]


def spec_of(name: str) -> str:
    """The spec of a policy that takes part."""
    return SPECS.get(name, name)


def add_running(parser: argparse.ArgumentParser) -> None:
    """The options of every program that simulates policies."""
    parser.add_argument("--policies", default=",".join(SPECS), help="separated by commas; default: %(default)s")
    add_jobs(parser)
    what = "where runs are remembered; default: %(default)s"
    parser.add_argument("--cache", type=Path, default=CACHE / "policies.jsonl", metavar="FILE", help=what)


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """The option of every program that works in several processes."""
    jobs = len(os.sched_getaffinity(0))
    what = "how many processes work; default: %(default)s"
    parser.add_argument("--jobs", type=int, default=jobs, metavar="N", help=what)


def chosen(names: str) -> list[str]:
    """The policies of a list that exist; others are told of and left out.

    `contestants` stands for all of `carpool.simulate.contestants`.
    """
    policies = list(dict.fromkeys(chain.from_iterable(_named(name) for name in names.split(","))))
    for name in unknown(policies):
        print(f"there is no policy {name}: left out", file=sys.stderr)
    return [name for name in policies if name not in unknown(policies)]


def _named(name: str) -> list[str]:
    return list(CONTESTANTS) if name == "contestants" else [name]


def unknown(names: Iterable[str]) -> list[str]:
    """Those that are no policies, or not yet."""
    return [name for name in names if spec_of(name).partition(":")[0] not in SIMULATED]


def simulate(case: Case) -> dict[str, Any]:
    """Run one case; its figures as JSON has them."""
    return report(case.policy, case.settings, case.seed).to_dict()


def report(policy: str, settings: dict[str, Any], seed: int) -> Report:
    """Run one policy, trained beforehand if its name says so."""
    name, _, training = policy.partition(" ")
    who: str | Policy = spec_of(name)
    if who == OPTIMAL:
        who = optimal(settings)
    elif training:
        who = trained(spec_of(name), training, settings)
    return run(who, **{**settings, "seed": seed})


def optimal(settings: dict[str, Any]) -> Policy:
    """The policy of the least mean latency for settings with Poisson arrivals and one worker."""
    last_call_s = LAST_CALL / poisson_rate(settings)
    return Optimal(optimum(settings).batch_sizes, settings["max_batch_size"], last_call_s)


def optimum(settings: dict[str, Any]) -> Optimum:
    """What is best for settings with Poisson arrivals and one worker."""
    return optimal_mean_latency(cost_of(settings["cost"]), poisson_rate(settings), settings["max_batch_size"])


def poisson_rate(settings: dict[str, Any]) -> float:
    """Requests per second."""
    (process,) = arrivals_of(settings["arrivals"])
    if not isinstance(process, Poisson) or settings.get("workers", 1) != 1:
        raise ValueError(f"the optimum is known for Poisson arrivals and one worker only, not for {settings}")
    return process.mean_rate(Scene(settings["duration_s"], capacity(settings["cost"], settings["max_batch_size"])))


def trained(spec: str, training: str, settings: dict[str, Any]) -> Policy:
    """A policy that has seen some batches, at the mean of their cost."""
    cost, limit = cost_of(settings["cost"]), settings["max_batch_size"]
    policy = policy_of(spec, max_batch_size=limit, slo_s=settings["slo_s"], cost_s=cost)
    sizes = [1, limit // 4, limit // 2, limit] * 2 if training == "warm" else [*range(1, limit + 1)] * 10
    for n in filter(None, sizes):
        policy.learn(0.0, WarmUpBatch(0.0, 0, n, n, 0, cost(n)))
    return policy


@functools.cache
def sources(policy_module: str) -> str:
    """A hash of our modules that a run of this policy needs, as they were when first asked."""
    return _fingerprint(policy_module)


def _must_be_unchanged() -> None:
    """What we have in memory, or hand to a new process, must be what the runs are remembered by."""
    for module in {policy.__module__ for policy in SIMULATED.values()}:
        if sources(module) != _fingerprint(module):
            raise SystemExit("the sources have changed meanwhile: start again; what has not changed is remembered")


def _fingerprint(policy_module: str) -> str:
    found, left = set(), ["carpool.simulate.engine", policy_module]
    while left:
        name = left.pop()
        if name not in found and name not in SKIP:
            found.add(name)
            left += _imports(name)
    text = "".join(name + _code(_source(name)) for name in sorted(found))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _code(source: str) -> str:
    """What is left of a module without comments and docstrings, which change no figure."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return ast.dump(tree)


def _imports(module: str) -> Iterator[str]:
    """The modules of ours that a module imports."""
    return iter([name for name in _imported(_source(module)) if _source(name)])


@functools.cache
def _imported(source: str) -> Sequence[str]:
    """All names of ours that a text imports, modules or not."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found += [name for name in names if name.startswith("carpool.")]
    return found


def _source(module: str) -> str:
    """The text of a module; nothing if the name is none."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return ""
    return Path(spec.origin).read_text() if spec is not None and spec.origin else ""


@functools.cache
def _requests(settings: str) -> float:
    given = json.loads(settings)
    if not isinstance(given["arrivals"], str):
        return len(given["arrivals"])
    most = capacity(given["cost"], given["max_batch_size"], given.get("workers", 1))
    busy = coordinator_of(given.get("coordinator"))
    if busy is not None and busy.request_s:
        most = min(most, 1.0 / busy.request_s)
    total = 0.0
    for process in arrivals_of(given["arrivals"]):
        if isinstance(process, Trace):
            total += len(list(process.times(None, Scene(math.inf, most))))  # type: ignore[arg-type]
        elif isinstance(process, Closed):
            total += most * given["duration_s"] / 2
        else:
            total += process.mean_rate(Scene(given["duration_s"], most)) * given["duration_s"]
    return total


def _simulated(cases: Sequence[Case], jobs: int) -> Iterator[tuple[Case, dict[str, Any]]]:
    """The cases with their figures, as they come."""
    if jobs == 1 or len(cases) == 1:
        yield from map(_with_figures, cases)
        return
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(cases)), initializer=prepare) as pool:
        yield from pool.imap_unordered(_with_figures, cases)


def _with_figures(case: Case) -> tuple[Case, dict[str, Any]]:
    return case, simulate(case)


def prepare() -> None:
    """In each process: Ctrl-C is for the one that started us, and so is the machine's attention."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """What was remembered; a line that an interruption has cut off is none."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def bar(what: str) -> Progress:
    """A bar on a terminal, which shows how many of `what` are done; prints go on as without it."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn(f"{{task.percentage:3.0f}} % of {{task.fields[runs]}} {what}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        redirect_stdout=sys.stdout.isatty(),
    )
