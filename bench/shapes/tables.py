"""What the runs of rules on workloads say: geometric means of the ratios to plain order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean

from bench.shapes.workloads import Kind, Workload
from bench.tools.figures import table
from carpool.simulate import Report

OVER = 1.05  # a ratio above this is counted as worse
FAIR = -3.0  # points of the longest tenth below which a workload is counted as unfair

Results = Mapping[tuple[str, str], Report]
"""The mean of the seeds by workload and rule."""


@dataclass(frozen=True, slots=True)
class Ratios:
    """One figure of a rule beside plain order, on several workloads."""

    by_workload: Mapping[str, float]

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return exp(fmean(log(max(1e-3, ratio)) for ratio in self.by_workload.values()))

    @property
    def least(self) -> float:
        return min(self.by_workload.values())

    @property
    def most(self) -> float:
        return max(self.by_workload.values())

    def over(self, limit: float = OVER) -> int:
        """How many workloads have more than `limit`."""
        return sum(ratio > limit for ratio in self.by_workload.values())


def ratios(results: Results, workloads: Sequence[Workload], rule: str, plain: str, figure: str) -> Ratios:
    """A rule's figure over that of plain order, by workload."""

    def value(workload: Workload, who: str) -> float:
        return max(1e-9, float(getattr(results[workload.name, who], figure) or 0.0))

    return Ratios({w.name: value(w, rule) / value(w, plain) for w in workloads})


def long_points(results: Results, workloads: Sequence[Workload], rule: str, plain: str) -> list[float]:
    """How many more percent of the longest tenth are in time than in plain order."""
    both = [(results[w.name, rule].long_attainment, results[w.name, plain].long_attainment) for w in workloads]
    return [100 * ((ours or 0.0) - (theirs or 0.0)) for ours, theirs in both]


def kind_table(kind: Kind, results: Results, workloads: Sequence[Workload], rules: Sequence[str], plain: str) -> str:
    """A line for each rule but plain order, with the figures that matter for the kind."""
    figures = {
        "closed": ("throughput", "mean_s", "p99_s", "long_p99_s"),
        "open": ("mean_s", "p99_s", "long_p99_s"),
        "slo": ("goodput",),
    }[kind]
    names = {
        "throughput": "throughput, worst",
        "mean_s": "mean",
        "p99_s": "p99",
        "long_p99_s": "p99 of longest tenth",
        "goodput": "goodput, worst",
    }
    header = ["rule", *(names[figure] for figure in figures)]
    if kind == "slo":
        header.append("longest tenth in time, points (worst; how many below -3)")
    lines = []
    for rule in rules:
        if rule == plain:
            continue
        cells = [rule, *(_cell(ratios(results, workloads, rule, plain, figure), figure) for figure in figures)]
        if kind == "slo":
            points = long_points(results, workloads, rule, plain)
            cells.append(f"{fmean(points):+.1f} ({min(points):+.1f}; {sum(x < FAIR for x in points)})")
        lines.append(cells)
    return table(header, lines, markdown=True)


def case_table(results: Results, workload: Workload, rules: Sequence[str]) -> str:
    """A line for each rule with its own figures, not ratios."""
    lines = []
    for rule in rules:
        report = results[workload.name, rule]
        times_s = (report.mean_s, report.p99_s, report.long_p99_s or 0.0)
        lines.append([rule, f"{report.throughput:,.0f}", *(f"{1e3 * seconds:.0f}" for seconds in times_s)])
    return table(["rule", "requests/s", "mean, ms", "p99, ms", "p99 of longest tenth, ms"], lines, markdown=True)


def worst_table(results: Results, workloads: Sequence[Workload], rule: str, plain: str, count: int = 10) -> str:
    """The workloads on which a rule fares worst beside plain order."""
    lines = []
    for w in workloads:
        ours, theirs = results[w.name, rule], results[w.name, plain]
        rate = "goodput" if w.kind == "slo" else "throughput"
        lines.append(
            (
                getattr(ours, rate) / max(1e-9, getattr(theirs, rate)),
                [w.name, *(_pair(ours, theirs, figure, 1e3) for figure in ("mean_s", "p99_s", "long_p99_s"))],
                _pair(ours, theirs, rate, 1.0),
            )
        )
    lines.sort(key=lambda line: line[0])
    rows = [[cells[0], f"{ratio:.3f}", both, *cells[1:]] for ratio, cells, both in lines[:count]]
    header = ["workload", "rate", "ours / plain", "mean, ms", "p99, ms", "p99 of longest tenth, ms"]
    return table(header, rows, markdown=True)


def _cell(found: Ratios, figure: str) -> str:
    """A geometric mean, and how bad it gets."""
    if figure in ("throughput", "goodput"):
        return f"{found.mean:.2f}, {found.least:.3f}"
    if figure == "mean_s":
        return f"{found.mean:.2f}"
    return f"{found.mean:.2f} ({found.over()}: {found.most:.2f})"


def _pair(ours: Report, theirs: Report, figure: str, factor: float) -> str:
    return " / ".join(f"{(getattr(report, figure) or 0.0) * factor:.4g}" for report in (ours, theirs))
