"""`carpool simulate --steps`: policies of steps side by side, in a table or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from carpool.engine.policy import STEPS_BY_NAME
from carpool.simulate.compare import processes
from carpool.simulate.report import json_text
from carpool.simulate.steps import StepReport, mean_of_steps, run_steps, step_cost_of, traffic_of

_COLUMNS = ("policy", "good", "smooth", "refused", "gap p99", "first p50", "p99", "part p50", "p99", "parts/s", "rows")
_LEGEND = (
    "Times are in ms. good: the first part within the SLO, the others within the SLO of parts on average; smooth: of"
    " all requests, those that were good and of which no part came later than a reader at that pace wants it; gap: the"
    " longest between two parts of a request; first: to the first part; part: mean distance of a request's parts."
)


def compare_steps(policies: Sequence[str], *, seeds: int, seed: int, jobs: int, **settings: Any) -> list[StepReport]:
    """Return one report for each policy, with the means over several seeds.

    Args:
        policies: Their names.
        seeds: How many runs are made for each of them.
        seed: The first seed.
        jobs: How many processes make the runs; 0 for one per core.
        settings: Further settings of `run_steps`.

    Raises:
        ValueError: A setting makes no sense.
    """
    _check(policies, settings)
    if seeds < 1:
        raise ValueError("seeds must be at least 1")
    runs = [{"policy": policy, "seed": seed + i, **settings} for policy in policies for i in range(seeds)]
    if jobs == 1 or len(runs) == 1:
        reports = [_run(each) for each in runs]
    else:
        with processes(jobs) as pool:
            reports = list(pool.map(_run, runs))
    return [mean_of_steps(reports[i : i + seeds]) for i in range(0, len(reports), seeds)]


def print_steps(reports: Sequence[StepReport], shown: dict[str, Any], *, as_json: bool, width: int) -> None:
    """Print reports.

    Args:
        reports: One for each policy.
        shown: The workload and the settings, as the user wrote them.
        as_json: Whether to print JSON instead of a table.
        width: The columns of output that does not go to a terminal.
    """
    if as_json:
        print(json_text({**shown, "reports": [asdict(report) for report in reports]}, 2))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = width
    console.print(", ".join(f"{name} {value}" for name, value in shown.items()), markup=False)
    console.print(_table(reports))
    console.print(_LEGEND, style="dim")


def _run(settings: dict[str, Any]) -> StepReport:
    return run_steps(**settings)


def _check(policies: Sequence[str], settings: dict[str, Any]) -> None:
    """Find the mistakes in a plan before any process starts. Raises ValueError."""
    unknown = [policy for policy in policies if policy not in STEPS_BY_NAME]
    if unknown:
        raise ValueError(f"there is no policy of steps {unknown[0]!r}; choose from {', '.join(STEPS_BY_NAME)}")
    cost = step_cost_of(settings["cost"])
    traffic_of(settings["arrivals"], settings["lengths"], cost, settings["rows"], settings["workers"], 1.0, 0, None)


def _table(reports: Sequence[StepReport]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(_COLUMNS):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    share, ms = partial(str.format, "{:.1%}"), lambda seconds: f"{seconds * 1000:.1f}"
    for r in reports:
        times = (r.gap_p99_s, r.first_p50_s, r.first_p99_s, r.part_p50_s, r.part_p99_s)
        shares = map(share, (r.good, r.smooth, r.refused))
        table.add_row(r.policy, *shares, *map(ms, times), f"{r.parts_per_s:.0f}", f"{r.rows:.1f}")
    return table
