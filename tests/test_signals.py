"""Signals to a real `carpool serve`: those inside are answered, nothing is left behind, a second signal ends it all."""

from __future__ import annotations

import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.effort import slow_where
from tests.support.http.front import post
from tests.support.http.jobs import job
from tests.support.http.net import Client, Gate
from tests.support.processes import alive, children, guards_of
from tests.support.serving import Served, serve
from tests.support.waiting import PATIENCE_S, wait_until

GATED = "tests.support.http.models:gated"
BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Where `models.Gated` waits."""
    with Gate() as one:
        yield one


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The process ids of a server's workers."""
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
    wait_until(lambda: bool(re.search(rb"(?m)^carpool_queue_length{.*} 1", served.ask("GET", "/metrics")[1])))
    return running, queued


def is_ready(served: Served) -> bool:
    """Whether an orchestrator would be told that the server is ready."""
    status = served.ask("GET", "/readyz")[0]
    assert status in (200, 503)
    return status == 200


@slow_where(lambda number: number == signal.SIGINT)
@BOTH
def test_those_inside_are_answered(gate: Gate, number: signal.Signals) -> None:
    """After SIGTERM requests inside are answered; meanwhile the server is alive, not ready, and
    refuses new ones; then it ends with status 0 and without a traceback.
    """
    with serve(GATED) as served:
        workers = workers_of(served.process)
        running, queued = send_in(served, gate)
        idle = Client(served.port)  # does not hold up the end
        served.process.send_signal(number)
        wait_until(lambda: not is_ready(served))
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


def test_nobody_is_refused_before_balancers_have_noticed() -> None:
    """With `--drain-delay-s` a server answers as before after SIGTERM, although /readyz says that
    it drains; then it ends with status 0, and a client that asked all the time was never refused.
    """
    with serve(GATED, "--drain-delay-s", "3") as served:
        assert is_ready(served)
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: not is_ready(served))
        assert json.loads(served.ask("GET", "/readyz")[1])["error"]["code"] == "draining"
        for _ in range(5):
            status, _, headers = served.ask("POST", "/predict", {"value": 2})
            assert (status, headers["connection"]) == (200, "close")
        assert served.wait() == 0
    assert any("serving for 3 s until requests are refused" in line for line in served.log)


@pytest.mark.fault("F24")
@slow_where(lambda number: number == signal.SIGTERM)
@BOTH
def test_a_second_signal_ends_it_at_once(gate: Gate, number: signal.Signals) -> None:
    """A second signal ends the server at once, although a call is running, whose client hears no
    more; its status is that of a process that was killed.
    """
    with serve(GATED) as served:
        workers = workers_of(served.process)
        running, queued = send_in(served, gate)
        served.process.send_signal(number)
        wait_until(lambda: not is_ready(served))
        served.process.send_signal(number)
        assert served.wait() == 128 + number
        wait_until(lambda: not any(alive(pid) for pid in workers))
        assert running.at_end() and queued.at_end()
        running.close()
        queued.close()
    assert "second signal: ending at once" in served.log[-1]
    assert "Traceback" not in "".join(served.log)


@pytest.mark.fault("F23")
@slow_where(lambda number: number == signal.SIGINT)
@BOTH
def test_a_signal_while_the_model_is_loading(
    gate: Gate, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a signal the server does not wait for a load, which never ends here, and leaves no
    worker behind.
    """
    monkeypatch.setenv("CARPOOL_TEST_GATE", gate.path)
    with serve("tests.support.http.models:slow_to_load", ready=False) as served:
        gate.knocked()
        workers = workers_of(served.process)
        served.process.send_signal(number)
        assert served.wait() == 0
        wait_until(lambda: not any(alive(pid) for pid in workers))
    assert "stopped" in served.log[-1]
    assert "Traceback" not in "".join(served.log)


def test_ctrl_c_while_the_module_is_imported(gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the module is imported ends the server as a program that was interrupted,
    without a traceback.
    """
    text = f"import socket\nsock = socket.socket(socket.AF_UNIX)\nsock.connect({gate.path!r})\nsock.recv(1)\n"
    (tmp_path / "heavy.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    with serve("heavy:service", ready=False) as served:
        gate.knocked()
        served.process.send_signal(signal.SIGINT)
        assert served.wait() == 128 + signal.SIGINT
    assert "Traceback" not in "".join(served.log)


@pytest.mark.fault("F18")
def test_no_worker_outlives_a_killed_server(gate: Gate) -> None:
    """Soon after `kill -9` of the server in the middle of a call no worker is alive."""
    with serve(GATED) as served:
        workers = workers_of(served.process)
        running, queued = send_in(served, gate)
        served.process.kill()
        served.process.wait(PATIENCE_S)
        wait_until(lambda: not any(alive(pid) for pid in workers))
        running.close()
        queued.close()


@pytest.mark.fault("F24")
@slow_where(lambda number: number == signal.SIGTERM)
@BOTH
def test_a_signal_for_all_processes_is_one_shutdown(gate: Gate, number: signal.Signals) -> None:
    """If a supervisor or terminal sends the signal to every process, workers and guard leave it to
    the server, which finishes in peace.
    """
    with serve(GATED) as served:
        everybody = workers_of(served.process)
        running, queued = send_in(served, gate)
        for pid in (*everybody, served.process.pid):
            os.kill(pid, number)
        wait_until(lambda: not is_ready(served))
        assert all(alive(pid) for pid in everybody)
        gate.open()
        assert [json.loads(client.answer().body)["value"] for client in (running, queued)] == [0, 1]
        assert served.wait() == 0
        for client in (running, queued):
            client.close()
    assert not any(alive(pid) for pid in everybody)
    assert "Traceback" not in "".join(served.log)


@pytest.mark.fault("F21")
def test_under_load_every_request_gets_its_answer() -> None:
    """When SIGTERM comes while eight clients ask and ask on their connections, they get 200 or,
    from then on, 503, and none is cut off.
    """
    told: list[list[tuple[float, int]]] = [[] for _ in range(8)]

    def client(port: int, told: list[tuple[float, int]]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        while not told or told[-1][1] == 200:
            began = time.monotonic()
            try:
                connection.request("POST", "/predict", b"0.01", {"content-type": "application/json"})
                response = connection.getresponse()
                response.read()
                told.append((began, response.status))
            except (OSError, http.client.HTTPException):
                told.append((began, 0))
        connection.close()

    with serve("tests.support.serving_models:sleeps") as served:
        clients = [threading.Thread(target=client, args=(served.port, mine)) for mine in told]
        for each in clients:
            each.start()
        wait_until(lambda: min(map(len, told)) > 10)
        signalled = time.monotonic()
        served.process.terminate()
        for each in clients:
            each.join()
        assert served.wait() == 0

    assert {status for mine in told for began, status in mine if began < signalled} <= {200, 503}


@pytest.mark.fault("F22")
def test_a_hung_call_does_not_hold_up_the_end() -> None:
    """When SIGTERM comes while a call hangs, it is given up as ever, its client hears an error, and
    the server ends.
    """
    with serve("tests.support.serving_models:hangs") as served, Client(served.port) as client:
        client.send(post(b"600.0"))
        wait_until(lambda: inside(served) == 1)
        served.process.terminate()
        assert client.answer().status in (500, 504)
        assert served.wait() == 0


def inside(served: Served) -> int:
    """How many requests are in the server, as `/metrics` says."""
    found = re.search(rb"(?m)^carpool_in_flight_requests{.*} (\d+)", served.ask("GET", "/metrics")[1])
    assert found is not None
    return int(found[1])


# -- pauses


@pytest.mark.fault("F60")
def test_a_server_that_was_stopped_goes_on_as_if_nothing_had_happened() -> None:
    """A server that was stopped for longer than calls may last and then continued answers; requests
    that expired hear so, and the workers are the same.
    """
    with (
        serve("tests.support.serving_models:sleeps") as served,
        Client(served.port) as patient,
        Client(served.port) as hasty,
    ):
        workers = workers_of(served.process)
        patient.send(post(b"1.4"))
        hasty.send(post(b"1.4", "/predict", "X-Request-Timeout-Ms: 2000"))  # the workers answer while it stands still
        wait_until(lambda: inside(served) == 2)
        os.kill(served.process.pid, signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(served.process.pid, signal.SIGCONT)
        assert patient.answer().status == 200
        assert hasty.answer().status == 504
        assert served.ask("POST", "/predict", 0.0)[0] == 200
        assert workers_of(served.process) == workers


@pytest.mark.fault("F60")
@pytest.mark.slow
def test_a_pause_of_all_is_nobodys_hang() -> None:
    """When all processes are paused in the middle of a call, as containers are, the worker has its
    time anew and answers.
    """
    with serve("tests.support.serving_models:sleeps") as served, Client(served.port) as client:
        workers = workers_of(served.process)
        client.send(post(b"1.5"))
        wait_until(lambda: inside(served) == 1)
        for pid in (served.process.pid, *workers):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(4.0)
        os.kill(served.process.pid, signal.SIGCONT)  # first: an answer that is there already tells of no hang
        wait_until(lambda: any("this process did not run for" in line for line in served.log))
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
        assert client.answer().status == 200
        assert workers_of(served.process) == workers


# -- no file descriptors


@pytest.mark.fault("F54")
def test_without_file_descriptors_open_connections_are_served() -> None:
    """Without descriptors nobody new comes in, a worker that dies may have to wait for its
    successor, and nothing spins; once there are some again, all is well.
    """
    with serve("tests.support.serving_models:sleeps") as served, Client(served.port) as client:
        pid = served.process.pid
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        assert client.ask(post(b"0.0")).status == 200
        highest = max(int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir())
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 1, hard))
        newcomers = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(50)]
        guards = guards_of(pid)
        victim = next(worker for worker in workers_of(served.process) if worker not in guards)
        os.kill(victim, signal.SIGKILL)
        busy_before, began = cpu_seconds(pid), time.monotonic()
        for _ in range(20):
            assert client.ask(post(b"0.0")).status == 200
            time.sleep(0.1)
        assert cpu_seconds(pid) - busy_before < 0.5 * (time.monotonic() - began)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        wait_until(lambda: len(workers_of(served.process)) == 3)  # two workers and the guard
        wait_until(lambda: served.ask("POST", "/predict", 0.0)[0] == 200)
        for newcomer in newcomers:
            newcomer.close()
    assert not any("has failed" in line for line in served.log)


def cpu_seconds(pid: int) -> float:
    """The processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
