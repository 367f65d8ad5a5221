"""Whether `max_batch_size` must be tuned with several workers: a limit of 64 beside the best limit.

The best limit is found by search, for each workload anew: of those whose goodput is within 0.3 % of
the best one, the one with the least p99, or the least mean where there is no SLO. All limits meet
the same arrivals, seed by seed.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from bench.policies.runs import Runs, add_running
from bench.policies.tables import OURS, Means, means_of
from bench.policies.workloads import Workload, load, workload_of
from bench.tools import options
from bench.tools.docs import write
from bench.tools.figures import table
from carpool.simulate import capacity

LIMITS = (1, 2, 4, 8, 16, 32, 64)
HIGH = LIMITS[-1]
EQUAL = 0.003  # of the best goodput
NAMED = r"^P .* m\d.* r0"
OWN = tuple(
    workload_of({"name": name, "cost": cost, "arrivals": f"poisson:rho={rho}", "slo_s": slo_s, "workers": workers})
    for name, cost, rho, slo_s, workers in (
        ("800/s, 2 workers", "table", 1.0, 0.06, 2),
        ("800/s, 3 workers", "table", 2 / 3, 0.06, 3),
        ("800/s, 6 workers", "table", 1 / 3, 0.06, 6),
        ("800/s, 8 workers", "table", 1 / 4, 0.06, 8),
        ("400/s, 2 workers", "table", 1 / 2, 0.06, 2),
        ("balanced m4 r0.50", "balanced", 0.5, 0.1, 4),
        ("balanced m2 r0.70", "balanced", 0.7, None, 2),
        ("knee m4 r0.70", "knee", 0.7, 0.06, 4),
        ("sqrt m4 r0.70", "sqrt", 0.7, 0.1, 4),
        ("tile16 m4 r0.70", "tile16", 0.7, 0.05, 4),
    )
)
"""Workloads for it alone: below capacity, where a limit may be of use."""


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="of each workload; default: %(default)s")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/")
    add_running(parser)
    given = parser.parse_args()
    found = limits_table([*OWN, *load(NAMED)], given.seeds, Runs(given.cache, given.jobs))
    print(found)
    if given.docs:
        write({"limits": found})
    return 0


def limits_table(workloads: list[Workload], seeds: int, runs: Runs) -> str:
    """Compare, per workload, a limit of 64 with the best one: goodput, mean and p99."""
    header = ["workload", f"limit {HIGH}", "best limit", "with it", "goodput", "mean", "p99"]
    rows = []
    for workload in workloads:
        limited = {limit: with_limit(workload, limit) for limit in LIMITS}
        results = means_of(list(limited.values()), [OURS], lambda _: range(seeds), runs, workload.name)
        by_limit = {limit: results[each.name, OURS] for limit, each in limited.items()}
        best = best_limit(by_limit, has_slo=workload.slo_s is not None)
        ours, theirs = by_limit[HIGH], by_limit[best]
        pairs = (ours.goodput, theirs.goodput), (ours.mean_s, theirs.mean_s), (ours.p99_s, theirs.p99_s)
        changes = [f"{(high / low - 1) * 100:+.1f} %" for high, low in pairs]
        rows.append([workload.name, _cell(ours), str(best), _cell(theirs), *changes])
    return table(header, rows, markdown=True)


def with_limit(workload: Workload, limit: int) -> Workload:
    """The same arrivals for another limit, although a load would mean another rate with it."""
    settings = workload.settings
    rho = float(settings["arrivals"].rpartition("=")[2])
    rate = rho * capacity(settings["cost"], settings["max_batch_size"], settings["workers"])
    arrivals = f"poisson:rate={rate:.6g}"
    return Workload(f"{workload.name}, {limit}", {**settings, "arrivals": arrivals, "max_batch_size": limit})


def best_limit(results: Mapping[int, Means], *, has_slo: bool) -> int:
    """The one to be chosen by whoever has tried all of them."""
    most = max(means.goodput for means in results.values())
    level = [limit for limit, means in results.items() if means.goodput >= (1 - EQUAL) * most]
    return min(level, key=lambda limit: results[limit].p99_s if has_slo else results[limit].mean_s)


def _cell(means: Means) -> str:
    return f"{means.goodput:.0f} / {means.mean_s * 1e3:.1f} / {means.p99_s * 1e3:.1f}"


if __name__ == "__main__":
    sys.exit(main())
