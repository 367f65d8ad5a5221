"""The command `carpool score` in this process: settings, rates, retries, and rows that are not sent."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import inf
from pathlib import Path
from typing import Any

import pytest

import carpool
from carpool import Service, Stage
from carpool.cli.score_command import service_to_score
from carpool.client.score import run
from carpool.client.score.inputs import InputRow
from carpool.client.score.outputs import Answer
from carpool.client.score.run import Job, ServerScorer, ServiceScorer, score
from carpool.errors import DeadlineExceeded
from tests.support.waiting import PATIENCE_S


def job(source: Path, out: Path, errors: Path | None = None, **more: Any) -> Job:
    settings = {"in_format": None, "out_format": None, "resume": False, "retry_failed": False, **more}
    return Job(str(source), str(out), None if errors is None else str(errors), **settings)


def scorer(predict: Any) -> ServiceScorer:
    return ServiceScorer(Service(Stage(predict, max_batch_size=4, run_in="thread"), timeout_s=None))


def shown(xs: list[dict[str, float | None]]) -> list[str]:
    return [repr(x["x"]) for x in xs]


def test_nan_comes_from_tables_as_it_is(tmp_path: Path) -> None:
    """NaN and infinities of Parquet, and of CSV where the hint is a float, are what the model gets."""
    (tmp_path / "in.csv").write_text("x\nnan\ninf\n-inf\n1\n")
    assert score(job(tmp_path / "in.csv", tmp_path / "out"), scorer(shown)) == 0
    assert (tmp_path / "out").read_text() == '"nan"\n"inf"\n"-inf"\n"1.0"\n'
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"x": [math.nan, inf, -inf, None]}), tmp_path / "in.parquet")
    assert score(job(tmp_path / "in.parquet", tmp_path / "again"), scorer(shown)) == 0
    assert (tmp_path / "again").read_text() == '"nan"\n"inf"\n"-inf"\n"None"\n'


@pytest.mark.parametrize("format", ["ndjson", "csv", "parquet"])
@pytest.mark.parametrize("value", [math.nan, inf, -inf])
def test_a_result_that_json_lacks_is_its_rows_error(tmp_path: Path, format: str, value: float) -> None:
    """In each kind of file NaN and infinities are errors of their rows, and not null."""

    def predict(xs: list[int]) -> list[Any]:
        return [{"y": value if x == 1 else x} for x in xs]

    (tmp_path / "in").write_text("0\n1\n2\n")
    errors = tmp_path / "errors"
    assert score(job(tmp_path / "in", tmp_path / "out", errors, out_format=format), scorer(predict)) == 1
    (told,) = map(json.loads, errors.read_text().splitlines())
    assert (told["row"], told["error"]["code"]) == (2, "bad_result")


def test_failed_rows_are_tried_again(tmp_path: Path) -> None:
    """Rows that failed are run once more where they stand, then those that have no answer; nothing else is run."""
    ran: list[int] = []

    def broken(xs: list[int]) -> list[int]:
        ran.extend(xs)
        if any(x in (1, 3) for x in xs):
            raise RuntimeError("odd")
        return xs

    def better(xs: list[int]) -> list[int]:
        ran.extend(xs)
        if 3 in xs:
            raise RuntimeError("three")
        return [10 * x for x in xs]

    source, out, errors = tmp_path / "in", tmp_path / "out", tmp_path / "errors"
    source.write_text("0\n1\n2\n3\n4\n")
    assert score(job(source, out, errors), scorer(broken)) == 1
    source.write_text("0\n1\n2\n3\n4\n5\n")
    ran.clear()
    assert score(job(source, out, errors, resume=True, retry_failed=True), scorer(better)) == 1
    assert sorted({*ran}) == [1, 3, 5]
    lines = list(map(json.loads, out.read_text().splitlines()))
    assert [*lines[:3], *lines[4:]] == [0, 10, 2, 4, 50] and "three" in lines[3]["error"]["message"]
    assert [json.loads(line)["row"] for line in errors.read_text().splitlines()] == [4]
    assert score(job(source, out, errors, resume=True, retry_failed=True), scorer(lambda xs: xs)) == 0
    assert out.read_text() == "0\n10\n2\n3\n4\n50\n" and errors.read_text() == ""


def test_where_all_rows_failed_it_begins_anew(tmp_path: Path) -> None:
    """Nothing of such a file is kept, so that a CSV file has the header of good answers."""
    source, out = tmp_path / "in", tmp_path / "out.csv"
    source.write_text("0\n1\n")
    assert score(job(source, out), scorer(lambda xs: 1 / 0)) == 1
    again = job(source, out, resume=True, retry_failed=True)
    assert score(again, scorer(lambda xs: [{"x": x} for x in xs])) == 0
    assert out.read_text() == "x,error\n0,\n1,\n"


def test_what_is_tried_again_must_be_there(tmp_path: Path) -> None:
    """`--retry-failed` alone is a mistake."""
    with pytest.raises(ValueError, match="--retry-failed goes with --resume"):
        score(job(tmp_path / "in", tmp_path / "out", retry_failed=True), scorer(shown))


PROGRAM = """
import carpool


def double(xs: list[float]) -> list[float]:
    return [2 * x for x in xs]


service = carpool.Service(carpool.Stage(double, max_batch_size=4, max_batch_time_s=9.0), timeout_s=3, slo_s=0.1)
"""


def test_nobody_waits_and_settings_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service is scored without time-outs and SLOs, whoever says them, and with all other settings that the
    environment and the file say of it; what they say of other services does not matter.
    """
    (tmp_path / "scored_program.py").write_text(PROGRAM)
    (tmp_path / "carpool.toml").write_text(
        "[services.other]\nslo_s = 1\n[stages.other]\nworkers = 9\n[stages.double]\nmax_batch_size = 32\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CARPOOL_SET", "stages.double.workers=3 services.double.timeout_s=5")
    service = service_to_score("scored_program:service")
    assert (service.timeout_s, service.slo_s) == (inf, None)
    (stage,) = service.stages
    assert (stage.workers, stage.max_batch_size, stage.max_batch_time_s) == (3, 32, 9.0)
    monkeypatch.setenv("CARPOOL_SET", "stages.double.wokers=3")
    with pytest.raises(ValueError, match="did you mean 'workers'"):
        service_to_score("scored_program:service")


class _Slow:
    """A scorer that takes 50 s to be ready and a second for each of two rows.

    Args:
        clock: The time, which it moves on.
    """

    fields = ()

    def __init__(self, clock: list[float]) -> None:
        self._clock = clock

    def answers(self, rows: Iterable[InputRow]) -> Iterator[list[Answer]]:
        self._clock[0] += 50
        yield []
        for row in rows:
            self._clock[0] += 1
            yield [Answer(bytes(row.line or b"").strip(), False)]

    def summary(self, seconds: float) -> list[str]:
        return []


def test_the_rate_counts_from_ready_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it takes to load a model is not held against the rows."""
    clock = [100.0]
    monkeypatch.setattr(run, "monotonic", lambda: clock[0])
    (tmp_path / "in").write_text("1\n2\n")
    assert score(job(tmp_path / "in", tmp_path / "out"), _Slow(clock)) == 0
    assert "2 rows in 2.0 s, 1 rows/s" in capsys.readouterr().err


class _Client:
    """A client of a server that answers each item with itself, three at a time."""

    def __init__(self, url: str, model: str | None) -> None:
        self.sent: list[Any] = []

    def __enter__(self) -> _Client:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_until_ready(self) -> None:
        pass

    def bunches(self, xs: Iterable[Any], timeout_s: float) -> Iterator[list[Any]]:
        found = [json.loads(bytes(x)) for x in xs]
        for at in range(0, len(found), 3):
            yield found[at : at + 3]


@pytest.mark.parametrize("bad", [0, 1, 3, 4])
def test_rows_that_are_not_sent_keep_their_places(tmp_path: Path, bad: int) -> None:
    """A row that cannot be sent to a server has its error where it stands, first and last ones as well."""
    (tmp_path / "in.csv").write_text("x\n" + "".join("1,2\n" if n == bad else f"{n}\n" for n in range(5)))
    assert score(job(tmp_path / "in.csv", tmp_path / "out"), ServerScorer("http://it", None, _Client)) == 1
    lines = list(map(json.loads, (tmp_path / "out").read_text().splitlines()))
    assert "the header 1" in lines[bad]["error"]["message"] and f"line {bad + 2} of" in lines[bad]["error"]["message"]
    assert [line for n, line in enumerate(lines) if n != bad] == [{"x": n} for n in range(5) if n != bad]


class _FallsSilent(BaseHTTPRequestHandler):
    """Is ready, answers one row, and then says nothing more."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(1)  # a row is on its way
        self.send_response(200)
        self.send_header("content-type", "application/x-ndjson")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"2\r\n7\n\r\n")
        while self.rfile.read(1):  # until the client has gone
            pass

    def log_message(self, *_: object) -> None:
        pass


def test_a_server_that_falls_silent_ends_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose server owes answers and sends nothing ends with an error, and keeps the rows that were answered."""
    monkeypatch.setattr(run, "LONGEST_SILENCE_S", 0.2)
    (tmp_path / "in").write_text("1\n2\n")
    with ThreadingHTTPServer(("127.0.0.1", 0), _FallsSilent) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            scorer = ServerScorer(f"http://127.0.0.1:{server.server_port}", None, carpool.Client)
            with pytest.raises(DeadlineExceeded, match="did not answer in time"):
                score(job(tmp_path / "in", tmp_path / "out"), scorer)
        finally:
            server.shutdown()
            thread.join()
    assert (tmp_path / "out").read_text() == "7\n"


SLOW_PROGRAM = """
import pathlib, time
import carpool


def wait(xs: list[int]) -> list[int]:
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    return xs


service = carpool.Service(carpool.Stage(wait, max_batch_size=4))
"""


@pytest.mark.slow
def test_a_terminal_shows_how_far_it_is(tmp_path: Path) -> None:
    """While nothing is answered, the time goes on each second, so that a person sees that it is alive."""
    pty = pytest.importorskip("pty")
    (tmp_path / "program.py").write_text(SLOW_PROGRAM)
    (tmp_path / "in").write_text("1\n2\n")
    ours, theirs = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-m", "carpool", "score", "program:service", "--in", "in", "--out", "out"],
        cwd=tmp_path, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    while len(set(re.findall(rb"scoring.*?0:00:\d\d", seen))) < 3:
        seen += os.read(ours, 1000)  # until the end: then it raises
    (tmp_path / "go").touch()
    try:
        while piece := os.read(ours, 1000):
            seen += piece
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert running.wait(PATIENCE_S) == 0 and b"2 rows in" in seen
