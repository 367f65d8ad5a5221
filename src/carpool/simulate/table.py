"""A table of reports for a terminal: policies as rows, the best figure of each column marked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from carpool.simulate.report import Report

COMPARABLE = 0.99  # below this share of the best goodput, a latency cannot be compared


def _number(value: float) -> str:
    """Write a number, with a digit behind the point if it is small."""
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
        name: The heading.
        value: The function from a report to the figure.
        write: The function from the figure to its text.
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
    """Return the cells of one column, with a mark on all that read like the best, unless all do."""
    written = [_written(column, report) for report in reports]
    best = _best(column, reports) if len(set(written)) > 1 else None
    return [Text(f"{text}*", "bold green") if text == best else Text(f"{text} ") for text in written]


def _best(column: Column, reports: Sequence[Report]) -> str | None:
    """Return the text of the best figure; None where no figure is best."""
    top = COMPARABLE * max(report.goodput for report in reports)
    rivals = [report for report in reports if not column.comparable or report.goodput >= top]
    values = [value for value in map(column.value, rivals) if value is not None and not math.isnan(value)]
    if column.best is None or not values:
        return None
    return column.write(max(values) if column.best == "most" else min(values))


def _written(column: Column, report: Report) -> str:
    """Return the text of a figure, or a dash where the report has none."""
    value = column.value(report)
    return "-" if value is None or math.isnan(value) else column.write(value)
