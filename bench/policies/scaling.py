"""How many workers traffic that changes takes, by the rules of autoscalers, in virtual time.

A batch of n takes 80 ms + 2.5 ms for each, the SLO is 600 ms, a worker takes 10 s to start, and
there are at most 8. All rules meet the same requests, and go down when they have wanted fewer
workers for 20 s. The day has 30 requests a second at night, 930 at noon and a burst of 300 more for
15 s; the other traffics are in `TRAFFIC`, three of them with half of the SLO. Beside the defaults
of others are their best settings in hindsight: of a grid those with the fewest worker-seconds that
answer as many in time as carpool. "Symphony's target sizes" are the workers for which Symphony
plans at the true rate of the last five seconds, times a factor, and with the true cost.

With --fast all that is ten times as fast, and takes ten times as long to simulate.

    python -m bench.policies.scaling --docs --picture   the tables and the picture, into docs/
    python -m bench.policies.scaling --traffic day,ramps --seeds 1
"""

from __future__ import annotations

import multiprocessing
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count

from bench.policies.runs import add_jobs, bar, prepare
from bench.tools import options
from bench.tools.docs import DOCS, write
from bench.tools.figures import commit, table
from carpool.simulate import Report, compare
from carpool.simulate.arrivals import arrivals_of
from carpool.simulate.costs import cost_of
from carpool.simulate.servers import Servers
from carpool.simulate.traffic import Traffic, arrivals_per_second

DURATION_S = 240.0
DAY = "day"
SLO_S, TIGHT_SLO_S = 0.6, 0.3
ARRIVALS = {
    DAY: "sine:rate=480,swing=450,phase=0.75+flash:rate=0,peak_rate=300,between=0.625/0.6875",
    "bursts": "mmpp:rates=150/900,mean_dwell=30s/15s",
    "ramps": "sine:rate=480,swing=450,period=60s,phase=0.75",
    "rise": "sine:rate=480,swing=450,period=480s,phase=0.75",
    "steps": "poisson:rate=100+flash:rate=0,peak_rate=500,between=0.2/0.8+flash:rate=0,peak_rate=300,between=0.4/0.6",
}
"""Beside the day there are bursts of 15 s on average, of six times the rate between them; a rate
from 30 to 930 and back in each minute; one from 30 to 930 in four minutes; and one that rises and
falls in steps."""
TRAFFIC = {name: (arrivals, SLO_S) for name, arrivals in ARRIVALS.items()} | {
    f"tight-{name}": (ARRIVALS[name], TIGHT_SLO_S) for name in (DAY, "bursts", "ramps")
}
"""What comes, and the SLO."""

COST, FAST_COST = "affine:a=80ms,b=2.5ms", "affine:a=8ms,b=0.25ms"
FASTER = 10
LIMIT = 64
MOST = 8
RANGE = f"1-{MOST}"
OURS = ("load", RANGE)
SYMPHONY = "symphony:"
RULES = {
    "what the load needs (carpool)": OURS,
    "requests inside / 2 (Ray Serve's default)": ("ongoing:2", RANGE),
    "requests inside / 64": ("ongoing:64", RANGE),
    "busy share / 0.7": ("busy:0.7", RANGE),
    "always 4": ("load", "4"),
    "always 8": ("load", "8"),
}
GRIDS = {
    "requests inside / {}": [(f"ongoing:{n}", RANGE) for n in (8, 16, 32, 64, 128)],
    "Symphony's target sizes × {}": [(f"{SYMPHONY}{factor:g}", RANGE) for factor in (1, 1.1, 1.25, 1.4, 1.5, 1.6, 1.8)],
    "always {}": [("load", str(n)) for n in range(2, MOST + 1)],
}
"""The settings of which the best one in hindsight is shown, by their families."""

EQUAL = 0.001  # of all requests: as many are in time

Rule = tuple[str, str]
"""A rule of scaling, and the workers."""


@dataclass(frozen=True, slots=True)
class Task:
    """The runs of one rule in one traffic."""

    policy: str
    traffic: str
    rule: Rule
    seeds: int
    is_fast: bool


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--policy", default="adaptive", help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="of each rule; default: %(default)s")
    options.add_names(parser, "--traffic", TRAFFIC, "what comes")
    parser.add_argument("--fast", action="store_true", help="ten times the requests of a model ten times as fast")
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/")
    parser.add_argument("--picture", action="store_true", help="draw the picture in docs/, for which the day is needed")
    add_jobs(parser)
    given = parser.parse_args()
    rules = list(dict.fromkeys(chain(RULES.values(), *GRIDS.values())))
    tasks = [Task(given.policy, traffic, rule, given.seeds, given.fast) for traffic in given.traffic for rule in rules]
    reports = dict(run_all(tasks, given.jobs))
    seeds = f"{given.seeds} seed{'s' * (given.seeds > 1)}"
    sections = {"scaling-traffic": f"{traffic_table(given.traffic, reports)}\n\n{seeds}, commit `{commit()}`."}
    if DAY in given.traffic:
        of_day = {name: reports[DAY, rule] for name, rule in RULES.items()}
        sections["scaling"] = scaling_table(of_day)
    print("\n\n".join(sections.values()))
    if given.docs:
        write(sections)
    if given.picture and DAY in given.traffic:
        from carpool.simulate.plot import draw_workers  # matplotlib, for which the tables do not wait

        shown = {name: report for name, report in of_day.items() if report.workers_over_time}
        traffic = Traffic(arrivals_of(ARRIVALS[DAY]), Servers.of(COST, LIMIT, MOST), duration_s=DURATION_S)
        draw_workers(DOCS / "scaling.svg", shown, arrivals_per_second(traffic))
    return 0


def run_all(tasks: Sequence[Task], jobs: int) -> Iterable[tuple[tuple[str, Rule], Report]]:
    """Yield the mean of the runs of each task, by its traffic and rule."""
    with bar("rules") as progress, multiprocessing.get_context("spawn").Pool(jobs, initializer=prepare) as pool:
        shown = progress.add_task("scaling", total=len(tasks), runs=len(tasks))
        for task, report in zip(tasks, pool.imap(run, tasks), strict=True):
            progress.advance(shown)
            yield (task.traffic, task.rule), report


def run(task: Task, duration_s: float = DURATION_S) -> Report:
    """Return the mean of some runs under one rule."""
    (arrivals, slo_s), cost = TRAFFIC[task.traffic], COST
    if task.is_fast:
        arrivals, slo_s, cost = tenfold(arrivals), slo_s / FASTER, FAST_COST
    rule, workers = task.rule
    scaling = by_symphony(float(rule.removeprefix(SYMPHONY)), slo_s, cost) if rule.startswith(SYMPHONY) else rule
    settings = {"slo_s": slo_s, "max_batch_size": LIMIT, "duration_s": duration_s, "start_s": 10.0}
    (report,) = compare(
        [task.policy], arrivals, cost, seeds=task.seeds, jobs=1, scaling=scaling, workers=workers, **settings
    )
    return report


def by_symphony(factor: float, slo_s: float, cost: str) -> Callable[[float], int]:
    """The workers that Symphony plans with at a rate: the fewest whose staggered batches carry it.

    Batches of n that N workers start in turn follow one another in t(n)/N, for which a request
    waits at most. So n is the largest batch with t(n)·(1 + 1/N) <= SLO, and N is the fewest with
    N·n/t(n) >= rate.
    Source: Chen et al., "Symphony" (arXiv 2308.07470), and equations 1 and 2 of
    `nexus/dispatcher/batch_size_estimator.cpp` of its code, which has fractions of workers, and the
    same factor.
    """
    cost_s = cost_of(cost)

    def carried(workers: int) -> float:
        n = max(1, bisect_right(range(1, LIMIT + 1), slo_s / (1.0 + 1.0 / workers), key=cost_s))
        return workers * n / cost_s(n)

    return lambda rate: next(workers for workers in count(1) if carried(workers) >= factor * rate)


def tenfold(arrivals: str) -> str:
    """The same traffic with ten times the requests."""
    number = r"\d+(?:\.\d+)?"

    def times_ten(found: re.Match[str]) -> str:
        return found[1] + "/".join(f"{FASTER * float(rate):g}" for rate in found[2].split("/"))

    return re.sub(rf"\b((?:rate|rates|swing|peak_rate)=)({number}(?:/{number})*)", times_ten, arrivals)


def cheapest(grid: Sequence[Rule], traffic: str, reports: Mapping[tuple[str, Rule], Report]) -> Rule | None:
    """The rule with the fewest worker-seconds of those that answer as many in time as carpool's."""
    least = reports[traffic, OURS].attainment - EQUAL
    good = [rule for rule in grid if reports[traffic, rule].attainment >= least]
    return min(good, key=lambda rule: reports[traffic, rule].worker_s, default=None)


def traffic_table(traffics: Sequence[str], reports: Mapping[tuple[str, Rule], Report]) -> str:
    """What each traffic takes by carpool's rule, by Ray Serve's, and by the best in hindsight."""
    rows = []
    for traffic in traffics:
        ours = reports[traffic, OURS]
        shown = dict(list(RULES.items())[:2])
        for family, grid in GRIDS.items():
            rule = cheapest(grid, traffic, reports)
            if rule is None:
                rows_name = f"best: {family.format('…')}, none as good"
                shown[rows_name] = max(grid, key=lambda rule, name=traffic: reports[name, rule].attainment)  # type: ignore[misc]
            else:
                shown[f"best: {family.format(rule[0].partition(':')[2] or rule[1])}"] = rule
        for name, rule in shown.items():
            report = reports[traffic, rule]
            good = report.worker_s / (report.goodput * report.duration_s)
            cells = [f"{report.attainment:.2%}", f"{report.p99_s * 1e3:.0f}", f"{report.worker_s:,.0f}"]
            cells += [f"{report.worker_s / ours.worker_s:.2f}", f"{good * 1e3:.2f}"]
            rows.append([f"{traffic}: {name}", *cells])
    header = ["workers by", "in time", "p99 ms", "worker-seconds", "of carpool's", "worker-ms per good answer"]
    return table(header, rows, markdown=True)


def scaling_table(reports: Mapping[str, Report]) -> str:
    """How many requests were in time under each rule, and what it took."""
    rows = [
        [
            name,
            f"{report.attainment:.1%}",
            f"{report.p99_s * 1e3:.0f}",
            f"{report.worker_s:,.0f}",
            f"{max(report.workers_over_time.values(), default=0):.0f}" if report.workers_over_time else name[-1],
            f"{report.mean_batch_size:.1f}",
        ]
        for name, report in reports.items()
    ]
    header = ["workers by", "in time", "p99 ms", "worker-seconds", "most workers", "mean batch"]
    return table(header, rows, markdown=True)


if __name__ == "__main__":
    sys.exit(main())
