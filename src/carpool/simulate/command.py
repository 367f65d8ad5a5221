"""The command `carpool simulate`: compare policies on a workload, in a table, a picture or JSON."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from carpool.engine.policy import STEPS_BY_NAME
from carpool.simulate import specs
from carpool.simulate.arrivals import USUAL_ARRIVALS, Arrivals, arrivals_of
from carpool.simulate.compare import LOADS, compare, sweep
from carpool.simulate.coordinator import coordinator_of
from carpool.simulate.cost_file import given_costs
from carpool.simulate.costs import USUAL_COST
from carpool.simulate.features import Features
from carpool.simulate.lengths import EXAMPLE as LENGTHS
from carpool.simulate.options import Options
from carpool.simulate.policies import policy_of
from carpool.simulate.replay import Trace
from carpool.simulate.report import Report, json_text
from carpool.simulate.scaling import USUAL_RULE, rule_of
from carpool.simulate.servers import Servers, WorkerRange
from carpool.simulate.steps import EXAMPLE as STEP_COST
from carpool.simulate.steps_table import compare_steps, print_steps
from carpool.simulate.table import table_of
from carpool.simulate.traffic import Traffic, arrivals_per_second

T = TypeVar("T")

_POLICIES = "adaptive,greedy,static:10ms,aimd,cork,deadline"
_USAGE_ERROR = 2
_DURATION = "30s"
_FILE_WIDTH = 160  # columns of output that does not go to a terminal
_LIMITS = ("max_queue_size", "max_padded_size", "max_workers_per_key")  # options without which there is no limit


def simulate(*, options: Annotated[Options | None, Parameter(name="*")] = None) -> None:
    """Compare batching policies on a workload in virtual time, without running a service.

    The policies are those of a service, and decide as they do there. Each one meets the same
    requests. * marks the best figure of a column. A latency can only be the best where goodput is
    within 1 % of the best one, since a policy that drops requests has short latencies.

    Example: carpool simulate --arrivals poisson:rate=800 --cost affine:a=8ms,b=0.25ms --slo 60ms

    Example: carpool simulate --policy adaptive,cork --arrivals closed:16,think=1ms+poisson:rho=0.3

    Example: carpool simulate --cost table:1=8ms,64=24ms+noisy:sigma=0.2 --arrivals bursts:rho=0.8

    Example: carpool simulate --trace requests.csv,rho=0.7 --workers 2 --plot policies.html

    Example: carpool simulate --lengths lognormal:14,input_sigma=0.8 --cost padded:a=2ms,b=20us

    Example: carpool simulate --steps --arrivals poisson:rate=10 --lengths fixed:output=30 --slo 2s
    """
    chosen = options or Options()
    if chosen.steps:
        _simulate_steps(chosen)
    else:
        _simulate_batches(chosen)


def _simulate_batches(options: Options) -> None:
    """Compare policies of batches, and show what came of it; exit if an option makes no sense."""
    slo, plot = options.slo or "60ms", options.plot
    with _exit_on_mistake():
        comparison = _comparison(options, slo)
        capacity = _capacity(comparison)
        draw = None if plot is None else _drawer(plot)
        comes_and_goes = any(not each.isdigit() for each in options.workers or ())
        found = _run(comparison, options, with_sweep=plot is not None and not comes_and_goes)
    shown = _Shown(options.arrivals or options.trace or USUAL_ARRIVALS, " -> ".join(comparison.cost), slo)
    if draw is not None and plot is not None and comes_and_goes:
        _draw_workers(plot, comparison, found.reports, title=", ".join(shown))
    elif draw is not None and plot is not None:
        slo_s = comparison.settings["slo_s"]
        draw(plot, found.swept, slo_s=slo_s if isinstance(slo_s, float) else None, title=", ".join(shown))
    if options.as_json:
        limits = {name: getattr(options, name) for name in _LIMITS}
        _print_json(shown, {**comparison.settings, **limits}, capacity, found)
    else:
        _print_table(shown, comparison.settings, capacity, found.reports, plot)


def _simulate_steps(options: Options) -> None:
    """Compare policies of steps, and show what came of it; exit if an option makes no sense."""
    slo = options.slo or "1s"
    with _exit_on_mistake():
        _refuse_what_steps_lack(options)
        settings = _step_settings(options)
        reports = compare_steps(
            specs.listed(options.policy or ",".join(STEPS_BY_NAME)),
            **settings,
            seed=options.seed,
            seeds=options.seeds,
            jobs=options.jobs,
            slo_s=_goal_s(slo),
            part_slo_s=_goal_s(options.part_slo),
            duration_s=specs.duration(options.duration or "2m"),
        )
    goals = {"slo": slo, "part_slo": options.part_slo}
    shown = {**settings, **goals, "requests": reports[0].requests, "seeds": options.seeds}
    print_steps(reports, shown, as_json=options.as_json, width=_FILE_WIDTH)


def _step_settings(options: Options) -> dict[str, Any]:
    """Return what the options say of the one stage of a simulation of steps. Raises ValueError."""
    cost = options.cost
    rows = _one_or_each(_numbers("max-batch-size", options.max_batch_size), 64)
    workers = _one_or_each(_fixed(_numbers("workers", options.workers)), 1)
    if isinstance(rows, list) or isinstance(workers, list) or (cost and len(cost) > 1):
        raise ValueError("a simulation of steps has one stage: give --cost, --max-batch-size and --workers once")
    return {
        "arrivals": options.arrivals or (options.trace and f"trace:{options.trace}") or "poisson:rate=8",
        "cost": cost[0] if cost else STEP_COST,
        "lengths": options.lengths or LENGTHS,
        "rows": rows,
        "workers": workers,
        "learned": options.learned,
    }


def _refuse_what_steps_lack(options: Options) -> None:
    """Raise ValueError if an option was given that does not go with `--steps`."""
    given = {
        "weights": options.weights,
        "weights-known": options.weights_known,
        "max-queue-size": options.max_queue_size,
        "start-s": options.start_s,
        "scaling": options.scaling if options.scaling != USUAL_RULE else None,
        "lengths-unknown": options.lengths_unknown,
        "keys": options.keys,
        "coordinator": options.coordinator,
        "ahead": options.ahead,
        "plot": options.plot,
        "switch": specs.duration(options.switch),
        "settle": specs.duration(options.settle),
    }
    for name, value in given.items():
        if value:
            raise ValueError(f"--steps does not go with --{name}: leave one of them out")


def _goal_s(text: str) -> float | None:
    """Return a goal in seconds; None for `none`. Raises ValueError."""
    return None if text == "none" else specs.duration(text)


class _Comparison(NamedTuple):
    """What is to be simulated: policies, and the workload that each of them meets.

    Attributes:
        policies: The policies' specs.
        arrivals: The processes of every run.
        cost: The cost of each stage, as a spec.
        settings: Further settings of `run`.
    """

    policies: Sequence[str]
    arrivals: Sequence[Arrivals]
    cost: list[str]
    settings: dict[str, Any]


class _Capacity(NamedTuple):
    """What the simulated workers can do, and how much is asked of them.

    Attributes:
        per_second: How many requests per second they can serve.
        load: The mean arrival rate as a share of that; None with a closed loop.
    """

    per_second: float
    load: float | None


class _Found(NamedTuple):
    """What the runs have found.

    Attributes:
        reports: One for each policy.
        swept: One for each policy and load, if a picture needs them.
    """

    reports: list[Report]
    swept: list[Report]


class _Shown(NamedTuple):
    """The workload as the user wrote it, above the figures."""

    arrivals: str
    cost: str
    slo: str


@contextlib.contextmanager
def _exit_on_mistake() -> Iterator[None]:
    """Turn a ValueError, which is a mistake of the user, into a line on stderr and an exit."""
    try:
        yield
    except ValueError as error:
        print(f"carpool: {error}", file=sys.stderr)
        raise SystemExit(_USAGE_ERROR) from None


def _comparison(options: Options, slo: str) -> _Comparison:
    """Return what the options say is to be simulated. Raises ValueError."""
    cost, known_limits = given_costs(options.cost, USUAL_COST)
    sizes = _numbers("max-batch-size", options.max_batch_size) or known_limits
    settings = {
        "slo_s": _slo_s(slo),
        "max_batch_size": _one_or_each(sizes, 64),
        "workers": _one_or_each(_numbers("workers", options.workers), 1),
        "start_s": options.start_s,
        "scaling": options.scaling,
        "duration_s": _duration_s(options.duration, options.trace if options.arrivals is None else None),
        "settle_s": specs.duration(options.settle),
        "weights": options.weights,
        "weights_known": options.weights_known,
        "lengths": options.lengths,
        "lengths_known": not options.lengths_unknown,
        "allowed_lengths": _lengths(options.allowed_lengths),
        "keys": options.keys,
        "switch_s": specs.duration(options.switch),
        "hop_s": specs.duration(options.hop),
        "hop_item_s": specs.duration(options.hop_item),
        "turn_s": specs.duration(options.turn),
        "coordinator": options.coordinator,
        "runs_ahead": options.ahead,
    }
    limits = {name: getattr(options, name) for name in _LIMITS}
    settings |= {name: inf if limit is None else limit for name, limit in limits.items()}
    policies = specs.listed(options.policy or _POLICIES)
    return _Comparison(policies, _arrivals(options.arrivals, options.trace), cost, settings)


def _arrivals(arrivals: str | None, trace: str | None) -> list[Arrivals]:
    """Return the processes that the two options give together. Raises ValueError."""
    found: list[Arrivals] = []
    if trace is not None:
        found += [Trace(trace)] if Path(trace).is_file() else arrivals_of(f"trace:{trace}")
    if arrivals is not None or trace is None:
        found += arrivals_of(arrivals or USUAL_ARRIVALS)
    return found


def _slo_s(text: str) -> float | tuple[float, ...] | None:
    """Return the SLO or the SLOs in seconds; None where there is none. Raises ValueError."""
    if text == "none":
        return None
    slos = tuple(map(specs.duration, text.split("/")))
    return slos if len(slos) > 1 else slos[0]


def _duration_s(text: str | None, only_trace: str | None) -> float | None:
    """Return for how many seconds requests arrive; None if that is the length of the only trace."""
    if text is None and only_trace is not None:
        return None
    return specs.duration(text or _DURATION)


def _lengths(text: str | None) -> list[int] | None:
    """Return the allowed lengths, rising; None where any length is. Raises ValueError."""
    if text is None:
        return None
    try:
        lengths = sorted(map(int, text.split(",")))
    except ValueError:
        raise ValueError(f"allowed lengths are whole numbers, such as 32,64,128, not {text!r}") from None
    if lengths[0] < 1:
        raise ValueError(f"allowed lengths must be at least 1, not {text!r}")
    return lengths


def _numbers(option: str, given: list[str] | None) -> list[Any]:
    """Return what an option says for each stage: numbers, and other texts as they are.

    Raises:
        ValueError: It says several things for one stage, or no number where one is needed.
    """
    for each in given or ():
        if "," in each:
            stages = " ".join(each.split(","))
            raise ValueError(
                f"--{option} {each} is several numbers in one: for stages in a row write --{option} {stages}, one for"
                f" each; to see what each of them would come to, carpool plan --{option} {each}"
            )
        if option != "workers" and not each.isdigit():
            raise ValueError(f"--{option} must be a whole number, not {each!r}")
    return [int(each) if each.isdigit() else each for each in given or ()]


def _fixed(workers: list[Any]) -> list[int]:
    """Return numbers of workers that stay as they are. Raises ValueError."""
    ranges = [WorkerRange.of(each) for each in workers]
    if any(each.least < each.most for each in ranges):
        raise ValueError("a simulation of steps has a fixed number of workers: give --workers one number")
    return [each.least for each in ranges]


def _draw_workers(path: Path, comparison: _Comparison, reports: Sequence[Report], title: str) -> None:
    """Draw how many workers there were over time, and how many requests came."""
    from carpool.simulate.plot_workers import draw_workers

    settings = comparison.settings
    servers = Servers.of(comparison.cost, settings["max_batch_size"], settings["workers"])
    traffic = Traffic(comparison.arrivals, servers, duration_s=settings["duration_s"])
    draw_workers(path, {report.policy: report for report in reports}, arrivals_per_second(traffic), title=title)


def _one_or_each(values: Sequence[T] | None, default: int) -> T | int | list[T]:
    """Return one value for all stages, or a list with one for each."""
    if not values:
        return default
    return values[0] if len(values) == 1 else list(values)


def _capacity(comparison: _Comparison) -> _Capacity:
    """Return what the workers can do, and the load.

    This finds the mistakes in the settings before any process starts.

    Raises:
        ValueError: A setting makes no sense.
    """
    settings = comparison.settings
    servers = Servers.of(comparison.cost, settings["max_batch_size"], settings["workers"])
    rule_of(settings["scaling"])
    coordinator_of(settings["coordinator"])
    for policy in comparison.policies:
        policy_of(policy, max_batch_size=servers.limits[0], slo_s=None, cost_s=servers.costs[0])
    features = Features.of(settings)
    traffic = Traffic(comparison.arrivals, servers, duration_s=settings["duration_s"], features=features)
    return _Capacity(traffic.capacity(), traffic.load)


def _drawer(path: Path) -> Callable[..., None]:
    """Return the function that draws the picture, after making sure that it will be able to.

    Raises:
        ValueError: matplotlib is missing, or the path is wrong.
    """
    try:
        from carpool.simulate import plot
    except ImportError as error:
        raise ValueError(str(error)) from None
    if path.suffix not in plot.FORMATS:
        raise ValueError(f"{path}: the picture's file must end in {', '.join(plot.FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    return plot.draw


def _run(comparison: _Comparison, options: Options, *, with_sweep: bool) -> _Found:
    """Make all runs, with a progress bar if stderr is a terminal. Raises ValueError."""
    policies, arrivals, cost, settings = comparison
    seeds = options.seeds
    console = Console(stderr=True)
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(policies) * (seeds + len(LOADS) * with_sweep))
        first = len(policies) * seeds
        common = {"seed": options.seed, "jobs": options.jobs, **settings}
        reports = compare(
            policies, arrivals, cost, seeds=seeds, progress=lambda done, of: bar.update(task, completed=done), **common
        )
        if not with_sweep:
            return _Found(reports, [])
        swept = sweep(
            policies, arrivals, cost, progress=lambda done, of: bar.update(task, completed=first + done), **common
        )
    return _Found(reports, swept)


def _print_json(shown: _Shown, settings: dict[str, Any], capacity: _Capacity, found: _Found) -> None:
    """Print the workload, the settings and every figure as one JSON object."""
    content = {**shown._asdict(), **settings, "capacity": capacity.per_second, "load": capacity.load}
    reports = {"reports": [r.to_dict() for r in found.reports], "sweep": [r.to_dict() for r in found.swept]}
    print(json_text({**content, **reports}, 2))


def _about_lengths(report: Report) -> str:
    """Return what the columns about lengths mean; empty where requests have none."""
    if report.padding_share is None:
        return ""
    return (
        " padding: the share of what workers computed that was padding."
        " long: the tenth of the requests that are longest. The capacity is that of batches of equal lengths."
    )


def _print_table(
    shown: _Shown, settings: dict[str, Any], capacity: _Capacity, reports: list[Report], plot: Path | None
) -> None:
    """Print the workload in two lines, the table, and what its columns mean."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    first = reports[0]
    share = "" if capacity.load is None else f", load {capacity.load:.2f}"
    console.print(f"{shown.arrivals} on {shown.cost}, SLO {shown.slo}", markup=False)
    console.print(
        f"batches of up to {settings['max_batch_size']}, workers {settings['workers']},"
        f" capacity {capacity.per_second:.4g}/s{share}; {first.requests:.0f} requests in {first.duration_s:.4g} s,"
        f" mean of {len(first.seeds)} seed{'s' if len(first.seeds) > 1 else ''}",
        markup=False,
    )
    console.print(table_of(reports))
    console.print(
        "Latencies are in ms. pen.: the mean in which each request that is not in time counts for at least two SLOs."
        " busy: the share of time in which workers ran batches, also small ones; it is not the load."
        " work: the ms that they worked for each request in time."
        f"{_about_lengths(first)}",
        style="dim",
    )
    for report in reports:
        for settings in report.settings:
            console.print(
                f"{report.policy}: {', '.join(f'{name}={x:g}' for name, x in settings.items())}", markup=False
            )
    if plot is not None:
        console.print(f"drawn: {plot}", markup=False)
