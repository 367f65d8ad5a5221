"""The picture of carpool beside other servers: our side answers in an open loop, and figures become points."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.picture import systems
from bench.picture.__main__ import draw, points_of
from bench.reality import open_loop
from bench.tools.figures import machine
from bench.tools.server import running


@pytest.mark.slow
def test_our_side_is_served_and_asked_in_turn(tmp_path: Path) -> None:
    """The service of digits answers each of the bodies that the generator sends in turn."""
    import sys

    ours = systems.launch("carpool", "digits")
    bodies = tmp_path / "bodies"
    bodies.write_bytes(b"".join(systems.body("carpool", item) + b"\n" for item in systems.items("digits")))
    with running(replace(ours, command=[sys.executable, *ours.command[1:]])) as server:
        load = open_loop.run(server, rate=50, seconds=2, warm_up_s=0, slo_s=10, seed=0, bodies=bodies)

    assert load.requests > 50 and load.ok == load.requests


@pytest.mark.parametrize("name", systems.NAMES)
@pytest.mark.parametrize("model", systems.MODELS)
def test_each_server_is_there_and_gets_bodies(name: str, model: str) -> None:
    """Each server has a file or a service for each model, and its bodies hold the same items."""
    launch = systems.launch(name, model)

    assert launch.directory.is_dir()
    files = [word for word in launch.command if word.endswith("_side.py")]
    assert all((launch.directory / file).exists() for file in files)
    assert {len(systems.items(model))} <= {200, 400}
    assert json.dumps(systems.items(model)[0]) in systems.body(name, systems.items(model)[0]).decode()


def row(**changes: Any) -> dict[str, Any]:
    usual = {
        "name": "carpool",
        "model": "digits",
        "rate": 100.0,
        "seconds": 2.0,
        "round": 0,
        "requests": 200,
    }
    return {**usual, "ok": 200, "p99_s": 0.01, **changes}


def test_points_are_medians_of_rounds() -> None:
    """A point has the median of its rounds, and is marked if a round lost answers."""
    rows = [row(), row(p99_s=0.03, ok=190), row(p99_s=0.02), row(rate=200.0, ok=180)]

    assert points_of(rows, "carpool", "digits") == [
        {"rate": 100.0, "served": 100.0, "p99_ms": 20.0, "whole": False},
        {"rate": 200.0, "served": 90.0, "p99_ms": 10.0, "whole": False},
    ]


def test_the_picture_names_machine_and_versions(tmp_path: Path) -> None:
    """The picture is a file of SVG, with the machine and the versions in it."""
    pytest.importorskip("matplotlib")
    found = {
        "machine": {**machine(), "date": "2026-11-28 12:00", "mosec": "0.9.8"},
        "capacities": {"digits": 200.0},
        "rows": [row()],
    }
    draw(found, tmp_path / "picture.svg")

    text = (tmp_path / "picture.svg").read_text()
    assert text.count("<svg") == 1
    assert "2026-11-28 12:00" in text and "mosec 0.9.8" in text
