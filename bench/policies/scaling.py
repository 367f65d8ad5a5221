"""How many workers a day takes, by the rules of autoscalers, in virtual time.

The day has 30 requests a second at night, 930 at noon and a burst of 300 more for 15 s; a batch of
n takes 80 ms + 2.5 ms for each, the SLO is 600 ms, a worker takes 10 s to start, and there are at
most 8. All rules meet the same requests, and go down when they have wanted fewer workers for 20 s.
With --fast all that is ten times as fast, and takes ten times as long to simulate.

    python -m bench.policies.scaling --docs         the table and the picture, into docs/
"""

from __future__ import annotations

import sys

from bench.tools import options
from bench.tools.docs import DOCS, write
from bench.tools.figures import table
from carpool.simulate import Report, compare
from carpool.simulate.arrivals import arrivals_of
from carpool.simulate.plot_workers import draw_workers
from carpool.simulate.servers import Servers
from carpool.simulate.traffic import Traffic, arrivals_per_second

DAY_S = 240.0
DAY = "sine:rate=480,swing=450,phase=0.75+flash:rate=0,peak_rate=300,between=0.625/0.6875"
COST = "affine:a=80ms,b=2.5ms"
SLO_S = 0.6
FAST_DAY = "sine:rate=4800,swing=4500,phase=0.75+flash:rate=0,peak_rate=3000,between=0.625/0.6875"
FAST_COST = "affine:a=8ms,b=0.25ms"
FAST_SLO_S = 0.06
LIMIT = 64
MOST = 8
RULES = {
    "what the load needs (carpool)": ("load", f"1-{MOST}"),
    "requests inside / 2 (Ray Serve's default)": ("ongoing:2", f"1-{MOST}"),
    "requests inside / 64": ("ongoing:64", f"1-{MOST}"),
    "busy share / 0.7": ("busy:0.7", f"1-{MOST}"),
    "always 4": ("load", "4"),
    "always 8": ("load", "8"),
}


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--policy", default="adaptive", help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="of each rule; default: %(default)s")
    parser.add_argument("--fast", action="store_true", help="ten times the requests of a model ten times as fast")
    parser.add_argument("--docs", action="store_true", help="write table and picture into docs/")
    given = parser.parse_args()
    reports = {}
    for name, rule in RULES.items():
        reports[name] = day(given.policy, *rule, seeds=given.seeds, fast=given.fast)
        print(f"{name}: {reports[name].attainment:.2%}, {reports[name].worker_s:.0f} s", file=sys.stderr, flush=True)
    found = scaling_table(reports)
    print(found)
    if given.docs:
        write({"scaling": found})
        shown = {name: report for name, report in reports.items() if report.workers_over_time}
        traffic = Traffic(arrivals_of(DAY), Servers.of(COST, LIMIT, MOST), duration_s=DAY_S)
        draw_workers(DOCS / "scaling.svg", shown, arrivals_per_second(traffic))
    return 0


def day(policy: str, scaling: str, workers: str, *, seeds: int, fast: bool) -> Report:
    """The mean of some days under one rule."""
    arrivals, cost, slo_s = (FAST_DAY, FAST_COST, FAST_SLO_S) if fast else (DAY, COST, SLO_S)
    settings = {"slo_s": slo_s, "max_batch_size": LIMIT, "duration_s": DAY_S, "start_s": 10.0}
    (report,) = compare([policy], arrivals, cost, seeds=seeds, jobs=1, scaling=scaling, workers=workers, **settings)
    return report


def scaling_table(reports: dict[str, Report]) -> str:
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
