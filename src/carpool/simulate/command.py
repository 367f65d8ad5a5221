"""The command `carpool simulate`: compare policies on a workload, in a table, a picture or JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from carpool.engine.policy import STEPS_BY_NAME
from carpool.service.overrides import BrokenModule, NotFound, service_named
from carpool.simulate import specs
from carpool.simulate.arrivals import USUAL_ARRIVALS, Arrivals, Trace, arrivals_of
from carpool.simulate.compare import LOADS, compare, sweep
from carpool.simulate.coordinator import coordinator_of
from carpool.simulate.costs import USUAL_COST, costs_by_stage, given_costs
from carpool.simulate.features import LENGTH_EXAMPLE, Features
from carpool.simulate.graphs import SimulatedGraph, graph_of
from carpool.simulate.policies import policy_of
from carpool.simulate.report import Report, json_text
from carpool.simulate.servers import USUAL_RULE, Servers, WorkerRange, rule_of
from carpool.simulate.steps import EXAMPLE as STEP_COST
from carpool.simulate.table import compare_steps, exit_on_mistake, print_steps, table_of, wide_console
from carpool.simulate.traffic import Traffic, arrivals_per_second

T = TypeVar("T")

_POLICIES = "adaptive,greedy,static:10ms,aimd,cork,deadline"
_DURATION = "30s"
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

    Example: carpool simulate --service program:service --cost costs.json --ways en=0.8

    Example: carpool simulate --steps --arrivals poisson:rate=10 --lengths fixed:output=30 --slo 2s
    """
    chosen = options or Options()
    if chosen.steps:
        _simulate_steps(chosen)
    else:
        _simulate_batches(chosen)


def _simulate_batches(options: Options) -> None:
    slo, plot = options.slo or "60ms", options.plot
    with exit_on_mistake():
        comparison = _comparison(options, slo)
        traffic = _checked(comparison)
        draw = None if plot is None else _drawer(plot)
        comes_and_goes = any(not each.isdigit() for each in options.workers or ())
        reports, swept = _run(comparison, options, with_sweep=plot is not None and not comes_and_goes)
    shown = _Shown(options.arrivals or options.trace or USUAL_ARRIVALS, _costs_in_words(comparison.cost), slo)
    if draw is not None and plot is not None and comes_and_goes:
        _draw_workers(plot, comparison, reports, title=", ".join(shown))
    elif draw is not None and plot is not None:
        slo_s = comparison.settings["slo_s"]
        draw(plot, swept, slo_s=slo_s if isinstance(slo_s, float) else None, title=", ".join(shown))
    if options.as_json:
        graph = comparison.settings["graph"]
        settings = {**comparison.settings, "graph": None if graph is None else list(graph.stages)}
        figures = {"capacity": traffic.capacity(), "load": traffic.load, "reports": _dicts(reports)}
        print(json_text({**shown._asdict(), **settings, **figures, "sweep": _dicts(swept)}, 2))
    else:
        _print_table(shown, comparison.settings, traffic, reports, plot)


def _simulate_steps(options: Options) -> None:
    slo = options.slo or "1s"
    with exit_on_mistake():
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
    print_steps(reports, shown, as_json=options.as_json)


def _step_settings(options: Options) -> dict[str, Any]:
    cost = options.cost
    rows = _one_or_each(_numbers("max-batch-size", options.max_batch_size), 64)
    workers = _one_or_each(_fixed(_numbers("workers", options.workers)), 1)
    if isinstance(rows, list) or isinstance(workers, list) or (cost and len(cost) > 1):
        raise ValueError("a simulation of steps has one stage: give --cost, --max-batch-size and --workers once")
    return {
        "arrivals": options.arrivals or (options.trace and f"trace:{options.trace}") or "poisson:rate=8",
        "cost": cost[0] if cost else STEP_COST,
        "lengths": options.lengths or LENGTH_EXAMPLE,
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
        "service": options.service,
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
    return None if text == "none" else specs.duration(text)


class _Comparison(NamedTuple):
    """The contest: policies, and the workload that each of them meets."""

    policies: Sequence[str]
    arrivals: Sequence[Arrivals]
    cost: list[str] | dict[str, str]
    settings: dict[str, Any]


class _Shown(NamedTuple):
    """The workload as the user wrote it, above the figures."""

    arrivals: str
    cost: str
    slo: str


def _comparison(options: Options, slo: str) -> _Comparison:
    graph = _graph(options)
    cost: list[str] | dict[str, str]
    known_limits: list[int] | None
    if graph is None:
        cost, known_limits = given_costs(options.cost, USUAL_COST)
    else:
        cost, known_limits = costs_by_stage(options.cost, USUAL_COST, graph.stages), None
    sizes = _numbers("max-batch-size", options.max_batch_size) or known_limits
    settings = {
        "slo_s": _slo_s(slo),
        "max_batch_size": _one_or_each(sizes, 64),
        "workers": _one_or_each(_numbers("workers", options.workers), 1),
        "graph": graph,
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


def _graph(options: Options) -> SimulatedGraph | None:
    if options.service is None:
        if options.ways or options.early or options.items:
            raise ValueError("--ways, --early and --items say what happens in a graph: give --service, too")
        return None
    if os.getcwd() not in sys.path:  # as `python -m` does
        sys.path.insert(0, os.getcwd())
    try:
        service = service_named(options.service)
    except (BrokenModule, NotFound) as error:
        raise ValueError(str(error)) from None
    items = None if options.items is None else [_whole("items", n) for n in options.items.split("/")]
    return graph_of(service, _shares(options.ways), _shares(options.early), items)


def _whole(option: str, text: str) -> int:
    if not text.strip().isdigit():
        raise ValueError(f"--{option} must be whole numbers, such as 4 or 1/4/16, not {text!r}")
    return int(text)


def _shares(text: str | None) -> dict[str, float]:
    """Return shares by name from a text such as `en=0.8,de=20%`. Raises ValueError."""
    found = {}
    for each in (text or "").split(",") if text else ():
        name, is_given, share = each.rpartition("=")
        if not is_given:
            raise ValueError(f"{each!r} is no share of a name: write it as en=0.8")
        found[name.strip()] = specs.number(share)
    return found


def _costs_in_words(cost: list[str] | dict[str, str]) -> str:
    """Return the costs of stages as they stand above the figures."""
    if isinstance(cost, list):
        return " -> ".join(cost)
    if len({*cost.values()}) == 1:
        return f"{next(iter(cost.values()))} in each of {len(cost)} stages"
    return ", ".join(f"{name} {spec}" for name, spec in cost.items())


def _arrivals(arrivals: str | None, trace: str | None) -> list[Arrivals]:
    """Return the processes that the two options give together. Raises ValueError."""
    found: list[Arrivals] = []
    if trace is not None:
        found += [Trace(trace)] if Path(trace).is_file() else arrivals_of(f"trace:{trace}")
    if arrivals is not None or trace is None:
        found += arrivals_of(arrivals or USUAL_ARRIVALS)
    return found


def _slo_s(text: str) -> float | tuple[float, ...] | None:
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
    """Return the value of an option for each stage: numbers, and other texts as they are.

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
    ranges = [WorkerRange.of(each) for each in workers]
    if any(each.least < each.most for each in ranges):
        raise ValueError("a simulation of steps has a fixed number of workers: give --workers one number")
    return [each.least for each in ranges]


def _draw_workers(path: Path, comparison: _Comparison, reports: Sequence[Report], title: str) -> None:
    from carpool.simulate.plot import draw_workers

    settings = comparison.settings
    servers = Servers.of(comparison.cost, settings["max_batch_size"], settings["workers"], settings["graph"])
    traffic = Traffic(comparison.arrivals, servers, duration_s=settings["duration_s"])
    draw_workers(path, {report.policy: report for report in reports}, arrivals_per_second(traffic), title=title)


def _one_or_each(values: Sequence[T] | None, default: int) -> T | int | list[T]:
    if not values:
        return default
    return values[0] if len(values) == 1 else list(values)


def _checked(comparison: _Comparison) -> Traffic:
    """Find the mistakes in the settings before any process starts, and return the traffic.

    Raises:
        ValueError: A setting makes no sense.
    """
    settings = comparison.settings
    graph = settings["graph"]
    if graph is not None and settings["max_queue_size"] != inf:
        raise ValueError("--max-queue-size is that of the graph's stages: leave it out")
    servers = Servers.of(comparison.cost, settings["max_batch_size"], settings["workers"], graph)
    rule_of(settings["scaling"])
    coordinator_of(settings["coordinator"])
    for policy in comparison.policies:
        policy_of(policy, max_batch_size=servers.limits[0], slo_s=None, cost_s=servers.costs[0])
    features = Features.of(settings)
    return Traffic(comparison.arrivals, servers, duration_s=settings["duration_s"], features=features)


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


def _run(comparison: _Comparison, options: Options, *, with_sweep: bool) -> tuple[list[Report], list[Report]]:
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
            return reports, []
        swept = sweep(
            policies, arrivals, cost, progress=lambda done, of: bar.update(task, completed=first + done), **common
        )
    return reports, swept


def _dicts(reports: Sequence[Report]) -> list[dict[str, object]]:
    return [report.to_dict() for report in reports]


def _about_lengths(report: Report) -> str:
    if report.padding_share is None:
        return ""
    return (
        " padding: the share of what workers computed that was padding."
        " long: the tenth of the requests that are longest. The capacity is that of batches of equal lengths."
    )


def _print_table(
    shown: _Shown, settings: dict[str, Any], traffic: Traffic, reports: list[Report], plot: Path | None
) -> None:
    console = wide_console()
    first = reports[0]
    share = "" if traffic.load is None else f", load {traffic.load:.2f}"
    console.print(f"{shown.arrivals} on {shown.cost}, SLO {shown.slo}", markup=False)
    graph = settings["graph"]
    limits, workers = (settings["max_batch_size"], settings["workers"])
    if graph is not None:
        limits, workers = (", ".join(map(str, each)) for each in (graph.limits, graph.workers))
    console.print(
        f"batches of up to {limits}, workers {workers},"
        f" capacity {traffic.capacity():.4g}/s{share}; {first.requests:.0f} requests in {first.duration_s:.4g} s,"
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


@dataclass(frozen=True, kw_only=True)
class Options:
    """The run that the user wants; each text is read by the module of its subject.

    Attributes:
        policy: The policies, separated by commas: adaptive, greedy, static:10ms,
            static:10ms,max_queued_batches=10, static:10ms,from_idle=yes, aimd, cork, deadline
            (which gets the true cost). Or what other systems do: window:10ms (mosec, LitServe,
            TorchServe), ray:10ms, triton:10ms, symphony, clockwork, batch, and tuned, the best
            static settings in hindsight. With --steps: paced, greedy, static. If not given, one of
            each that services have.
        arrivals: When requests come: poisson:rate=800, gamma:rate=800,cv=2,
            mmpp:rates=200/2000,mean_dwell=1s/500ms, sine:rho=0.6,swing=0.5,
            flash:rho=0.2,peak_rho=2,between=0.4/0.55, bursts:rate=800,mean_burst=8,
            closed:clients=16,think=1ms, or several of them joined by +. Instead of rate, in
            requests per second, you can give rho, a share of what the workers can serve. The
            default is poisson:rate=800, unless there is a trace.
        cost: How long a batch of n takes: affine:a=8ms,b=0.25ms (the default), costs.json as
            carpool profile writes it, tile:a=3ms,step=4ms,width=16, sqrt:c=5ms,
            knee:a=8ms,b=0.25ms,knee=32,extra=0.9ms, table:1=8ms,64=24ms or table:costs.csv,
            followed by +noisy:sigma=0.25 or +drifting:factors=1/1.8/1.2 if you like. Where a batch
            is padded to its longest item, of length L: padded:a=2ms,b=20us,c=0us,e=0us, which is
            a + b n L + c n L^2 + e n, or a table by size and length,
            table:1x16=8ms,1x128=9ms,64x16=20ms,64x128=90ms or a file with three columns;
            +sorted:size=8 stands for code of yours that sorts a batch by length and runs it in
            parts of 8. Repeat the option for each further stage. With --steps:
            steps:a=5ms,b=0.1ms,c=18ms,d=0.15ms (the default), where starting requests takes a + b
            times their length, and a step of n of them c + d times n. Add
            sigma=0.3,stall_share=0.002,stall=1s for noise and stalls.
        service: Simulate the graph of a service, as module:attribute, whose stages have the batch
            limits, workers and queues that they are declared with. Then --cost is a file of carpool
            profile, or STAGE=affine:a=8ms,b=0.25ms for each stage, or one for all.
        ways: With --service: the share of the items that take each branch of a Route:
            en=0.8,de=0.2. Branches that are not named share the rest evenly.
        early: With --service: the share of the items for which a stage answers early, with Done:
            small=0.8.
        items: With --service: how long the lists are that come to a ForEach: 4, or 1/4/16 where
            each list has one of these lengths. 4 if not given.
        slo: The time within which a request should be answered, 60ms if not given. With 30ms/120ms
            each request has one of the two; none means no limit. With --steps it is the time to the
            first part, 1s if not given.
        max_batch_size: The most requests in a batch, 64 if not given. Give one number, or one for
            each stage. With --steps: the most streams in a running set.
        workers: How many workers a stage has, 1 if not given. Give one number, or one for each
            stage. With 1-8 it has one at first, and workers come and go with the load; the table
            then has their seconds, and --plot draws their number over time.
        start_s: The seconds until a worker that is added takes requests.
        scaling: By which rule workers come and go: load, as in services, by what comes and what
            batches cost; ongoing:2, by the requests that are inside (Ray Serve); or busy:0.7, by
            the share of time in which workers are busy.
        duration: How long requests arrive: 30s if not given, or as long as the trace.
        settle: For how long at the beginning requests are left out of the figures, so that a cold
            start does not count.
        seed: The first seed.
        seeds: The number of runs, each with another seed, over which every figure is averaged.
        trace: Replay a CSV file: trace.csv at its own speed, trace.csv,speed=2 or trace.csv,rho=0.7
            at another one. trace.csv,column=TIMESTAMP,size=TOKENS says which columns hold the times
            and the weights; length=TOKENS takes the lengths from one.
        weights: How much requests weigh, where they differ: pareto:shape=1.7,cap=50.
        weights_known: Give the policy the weights; the batch limit then counts them.
        lengths: How long requests are, where batches are padded to their longest:
            lognormal:input=14,input_sigma=0.8,most_input=512,
            bimodal:short=10,long=200,long_share=0.1, fixed:14, file:lengths.txt, or
            file:requests.csv,column=TOKENS. With --steps: how long inputs and answers are:
            lognormal:input=200,output=180 (the default there),
            exponential:least_input=8,most_input=64,output=32, fixed:input=1,output=30 or
            trace:requests.csv,input=ContextTokens,output=GeneratedTokens.
        lengths_unknown: Hide the lengths from the policies, so that they batch as in a stage
            without length=.
        max_padded_size: The most that a batch's count times its longest length may be. No limit if
            not given.
        allowed_lengths: The lengths that batches are padded to, separated by commas, as for models
            that are compiled for each shape: 32,64,128. If not given, each batch is padded to its
            longest.
        keys: How many keys there are, if only requests with equal keys may share a batch: 16, or
            zipf:count=100,power=1 where few of them are asked for often, or turn:100 where they
            follow each other in a circle.
        max_workers_per_key: The most workers that may serve one key at the same time. No limit if
            not given.
        switch: How much longer a batch takes if the one before on its worker had another key.
        max_queue_size: The most requests that may wait; further ones are refused. No limit if not
            given.
        hop: How long a batch travels to its worker and back. Some 300us to 400us with worker
            processes; your server's own is carpool_policy_hop_seconds in its /metrics.
        hop_item: How much longer it travels for each of its items, as where these are megabytes.
        turn: How long the driver collects events before it decides; about 0s in our servers.
        coordinator: How long the process that reads requests and writes batches works for each
            request, and for each batch besides: 12us,63us in a service of a trivial model. It takes
            no time if not given. Add way=28us,sigma=0.35,stall_share=0.05%,stall=1.5ms for the way
            to its workers, client=8us for each request of the process that runs the clients of
            closed loops, and slice=3ms,pause=2ms where it shares its core with others.
        ahead: Send a full batch to its worker shortly before the worker is free, so that it spends
            no time on the way.
        steps: Simulate a model that answers step by step, which requests join and leave at every
            step. There are no options then for weights, keys, queues, hops, turns, batches ahead
            and pictures.
        part_slo: With --steps: how far apart the parts of an answer should be on average; none
            gives the policy no goal.
        learned: With --steps: have policies learn the costs from finished batches. If not, they
            have them.
        jobs: How many runs to make at the same time; 0 means one for each core that the process
            may use.
        plot: Draw goodput and latency against load, the batch sizes, and latency by length if
            requests have lengths, into this .png, .svg or .html file. For this the arrivals are
            scaled to loads from 0.1 to 1.5, with one run each.
        as_json: Print JSON instead of the table.
    """

    policy: str | None = None
    arrivals: str | None = None
    cost: Annotated[list[str] | None, Parameter(negative=())] = None
    service: str | None = None
    ways: str | None = None
    early: str | None = None
    items: str | None = None
    slo: str | None = None
    max_batch_size: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=True)] = None
    workers: Annotated[list[str] | None, Parameter(negative=(), consume_multiple=True)] = None
    start_s: float = 0.0
    scaling: str = USUAL_RULE
    duration: str | None = None
    settle: str = "0s"
    seed: int = 0
    seeds: int = 5
    trace: str | None = None
    weights: str | None = None
    weights_known: Annotated[bool, Parameter(negative=())] = False
    lengths: str | None = None
    lengths_unknown: Annotated[bool, Parameter(negative=())] = False
    max_padded_size: int | None = None
    allowed_lengths: str | None = None
    keys: str | None = None
    max_workers_per_key: int | None = None
    switch: str = "0s"
    max_queue_size: int | None = None
    hop: str = "0s"
    hop_item: str = "0s"
    turn: str = "0s"
    coordinator: str | None = None
    ahead: Annotated[bool, Parameter(negative=())] = False
    steps: Annotated[bool, Parameter(negative=())] = False
    part_slo: str = "50ms"
    learned: Annotated[bool, Parameter(negative=())] = False
    jobs: int = 0
    plot: Path | None = None
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False
