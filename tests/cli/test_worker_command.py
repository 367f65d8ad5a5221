"""`carpool worker`: it joins a service that `carpool serve` runs, and says in one line what it lacks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.prepared import carpool_command
from tests.support.serving import serve
from tests.support.sources import ROOT
from tests.support.waiting import wait_until

PROGRAM = "tests.support.joining_program:service"


def worker(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "carpool", "worker", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def run_command(*arguments: str) -> str:
    """What a command prints that ends well."""
    done = carpool_command(*arguments, cwd=ROOT)
    done.check_returncode()
    return done.stdout


def test_a_worker_joins_a_server(tmp_path: Path) -> None:
    """A worker joins by a path, is shown in /metrics, answers, and leaves in good order; the server is
    ready while it has one.
    """
    path = str(tmp_path / "gate.sock")
    with serve(PROGRAM, "--join", path, folder=ROOT) as served:
        assert served.ask("GET", "/readyz")[0] == 503
        with worker(PROGRAM, "--connect", path) as process:
            wait_until(lambda: served.ask("GET", "/readyz")[0] == 200)
            assert json.loads(served.ask("POST", "/predict", 7)[1]) == [process.pid, 7]
            status, body, _ = served.ask("POST", "/admin/reload", {})
            assert (status, json.loads(body)["joined"]) == (200, {"where": {"Where": 1}})
            told = run_command("reload", f"http://127.0.0.1:{served.port}")
            assert "where: Where has 1 joined worker with the old model: restart them where they run" in told
            wait_until(lambda: any("1 joined worker with the old model" in line for line in served.log))
            assert 'carpool_worker_info{actor="",device="",host="' in served.ask("GET", "/metrics")[1].decode()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        wait_until(lambda: served.ask("GET", "/readyz")[0] == 503)


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--connect", "x"], 2, "'x' is not an address: write HOST:PORT"),
        (["--connect", "127.0.0.1:1"], 2, "so name a file with a token"),
        (["--connect", "./nowhere", "--wait-s", "0"], 1, "the service at ./nowhere cannot be reached"),
        (["--connect", "./x", "--stage", "Here"], 2, "lets no worker join a stage Here: choose one of Where"),
    ],
)
@pytest.mark.slow
def test_mistakes_are_told_in_one_line(arguments: list[str], status: int, text: str) -> None:
    """What is wrong with a command is said in one line."""
    process = worker(PROGRAM, *arguments)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == status
    assert text in errors
    assert "Traceback" not in errors
