"""The command `carpool plan`: how many workers a load needs.

It runs numbers of workers and batch limits until the load is met, and prints a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, NamedTuple

from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.table import Table

from carpool.simulate import specs
from carpool.simulate.arrivals import USUAL_ARRIVALS, arrivals_of
from carpool.simulate.compare import compare
from carpool.simulate.costs import USUAL_COST, given_costs
from carpool.simulate.report import Report, json_text
from carpool.simulate.servers import Servers
from carpool.simulate.table import exit_on_mistake, wide_console
from carpool.simulate.traffic import Traffic

_MOST_TRIED = 8  # numbers of workers beyond the least that could do
_BEYOND = 1  # numbers of workers that are shown beyond the first that is enough


class Staffing(NamedTuple):
    """Numbers of workers and batch limits, and their report.

    Attributes:
        capacity: The most requests per second that can be served for ever.
        report: The figures of the runs.
    """

    workers: tuple[int, ...]
    limits: tuple[int, ...]
    capacity: float
    report: Report


def workers_of(cost: Sequence[str], limits: Sequence[int], n: int) -> tuple[int, ...]:
    """Return the workers of each stage: `n` for the slowest, and no more than they need for others.

    Raises ValueError if a cost or a limit makes no sense.
    """
    alone = [Servers.of(each, limit, 1).capacity() for each, limit in zip(cost, limits, strict=True)]
    wanted = n * min(alone)
    return tuple(max(1, math.ceil(wanted / each - 1e-9)) for each in alone)


def staffings(
    cost: Sequence[str],
    arrivals: Any,
    limits: Sequence[Sequence[int]],
    workers: Sequence[int] | None,
    goal: float,
    *,
    policy: str = "adaptive",
    progress: Callable[[str], None] | None = None,
    **settings: Any,
) -> Iterator[Staffing]:
    """Yield the report of each number of workers, for each choice of batch limits.

    Args:
        limits: Batch limits of all stages, each choice of which is tried.
        workers: How many workers the slowest stage has, each of which is tried; None to begin with
            the least that can serve the load, and to end with one more than are enough.
        goal: The share of the requests that should be answered in time.

    Raises:
        ValueError: A setting makes no sense.
    """
    for limit in limits:
        least = _least(cost, arrivals, limit, settings)
        tried = workers or range(least, least + _MOST_TRIED)
        beyond = 0
        for n in tried:
            each = workers_of(cost, limit, n)
            if progress is not None:
                progress(f"{each} workers, batches of up to {list(limit)}")
            shape: dict[str, Any] = {"max_batch_size": list(limit), "workers": list(each)}
            (report,) = compare([policy], arrivals, list(cost), **shape, **settings)
            yield Staffing(each, tuple(limit), Servers.of(list(cost), list(limit), list(each)).capacity(), report)
            beyond += report.attainment >= goal
            if workers is None and beyond > _BEYOND:
                break


def _least(cost: Sequence[str], arrivals: Any, limits: Sequence[int], settings: dict[str, Any]) -> int:
    """Return the least number of workers that can serve the load, if one worker's load is known."""
    servers = Servers.of(list(cost), list(limits), 1)
    load = Traffic(arrivals_of(arrivals), servers, duration_s=settings["duration_s"]).load
    return 1 if load is None else max(1, math.ceil(load))


def best(found: Sequence[Staffing], goal: float) -> Staffing | None:
    """Return the choice with the fewest workers that meets the goal, the quickest of equals."""
    good = [choice for choice in found if choice.report.attainment >= goal]
    return min(good, key=lambda choice: (sum(choice.workers), choice.report.p99_s), default=None)


_NOT_ENOUGH = 1


def plan(
    *,
    cost: Annotated[list[str] | None, Parameter(negative=())] = None,
    arrivals: str | None = None,
    slo: str = "60ms",
    goal: str = "99%",
    workers: str | None = None,
    max_batch_size: str | None = None,
    policy: str = "adaptive",
    hop: str = "400us",
    duration: str = "30s",
    seed: int = 0,
    seeds: int = 3,
    jobs: int = 0,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
) -> None:
    """Find how many workers a load needs, without running a service.

    It tries numbers of workers in virtual time, as `carpool simulate` does, until enough requests
    are answered in time. The exit status is 0 if some number is enough, and 1 if none was.

    Example: carpool profile program:service --out costs.json

    Example: carpool plan --cost costs.json --arrivals poisson:rate=800 --slo 60ms

    Example: carpool plan --cost table:1=12ms,64=160ms --workers 3,4,5 --max-batch-size 8,64

    Parameters
    ----------
    cost:
        What batches cost: the file that `carpool profile` has written, or a cost as of
        `carpool simulate`, which is repeated for each further stage.
    arrivals:
        When requests come, as of `carpool simulate`: poisson:rate=800 if not given,
        bursts:rate=800,mean_burst=8, closed:clients=64, trace:requests.csv, and so on.
    slo:
        The time within which a request should be answered.
    goal:
        The share of the requests that should be.
    workers:
        The numbers of workers to try: 3,4,5 or 1-8. With several stages they are those of the
        slowest one, and the others get as many as they need beside it. If not given, from the least
        that can serve the load on, until they are enough.
    max_batch_size:
        The batch limits to try: 8,64. If not given, the one of the service that was profiled, or
        64.
    policy:
        The policy, as of `carpool simulate`.
    hop:
        How long a batch travels to its worker and back.
    duration:
        How long requests arrive.
    seed:
        The first seed.
    seeds:
        The number of runs, each with another seed, over which every figure is averaged.
    jobs:
        How many runs to make at the same time; 0 means one per core.
    as_json:
        Print JSON instead of the table.
    """
    with exit_on_mistake():
        costs, known = given_costs(cost, USUAL_COST)
        share = _share(goal)
        limits = [[each] * len(costs) for each in _numbers("max-batch-size", max_batch_size)]
        times = {"slo_s": specs.duration(slo), "hop_s": specs.duration(hop), "duration_s": specs.duration(duration)}
        with Console(stderr=True).status("") as status:
            tried = staffings(
                costs,
                arrivals or USUAL_ARRIVALS,
                limits or [known or [64] * len(costs)],
                _numbers("workers", workers) or None,
                share,
                policy=policy,
                progress=lambda what: status.update(f"simulating {what}"),
                seed=seed,
                seeds=seeds,
                jobs=jobs,
                **times,
            )
            found = list(tried)
    chosen = best(found, share)
    if as_json:
        print(json_text({"choices": [_as_dict(each) for each in found], "best": chosen and _as_dict(chosen)}, 2))
    else:
        _print(found, chosen, f"{arrivals or USUAL_ARRIVALS} on {' -> '.join(costs)}, SLO {slo}", goal, slo)
    raise SystemExit(0 if chosen is not None else _NOT_ENOUGH)


def _numbers(option: str, text: str | None) -> list[int]:
    found: list[int] = []
    for part in (text or "").split(",") if text else ():
        least, dash, most = part.strip().partition("-")
        if not least.isdigit() or not (most.isdigit() or not dash) or int(least) < 1:
            raise ValueError(f"--{option} must be numbers such as 3,4,5 or 1-8, not {text!r}")
        found += range(int(least), int(most or least) + 1)
    return sorted(set(found))


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise ValueError(f"--goal must be a share such as 99%, not {text!r}")
    return share


def _as_dict(choice: Staffing) -> dict[str, Any]:
    shape = {"workers": choice.workers, "max_batch_size": choice.limits, "capacity": choice.capacity}
    return {**shape, **choice.report.to_dict()}


def _row(numbers: Sequence[int]) -> str:
    return " -> ".join(map(str, numbers))


def _print(found: Sequence[Staffing], chosen: Staffing | None, about: str, goal: str, slo: str) -> None:
    console = wide_console()
    console.print(about, markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("workers", "batches up to", "capacity/s", "in time", "refused", "p50 ms", "p99 ms", "batch", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for choice in found:
        report = choice.report
        times = [f"{seconds * 1000:.1f}" for seconds in (report.p50_s, report.p99_s)]
        shares = [f"{report.attainment:.1%}", f"{report.drop_share:.1%}"]
        shape = [_row(choice.workers), _row(choice.limits), f"{choice.capacity:.0f}"]
        mark = "enough" if choice is chosen else ""
        table.add_row(*shape, *shares, *times, f"{report.mean_batch_size:.1f}", mark)
    console.print(table)
    if chosen is None:
        console.print(f"None of these answers {goal} of the requests within {slo}: try more workers, or other limits.")
        return
    workers, in_time, p99 = _row(chosen.workers), f"{chosen.report.attainment:.1%}", chosen.report.p99_s * 1000
    what = "1 worker is" if chosen.workers == (1,) else f"{workers} workers are"
    console.print(f"{what} enough: {in_time} of the requests within {slo}, p99 {p99:.1f} ms.")
