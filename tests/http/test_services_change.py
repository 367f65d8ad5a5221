"""Services are added to a server that runs, and removed, without a restart and without loss."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from carpool.cli import cli
from carpool.cli import operate_commands as operate
from carpool.errors import Unavailable
from carpool.http.app import App
from carpool.service.handle import AsyncHandle
from tests.support.http import models
from tests.support.http.front import get, post
from tests.support.http.jobs import job
from tests.support.http.net import Client, Gate, RunningServer, code_of, predict, serving
from tests.support.http.wire import Answer
from tests.support.processes import alive
from tests.support.serving import serve
from tests.support.waiting import PATIENCE_S

MODELS = "tests.support.http.models"
JSON = "Content-Type: application/json"
LATE = """
import carpool

class Ten(carpool.Model):
    examples = (1,)
    def predict(self, x: int) -> int:
        return 10 * x

class Fails(carpool.Model):
    def setup(self) -> None:
        raise ValueError("no weights here")
    def predict(self, x: int) -> int:
        return x

service = carpool.Service(Ten)
fails = carpool.Service(Fails)
"""


@pytest.fixture
def running() -> Iterator[RunningServer]:
    """A server of one service, in this process."""
    with serving(App(models.scale)) as one:
        yield one


@pytest.fixture(scope="module")
def unchanged() -> Iterator[RunningServer]:
    """One like `running`, for orders that change nothing."""
    with serving(App(models.scale)) as one:
        yield one


def ordered(running: RunningServer, change: str, **order: Any) -> Answer:
    """Send an order to the admin address, and return the answer."""
    with Client(running.port) as client:
        return client.ask(post(json.dumps(order).encode(), f"/admin/services/{change}", JSON))


def page(running: RunningServer, path: str) -> bytes:
    """The body of a page."""
    with Client(running.port) as client:
        return client.ask(get(path), "GET").body


def test_a_service_comes_and_goes(running: RunningServer) -> None:
    """A service that is added is served, counted and described as those from the start, also by the
    protocols of others; once it is removed, nothing of it is left.
    """
    with Client(running.port) as client:
        assert client.ask(get("/v2/models/csv/ready"), "GET").status == 404
        assert ordered(running, "add", target=f"{MODELS}:csv").status == 200
        assert client.ask(post(b"1,2", "/models/csv/predict", "Content-Type: text/csv")).status == 200
        assert client.ask(get("/v2/models/csv/ready"), "GET").status == 200
    state, (scale, csv) = running.server.state, running.app.endpoints
    assert state is not None
    assert state.shares.guaranteed == {scale: 256, csv: 256}
    assert b'carpool_connections{model="csv"}' in page(running, "/metrics")
    pids = running.pids
    assert len(pids) == 2
    assert b'model="csv"' in page(running, "/metrics")
    assert b"/models/csv/predict" in page(running, "/openapi.json")
    names = [service["name"] for service in json.loads(page(running, "/dashboard/data"))["figures"]["services"]]
    assert names == ["scale", "csv"]

    assert ordered(running, "remove", service="csv").status == 200
    assert state.shares.guaranteed == state.bodies.guaranteed == {}
    for path, method in (("/models/csv/predict", "POST"), ("/v2/models/csv/ready", "GET")):
        with Client(running.port) as client:
            assert client.ask(get(path, method=method), method).status == 404
    for path in ("/metrics", "/openapi.json", "/dashboard/data", "/"):
        assert not re.search(rb'"csv"|/models/csv|^csv:', page(running, path), re.MULTILINE), path
    assert page(running, "/readyz") == b"ready\n"
    assert not alive(pids[1])
    assert predict(running.port, 1.0).status == 200


def test_the_first_address_goes_to_whoever_is_added_when_it_is_free(running: RunningServer) -> None:
    """A service that is added answers at /predict if no other one does; the last one stays."""
    assert ordered(running, "remove", service="scale").status == 400
    assert ordered(running, "add", target=f"{MODELS}:echo").status == 200
    assert ordered(running, "remove", service="scale").status == 200
    assert predict(running.port, 1.0).status == 404
    assert ordered(running, "add", target=f"{MODELS}:scale").status == 200
    assert predict(running.port, 1.0).status == 200
    assert predict(running.port, 1.0, "/models/scale/predict").status == 200


@pytest.mark.parametrize(
    ("change", "order", "status", "text"),
    [
        ("add", {"target": "no.such.module:service"}, 400, "there is no module 'no'"),
        ("add", {"target": f"{MODELS}:nothing"}, 400, "has no attribute 'nothing'; it has scale"),
        ("add", {"target": f"{MODELS}:Scale"}, 400, "not a carpool.Service"),
        ("add", {"target": "service"}, 400, "write module:attribute"),
        ("add", {"target": "raises_at_import:service"}, 400, "cannot be imported: SystemExit: 3"),
        ("add", {"target": f"{MODELS}:scale"}, 400, "two services are called 'scale'"),
        ("add", {"target": f"{MODELS}:broken"}, 500, "Broken"),
        ("add", {"name": "scale"}, 400, "field"),
        ("remove", {"service": "csv"}, 400, "there is no service 'csv'; there is scale"),
    ],
)
def test_what_goes_wrong_leaves_everything_as_it_was(
    unchanged: RunningServer, change: str, order: Any, status: int, text: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """An order that cannot be carried out is answered with the reason, and changes nothing."""
    (tmp_path / "raises_at_import.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    running = unchanged
    before = running.pids, page(running, "/openapi.json")
    answer = ordered(running, change, **order)
    assert (answer.status // 100, text in answer.body.decode()) == (status // 100, True), answer.body
    assert (running.pids, page(running, "/openapi.json")) == before
    assert predict(running.port, 1.0).status == 200
    assert running.app.coming == []


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (OSError("too many processes"), "OSError: too many processes"),
        (KeyError("place"), "KeyError: 'place'"),
        (SystemExit(3), "SystemExit: 3"),
        (asyncio.CancelledError(), "CancelledError"),
    ],
)
def test_an_order_that_fails_for_any_reason_is_told_the_reason(
    unchanged: RunningServer, raised: BaseException, text: str, monkeypatch: Any, caplog: Any
) -> None:
    """An order that fails in a way of which nobody has thought is a 500 that names the error, and
    the log has its traceback; the server goes on.
    """

    async def fails(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(AsyncHandle, "scale", fails)
    with Client(unchanged.port) as client:
        answer = client.ask(post(b'{"workers": 2}', "/admin/scale", JSON))
    told = json.loads(answer.body)["error"]
    assert (answer.status, told["code"], told["message"]) == (500, "internal_error", text)
    assert told["workers"] == {"scale": {"Scale": 1}}
    assert "an order could not be carried out" in caplog.text
    assert predict(unchanged.port, 1.0).status == 200


def test_an_order_is_told_that_the_server_ends(running: RunningServer, monkeypatch: Any) -> None:
    """An order that is under way when the server stops is answered 503, `draining`."""
    begun = threading.Event()

    async def goes_on(*_: Any, **__: Any) -> None:
        begun.set()
        await asyncio.sleep(60)

    monkeypatch.setattr(AsyncHandle, "scale", goes_on)
    with Client(running.port) as client:
        client.send(post(b'{"workers": 2}', "/admin/scale", JSON))
        assert begun.wait(PATIENCE_S)
        running.wait(running.app.stop())
        answer = client.answer()
    assert (answer.status, code_of(answer)) == (503, "draining")


def test_what_is_inside_is_answered_first() -> None:
    """A service that is removed answers the requests inside, and refuses new ones; meanwhile the
    server is ready, and the others answer.
    """
    with Gate() as gate, serving(App(models.scale, models.gated)) as running, Client(running.port) as inside:
        inside.send(job(7, gate, path="/models/gated/predict"))
        gate.knocked()
        with ThreadPoolExecutor(1) as pool:
            removed = pool.submit(ordered, running, "remove", service="gated")
            running.wait_until(lambda: running.app.endpoints[1].is_leaving)
            assert predict(running.port, {"value": 1}, "/models/gated/predict").status == 404
            assert page(running, "/readyz") == b"ready\n"
            assert predict(running.port, 1.0).status == 200
            gate.open()
            assert json.loads(inside.answer().body)["value"] == 7
            assert removed.result().status == 200
        assert [endpoint.name for endpoint in running.app.endpoints] == ["scale"]


def test_the_server_ends_while_a_service_is_added(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is stopped while a service loads stops that one, too, and tells who ordered it."""
    monkeypatch.setenv("CARPOOL_TEST_GATE", gate.path)
    with serving(App(models.scale)) as running, ThreadPoolExecutor(1) as pool:
        added = pool.submit(ordered, running, "add", target=f"{MODELS}:slow_to_load")
        gate.knocked()
        (pid,) = running.call(lambda: [pid for each in running.app.coming for pid in each.handle.pids])
        running.wait(running.server.stop())
        assert added.result().status == 503
        assert not alive(pid)


def test_its_last_healthy_service_may_be_one_that_was_added(running: RunningServer) -> None:
    """A server goes on as long as one service can answer, also if that one was added later."""
    failed = running.call(lambda: running.loop.create_task(running.app.failed()))
    assert ordered(running, "add", target=f"{MODELS}:echo").status == 200
    first, second = [endpoint.driver for endpoint in running.app.endpoints]
    assert first is not None and second is not None
    running.call(lambda: first.stage_failed(Unavailable("no worker lives", code="stage_failed")))
    assert predict(running.port, 1.0, "/models/echo/predict").status == 200
    assert not running.call(failed.done)
    running.call(lambda: second.stage_failed(Unavailable("no worker lives", code="stage_failed")))
    running.wait_until(failed.done)


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By `carpool services` a server gets a service whose file was written after its start, and
    loses it; where the server needs a key, so do they.
    """
    (tmp_path / "program.py").write_text(LATE.replace("10 * x", "x").replace("Ten", "One"))
    (tmp_path / "keys").write_text("me:a-long-enough-key\n")
    (tmp_path / "mine").write_text("a-long-enough-key\n")
    with serve("program:service", "--api-keys", "keys", folder=tmp_path) as served:
        url, mine = f"http://127.0.0.1:{served.port}", tmp_path / "mine"
        (tmp_path / "late.py").write_text(LATE)
        with pytest.raises(SystemExit):
            operate.add("late:service", url=url)
        assert "A key is needed" in capsys.readouterr().err
        with pytest.raises(SystemExit, match="0"):
            cli(["reload", url, "--key-file", str(mine)])
        assert "One reloaded" in capsys.readouterr().out
        operate.add("late:service", url=url, key_file=mine)
        assert capsys.readouterr().out.splitlines()[1] == "Ten is served: Ten has 1 worker"
        assert served.ask("POST", "/models/Ten/predict", 2, x_api_key="a-long-enough-key")[:2] == (200, b"20")
        with pytest.raises(SystemExit):
            operate.add("late:fails", url=url, key_file=mine)
        assert "no weights here" in capsys.readouterr().err
        operate.remove("Ten", url=url, key_file=mine)
        assert capsys.readouterr().out == "One is served: One has 1 worker\n"
        assert served.ask("POST", "/models/Ten/predict", 2, x_api_key="a-long-enough-key")[0] == 404
    assert "late" not in sys.modules
