"""Pictures of simulated policies: goodput and latency against load, the sizes of batches, and the
number of workers over time.

The colours are those of Okabe & Ito, which people with any colour vision can tell apart; every
policy also has a mark of its own. Lines get thinner, so that all can be seen where they coincide.
"""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from carpool.simulate.report import Report

try:
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
except ImportError:
    raise ImportError("pictures need matplotlib: pip install 'carpool[simulate]'") from None

FORMATS = (".png", ".svg", ".html")
STYLES = {  # by policy the colour and the mark, which are the same in every picture
    "adaptive": ("#0072B2", "o"),
    "greedy": ("#009E73", "s"),
    "static": ("#E69F00", "^"),
    "aimd": ("#CC79A7", "D"),
    "cork": ("#D55E00", "v"),
    "deadline": ("#000000", "P"),
}
_MORE_STYLES = (("#56B4E9", "X"), ("#7F7F7F", "*"), ("#8C6D31", "<"), ("#5B5B9E", ">"), ("#3B7A57", "h"))
_INK, _FAINT, _GRID = "#222222", "#6B6B6B", "#E3E3E3"
CLOSED = 0.0  # stands for the load of a closed loop, which is not known beforehand
_CHOSEN_LOADS = 4  # the most groups in the picture of batch sizes
SETTINGS: Any = {
    "svg.hashsalt": "carpool",  # the same picture gives the same file
    "svg.fonttype": "none",
    "font.size": 9.5,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "text.color": _INK,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
}


class Plotted(Protocol):
    """The part of a report that a picture needs; see `Report` for the attributes."""

    @property
    def policy(self) -> str: ...

    @property
    def load(self) -> float | None: ...

    @property
    def goodput(self) -> float: ...

    @property
    def mean_s(self) -> float: ...

    @property
    def p99_s(self) -> float: ...

    @property
    def batch_sizes(self) -> Mapping[int, int]: ...

    @property
    def length_p99_s(self) -> Mapping[int, float]: ...


@dataclass(frozen=True, slots=True)
class _Point:
    """The figures of one policy at one load, over all seeds."""

    goodput: float
    mean_s: float
    p99_s: float
    batch_sizes: dict[int, int]
    length_p99_s: dict[int, float]


_Curves = dict[str, dict[float, _Point]]
"""The points by policy and load."""


def draw(path: str | Path, reports: Iterable[Plotted], *, slo_s: float | None = None, title: str = "") -> None:
    """Draw a picture of the reports into a file.

    Args:
        path: The file; its ending, .png, .svg or .html, says what is written.
        reports: The reports. Those of one policy at one load, with other seeds, are combined.
        slo_s: The SLO in seconds, drawn as a line in the panel of latencies.
        title: The title above the picture.

    Raises:
        ValueError: The file has another ending, or there are no reports.
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        raise ValueError(f"{path} must end in {', '.join(FORMATS)}: there is no picture of kind {path.suffix!r}")
    curves = _curves(reports)
    if not curves:
        raise ValueError("there are no reports to draw")
    with rc_context(SETTINGS):
        save(path, _figure(curves, slo_s, title), title or "Simulated policies", _table(curves))


def style(policy: str, others: Sequence[str] = ()) -> tuple[str, str]:
    """Return the colour and the mark of a policy.

    A policy without ones of its own gets some by its position among `others`.
    """
    kind = policy.partition(":")[0]
    if kind in STYLES and not any(other.partition(":")[0] == kind for other in others[: _position(policy, others)]):
        return STYLES[kind]
    return _MORE_STYLES[_position(policy, others) % len(_MORE_STYLES)]


def save(path: Path, figure: Figure, title: str, table: str = "") -> None:
    """Write a figure in the format that the file's ending says; a page has the table below it."""
    if path.suffix == ".png":
        figure.savefig(path, dpi=160, facecolor="white")
        return
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None}, facecolor="white")
    svg = "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"
    path.write_text(svg if path.suffix == ".svg" else _page(svg, title, table), encoding="utf-8")


def _position(policy: str, others: Sequence[str]) -> int:
    return others.index(policy) if policy in others else 0


def _curves(reports: Iterable[Plotted]) -> _Curves:
    groups: dict[str, dict[float, list[Plotted]]] = {}
    for report in reports:
        load = CLOSED if report.load is None else report.load
        groups.setdefault(report.policy, {}).setdefault(load, []).append(report)
    return {policy: {load: _point(by_load[load]) for load in sorted(by_load)} for policy, by_load in groups.items()}


def _point(reports: Sequence[Plotted]) -> _Point:
    sizes: dict[int, int] = {}
    for report in reports:
        for n, count in report.batch_sizes.items():
            sizes[n] = sizes.get(n, 0) + count
    n = len(reports)
    return _Point(
        goodput=sum(report.goodput for report in reports) / n,
        mean_s=sum(report.mean_s for report in reports) / n,
        p99_s=sum(report.p99_s for report in reports) / n,
        batch_sizes=sizes,
        length_p99_s=_means([report.length_p99_s for report in reports]),
    )


def _means(figures: Sequence[Mapping[int, float]]) -> dict[int, float]:
    keys = sorted({key for each in figures for key in each})
    found = {key: [each[key] for each in figures if key in each] for key in keys}
    return {key: sum(values) / len(values) for key, values in found.items()}


def _loads(curves: _Curves) -> list[float]:
    return sorted({load for points in curves.values() for load in points})


def _figure(curves: _Curves, slo_s: float | None, title: str) -> Figure:
    """Return three or four panels and one legend for all of them."""
    has_lengths = any(point.length_p99_s for points in curves.values() for point in points.values())
    panels = 4 if has_lengths else 3
    figure = Figure(figsize=(13.0 / 3 * panels, 4.6), layout=ConstrainedLayoutEngine(wspace=0.05))
    goodput, latency, sizes, *rest = figure.subplots(1, panels)
    if len(_loads(curves)) > 1:
        _draw_goodput(goodput, curves)
        _draw_latency(latency, curves)
    else:
        _draw_goodputs(goodput, curves)
        _draw_latencies(latency, curves)
    if slo_s is not None:
        _draw_slo(latency, slo_s, vertical=len(_loads(curves)) == 1)
    _draw_sizes(sizes, curves)
    for by_length in rest:
        _draw_by_length(by_length, curves)
    legend = figure.legend(
        handles=_legend(goodput, list(curves)),
        loc="outside upper center",
        ncols=max(2, min(7, len(curves))),
        frameon=False,
        fontsize=10.5,
        title=title or None,
    )
    legend.get_title().set_fontsize(12)
    return figure


def _legend(axes: Any, policies: Sequence[str]) -> list[Any]:
    return [axes.plot([], [], label=policy, **_line(policy, policies))[0] for policy in policies]


def _line(policy: str, policies: Sequence[str]) -> dict[str, Any]:
    """Return how a policy's curve is drawn: each one thinner than the one before, and above it."""
    colour, mark = style(policy, policies)
    position = _position(policy, policies)
    return {
        "color": colour,
        "marker": mark,
        "markersize": max(4.0, 9.0 - position),
        "linewidth": max(1.2, 5.0 * 0.74**position),
        "zorder": 2.0 + 0.1 * position,
        "solid_capstyle": "round",
    }


def _draw_goodput(axes: Any, curves: _Curves) -> None:
    for policy, points in curves.items():
        axes.plot(list(points), [point.goodput for point in points.values()], **_line(policy, list(curves)))
    axes.set_title("Goodput: answers in time", loc="left")
    axes.set_ylabel("requests per second")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 10 else f"{y:g}"))
    axes.set_ylim(bottom=0)
    _mark_loads(axes)


def _draw_latency(axes: Any, curves: _Curves) -> None:
    for policy, points in curves.items():
        line = _line(policy, list(curves))
        axes.plot(list(points), [point.mean_s * 1e3 for point in points.values()], **line)
        line |= {"marker": "", "linewidth": max(0.9, 0.5 * line["linewidth"]), "linestyle": (0, (4, 2))}
        axes.plot(list(points), [point.p99_s * 1e3 for point in points.values()], **line)
    axes.set_title("Latency: mean (solid) and p99 (dashed)", loc="left")
    axes.set_ylabel("milliseconds")
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis)
    _mark_loads(axes)


def _mark_loads(axes: Any) -> None:
    """Label the axis of loads, and mark where the load reaches the capacity."""
    axes.set_xlabel("load (share of capacity)")
    low, high = axes.get_xlim()
    if low < 1.0 < high:
        axes.axvline(1.0, color=_FAINT, linewidth=0.9, linestyle=":", zorder=1)


def _draw_goodputs(axes: Any, curves: _Curves) -> None:
    for row, (policy, points) in enumerate(curves.items()):
        goodput = next(iter(points.values())).goodput
        axes.barh(row, goodput, height=0.62, color=style(policy, list(curves))[0])
        axes.annotate(f"{goodput:,.4g}", (goodput, row), (4, 0), textcoords="offset points", va="center")
    load = _loads(curves)[0]
    axes.set_title("Goodput" if load == CLOSED else f"Goodput at {load:.3g} of capacity", loc="left")
    axes.set_xlabel("requests answered in time per second")
    axes.margins(x=0.15)
    _name_rows(axes, list(curves))


def _draw_latencies(axes: Any, curves: _Curves) -> None:
    for row, (policy, points) in enumerate(curves.items()):
        point = next(iter(points.values()))
        colour, mark = style(policy, list(curves))
        axes.plot([point.mean_s * 1e3, point.p99_s * 1e3], [row, row], color=colour, linewidth=2, zorder=2)
        axes.plot(point.mean_s * 1e3, row, marker=mark, color=colour, markersize=8, zorder=3)
        axes.plot(point.p99_s * 1e3, row, marker="|", color=colour, markersize=13, markeredgewidth=2, zorder=3)
    axes.set_title("Latency: mean (mark) and p99 (bar)", loc="left")
    axes.set_xlabel("milliseconds")
    axes.set_xscale("log")
    _plain_ticks(axes.xaxis)
    _name_rows(axes, list(curves))


def _name_rows(axes: Any, policies: Sequence[str]) -> None:
    """Label the rows with the policies, the first one at the top."""
    axes.set_yticks(range(len(policies)), policies)
    axes.set_ylim(len(policies) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def _draw_slo(axes: Any, slo_s: float, *, vertical: bool) -> None:
    """Draw the SLO as a line across the panel of latencies."""
    line = axes.axvline if vertical else axes.axhline
    line(slo_s * 1e3, color=_INK, linewidth=1.1, linestyle=(0, (1, 1.5)), zorder=1)
    label = {"fontsize": 8.5, "color": _INK, "textcoords": "offset points"}
    if vertical:
        axes.annotate("SLO", (slo_s * 1e3, 1), (3, -3), xycoords=("data", "axes fraction"), va="top", **label)
    else:
        axes.annotate("SLO", (0, slo_s * 1e3), (3, 3), xycoords=("axes fraction", "data"), **label)


def _draw_sizes(axes: Any, curves: _Curves) -> None:
    """Draw the batch sizes of each policy at a few loads.

    A thin line goes from the 5th to the 95th percentile, a broad one covers the middle half, and a
    mark stands at the median.
    """
    loads = _chosen(_loads(curves))
    policies = list(curves)
    step = 0.8 / len(policies)
    for group, load in enumerate(loads):
        for position, policy in enumerate(policies):
            point = curves[policy].get(load)
            if point is not None and point.batch_sizes:
                x = group + (position - (len(policies) - 1) / 2) * step
                _draw_spread(axes, x, point.batch_sizes, *style(policy, policies))
    axes.set_title("Batch sizes: median, middle half, 5-95 %", loc="left")
    axes.set_ylabel("requests in a batch")
    axes.set_xticks(range(len(loads)), ["closed loop" if load == CLOSED else f"{load:.3g}" for load in loads])
    axes.set_xlabel("" if loads == [CLOSED] else "load (share of capacity)")
    axes.set_xlim(-0.55, len(loads) - 0.45)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(visible=False, axis="x")


def _draw_by_length(axes: Any, curves: _Curves) -> None:
    loads = _loads(curves)
    load = max([load for load in loads if load <= 1], default=loads[0])
    for policy, points in curves.items():
        if load in points:
            figures = points[load].length_p99_s
            axes.plot(list(figures), [p99_s * 1e3 for p99_s in figures.values()], **_line(policy, list(curves)))
    axes.set_title("p99 by length" if load == CLOSED else f"p99 by length at {load:.3g} of capacity", loc="left")
    axes.set_xlabel("length of the request, up to")
    axes.set_ylabel("milliseconds")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda length, _: f"{length:g}"))
    axes.set_yscale("log")
    _plain_ticks(axes.yaxis)


def _draw_spread(axes: Any, x: float, sizes: Mapping[int, int], colour: str, mark: str) -> None:
    low, quarter, middle, three_quarters, high = (_quantile(sizes, q) for q in (0.05, 0.25, 0.5, 0.75, 0.95))
    axes.plot([x, x], [low, high], color=colour, linewidth=1.2, solid_capstyle="butt")
    axes.plot([x, x], [quarter, three_quarters], color=colour, linewidth=4.5, alpha=0.55, solid_capstyle="butt")
    axes.plot(x, middle, marker=mark, color=colour, markersize=6.5, markeredgecolor="white", markeredgewidth=0.7)


def _chosen(loads: Sequence[float]) -> list[float]:
    """Return a few of the loads, from the first to the last."""
    if len(loads) <= _CHOSEN_LOADS:
        return list(loads)
    last = len(loads) - 1
    return [loads[round(i * last / (_CHOSEN_LOADS - 1))] for i in range(_CHOSEN_LOADS)]


def _quantile(sizes: Mapping[int, int], q: float) -> int:
    """Return the batch size that a share `q` of the batches does not exceed."""
    left = q * sum(sizes.values())
    for n in sorted(sizes):
        left -= sizes[n]
        if left <= 0:
            return n
    return max(sizes)


def _plain_ticks(axis: Any) -> None:
    """Give a logarithmic axis ticks at 1, 2, 5, 10 …, written without powers."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _table(curves: _Curves) -> str:
    header = ("policy", "load", "goodput (1/s)", "mean (ms)", "p99 (ms)")
    rows = [
        (policy, f"{load:.3g}", f"{p.goodput:,.1f}", f"{p.mean_s * 1e3:.2f}", f"{p.p99_s * 1e3:.2f}")
        for policy, points in curves.items()
        for load, p in points.items()
    ]
    cells = [f"<tr>{''.join(f'<th>{name}</th>' for name in header)}</tr>"]
    cells += [f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return f"<table>\n{chr(10).join(cells)}\n</table>"


def _page(svg: str, title: str, table: str) -> str:
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{html.escape(title)}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: {_INK}; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }}
svg {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; margin: 2rem auto; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .2rem .9rem; text-align: right; border-bottom: 1px solid {_GRID}; }}
th:first-child, td:first-child {{ text-align: left; }}
</style>
{svg[svg.index("<svg") :]}
{table}
</html>
"""


def draw_workers(
    path: str | Path, reports: Mapping[str, Report], arrivals: Mapping[float, float], *, title: str = ""
) -> None:
    """Draw a picture into a file.

    Args:
        path: The file; its ending, .png, .svg or .html, says what is written.
        reports: The report of each rule or policy, by its name.
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
        save(Path(path), figure, title or "Simulated workers", _table_of_workers(reports))


def _draw(axes: Any, name: str, report: Report, names: Sequence[str]) -> None:
    over_time = report.workers_over_time
    text = f"{name}: {report.attainment:.1%} in time, {report.worker_s:,.0f} worker-seconds"
    line = {"color": style(name, names)[0], "linewidth": 1.8}
    axes.step(list(over_time), list(over_time.values()), where="post", label=text, **line)


def _table_of_workers(reports: Mapping[str, Report]) -> str:
    rows = ["<tr><th></th><th>in time</th><th>worker-seconds</th></tr>"]
    rows += [
        f"<tr><td>{html.escape(name)}</td><td>{report.attainment:.2%}</td><td>{report.worker_s:,.0f}</td></tr>"
        for name, report in reports.items()
    ]
    return "<table>" + "".join(rows) + "</table>"
