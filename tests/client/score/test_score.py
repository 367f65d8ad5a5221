"""`carpool score`: rows of files in, answers in their order out, and on again after a kill."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.prepared import run
from tests.support.serving import serve
from tests.support.signs import result_of
from tests.support.waiting import wait_until

PROGRAM = """
import time
from dataclasses import dataclass

import carpool


@dataclass
class Flat:
    rooms: int
    area: float
    city: str = "?"


class Price(carpool.Model):
    def predict(self, xs: list[Flat]) -> list[dict[str, float | str]]:
        return [{"price": x.rooms * x.area, "city": x.city} for x in xs]


def double(xs: list[float]) -> list[float]:
    if 13 in xs:
        raise RuntimeError("unlucky")
    return [2 * x for x in xs]


def slow(xs: list[int]) -> list[int]:
    time.sleep(0.001)
    return [x + 1 for x in xs]


def like_errors(xs: list[int]) -> list[dict[str, object]]:
    if 13 in xs:
        raise RuntimeError("unlucky")
    return [[{"error": 0.5}, {"error": 0.5, "label": x}, {"result": {"error": x}}][x % 3] for x in xs]


flats = carpool.Service(carpool.Stage(Price, max_batch_size=64))
numbers = carpool.Service(carpool.Stage(double, max_batch_size=64, workers=1))
signs = carpool.Service(carpool.Stage(like_errors, max_batch_size=64, workers=1))
slowly = carpool.Service(carpool.Stage(slow, max_batch_size=16, workers=1))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("score")
    (folder / "program.py").write_text(PROGRAM)
    return folder


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    """An empty folder with the program."""
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def command(place: Path, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "carpool", "score", *arguments],
        cwd=place, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip


def score(place: Path, *arguments: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
    """Run it to its end: status, output and what it says."""
    env = {**os.environ, "COLUMNS": "200"}
    done = run("-m", "carpool", "score", *arguments, env=env, cwd=place, stdin=stdin, timeout=60)
    return done.returncode, done.stdout, done.stderr.decode()


def test_lines_are_answered_in_order(place: Path) -> None:
    """Each line has its answer, wrong ones an error, which is also listed with its row; the status is 1."""
    (place / "rows.ndjson").write_text('1\n2\n\n"x"\n13\n5\n')
    status, _, said = score(
        place, "program:numbers", "--in", "rows.ndjson", "--out", "out.ndjson", "--errors", "bad.ndjson"
    )
    answers = [json.loads(line) for line in (place / "out.ndjson").read_text().splitlines()]
    assert (answers[:2], answers[4]) == ([2.0, 4.0], 10.0)
    assert [each["error"]["status"] for each in answers[2:4]] == [422, 500]
    errors = [json.loads(line) for line in (place / "bad.ndjson").read_text().splitlines()]
    assert [(each["row"], each["error"]["code"]) for each in errors] == [(3, "invalid_item"), (4, "model_error")]
    assert errors[1]["error"]["message"] == "RuntimeError: unlucky"
    assert status == 1
    assert "5 rows in" in said and "rows/s, 2 failed" in said and "mean batch size" in said and "workers busy" in said


@pytest.mark.slow
def test_tables_in_and_out(place: Path) -> None:
    """CSV and Parquet have columns; the types of a row are those of the model's items."""
    (place / "flats.csv").write_text('rooms,area,city\n2,10,a\n3,1.5,"b, c"\nmany,1,d\n')
    status, _, said = score(place, "program:flats", "--in", "flats.csv", "--out", "out.csv")
    with open(place / "out.csv", newline="") as file:
        first, second, third = csv.DictReader(file)
    assert (first["price"], first["city"], first["error"]) == ("20.0", "a", "")
    assert (second["price"], second["city"]) == ("4.5", "b, c")
    assert third["price"] == "" and json.loads(third["error"])["status"] == 422 and status == 1
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.table({"rooms": [1, 2], "area": [1.5, 2.5]}), place / "flats.parquet")
    status, _, said = score(place, "program:flats", "--in", "flats.parquet", "--out", "out.parquet")
    assert status == 0, said
    assert parquet.read_table(place / "out.parquet").to_pylist() == [
        {"price": 1.5, "city": "?", "error": None},
        {"price": 5.0, "city": "?", "error": None},
    ]


@pytest.mark.slow
def test_pipes(place: Path) -> None:
    """`-` is the standard input and output."""
    assert score(place, "program:numbers", "--in", "-", "--out", "-", stdin=b"1\n2\n")[:2] == (0, b"2.0\n4.0\n")


@pytest.mark.slow
def test_a_running_server(place: Path) -> None:
    """An address asks a server instead of a module."""
    pytest.importorskip("httpx")
    with serve("program:numbers", folder=place) as served:
        (place / "rows.ndjson").write_text("".join(f"{n}\n" for n in range(3000)))
        status, _, said = score(place, f"http://127.0.0.1:{served.port}", "--in", "rows.ndjson", "--out", "o.ndjson")
        answers = [json.loads(line) for line in (place / "o.ndjson").read_text().splitlines()]
        assert len(answers) == 3000 and status == 1, said
        assert [x for n, x in enumerate(answers) if n != 13] == [2.0 * n for n in range(3000) if n != 13]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("program:numbers", "--in", "none.ndjson", "--out", "o"), "No such file"),
        (("program:numbers", "--in", "rows.ndjson", "--out", "there.ndjson"), "is there already: go on with --resume"),
        (
            ("program:numbers", "--in", "-", "--out", "there.ndjson", "--resume"),
            "--resume needs an --in that is a file",
        ),
        (
            ("program:numbers", "--in", "rows.ndjson", "--out", "-", "--resume"),
            "--resume needs an --out that is a file",
        ),
        (("program:none", "--in", "rows.ndjson", "--out", "o"), "has no attribute 'none'"),
        (
            ("program:numbers", "--in", "rows.ndjson", "--out", "o", "--model", "flats"),
            "is the service double, not 'flats'",
        ),
        (("program:numbers", "--in", "bad.csv", "--out", "o"), "names a column twice"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(place: Path, arguments: tuple[str, ...], said: str) -> None:
    """A wrong command ends with status 2 and one line."""
    (place / "rows.ndjson").write_text("1\n")
    (place / "there.ndjson").write_text("1\n")
    (place / "bad.csv").write_text("a,a\n1,2\n")
    status, _, err = score(place, *arguments)
    assert status == 2 and said in err and "Traceback" not in err


def test_it_goes_on_where_it_was(place: Path) -> None:
    """With `--resume` what is there stays, a last line that is not complete is written anew."""
    (place / "rows.ndjson").write_text('1\n"x"\n3\n4\n')
    (place / "out.ndjson").write_text('2.0\n{"error":{"code":"invalid_item"}}\n{"err')
    (place / "bad.ndjson").write_text('{"row":2,"error":{}}\n{"row":3,"error":{}}\n')
    resume = ("program:numbers", "--in", "rows.ndjson", "--out", "out.ndjson", "--errors", "bad.ndjson", "--resume")
    status, _, said = score(place, *resume)
    assert (place / "out.ndjson").read_text() == '2.0\n{"error":{"code":"invalid_item"}}\n6.0\n8.0\n'
    assert (place / "bad.ndjson").read_text() == '{"row":2,"error":{}}\n' and status == 1
    assert "2 rows were answered before" in said
    assert score(place, *resume)[0] == 1
    (place / "out.csv").write_text('price,city,error\n20.0,"a\nb",\n4')
    (place / "flats.csv").write_text('rooms,area,city\n2,10,"a\nb"\n2,2,c\n')
    assert score(place, "program:flats", "--in", "flats.csv", "--out", "out.csv", "--resume")[0] == 0
    assert (place / "out.csv").read_text() == 'price,city,error\n20.0,"a\nb",\n4.0,c,\n'


def kill_in_the_middle(process: subprocess.Popen[bytes], out: Path, after_s: float) -> None:
    """Kill a run some time after it has begun to write."""
    before = out.stat().st_size if out.exists() else 0
    wait_until(lambda: process.poll() is not None or (out.exists() and out.stat().st_size > before))
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)


@pytest.mark.slow
def test_it_survives_being_killed(place: Path) -> None:
    """Killed at ten random moments and gone on with, the answers are those of one undisturbed run."""
    rows = 60_000
    (place / "rows.ndjson").write_text("".join(f"{n if n % 1000 else json.dumps('x')}\n" for n in range(rows)))
    arguments = ("program:slowly", "--in", "rows.ndjson", "--out", "out.ndjson", "--errors", "bad.ndjson", "--resume")
    dice, done = random.Random(0), [0]
    for _ in range(10):
        kill_in_the_middle(command(place, *arguments), place / "out.ndjson", dice.uniform(0.0, 0.2))
        done.append((place / "out.ndjson").read_bytes().count(b"\n"))
    assert len(set(done)) > 5 and sorted(done) == done, "it was killed before it had done anything"
    status, _, said = score(place, *arguments)
    assert status == 1, said
    found: list[Any] = [json.loads(line) for line in (place / "out.ndjson").read_text().splitlines()]
    assert [x if isinstance(x, int) else "error" for x in found] == [
        n + 1 if n % 1000 else "error" for n in range(rows)
    ]
    listed = [json.loads(line)["row"] for line in (place / "bad.ndjson").read_text().splitlines()]
    assert listed == list(range(1, rows + 1, 1000))


@pytest.mark.parametrize("way", ["service", pytest.param("server", marks=pytest.mark.slow)])
def test_results_that_look_like_errors_are_none(place: Path, way: str) -> None:
    """They count as answered, also when the run is gone on with; what has failed counts in both."""
    (place / "rows.ndjson").write_text("".join(f"{n}\n" for n in range(12)))
    more = "".join(f"{n}\n" for n in range(12, 15))

    def both(target: str) -> None:
        arguments = ("--in", "rows.ndjson", "--out", "out.ndjson")
        status, _, said = score(place, target, *arguments)
        assert (status, "12 rows" in said, "0 failed" in said) == (0, True, True)
        with open(place / "rows.ndjson", "a") as file:
            file.write(more)
        status, _, said = score(place, target, *arguments, "--resume")
        assert (status, "3 rows" in said, "1 failed" in said) == (1, True, True)
        status, _, said = score(place, target, *arguments, "--resume")
        assert (status, "0 rows" in said, "1 failed" in said) == (1, True, True)
        found = [result_of(json.loads(line)) for line in (place / "out.ndjson").read_text().splitlines()]
        wanted: list[Any] = [
            [{"error": 0.5}, {"error": 0.5, "label": n}, {"result": {"error": n}}][n % 3] for n in range(15)
        ]
        assert found == [*wanted[:13], "an error", wanted[14]]

    if way == "service":
        both("program:signs")
    else:
        with serve("program:signs", folder=place) as served:
            both(f"http://127.0.0.1:{served.port}")


@pytest.mark.parametrize("format", ["csv", pytest.param("parquet", marks=pytest.mark.slow)])
def test_the_column_of_errors_is_no_field_of_the_answers(place: Path, format: str) -> None:
    """Where answers have a field called `error`, errors stand in a column of another name."""
    (place / "rows.ndjson").write_text("1\n4\n13\n")
    status, _, said = score(place, "program:signs", "--in", "rows.ndjson", "--out", f"out.{format}")
    assert status == 1 and "1 failed" in said
    if format == "csv":
        with open(place / "out.csv", newline="") as file:
            rows: list[dict[str, Any]] = list(csv.DictReader(file))
        one, four, bad = rows
        assert (one["error"], one["label"], one["_error"]) == ("0.5", "1", "")
        status, _, said = score(place, "program:signs", "--in", "rows.ndjson", "--out", "out.csv", "--resume")
        assert status == 1 and "1 failed" in said
    else:
        one, four, bad = pytest.importorskip("pyarrow.parquet").read_table(place / "out.parquet").to_pylist()
        assert one == {"error": 0.5, "label": 1, "_error": None}
    assert float(four["error"]) == 0.5 and not bad["error"] and json.loads(bad["_error"])["code"] == "model_error"
