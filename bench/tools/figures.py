"""From runs to figures: medians, ratios of neighbours, tables, and facts about the machine."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import ROOT

Facts = dict[str, Any]
"""Figures, and what belongs to them, by name."""


@dataclass(frozen=True, slots=True)
class Spread:
    """One quantity over all runs of one side."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))

    def text(self, show: Callable[[float], str]) -> str:
        """The median, and in brackets the lowest and the highest."""
        return f"{show(self.median)} ({show(self.low)}-{show(self.high)})"


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the ratios of neighbours in time.

    Other work on the machine slows both runs of a pair alike, so this holds where the ratio of two
    medians does not.
    """
    ratios = [a / b for a, b in zip(ours, theirs, strict=True) if b]
    return median(ratios) if ratios else float("nan")


def short(number: float) -> str:
    """A number with three digits that matter."""
    return f"{number:,.0f}" if number >= 100 else f"{number:#.3g}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool) -> str:
    """Rows in columns of equal width; the first column is text, the others are numbers."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return f"| {' | '.join(padded)} |" if markdown else "  ".join(padded)

    dashes = [width * "-" for width in widths]
    rule = line([dashes[0], *(f"{dash[:-1]}:" for dash in dashes[1:])]) if markdown else "  ".join(dashes)
    return "\n".join([line(header), rule, *map(line, rows)])


def machine() -> Facts:
    """Where and when something is measured: a figure without this means nothing."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": commit(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def origin(facts: Facts) -> str:
    """What of `machine` a page of the docs tells of a table."""
    return f"{facts['date']}, {facts['cores']} cores, {facts['cpu']}, commit {facts['commit']}"


def commit() -> str:
    """The commit of the tree that is measured, with a plus if it has been changed since."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=10"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
