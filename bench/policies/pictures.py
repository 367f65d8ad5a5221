"""The pictures of docs/policies.md and docs/policies-evidence.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from bench.policies.runs import Case, Runs
from bench.policies.tables import Duel
from bench.policies.workloads import BURSTY, CLOSED, GROUPS, OVERLOAD, STEADY, poisson
from carpool.simulate.plot import SETTINGS, draw, save

COLOURS = {STEADY: "#0072B2", OVERLOAD: "#D55E00", BURSTY: "#E69F00", CLOSED: "#009E73"}
HATCHES = {STEADY: "", OVERLOAD: "", BURSTY: "////", CLOSED: ""}
SHOWN = ("adaptive", "greedy", "window", "ray", "triton", "cork", "symphony")
"""The default, and rules of other servers: of mosec and LitServe, Ray Serve, Triton, BentoML."""
LOADS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.1, 1.2, 1.5, 2.0)
NAMED = 1.0  # percent of gain or loss from which on workloads are named


def draw_gains(path: Path, duels: Sequence[Duel], groups: dict[str, str]) -> None:
    """Draw a bar for each workload, its goodput beside the best rival's, the worst first.

    Names stand on the other side of the line, where there is room.
    """
    gains = [(duel.goodput - 1) * 100 for duel in duels]
    with rc_context(SETTINGS):
        figure = Figure(figsize=(13.0, 5.0), layout="constrained")
        axes = figure.subplots()
        for group in GROUPS:
            places = [i for i, duel in enumerate(duels) if groups[duel.workload] == group]
            bars = axes.bar(places, [gains[i] for i in places], width=0.82, color=COLOURS[group], label=group)
            for bar in bars:
                bar.set(hatch=HATCHES[group], edgecolor="white", linewidth=0)
        axes.set_yscale("symlog", linthresh=1.0, linscale=0.6)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:+g} %" if y else "level"))
        axes.set_yticks([-10, -5, -2, -1, 0, 1, 2, 5, 10, 20, 50, 100])
        axes.set_ylim(min(-4.0, 1.3 * min(gains)), max(2.0, 1.3 * max(gains)))
        axes.minorticks_off()
        axes.axhline(0, color="#222222", linewidth=0.8)
        axes.set_xlim(-1, len(duels))
        axes.set_xticks([])
        axes.set_xlabel(f"{len(duels)} workloads, sorted")
        axes.set_title("Goodput of Adaptive beside the best of static, greedy, AIMD and Cork", loc="left")
        axes.grid(visible=False, axis="x")
        axes.legend(frameon=False, loc="upper left")
        for i, (duel, gain) in enumerate(zip(duels, gains, strict=True)):
            if abs(gain) >= NAMED:
                offset, side = ((0, -4), "top") if gain > 0 else ((0, 4), "bottom")
                place = {"textcoords": "offset points", "rotation": 90, "ha": "center", "va": side, "size": 6.5}
                axes.annotate(duel.workload, (i, 0), offset, **place)
        save(path, figure, "Goodput of Adaptive beside the best other policy")


def draw_loads(path: Path, runs: Runs, *, duration_s: float) -> None:
    """Goodput, latency and batch sizes against load, for the cost called fixed."""
    workloads = [poisson("fixed", load, slo_s=0.06, duration_s=duration_s) for load in LOADS]
    cases = [Case(policy, workload.settings, 0) for policy in SHOWN for workload in workloads]
    title = "8 ms + 0.25 ms a request, batches of up to 64, Poisson arrivals, SLO 60 ms"
    draw(path, runs.rows(cases, "load sweep"), slo_s=0.06, title=title)
