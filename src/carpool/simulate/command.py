"""`carpool simulate`: what policies would do for a workload, in a table, a picture or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from carpool.simulate import specs
from carpool.simulate.arrivals import Arrivals, arrivals_of
from carpool.simulate.compare import LOADS, compare, sweep
from carpool.simulate.policies import policy_of
from carpool.simulate.replay import Trace
from carpool.simulate.report import Report
from carpool.simulate.servers import Servers
from carpool.simulate.table import table_of
from carpool.simulate.traffic import Traffic
from carpool.simulate.weights import weights_of

_USAGE_ERROR = 2
_DURATION = "30s"
_FILE_WIDTH = 160  # of what does not go to a terminal


def simulate(
    *,
    policy: str = "adaptive,greedy,static:10ms,aimd,cork,deadline",
    arrivals: str | None = None,
    cost: Annotated[list[str] | None, Parameter(negative=())] = None,
    slo: str = "60ms",
    max_batch_size: Annotated[list[int] | None, Parameter(negative=())] = None,
    workers: Annotated[list[int] | None, Parameter(negative=())] = None,
    duration: str | None = None,
    seed: int = 0,
    seeds: int = 5,
    trace: str | None = None,
    weights: str | None = None,
    weights_known: Annotated[bool, Parameter(negative=())] = False,
    max_queue_size: int | None = None,
    hop: str = "0s",
    turn: str = "0s",
    ahead: Annotated[bool, Parameter(negative=())] = False,
    jobs: int = 0,
    plot: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Compare batching policies on a workload, in virtual time: the service's own decisions, without a service.

    Each policy meets the same requests. * marks the best of a column; a latency can be the best only where goodput is
    within 1 % of the best, since whoever drops requests has short ones.

    Example: carpool simulate --arrivals poisson:rate=800 --cost affine:a=8ms,b=0.25ms --slo 60ms

    Example: carpool simulate --policy adaptive,cork --arrivals closed:clients=16,think=1ms+poisson:rho=0.3

    Example: carpool simulate --cost table:1=8ms,16=11ms,64=24ms+noisy:sigma=0.2 --arrivals bursts:rho=0.8

    Example: carpool simulate --trace requests.csv,rho=0.7 --workers 2 --plot policies.html

    Parameters
    ----------
    policy:
        One or several, with commas between: adaptive, greedy, static:10ms, static:10ms,max_queued_batches=10,
        static:10ms,from_idle=yes, aimd, cork, deadline (which is told the true cost).
    arrivals:
        When requests come; + joins several. poisson:rate=800, gamma:rate=800,cv=2,
        mmpp:rates=200/2000,mean_dwell=1s/500ms, sine:rho=0.6,swing=0.5, flash:rho=0.2,peak_rho=2,between=0.4/0.55,
        bursts:rate=800,mean_burst=8, closed:clients=16,think=1ms. Instead of rate, requests per second, rho may say a
        share of what the workers can serve. poisson:rate=800 if neither this nor a trace is given.
    cost:
        What a batch of n takes: affine:a=8ms,b=0.25ms (the default), tile:a=3ms,step=4ms,width=16, sqrt:c=5ms,
        knee:a=8ms,b=0.25ms,knee=32,extra=0.9ms, table:1=8ms,64=24ms or table:costs.csv; then +noisy:sigma=0.25 or
        +drifting:factors=1/1.8/1.2. Once more for each further stage.
    slo:
        Within which a request should be answered; 30ms/120ms: each has one of the two; none.
    max_batch_size:
        Most requests in a batch, 64 if not given. Once, or once per stage.
    workers:
        How many serve at the same time, 1 if not given. Once, or once per stage.
    duration:
        How long requests arrive; 30s, or as long as the trace.
    seed:
        The first seed.
    seeds:
        How many runs each figure is the mean of.
    trace:
        Replay a CSV file, at its own speed; trace.csv,speed=2 or trace.csv,rho=0.7 at another, and
        trace.csv,column=TIMESTAMP,size=TOKENS says where the times and the weights are.
    weights:
        Of requests, where they differ: pareto:shape=1.7,cap=50.
    weights_known:
        Tell the policy the weights; the batch limit then counts them.
    max_queue_size:
        Most requests that wait; more are refused. No limit if not given.
    hop:
        What the way to a worker and back takes.
    turn:
        How long the driver gathers what happens before it decides.
    ahead:
        A full batch goes to its worker shortly before that is free, and spends no time on its way there and back.
    jobs:
        How many runs at the same time; 0 is one per core.
    plot:
        Draw goodput and latency against load, and the batch sizes, into this .png, .svg or .html file. The arrivals are
        scaled to loads from 0.1 to 1.5, one run each.
    as_json:
        Print JSON instead of the table.
    """
    try:
        plan = _Plan(
            _policies(policy),
            _arrivals(arrivals, trace),
            cost or ["affine:a=8ms,b=0.25ms"],
            {
                "slo_s": _slo_s(slo),
                "max_batch_size": _one_or_each(max_batch_size, 64),
                "workers": _one_or_each(workers, 1),
                "duration_s": _duration_s(duration, trace if arrivals is None else None),
                "weights": weights,
                "weights_known": weights_known,
                "max_queue_size": inf if max_queue_size is None else max_queue_size,
                "hop_s": specs.duration(hop),
                "turn_s": specs.duration(turn),
                "runs_ahead": ahead,
            },
        )
        capacity, load = _check(plan)
        draw = None if plot is None else _drawer(plot)
        reports, swept = _run(plan, seed, seeds, jobs, with_sweep=plot is not None)
    except ValueError as error:
        _fail(str(error))
    shown = {"arrivals": arrivals or trace or "poisson:rate=800", "cost": " -> ".join(plan.cost), "slo": slo}
    if draw is not None and plot is not None:
        slo_s = plan.settings["slo_s"]
        draw(plot, swept, slo_s=slo_s if isinstance(slo_s, float) else None, title=", ".join(shown.values()))
    if as_json:
        content = {**shown, **plan.settings, "max_queue_size": max_queue_size, "capacity": capacity, "load": load}
        found = {"reports": [r.to_dict() for r in reports], "sweep": [r.to_dict() for r in swept]}
        print(json.dumps({**content, **found}, indent=2))
    else:
        _print(shown, plan, capacity, load, reports, plot)


class _Plan(NamedTuple):
    """What is to be simulated."""

    policies: Sequence[str]
    arrivals: Sequence[Arrivals]
    cost: list[str]
    settings: dict[str, Any]


def _policies(text: str) -> list[str]:
    """A comma starts another policy unless `name=value` follows it."""
    return specs.listed(text)


def _arrivals(arrivals: str | None, trace: str | None) -> list[Arrivals]:
    found: list[Arrivals] = []
    if trace is not None:
        found += [Trace(trace)] if Path(trace).is_file() else arrivals_of(f"trace:{trace}")
    if arrivals is not None or trace is None:
        found += arrivals_of(arrivals or "poisson:rate=800")
    return found


def _slo_s(text: str) -> float | tuple[float, ...] | None:
    if text == "none":
        return None
    slos = tuple(map(specs.duration, text.split("/")))
    return slos if len(slos) > 1 else slos[0]


def _duration_s(text: str | None, trace: str | None) -> float | None:
    """Of the trace, if there is nothing else."""
    if text is None and trace is not None:
        return None
    return specs.duration(text or _DURATION)


def _one_or_each(values: list[int] | None, default: int) -> int | list[int]:
    if not values:
        return default
    return values[0] if len(values) == 1 else values


def _check(plan: _Plan) -> tuple[float, float | None]:
    """Capacity and load. What makes no sense is said now, before processes start."""
    settings = plan.settings
    servers = Servers.of(plan.cost, settings["max_batch_size"], settings["workers"])
    for policy in plan.policies:
        policy_of(policy, max_batch_size=servers.limits[0], slo_s=None, cost_s=servers.costs[0])
    given = weights_of(settings["weights"])
    known = settings["weights_known"]
    traffic = Traffic(plan.arrivals, servers, duration_s=settings["duration_s"], weights=given, weights_known=known)
    return servers.capacity(1.0 if given is None else given.mean, weights_known=known), traffic.load


def _drawer(path: Path) -> Any:
    """What draws the picture; whether it could be written is found out before the work."""
    try:
        from carpool.simulate import plot
    except ImportError as error:
        raise ValueError(str(error)) from None
    if path.suffix not in plot.FORMATS:
        raise ValueError(f"{path}: the picture's file must end in {', '.join(plot.FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    return plot.draw


def _run(plan: _Plan, seed: int, seeds: int, jobs: int, *, with_sweep: bool) -> tuple[list[Report], list[Report]]:
    """All runs, with a progress bar on the terminal."""
    policies, arrivals, cost, settings = plan
    console = Console(stderr=True)
    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(policies) * (seeds + len(LOADS) * with_sweep))
        first = len(policies) * seeds
        common = {"seed": seed, "jobs": jobs, **settings}
        reports = compare(
            policies, arrivals, cost, seeds=seeds, progress=lambda done, of: bar.update(task, completed=done), **common
        )
        if not with_sweep:
            return reports, []
        swept = sweep(
            policies, arrivals, cost, progress=lambda done, of: bar.update(task, completed=first + done), **common
        )
    return reports, swept


def _print(
    shown: dict[str, str], plan: _Plan, capacity: float, load: float | None, reports: list[Report], plot: Path | None
) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    first = reports[0]
    share = "" if load is None else f", load {load:.2f}"
    console.print(f"{shown['arrivals']} on {shown['cost']}, SLO {shown['slo']}", markup=False)
    console.print(
        f"batches of up to {plan.settings['max_batch_size']}, workers {plan.settings['workers']},"
        f" capacity {capacity:.4g}/s{share}; {first.requests:.0f} requests in {first.duration_s:.4g} s,"
        f" mean of {len(first.seeds)} seed{'s' if len(first.seeds) > 1 else ''}",
        markup=False,
    )
    console.print(table_of(reports))
    console.print(
        "Latencies in ms. pen.: mean in which whatever is not in time counts for two SLOs at least.", style="dim"
    )
    if plot is not None:
        console.print(f"drawn: {plot}", markup=False)


def _fail(text: str) -> NoReturn:
    print(f"carpool: {text}", file=sys.stderr)
    raise SystemExit(_USAGE_ERROR)
