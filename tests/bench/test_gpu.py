"""The benchmark for a card, without one: the same code runs small on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import ROOT


def rows_of(tmp_path: Path, *words: str) -> list[dict[str, Any]]:
    """Run parts small, and return the rows of the last one."""
    file = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "bench", "gpu", *words, "--small", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(file.read_text())[-1]["rows"]
    return found


@pytest.mark.slow
def test_the_floor_times_each_way_of_a_batch(tmp_path: Path) -> None:
    """Each kind of item goes there, and there and back; a card's own steps need one."""
    rows = rows_of(tmp_path, "floor")
    sides = {row["side"] for row in rows}
    assert {
        f"{way}: {kind}" for way in ("there", "there and back") for kind in ("numpy", "pickled", "one block")
    } < sides
    assert all(row["batch_s"] > 0 for row in rows)


def test_the_front_s_answers_are_compared_and_runs_are_joined(tmp_path: Path) -> None:
    """A server is asked, each answer is compared, and the second run stands behind the first one."""
    for _ in range(2):
        (row,) = rows_of(tmp_path, "front")
        assert row["items_per_s"] > 0 and row["failed"] == 0
    assert len(json.loads((tmp_path / "gpu.json").read_text())) == 2


@pytest.mark.slow
def test_parts_that_run_a_network_compare_its_answers(tmp_path: Path) -> None:
    """The sides that need nothing but torch are the bare loop, and carpool in a program."""
    pytest.importorskip("torch")
    rows = rows_of(tmp_path, "mlp", "--sides", "program")
    loads = ("stream", "64 threads", "256 threads")
    assert [row["side"] for row in rows] == ["the bare loop", *(f"carpool, {load}" for load in loads)]
    assert all(row["counts"]["items"] > 0 for row in rows)
