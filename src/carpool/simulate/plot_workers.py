"""A picture of workers that come and go, and of the requests that came meanwhile."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from carpool.simulate.plot import SETTINGS, save, style


class Scaled(Protocol):
    """What a picture needs of a report; see `Report` for the attributes."""

    @property
    def attainment(self) -> float: ...

    @property
    def worker_s(self) -> float: ...

    @property
    def workers_over_time(self) -> Mapping[float, float]: ...


def draw_workers(
    path: str | Path, reports: Mapping[str, Scaled], arrivals: Mapping[float, float], *, title: str = ""
) -> None:
    """Draw a picture into a file.

    Args:
        path: The file; its ending, .png, .svg or .html, says what is written.
        reports: What came of each rule or policy, by its name.
        arrivals: By the second, how many requests came.
        title: The title above the picture.
    """
    with rc_context(SETTINGS):
        figure = Figure(figsize=(9.0, 4.8), layout=ConstrainedLayoutEngine(hspace=0.03))
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
        above.plot(list(arrivals), list(arrivals.values()), color="#7F7F7F", linewidth=0.9)
        above.set_ylabel("requests/s")
        above.set_ylim(bottom=0)
        for name, report in reports.items():
            _draw(below, name, report, list(reports))
        below.set_ylabel("workers")
        below.set_xlabel("seconds")
        below.set_ylim(bottom=0)
        below.yaxis.set_major_locator(MaxNLocator(integer=True))
        legend = figure.legend(loc="outside upper center", frameon=False, title=title or None)
        legend.get_title().set_fontsize(11)
        save(Path(path), figure, title or "Simulated workers", _table(reports))


def _draw(axes: Any, name: str, report: Scaled, names: Sequence[str]) -> None:
    """Draw the number of workers as steps."""
    over_time = report.workers_over_time
    text = f"{name}: {report.attainment:.1%} in time, {report.worker_s:,.0f} worker-seconds"
    line = {"color": style(name, names)[0], "linewidth": 1.8}
    axes.step(list(over_time), list(over_time.values()), where="post", label=text, **line)


def _table(reports: Mapping[str, Scaled]) -> str:
    """Return the figures of the picture as an HTML table."""
    rows = ["<tr><th></th><th>in time</th><th>worker-seconds</th></tr>"]
    rows += [
        f"<tr><td>{html.escape(name)}</td><td>{report.attainment:.2%}</td><td>{report.worker_s:,.0f}</td></tr>"
        for name, report in reports.items()
    ]
    return "<table>" + "".join(rows) + "</table>"
