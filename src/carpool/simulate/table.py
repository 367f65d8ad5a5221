"""Tables of reports for a terminal: policies as rows, the best figure of each column marked.

Those of `carpool simulate --steps` may be JSON instead.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from carpool.engine.policy import STEPS_BY_NAME
from carpool.simulate.compare import processes
from carpool.simulate.report import Report, json_text
from carpool.simulate.steps import StepReport, mean_of_steps, run_steps, step_cost_of, traffic_of

_FILE_WIDTH = 160  # columns of output that does not go to a terminal
_USAGE_ERROR = 2
COMPARABLE = 0.99  # below this share of the best goodput, a latency cannot be compared


@contextmanager
def exit_on_mistake() -> Iterator[None]:
    """Turn a mistake of the user, a ValueError or an OSError, into a line on stderr and an exit."""
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"carpool: {error}", file=sys.stderr)
        raise SystemExit(_USAGE_ERROR) from None


def wide_console() -> Console:
    """Return a console for tables, wide where the output does not go to a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    return console


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def _ms(seconds: float) -> str:
    """Write seconds as milliseconds, with about three digits."""
    ms = seconds * 1000
    return f"{ms:.0f}" if ms >= 1000 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def _work(seconds: float) -> str:
    """Write seconds as milliseconds, with three digits however few they are."""
    ms = seconds * 1000
    return f"{ms:.0f}" if ms >= 100 else f"{ms:#.3g}"


def _percent(share: float) -> str:
    return f"{share:.1%}"


class Column(NamedTuple):
    """One figure of all policies.

    Attributes:
        best: Whether the most or the least is best; None where neither is.
        comparable: Whether only policies with about the best goodput can be best, since dropping
            requests makes latencies short.
    """

    name: str
    value: Callable[[Report], float | None]
    write: Callable[[float], str]
    best: Literal["most", "least"] | None = None
    comparable: bool = False


COLUMNS = (
    Column("good/s", lambda r: r.goodput, _number, "most"),
    Column("in time", lambda r: r.attainment, _percent, "most"),
    Column("drop", lambda r: r.drop_share, _percent),
    Column("mean", lambda r: r.mean_s, _ms, "least", True),
    Column("p50", lambda r: r.p50_s, _ms, "least", True),
    Column("p99", lambda r: r.p99_s, _ms, "least", True),
    Column("pen.", lambda r: r.penalised_mean_s, _ms, "least"),
    Column("batch", lambda r: r.mean_batch_size, _number),
    Column("busy", lambda r: r.utilisation, _percent),
    Column("coord.", lambda r: r.coordinator_utilisation, _percent),
    Column("work", lambda r: r.worker_s_per_good, _work, "least", True),
    Column("worker s", lambda r: r.worker_s if r.workers_over_time else None, _number, "least", True),
    Column("padding", lambda r: r.padding_share, _percent, "least"),
    Column("long p99", lambda r: r.long_p99_s, _ms, "least", True),
    Column("long in time", lambda r: r.long_attainment, _percent, "most"),
    Column("switches", lambda r: r.switch_share, _percent, "least"),
    Column("fair", lambda r: r.fairness, "{:.2f}".format, "most"),
)


def table_of(reports: Sequence[Report]) -> Table:
    """Return a table with the reports as rows, without columns in which no report has a figure."""
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    columns = [column for column in COLUMNS if any(column.value(report) is not None for report in reports)]
    for column in columns:
        table.add_column(f"{column.name} ", justify="right", no_wrap=True)
    cells = [_cells(column, reports) for column in columns]
    for report, row in zip(reports, zip(*cells, strict=True), strict=True):
        table.add_row(Text(report.policy), *row)
    return table


def _cells(column: Column, reports: Sequence[Report]) -> list[Text]:
    written = [_written(column, report) for report in reports]
    best = _best(column, reports) if len(set(written)) > 1 else None
    return [Text(f"{text}*", "bold green") if text == best else Text(f"{text} ") for text in written]


def _best(column: Column, reports: Sequence[Report]) -> str | None:
    top = COMPARABLE * max(report.goodput for report in reports)
    rivals = [report for report in reports if not column.comparable or report.goodput >= top]
    values = [value for value in map(column.value, rivals) if value is not None and not math.isnan(value)]
    if column.best is None or not values:
        return None
    return column.write(max(values) if column.best == "most" else min(values))


def _written(column: Column, report: Report) -> str:
    value = column.value(report)
    return "-" if value is None or math.isnan(value) else column.write(value)


_COLUMNS = ("policy", "good", "smooth", "refused", "gap p99", "first p50", "p99", "part p50", "p99", "parts/s", "rows")
_LEGEND = (
    "Times are in ms. good: the first part within the SLO, the others within the SLO of parts on average; smooth: of"
    " all requests, those that were good and of which no part came later than a reader at that pace wants it; gap: the"
    " longest between two parts of a request; first: to the first part; part: mean distance of a request's parts."
)


def compare_steps(policies: Sequence[str], *, seeds: int, seed: int, jobs: int, **settings: Any) -> list[StepReport]:
    """Return one report for each name of a policy, as `compare` does, with settings of `run_steps`.

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


def print_steps(reports: Sequence[StepReport], shown: dict[str, Any], *, as_json: bool) -> None:
    """Print the reports of all policies below the workload, `shown` as the user wrote it."""
    if as_json:
        print(json_text({**shown, "reports": [asdict(report) for report in reports]}, 2))
        return
    console = wide_console()
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
