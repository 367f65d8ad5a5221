"""`bench.documents`: the documents' designs do what they are measured for, and each program runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench import PYTHONPATH, ROOT
from bench.documents import clocks
from bench.documents.__main__ import Result, cells, header, rows_of
from bench.documents.cooperative_queue import CooperativeQueue
from bench.documents.rows import ROWS


def run(*arguments: str) -> str:
    """What a program of `bench.documents` prints."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("side", ["document", "carpool"])
@pytest.mark.parametrize(("document", "row"), [("1", "floats"), ("2", "scale_shift"), ("3", "free")])
def test_a_turn_of_a_side_gives_its_figures(document: str, row: str, side: str) -> None:
    """A turn of a side gives its figures; every answer is checked in it, so a design that answers
    wrongly, or not at all, fails here.
    """
    figures = json.loads(run("bench.documents.rows", document, row, side, "0.2"))

    assert figures["seconds_per_item"] > 0
    assert figures["cpu_s_per_item"] >= 0
    assert ("idle_s" in figures) == (document == "1")
    assert figures.get("items_per_batch", 1) <= 100


@pytest.mark.slow
def test_the_program_prints_a_table_and_writes_every_turn(tmp_path: Path) -> None:
    """The program runs the rows that are asked for, document and carpool in turn, prints a table
    and writes every turn.
    """
    file = tmp_path / "figures.json"
    printed = run("bench.documents", "3", "--rows=alone", "--rounds=2", "--seconds=0.1", f"--json={file}")

    (row,) = json.loads(file.read_text())["rows"]
    assert [len(row["turns"][side]) for side in ("document", "carpool")] == [2, 2]
    assert "free function, one caller" in printed
    assert "CooperativeQueue" in printed
    assert "BatchedService" not in printed


def turns(seconds_per_item: float, **more: float) -> list[dict[str, Any]]:
    return [{"seconds_per_item": seconds_per_item, "cpu_s_per_item": 1e-5, **more}] * 3


def test_a_ratio_is_that_of_the_rates() -> None:
    """A ratio above 1 means that carpool answers more."""
    result = Result("3", "free", "free function", turns(1e-4), turns(5e-5))

    assert result.ratios == [2.0] * 3
    assert cells(result)[:4] == [
        "free function",
        "10,000 (10,000-10,000)",
        "20,000 (20,000-20,000)",
        "2.00 (2.00-2.00)",
    ]


@pytest.mark.parametrize("document", ["1", "2", "3", "5"])
def test_each_document_has_rows_with_as_many_cells_as_columns(document: str) -> None:
    """Each document has rows with as many cells as columns, those of the worker and of the clients
    included.
    """
    more = {"items_per_batch": 100.0, "call_s": 5e-3, "between_s": 1e-4, "idle_s": 5e-5, "p50_s": 1e-3, "p99_s": 2e-3}
    for row in rows_of(document):
        title = ROWS[document][row].title if document in ROWS else "CSV"
        assert len(cells(Result(document, row, title, turns(1e-4, **more), turns(1e-4, **more)))) == len(
            header(document)
        )


def test_the_line_of_threads_answers_everybody() -> None:
    """In the line of threads each thread gets its own answer, and batches form while one runs."""
    sizes = []

    def double(xs: list[int]) -> list[int]:
        sizes.append(len(xs))
        return [2 * x for x in xs]

    line = CooperativeQueue(double)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(line, range(500))) == [2 * x for x in range(500)]
    assert sum(sizes) == 500


def test_a_worker_tells_its_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker tells its batches, its items and what lies between two calls, and the sums are those
    of all workers that tell.
    """
    monkeypatch.setenv(clocks.FOLDER, str(tmp_path))
    assert clocks.read_all() == clocks.Times()
    clock = clocks.Clock()
    for items in (3, 4):
        clock.begin()
        clock.end(items)
    (tmp_path / "other.clock").write_bytes((tmp_path / f"{os.getpid()}.clock").read_bytes())

    told = clocks.read_all()
    assert (told.batches, told.items) == (4, 14)
    assert told.between_s > 0
    assert told.between_cpu_s >= 0
