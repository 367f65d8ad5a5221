"""Draws throughput and p99 against the offered load: carpool, mosec, LitServe, Ray Serve, BentoML.

Two models, served by one worker each with the same largest batch and everything else at its
default: a small network (digits) and MiniLM with texts of 1 to 180 words (texts). Requests come in
an open loop (`bench.reality.open_loop`), so latency counts from when a request should have left.
A server that has answered fewer than half of two offered loads rightly is offered no more.
Servers run one at a time, in turn, `--rounds` times; a point is the median of its rounds, and a
round in which fewer than 99 % were answered rightly has a hollow mark.

    python -m bench.peers.install mosec litserve ray bentoml
    python -m bench.picture --install      puts the models into these environments, once
    python -m bench.picture                measures (an hour) and draws docs/peers.svg
    python -m bench.picture --draw         draws anew from the figures

A quick look: `python -m bench.picture --models digits --names carpool mosec --rounds 1`.
It needs a machine that does nothing else.
"""

from __future__ import annotations

import json
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final

import carpool
from bench import ROOT
from bench.peers.install import versions
from bench.picture import systems
from bench.reality import open_loop
from bench.tools import options
from bench.tools.comparison import say
from bench.tools.figures import machine
from bench.tools.server import NotServing, running

FIGURES: Final = Path(__file__).parent / "figures.json"
PICTURE: Final = ROOT / "docs" / "peers.svg"
RATES: Final = {
    "digits": (50, 200, 500, 1000, 2000, 4000, 8000, 12_000, 16_000),
    "texts": (5, 10, 20, 30, 40, 50, 60, 80, 100),
}
"""The offered loads in requests per second: up to what no server holds on two cores."""
MOST_OVERLOADS: Final = 2
SLO_S: Final = {"digits": 0.05, "texts": 1.0}
TITLES: Final = {"digits": "digits: a small network", "texts": "MiniLM: texts of 1 to 180 words"}
LABELS: Final = {
    "carpool": "carpool",
    "mosec": "mosec",
    "litserve": "LitServe",
    "ray": "Ray Serve",
    "bentoml": "BentoML",
}


def measure(names: Sequence[str], models: Sequence[str], rounds: int, seconds: float) -> dict[str, Any]:
    """Return the machine, and a row for each server, model, load and round."""
    rows = []
    for model in models:
        for turn in range(rounds):
            for name in names:
                try:
                    for row in one_server(name, model, turn, seconds):
                        rows.append({**row, "round": turn})
                except (NotServing, open_loop.NoLoad) as problem:
                    say(f"{name} goes no further: {problem}")
    peers = versions(*(name for name in names if name != "carpool"))
    return {"machine": {**machine(), "carpool": carpool.__version__, **peers}, "rows": rows}


def one_server(name: str, model: str, turn: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each offered load of a server that is started for it, the lowest first."""
    n_overloads = 0
    with tempfile.TemporaryDirectory() as folder, running(systems.launch(name, model)) as server:
        bodies = Path(folder) / "bodies"
        bodies.write_bytes(b"".join(systems.body(name, item) + b"\n" for item in systems.items(model)))
        for rate in RATES[model]:
            load = open_loop.run(
                server, rate=rate, seconds=seconds, warm_up_s=2, slo_s=SLO_S[model], seed=turn, bodies=bodies
            )
            late = f"generator late by {load.late_p99_s * 1e3:,.1f} ms (p99), {load.own_cpu:.2f} cores"
            say(f"  {model} {name} {rate:,.0f}/s: {load.ok / seconds:,.0f}/s, p99 {load.p99_s * 1e3:,.1f} ms; {late}")
            yield {"name": name, "model": model, **asdict(load)}
            n_overloads += load.ok < load.requests / 2
            if n_overloads == MOST_OVERLOADS:
                break


def draw(found: dict[str, Any], path: Path) -> None:
    """Draw the picture of some figures."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row["model"] for row in found["rows"]))
    figure = Figure(figsize=(4.8 * len(models), 6.4), layout="constrained")
    axes = figure.subplots(2, len(models), squeeze=False, sharex="col")
    for column, model in enumerate(models):
        for name in dict.fromkeys(row["name"] for row in found["rows"]):
            points = points_of(found["rows"], name, model)
            loads = [point["rate"] for point in points]
            style = {"marker": "o", "markersize": 4, "linewidth": 2.4 if name == "carpool" else 1.2}
            served = [point["served"] for point in points]
            (line,) = axes[0][column].plot(loads, served, label=LABELS[name], **style)
            axes[1][column].plot(loads, [point["p99_ms"] for point in points], color=line.get_color(), **style)
            hollow = [(p["rate"], p["p99_ms"]) for p in points if not p["whole"]]
            if hollow:
                mark = {"facecolors": "white", "edgecolors": line.get_color(), "zorder": 3, "s": 28}
                axes[1][column].scatter(*zip(*hollow, strict=True), **mark)
        loads = sorted({row["rate"] for row in found["rows"] if row["model"] == model})
        ideal = {"color": "0.75", "linewidth": 1, "linestyle": "--", "zorder": 0, "label": "all that is offered"}
        axes[0][column].plot(loads, loads, **ideal)
        axes[0][column].set_title(TITLES[model])
        axes[0][column].set_ylabel("answered per second")
        axes[1][column].set_ylabel("p99, ms")
        axes[1][column].set_yscale("log")
        if model == "digits":  # their loads are steps of about two
            axes[0][column].set_xscale("log")
            axes[0][column].set_yscale("log")
        axes[1][column].set_xlabel("offered requests per second")
        for axis in (axes[0][column].yaxis, axes[1][column].xaxis, axes[1][column].yaxis):
            axis.set_major_formatter("{x:,g}")
    axes[0][0].legend(frameon=False, fontsize=8)
    rounds, seconds = 1 + max(row["round"] for row in found["rows"]), found["rows"][0]["seconds"]
    origin = f"{_origin(found['machine'])} Each load for {seconds:g} s, rounds: {rounds}."
    figure.supxlabel(textwrap.fill(origin, 70 * len(models)), fontsize=7)
    figure.savefig(path, metadata={"Date": None})


def _origin(facts: dict[str, Any]) -> str:
    """Return when, where and with which versions the figures were measured."""
    versions_of = ", ".join(f"{LABELS[name]} {facts[name]}" for name in LABELS if name in facts)
    return (
        f"{facts['date']}, {facts['cpu']}, {facts['cores']} cores, Linux {facts['kernel']}, Python {facts['python']}; "
        f"{versions_of}; commit {facts['commit']}. One worker each, the client on the same cores. "
        "Hollow: less than 99 % were answered."
    )


def points_of(rows: Sequence[dict[str, Any]], name: str, model: str) -> list[dict[str, Any]]:
    """Return the medians of a server's rounds, by offered load."""
    points = []
    own = [row for row in rows if row["name"] == name and row["model"] == model]
    for rate in sorted({row["rate"] for row in own}):
        same = [row for row in own if row["rate"] == rate]
        points.append(
            {
                "rate": rate,
                "served": median(row["ok"] / row["seconds"] for row in same),
                "p99_ms": median(row["p99_s"] * 1e3 for row in same),
                "whole": all(row["ok"] >= 0.99 * row["requests"] for row in same),
            }
        )
    return points


def main() -> int:
    """Run the command; returns the exit status."""
    parser = options.parser(__doc__)
    parser.add_argument("--names", nargs="+", default=systems.NAMES, choices=systems.NAMES, help="the servers")
    parser.add_argument("--models", nargs="+", default=systems.MODELS, choices=systems.MODELS, help="the models")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a load; default: %(default)s")
    parser.add_argument("--install", action="store_true", help="put the models into the environments, and end")
    parser.add_argument("--draw", action="store_true", help="draw from the figures that are there")
    given = parser.parse_args()
    if given.install:
        systems.install(given.names)
        return 0
    if not given.draw:
        FIGURES.write_text(json.dumps(measure(given.names, given.models, given.rounds, given.seconds), indent=1) + "\n")
    draw(json.loads(FIGURES.read_text()), PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
