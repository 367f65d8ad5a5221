"""Signals to a real `carpool serve`: those inside are answered, nothing is left behind, a second signal ends it all."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drive.test_faults import alive, children, wait_until
from tests.http.net import PATIENCE_S, Client, Gate, until
from tests.http.test_statuses import job
from tests.serving import Served, serve

GATED = "tests.http.models:gated"
BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Where `models.Gated` waits."""
    with Gate() as one:
        yield one


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Their process ids."""
    pids = children(process.pid)
    assert pids
    assert all(alive(pid) for pid in pids)
    return pids


def send_in(served: Served, gate: Gate) -> tuple[Client, Client]:
    """Two clients: the request of the first is running, that of the second is queued."""
    running, queued = Client(served.port), Client(served.port)
    running.send(job(0, gate, path="/predict"))
    gate.knocked()
    queued.send(job(1, path="/predict"))
    until(lambda: bool(re.search(rb"(?m)^carpool_queue_length{.*} 1", served.ask("GET", "/metrics")[1])))
    return running, queued


def is_ready(served: Served) -> bool:
    """What an orchestrator is told."""
    status = served.ask("GET", "/readyz")[0]
    assert status in (200, 503)
    return status == 200


@BOTH
def test_those_inside_are_answered(gate: Gate, number: signal.Signals) -> None:
    """Meanwhile it is alive, not ready, and refuses what is new; then it ends with status 0 and without a traceback."""
    with serve(GATED) as served:
        workers = workers_of(served.process)
        running, queued = send_in(served, gate)
        idle = Client(served.port)  # does not hold up the end
        served.process.send_signal(number)
        until(lambda: not is_ready(served))
        assert served.ask("GET", "/livez")[0] == 200
        status, body, headers = served.ask("POST", "/predict", {"value": 2})
        assert (status, json.loads(body)["error"]["code"]) == (503, "draining")
        assert int(headers["retry-after"]) >= 1
        assert served.process.poll() is None
        gate.open()
        assert [json.loads(client.answer().body)["value"] for client in (running, queued)] == [0, 1]
        assert served.wait() == 0
        assert idle.at_end()
        for client in (running, queued, idle):
            client.close()
    assert not any(alive(pid) for pid in workers)
    assert any(f"{number.name}: no new requests" in line for line in served.log)
    assert "stopped" in served.log[-1]
    assert "Traceback" not in "".join(served.log)


@BOTH
def test_a_second_signal_ends_it_at_once(gate: Gate, number: signal.Signals) -> None:
    """Although a call is running, whose client hears no more; the status is the one of a process that was killed."""
    with serve(GATED) as served:
        workers = workers_of(served.process)
        running, queued = send_in(served, gate)
        served.process.send_signal(number)
        until(lambda: not is_ready(served))
        served.process.send_signal(number)
        assert served.wait() == 128 + number
        until(lambda: not any(alive(pid) for pid in workers))
        assert running.at_end() and queued.at_end()
        running.close()
        queued.close()
    assert "second signal: ending at once" in served.log[-1]
    assert "Traceback" not in "".join(served.log)


@BOTH
def test_a_signal_while_the_model_is_loading(
    gate: Gate, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for the load, which never ends here, and leaves no worker behind."""
    monkeypatch.setenv("CARPOOL_TEST_GATE", gate.path)
    with serve("tests.http.models:slow_to_load", ready=False) as served:
        gate.knocked()
        workers = workers_of(served.process)
        served.process.send_signal(number)
        assert served.process.wait(timeout=4.0) == 0  # a worker that is ready would have 5 s to tear down
        served.wait()
        until(lambda: not any(alive(pid) for pid in workers))
    assert "stopped" in served.log[-1]
    assert "Traceback" not in "".join(served.log)


def test_ctrl_c_while_the_module_is_imported(gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to finish yet: it ends, as a program that was interrupted, without a traceback."""
    text = f"import socket\nsock = socket.socket(socket.AF_UNIX)\nsock.connect({gate.path!r})\nsock.recv(1)\n"
    (tmp_path / "heavy.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with serve("heavy:service", ready=False) as served:
        gate.knocked()
        served.process.send_signal(signal.SIGINT)
        assert served.wait() == 128 + signal.SIGINT
    assert "Traceback" not in "".join(served.log)


def test_no_worker_outlives_a_killed_server(gate: Gate) -> None:
    """`kill -9` of the server in the middle of a call: two seconds later no worker is alive."""
    with serve(GATED) as served:
        workers = workers_of(served.process)
        running, queued = send_in(served, gate)
        served.process.kill()
        served.process.wait(PATIENCE_S)
        wait_until(lambda: not any(alive(pid) for pid in workers), timeout_s=2.0)
        running.close()
        queued.close()
