"""Where logs and workers' output go may block, be full or be closed: serving goes on, and it ends as it should."""

from __future__ import annotations

import http.client
import io
import json
import logging
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from carpool.engine.observe import log
from carpool.engine.observe.log import _MOST_LINES, Outlet
from tests.effort import slow_where
from tests.support.waiting import wait_until

PROGRAM = """
    import sys, time
    import carpool
    from tests.support import models

    if __name__ == "__main__":
        with carpool.Service(carpool.Stage(models.Prints)).run() as service:
            for n in range(400):
                assert service.predict(1000) == 1000
            open(sys.argv[1], "w").write("all answered")
"""


class Waits(io.StringIO):
    """A stream that blocks until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def write(self, text: str) -> int:
        self.go.wait(20)
        return super().write(text)


def test_lines_come_out_in_their_order() -> None:
    """Lines come out in their order, all of them once they are waited for."""
    stream = io.StringIO()
    outlet = Outlet(lambda: stream)
    for n in range(100):
        outlet.write(f"line {n}")
    outlet.flush(20)

    assert stream.getvalue().splitlines() == [f"line {n}" for n in range(100)]


def test_what_nobody_reads_is_dropped_and_counted() -> None:
    """Writing never blocks: what nobody reads is bounded, then dropped, and how much is missing is
    said where it is missing.
    """
    stream = Waits()
    outlet = Outlet(lambda: stream)
    began = time.monotonic()
    for n in range(_MOST_LINES + 1000):
        outlet.write(f"line {n}")
    assert time.monotonic() - began < 5
    assert 999 <= outlet.dropped <= 1000  # the thread may have taken one already
    stream.go.set()
    outlet.flush(20)
    outlet.write("afterwards")
    outlet.flush(20)

    lines = stream.getvalue().splitlines()
    assert lines[0] == "line 0"
    assert "lines were dropped here" in lines[-2]
    assert lines[-1] == "afterwards"


def test_the_line_about_dropped_lines_is_written_as_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a log of which each line is an object, the line that counts dropped ones is one, too."""
    stream = Waits()
    monkeypatch.setattr(sys, "stderr", stream)
    handler = log._ThroughOutlet()
    handler.setFormatter(log.JsonLines())
    for n in range(_MOST_LINES + 1000):
        handler.emit(logging.LogRecord("carpool", logging.INFO, "", 0, f"line {n}", None, None))
    stream.go.set()
    handler._outlet.flush(20)
    handler.emit(logging.LogRecord("carpool", logging.INFO, "", 0, "afterwards", None, None))
    handler._outlet.flush(20)

    told = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert "lines were dropped here" in told[-2]
    assert told[-1] == "afterwards"


def test_waiting_for_it_is_bounded() -> None:
    """Waiting for lines to come out is bounded, so that the end of a program does not hang."""
    stream = Waits()
    outlet = Outlet(lambda: stream)
    outlet.write("never")
    began = time.monotonic()
    outlet.flush(0.1)
    assert time.monotonic() - began < 5
    stream.go.set()


def test_a_stream_that_fails_is_passed_over() -> None:
    """If a stream is closed its line is lost, and the next one finds the stream that has replaced
    it.
    """
    closed, open_ = io.StringIO(), io.StringIO()
    closed.close()
    streams = iter([closed, open_])
    outlet = Outlet(lambda: next(streams))
    outlet.write("lost")
    outlet.write("kept")
    outlet.flush(20)

    assert open_.getvalue() == "kept\n"


def test_lines_go_where_a_notebook_shows_them() -> None:
    """If a stream is not a file, lines are written to the stream, also if it has a descriptor: a
    notebook's stream has that of the terminal in which the notebook was started.
    """
    ours, terminal = os.pipe()

    class Cell(io.StringIO):
        def fileno(self) -> int:
            return terminal

    cell = Cell()
    outlet = Outlet(lambda: cell)
    outlet.write("shown")
    outlet.flush(20)
    os.close(terminal)
    with open(ours, "rb") as seen_in_the_terminal:
        assert (cell.getvalue(), seen_in_the_terminal.read()) == ("shown\n", b"")


# -- real servers and programs


@pytest.fixture
def unread() -> Iterator[int]:
    """The end to write to of a pipe that nobody reads."""
    ours, theirs = os.pipe()
    yield theirs
    os.close(ours)
    os.close(theirs)


@pytest.mark.fault("F57")
@slow_where(lambda kind: kind != "full")
@pytest.mark.parametrize("kind", ["unread", "full", "closed"])
def test_a_server_whose_log_goes_nowhere_serves_on(kind: str, unread: int) -> None:
    """With stderr at a pipe that nobody reads, at a full disk or at a closed pipe, a server still
    answers a megabyte of log later, and ends with status 0.
    """
    if kind == "full":
        stderr = os.open("/dev/full", os.O_WRONLY)
    elif kind == "closed":
        ours, stderr = os.pipe()
        os.close(ours)
    else:
        stderr = os.dup(unread)
    port = free_port()
    command = [sys.executable, "-m", "carpool", "serve", "tests.support.serving_models:prints", "--port", str(port)]
    process = subprocess.Popen([*command, "--log", "json"], stderr=stderr, stdout=subprocess.DEVNULL)
    os.close(stderr)
    try:
        wait_until(lambda: answers(port, "GET", "/readyz") == b"ready\n")
        for _ in range(20):
            assert answers(port, "POST", "/predict", 50_000) == b"50000"
        process.terminate()
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def answers(port: int, method: str, path: str, body: object = None) -> bytes | None:
    """The body of a good answer; None if there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        data = response.read()
        return data if response.status == 200 else None
    except ConnectionRefusedError:
        return None
    finally:
        connection.close()


@pytest.mark.fault("F57")
def test_a_program_whose_output_nobody_reads_goes_on(unread: int, tmp_path: Path) -> None:
    """If nobody reads a program's output, what its workers print waits and is then dropped;
    requests are answered and the program ends.
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path / "done")]
    process = subprocess.Popen(command, stdout=unread, env={**os.environ, "PYTHONPATH": path})
    try:
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "done").read_text() == "all answered"
