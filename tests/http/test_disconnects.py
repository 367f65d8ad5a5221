"""Real clients that leave, on both event loops: what is queued for them is taken out, and who waits is answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
import uvloop

from carpool import Service, Stage
from carpool.http.app import App
from tests.support.http import models
from tests.support.http.jobs import job
from tests.support.http.net import Client, Gate, RunningServer, serving, waiting


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def running(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    """One worker, batches of one, of which none goes ahead of time: that could not be taken back."""
    loop = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
    with serving(
        App(Service(Stage(models.Gated, max_batch_size=1, idempotent=False), name="gated")), loop=loop
    ) as server:
        yield server


@pytest.mark.fault("F33")
@pytest.mark.parametrize("how", ["close", "reset", "close after a pipelined row"])
def test_a_client_that_leaves_while_queued(running: RunningServer, gate: Gate, how: str) -> None:
    """If a client leaves while its requests are queued, the model never sees them; those before and
    behind are answered.
    """
    before = running.outcomes().get("cancelled", 0)
    with Client(running.port) as busy, Client(running.port) as behind:
        gone = Client(running.port)
        busy.send(job(1, gate, path="/predict"))
        gate.knocked()
        count = 5 if "row" in how else 1
        gone.send(job(666, path="/predict") * count)
        running.wait_until(lambda: waiting(running.app) == count)
        behind.send(job(2, path="/predict"))
        running.wait_until(lambda: waiting(running.app) == count + 1)
        if how == "reset":
            gone.reset()
        else:
            gone.close()
        running.wait_until(lambda: waiting(running.app) == 1)
        gate.open()
        assert [json.loads(client.answer().body)["value"] for client in (busy, behind)] == [1, 2]
        seen = json.loads(busy.ask(job(-1, path="/predict")).body)["seen"]
    assert 666 not in seen
    assert running.outcomes()["cancelled"] == before + count


@pytest.mark.fault("F35")
def test_a_client_that_half_closes(running: RunningServer, gate: Gate) -> None:
    """A client that has closed its own side after a request gets its answer, however long that
    takes, and then the end.
    """
    with Client(running.port) as busy, Client(running.port) as half:
        busy.send(job(1, gate, path="/predict"))
        gate.knocked()
        half.send(job(3, path="/predict") + job(4, path="/predict"))
        half.end()
        running.wait_until(lambda: waiting(running.app) == 2)
        half.sock.settimeout(0.3)  # the probe for its presence has been sent by then
        with pytest.raises(TimeoutError):
            half.answer()
        half.sock.settimeout(20.0)
        gate.open()
        assert [json.loads(half.answer().body)["value"] for _ in range(2)] == [3, 4]
        assert half.at_end()
        assert json.loads(busy.answer().body)["value"] == 1


def test_a_client_that_leaves_while_its_batch_runs(running: RunningServer, gate: Gate) -> None:
    """A client that leaves while its batch runs disturbs nothing: the next one is served by the
    same worker.
    """
    pids = running.pids
    gone = Client(running.port)
    gone.send(job(5, gate, path="/predict"))
    gate.knocked()
    gone.reset()
    gate.open()
    with Client(running.port) as client:
        assert json.loads(client.ask(job(6, path="/predict")).body)["value"] == 6
    assert running.pids == pids


def test_a_hundred_clients_that_come_and_go(running: RunningServer) -> None:
    """When a hundred clients connect and reset, each at another point of a request, no connection
    stays behind.
    """
    request = job(7, path="/predict")
    for n in range(100):
        client = Client(running.port)
        client.send(request[: n * 2])
        client.reset()
    with Client(running.port) as client:
        assert json.loads(client.ask(request).body)["value"] == 7
    state = running.server.state
    assert state is not None
    running.wait_until(lambda: not state.connections)
