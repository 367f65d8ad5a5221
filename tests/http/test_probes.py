"""/livez and /readyz: what an orchestrator is told, and when."""

from __future__ import annotations

import json
import logging
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from carpool import Model, Service, Stage
from carpool.http.app import App
from tests.support.http import models
from tests.support.http.front import Front, get, post
from tests.support.http.jump import on_a_jumping_loop, turns
from tests.support.http.net import Client, Gate, RunningServer, code_of, predict, serving
from tests.support.http.wire import Answer
from tests.support.waiting import PATIENCE_S, wait_until


def probe(running: RunningServer, path: str, method: str = "GET") -> Answer:
    """Ask for a probe on a connection of its own."""
    with Client(running.port) as client:
        return client.ask(get(path, method=method), method)


def models_of(answer: Answer) -> dict[str, str]:
    """What an answer says of each model that is not ready."""
    models: dict[str, str] = json.loads(answer.body)["error"]["models"]
    return models


@pytest.mark.parametrize(("path", "text"), [("/livez", b"ok\n"), ("/readyz", b"ready\n")])
def test_all_is_well(server: RunningServer, path: str, text: bytes) -> None:
    """Probes answer 200 with a short text when all is well, and HEAD the same without it."""
    answer = probe(server, path)
    assert (answer.status, answer.body, answer.headers["content-type"]) == (200, text, "text/plain; charset=utf-8")
    head = probe(server, path, "HEAD")
    assert (head.status, head.body, head.headers["content-length"]) == (200, b"", str(len(text)))


@pytest.mark.fault("F25")
def test_while_it_starts(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """While starting a server is live from the first moment, and ready when all services are; those
    that are up already are asked at once.
    """
    monkeypatch.setenv("CARPOOL_TEST_GATE", gate.path)
    running = RunningServer(App(models.scale, models.slow_to_load))
    running.listen()
    try:
        assert probe(running, "/livez").status == 200
        assert probe(running, "/readyz").status == 503
        with ThreadPoolExecutor(1) as pool:
            start = pool.submit(running.start)
            gate.knocked()
            answer = probe(running, "/readyz")
            assert (answer.status, code_of(answer)) == (503, "starting")
            assert "retry-after" in answer.headers
            running.wait_until(lambda: running.app.endpoints[0].driver is not None)
            assert models_of(probe(running, "/readyz")) == {"slow": "slow is starting"}
            own = probe(running, "/models/slow/ready")
            assert (own.status, code_of(own), models_of(own)) == (503, "starting", {"slow": "slow is starting"})
            assert probe(running, "/models/scale/ready").status == 200
            assert predict(running.port, 1.0).status == 200
            of_slow = predict(running.port, 1.0, "/models/slow/predict")
            assert (of_slow.status, code_of(of_slow), models_of(of_slow)) == (
                503,
                "starting",
                {"slow": "slow is starting"},
            )
            by_protocol = [
                predict(running.port, {"instances": [1.0]}, f"/v1/models/{name}:predict") for name in ("scale", "slow")
            ]
            assert [answer.status for answer in by_protocol] == [200, 503]
            assert b"slow is starting" in by_protocol[1].body
            gate.open()
            start.result(PATIENCE_S)
        assert probe(running, "/readyz").status == 200
    finally:
        running.stop()


@on_a_jumping_loop
async def test_while_it_drains() -> None:
    """While draining a server is live, but not ready."""
    front = Front()
    wire = front.connect()
    wire.send(get("/readyz"))
    front.app.drain()
    wire.send(get("/readyz") + get("/livez") + get(f"/models/{front.app.endpoints[0].name}/ready"))
    await turns()
    answers = wire.answers()
    assert [a.status for a in answers] == [200, 503, 200, 503]
    assert code_of(answers[1]) == code_of(answers[3]) == "draining"


def test_without_a_worker() -> None:
    """A server whose worker is dead is not ready within a moment, and is ready again with the next
    one.
    """
    with serving(App(models.scale)) as running:
        (pid,) = running.pids
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: probe(running, "/readyz").status == 503)
        assert probe(running, "/livez").status == 200
        wait_until(lambda: probe(running, "/readyz").status == 200)
        assert predict(running.port, 1.0).status == 200


def test_one_model_does_not_make_the_others_unready(tmp_path: Path) -> None:
    """`/readyz` is ready while some model answers and names those that do not, but not to a prober
    without the key that everybody else needs; each model has a page of its own.
    """
    keys = tmp_path / "keys"
    keys.write_text("alice:a-long-enough-key\n")
    fragile, key = Service(models.Fragile, name="fragile"), "X-API-Key: a-long-enough-key"
    with serving(App(models.scale, fragile, idle_check_s=0.0, api_keys=keys, open_readyz=True)) as running:
        predict(running.port, "break", "/models/fragile/predict", key)
        with Client(running.port) as client:
            told = client.ask(get("/readyz", key), "GET")
            untold = client.ask(get("/readyz"), "GET")
            own = client.ask(get("/models/fragile/ready", key), "GET")
            of_other = client.ask(get("/models/scale/ready", key), "GET")
            without_key = client.ask(get("/models/fragile/ready"), "GET")
        problem = "fragile no longer answers its example"
        assert (told.status, told.body) == (200, f"ready\nnot ready: {problem}\n".encode())
        assert (untold.status, untold.body) == (200, b"ready\n")
        assert (own.status, code_of(own), models_of(own)) == (503, "not_ready", {"fragile": problem})
        assert (of_other.status, of_other.body) == (200, b"ready\n")
        assert without_key.status == 401


def test_no_model_is_ready(tmp_path: Path) -> None:
    """Once no model answers, `/readyz` is 503, and tells why only to whom it may."""
    keys = tmp_path / "keys"
    keys.write_text("alice:a-long-enough-key\n")
    one, two = (Service(models.Fragile, name=name) for name in ("one", "two"))
    with serving(App(one, two, idle_check_s=0.0, api_keys=keys, open_readyz=True)) as running:
        for name in ("one", "two"):
            predict(running.port, "break", f"/models/{name}/predict", "X-API-Key: a-long-enough-key")
        with Client(running.port) as client:
            told = client.ask(get("/readyz", "X-API-Key: a-long-enough-key"), "GET")
            untold = client.ask(get("/readyz"), "GET")
        assert models_of(told) == {name: f"{name} no longer answers its example" for name in ("one", "two")}
        assert (untold.status, code_of(untold)) == (503, "not_ready")
        assert "models" not in json.loads(untold.body)["error"]


def test_an_example_that_no_longer_runs(caplog: pytest.LogCaptureFixture) -> None:
    """Without traffic the example is run, so that workers which are there but answer nothing are
    found out.
    """
    with serving(App(Service(models.Fragile, name="fragile"), idle_check_s=0.0)) as running:
        assert probe(running, "/readyz").status == 200
        assert predict(running.port, "break").status == 500
        with caplog.at_level(logging.ERROR):
            answer = probe(running, "/readyz")
        assert (answer.status, code_of(answer)) == (503, "not_ready")
        assert models_of(answer) == {"fragile": "fragile no longer answers its example"}
        assert "fragile no longer answers its example" in caplog.text
        assert probe(running, "/livez").status == 200


class TurnsToTexts(Model):
    """Gives numbers, as its hint says, until it is told to give texts."""

    examples = (1,)
    broken = False

    def predict(self, x: int) -> int:
        self.broken = self.broken or x == 0
        return str(x) if self.broken else x  # type: ignore[return-value]


class GivesNan(Model):
    """Gives what only msgpack expresses."""

    examples = (1.0,)

    def predict(self, x: float) -> float:
        return float("nan")


class GivesObjects(Model):
    """Gives what Python callers can get, and nobody else."""

    examples = (1,)

    def predict(self, x):  # type: ignore[no-untyped-def]
        return object()


class Sized(Model):
    """Takes bytes as they are."""

    examples = (b"abc",)

    def predict(self, x: bytes) -> bytes:
        return x


def test_an_example_goes_the_whole_way(caplog: pytest.LogCaptureFixture) -> None:
    """A model of which every answer is a 500 is not ready, though Python callers would get results."""
    with serving(App(Service(TurnsToTexts, name="turns"), idle_check_s=0.0)) as running:
        assert probe(running, "/readyz").status == 200
        assert predict(running.port, 0).status == 500
        with caplog.at_level(logging.ERROR):
            assert probe(running, "/readyz").status == 503
        assert "the result does not fit int" in caplog.text


@pytest.mark.parametrize(("model", "status"), [(GivesNan, 200), (Sized, 200), (GivesObjects, 503)])
def test_what_clients_can_get_is_ready(model: type[Model], status: int) -> None:
    """A model is ready if a client can get its answers in some format."""
    with serving(App(Service(Stage(model, run_in="thread"), name="tried"), idle_check_s=0.0)) as running:
        assert probe(running, "/readyz").status == status


def test_good_answers_spare_the_example() -> None:
    """While traffic succeeds no example is run; without it one is, at most once in a while."""
    with serving(App(Service(models.Fragile, name="fragile"), idle_check_s=3600.0)) as running:
        predict(running.port, "fine")
        for _ in range(5):
            assert probe(running, "/readyz").status == 200
        assert running.outcomes() == {"ok": 1}
        running.app._pages.idle_check_s = 0.0
        probe(running, "/readyz")
        assert running.outcomes() == {"ok": 2}


def test_a_model_without_examples_is_not_tried() -> None:
    """A model without examples is ready without having been tried."""
    with serving(App(models.gated, idle_check_s=0.0)) as running:
        assert probe(running, "/readyz").status == 200
        assert running.outcomes() == {}


def test_a_check_that_is_under_way_when_it_stops(gate: Gate) -> None:
    """Regression: the probe was never answered, and held up the end."""
    service = Service(Stage(models.Gated, max_batch_size=1), name="gated")
    with serving(App(service, idle_check_s=0.0)) as running, Client(running.port) as client:
        object.__setattr__(service.stages[0].traits, "examples", (models.Job(0, gate.path),))
        client.send(get("/readyz"))
        gate.knocked()
        with ThreadPoolExecutor(1) as pool:
            stopped = pool.submit(running.wait, running.app.stop(drain=False))
            assert client.answer().status == 503
            gate.open()
            stopped.result(PATIENCE_S)


def test_probes_answer_under_load(server: RunningServer) -> None:
    """Probes are answered under load, since they share nothing with the model's queue."""
    with Client(server.port) as busy:
        busy.send(post(b"[1]", "/models/csv/predict") * 200)
        assert probe(server, "/livez").status == 200
        assert [busy.answer().status for _ in range(200)] == [200] * 200
