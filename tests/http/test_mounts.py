"""The ASGI app where others put it: under hypercorn, mounted in FastAPI and Starlette, and without worker processes."""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import pytest

import carpool
from carpool import Model, Service, Stage, StartupError
from carpool.http import asgi
from carpool.http.app import App
from tests.effort import slow_where
from tests.http.sample_requests import REQUESTS
from tests.http.uvicorn_program import Program, pids
from tests.support.http import models
from tests.support.http.both_fronts import asked, behind, said, stopped_in_the_end, workers_of
from tests.support.http.front import get, post
from tests.support.http.jobs import job, outcome, small_queue
from tests.support.http.net import Client, Gate, RunningServer, predict, waiting
from tests.support.late import Late
from tests.support.processes import alive, children
from tests.support.serving import serve
from tests.support.waiting import PATIENCE_S, wait_until

fastapi, applications = Late("fastapi"), Late("starlette.applications")
responses, routing = Late("starlette.responses"), Late("starlette.routing")


class Hypercorn:
    """An app behind hypercorn, on a loop that runs in another thread.

    Args:
        app: Any ASGI app.
        loop: Where it runs.
    """

    def __init__(self, app: Any, loop: asyncio.AbstractEventLoop) -> None:
        sock = socket.create_server(("127.0.0.1", 0))
        self.port: int = sock.getsockname()[1]
        config = Late("hypercorn.config").Config()
        config.bind = [f"fd://{sock.detach()}"]
        config.errorlog = None
        self._loop = loop
        self._stopping = asyncio.Event()
        serving = Late("hypercorn.asyncio").serve(app, config, shutdown_trigger=self._stopping.wait)
        self._ended = asyncio.run_coroutine_threadsafe(serving, loop)

    def stop(self) -> None:
        """End the server as a signal would."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._ended.result(PATIENCE_S)


@contextmanager
def behind_hypercorn(app: Any, loop: asyncio.AbstractEventLoop) -> Iterator[Hypercorn]:
    """An app behind a hypercorn, which answers as soon as the app has started."""
    server = Hypercorn(app, loop)
    try:
        yield server
    finally:
        server.stop()


# -- hypercorn


@pytest.fixture(scope="module")
def other(server: RunningServer) -> Iterator[Hypercorn]:
    """The app object that our own server serves, behind hypercorn too; its lifespan is nobody's here."""

    async def without_lifespan(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            raise RuntimeError("no lifespan")
        await server.app(scope, receive, send)

    with behind_hypercorn(without_lifespan, server.loop) as one:
        yield one


@pytest.mark.parametrize("name", [name for name, (status, _) in REQUESTS.items() if status != 413])
def test_hypercorn_answers_as_our_own_server_does(server: RunningServer, other: Hypercorn, name: str) -> None:
    """Hypercorn and our own server give the same status, headers and body. A 413 is left out:
    hypercorn hangs up on a body that nobody reads.
    """
    status, data = REQUESTS[name]
    ours, theirs = asked(server.port, data), asked(other.port, data)
    assert ours.status == status
    assert said(theirs) == said(ours)


def test_hypercorns_lifespan_starts_and_stops_the_workers(loop: asyncio.AbstractEventLoop) -> None:
    """Behind hypercorn the first answer comes from workers that were there before it, and all are
    gone when hypercorn has ended.
    """
    app = App(models.scale)
    with behind_hypercorn(app, loop) as server:
        assert asked(server.port, get("/readyz")).status == 200
        (pid,) = workers_of(app)
        assert predict(server.port, 4.0).body == b"8.0"
        assert alive(pid)
    assert not alive(pid)


def test_a_client_that_leaves_hypercorn_while_queued(loop: asyncio.AbstractEventLoop, gate: Gate) -> None:
    """If a client of hypercorn leaves while its request is queued, the model never sees that."""
    app = App(small_queue())
    with behind_hypercorn(app, loop) as server, Client(server.port) as busy:
        busy.send(job(1, gate, path="/predict"))
        gate.knocked()
        gone = Client(server.port)
        gone.send(job(666, path="/predict"))
        wait_until(lambda: waiting(app) == 1)
        gone.close()
        wait_until(lambda: waiting(app) == 0)
        gate.open()
        assert busy.answer().status == 200
        assert json.loads(busy.ask(job(-1, path="/predict")).body)["seen"] == [1, -1]


# -- mounted beside ordinary routes


def in_fastapi(app: App, lifespan: Any) -> Any:
    """An app with a route of its own, and ours below /ml."""
    host = fastapi.FastAPI(lifespan=lifespan)

    @host.get("/hello")
    async def hello(name: str) -> dict[str, str]:
        return {"hello": name}

    host.mount("/ml", app)
    return host


def in_starlette(app: App, lifespan: Any) -> Any:
    """The app mounted in Starlette."""

    async def hello(request: Any) -> Any:
        return responses.JSONResponse({"hello": request.query_params["name"]})

    return applications.Starlette(routes=[routing.Route("/hello", hello), routing.Mount("/ml", app)], lifespan=lifespan)


Host = Callable[[App, Any], Any]
Front = Callable[[Any, asyncio.AbstractEventLoop], AbstractContextManager[Any]]
hosts = pytest.mark.parametrize("host", [in_fastapi, in_starlette])
fronts = pytest.mark.parametrize(
    "front", [lambda app, loop: behind(app, loop, lifespan="on"), behind_hypercorn], ids=["uvicorn", "hypercorn"]
)


def check_all_routes(port: int) -> None:
    """The host's own, ours, and what neither has."""
    assert json.loads(asked(port, get("/hello?name=you")).body) == {"hello": "you"}
    assert predict(port, 4.0, "/ml/predict").body == b"8.0"
    assert predict(port, 40, "/ml/models/two%20steps/predict").body == b"42"
    assert outcome(predict(port, "4.0", "/ml/predict")) == (422, "invalid_item")
    assert outcome(asked(port, get("/ml/hello"))) == (404, "not_found")
    assert asked(port, get("/ml/readyz")).status == 200
    assert b'carpool_requests_total{model="scale",outcome="ok"} 1' in asked(port, get("/ml/metrics")).body
    assert "/predict" in json.loads(asked(port, get("/ml/openapi.json")).body)["paths"]
    assert asked(port, post(b"4.0")).status == 404


@slow_where(lambda host, front: host is in_starlette or front is behind_hypercorn)
@fronts
@hosts
def test_mounted_with_our_lifespan(loop: asyncio.AbstractEventLoop, host: Host, front: Front) -> None:
    """With our lifespan in the host's, workers are there before the first request, which is not for
    one of our addresses, and gone after the last.
    """
    app = App(models.scale, models.two_steps)
    with front(host(app, carpool.lifespan(app)), loop) as server:
        assert json.loads(asked(server.port, get("/hello?name=you")).body) == {"hello": "you"}
        (pid,) = workers_of(app)
        check_all_routes(server.port)
        assert workers_of(app) == [pid]
    assert not alive(pid)


@slow_where(lambda host, front: host is in_fastapi or front is not behind_hypercorn)
@fronts
@hosts
def test_mounted_without_a_lifespan(loop: asyncio.AbstractEventLoop, host: Host, front: Front) -> None:
    """Without a lifespan the first request to one of our addresses starts the workers; one to the
    host's does not.
    """
    app = App(models.scale, models.two_steps)
    with stopped_in_the_end(app, loop), front(host(app, None), loop) as server:
        assert json.loads(asked(server.port, get("/hello?name=you")).body) == {"hello": "you"}
        assert workers_of(app) == []
        check_all_routes(server.port)
        (pid,) = workers_of(app)
        assert alive(pid)
    assert not alive(pid)


def test_the_lifespan_of_two_apps_stops_the_first_if_the_second_cannot_start() -> None:
    """If the second of two apps in one lifespan cannot start, the first is stopped, the reason is
    told, and nothing is left behind.
    """
    good, broken = App(models.scale), App(models.broken)
    started: list[int] = []

    async def enter() -> None:
        async with carpool.lifespan(good, broken)(None):
            raise AssertionError("it must not get here")

    start = good.ensure_started

    async def start_and_look(*, anew: bool = False) -> None:
        await start(anew=anew)
        started.extend(workers_of(good))

    good.ensure_started = start_and_look  # type: ignore[method-assign]
    with pytest.raises(StartupError, match="no weights"):
        asyncio.run(enter())
    (pid,) = started
    assert not alive(pid)


# -- without worker processes


class InThread(Model):
    """A model that doubles, and says in which thread it runs."""

    def predict(self, xs: list[float]) -> list[dict[str, Any]]:
        if 13.0 in xs:
            raise ArithmeticError("thirteen is not served")
        return [{"value": 2 * x, "seen": [threading.current_thread().name]} for x in xs]


async def in_task(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A model on the loop that adds in which task it runs."""
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    return [{"value": item["value"], "seen": [*item["seen"], task.get_name()]} for item in items]


@fronts
@pytest.mark.parametrize("host", [None, in_fastapi], ids=["alone", "mounted"])
def test_thread_and_loop_stages_need_no_process(
    loop: asyncio.AbstractEventLoop, host: Host | None, front: Front
) -> None:
    """An app of thread and loop stages runs wholly in the server's process; types, errors and
    probes are those of any service.
    """
    stages = Stage(InThread, max_batch_size=8, run_in="thread"), Stage(in_task, max_batch_size=8, run_in="loop")
    app = App(Service(*stages, name="inside"))
    prefix = "" if host is None else "/ml"
    before = set(children(os.getpid()))
    with (
        front(app if host is None else host(app, carpool.lifespan(app)), loop) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        answers = list(pool.map(lambda x: predict(server.port, x, prefix + "/predict"), range(12)))
        assert set(children(os.getpid())) - before == set()
        assert [json.loads(answer.body)["value"] for answer in answers] == [2.0 * x for x in range(12)]
        seen = {tuple(json.loads(answer.body)["seen"]) for answer in answers}
        assert seen == {("carpool InThread/0", "carpool in_task/0")}
        assert outcome(predict(server.port, 13.0, prefix + "/predict")) == (500, "model_error")
        assert outcome(predict(server.port, "x", prefix + "/predict")) == (422, "invalid_item")
        assert asked(server.port, get(prefix + "/readyz")).status == 200
        assert workers_of(app) == []
    wait_until(lambda: "carpool InThread/0" not in {thread.name for thread in threading.enumerate()})


def threads_of_models() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("carpool InThread/")]


def test_an_app_whose_loop_has_ended_is_stopped_on_another_one() -> None:
    """An app whose loop has ended can be stopped on another one: its workers have ended with the
    loop, and nothing is reported.
    """
    app = App(Service(Stage(InThread, max_batch_size=8, run_in="thread")))
    asyncio.run(app.ensure_started())
    asyncio.run(app.stop())
    wait_until(lambda: not threads_of_models())


def test_whoever_asks_for_a_start_while_it_is_under_way_gets_the_same_one() -> None:
    """A request that comes while `start` is at work waits for it, and starts nothing a second time."""
    app = App(Service(Stage(InThread, max_batch_size=8, run_in="thread")))

    async def start_twice() -> int:
        await asyncio.gather(app.start(), app.ensure_started())
        found = len(threads_of_models())
        await app.stop()
        return found

    assert asyncio.run(start_twice()) == 1
    wait_until(lambda: not threads_of_models())


def test_an_app_that_is_stopped_before_its_start_has_begun_is_stopped() -> None:
    """An app that is stopped before its start has begun does not start afterwards, and can be
    started anew at once.
    """
    app = App(Service(Stage(InThread, max_batch_size=8, run_in="thread")))

    async def start_and_stop() -> list[int]:
        starting = asyncio.ensure_future(app.start())
        await asyncio.sleep(0)
        await app.stop()
        with pytest.raises(carpool.Unavailable, match="closed while it was starting"):
            await starting
        found = [len(threads_of_models())]
        await asyncio.gather(app.ensure_started(anew=True), app.ensure_started(anew=True))
        found.append(len(threads_of_models()))
        await app.stop()
        return found

    assert asyncio.run(start_and_stop()) == [0, 1]
    wait_until(lambda: not threads_of_models())


# -- one of several

WARNING = "this process was started by a server that may run several"


@pytest.fixture
def unwarned() -> Iterator[None]:
    """A process that has not warned yet."""
    asgi.warn_of_siblings.cache_clear()
    yield
    asgi.warn_of_siblings.cache_clear()


def warnings_of_two_starts(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What is said when two apps of one process start, each asked twice."""

    async def start() -> None:
        async with carpool.lifespan(*apps)(None):
            for app in apps:
                await app.ensure_started()

    apps = [App(Service(Stage(InThread, max_batch_size=8, run_in="thread"))) for _ in range(2)]
    with caplog.at_level(logging.WARNING, "carpool"):
        asyncio.run(start())
    return [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize("sign", ["a parent", "WEB_CONCURRENCY", "gunicorn"])
def test_one_of_several_says_so_once(
    sign: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An app that can tell that it is one of several server processes warns of it once, however it
    can tell and however many apps there are.
    """
    if sign == "a parent":
        monkeypatch.setattr(multiprocessing, "parent_process", lambda: multiprocessing.current_process())
    elif sign == "gunicorn":
        monkeypatch.setitem(sys.modules, "gunicorn", ModuleType("gunicorn"))
    else:
        monkeypatch.setenv("WEB_CONCURRENCY", "4")
    assert len(warnings_of_two_starts(caplog)) == 1


@pytest.mark.usefixtures("unwarned")
@pytest.mark.parametrize("concurrency", [None, "1"])
def test_the_only_one_does_not(
    concurrency: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An app without signs of other server processes does not warn."""
    if concurrency is None:
        monkeypatch.delenv("WEB_CONCURRENCY", raising=False)
    else:
        monkeypatch.setenv("WEB_CONCURRENCY", concurrency)
    assert warnings_of_two_starts(caplog) == []


def test_carpool_serve_has_no_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    """`carpool serve` is one process and does not warn, whatever the environment says of other
    servers.
    """
    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    with serve("tests.support.serving_models:talks") as served:
        assert served.ask("POST", "/predict", "hello")[0] == 200
    assert served.wait() == 0
    assert WARNING not in "".join(served.log)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_uvicorns_workers_say_so_once_each(workers: int) -> None:
    """Each of uvicorn's two server processes warns once, and a single one does not."""
    expected = workers if workers > 1 else 0
    with Program(pids, "--workers", str(workers)) as program:
        assert predict(program.port(), 0.0).status == 200
        wait_until(lambda: program.log.count(WARNING) >= expected)
        program.process.send_signal(signal.SIGTERM)
        program.wait()
    assert program.log.count(WARNING) == expected
