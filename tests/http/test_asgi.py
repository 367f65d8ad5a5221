"""The other front: the same app under a real uvicorn answers as it does under our own server, starts and ends well."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from carpool import Service, Stage
from carpool.engine.core import roster
from carpool.http.app import App
from tests.effort import slow_where
from tests.http.sample_requests import ID, REQUESTS
from tests.http.uvicorn_program import Program, broken, listens, pids
from tests.support.http import models
from tests.support.http.both_fronts import Uvicorn, asked, behind, both_fronts, said, stopped_in_the_end, workers_of
from tests.support.http.front import get, post
from tests.support.http.jobs import job, outcome, small_queue
from tests.support.http.net import Client, Gate, RunningServer, code_of, predict, serving, waiting
from tests.support.http.wire import Answer
from tests.support.processes import alive, children, guards_of
from tests.support.waiting import PATIENCE_S, wait_until


class Call:
    """One call of an app by hand, for what uvicorn does not do.

    Args:
        messages: What the app receives; then it waits in vain.

    Attributes:
        sent: What the app has sent.
    """

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self._messages = list(messages)

    async def of(self, app: App, method: str, path: str) -> None:
        """An HTTP request with only what ASGI prescribes."""
        await app({"type": "http", "method": method, "path": path, "headers": []}, self.receive, self.send)

    async def receive(self) -> dict[str, Any]:
        return self._messages.pop(0) if self._messages else await asyncio.Future()

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


def timeless(answer: Answer) -> tuple[int, dict[str, str], bytes]:
    """The same, but for the seconds that it tells of."""
    status, headers, body = said(answer)
    return status, headers, re.sub(rb"\d+\.\d{3} s", b"so long", body)


# -- every answer is the same


@pytest.fixture(scope="module", params=["httptools", "h11"])
def other(request: pytest.FixtureRequest, server: RunningServer) -> Iterator[Uvicorn]:
    """The app object that our own server serves, behind uvicorn too, with each of its parsers."""
    with behind(server.app, server.loop, http=request.param) as one:
        yield one


@pytest.mark.parametrize("name", REQUESTS)
def test_both_fronts_answer_the_same(server: RunningServer, other: Uvicorn, name: str) -> None:
    """Uvicorn and our own server give the same status, headers and body, whatever is asked."""
    status, data = REQUESTS[name]
    ours, theirs = asked(server.port, data), asked(other.port, data)
    assert ours.status == status
    assert said(theirs) == said(ours)


@pytest.mark.parametrize("path", ["/livez", "/openapi.json", "/predict"])
def test_both_fronts_answer_the_same_to_head(server: RunningServer, other: Uvicorn, path: str) -> None:
    """The answer to HEAD has the headers of a GET and no body, by either front."""
    data = get(path, ID, method="HEAD")
    ours = asked(server.port, data, "HEAD")
    assert ours.body == b""
    assert said(asked(other.port, data, "HEAD")) == said(ours)


def test_an_answer_to_head_has_no_body_even_for_the_server(server: RunningServer) -> None:
    """The app itself gives no body with an answer to HEAD: uvicorn would leave it out, but not
    every server does.
    """
    call = Call({"type": "http.request"})
    server.wait(call.of(server.app, "HEAD", "/livez"))
    start, body = call.sent
    assert (b"content-length", b"3") in start["headers"]
    assert body["body"] == b""


def test_both_fronts_count_for_the_same_metrics(server: RunningServer, other: Uvicorn) -> None:
    """Requests through one front show in the metrics that are asked for through the other."""
    before = server.outcomes().get("ok", 0)
    assert asked(other.port, post(b"3.0")).status == 200
    metrics = asked(other.port, get("/metrics"))
    assert b'carpool_requests_total{model="scale",outcome="ok"} %d' % (before + 1) in metrics.body
    assert metrics.headers["content-type"] == asked(server.port, get("/metrics")).headers["content-type"]


def test_requests_on_one_connection(other: Uvicorn) -> None:
    """A connection stays open for several requests, also after a refusal whose body has been read."""
    with Client(other.port) as client:
        for n in range(20):
            assert client.ask(post(b"%d" % n)).body == b"%d.0" % (2 * n)
            assert client.ask(post(b'"3"')).status == 422


def test_an_id_that_is_none_is_not_repeated(other: Uvicorn) -> None:
    """A request id that is not plain text is not repeated: each error gets one of its own, in the
    header and in the body.
    """
    answers = [asked(other.port, post(b'"3"', "/predict", "X-Request-Id: <b>")) for _ in range(2)]
    ids = [json.loads(answer.body)["error"]["request_id"] for answer in answers]
    assert ids == [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 2
    assert "<b>" not in ids


@pytest.mark.parametrize("request_", [post(b"3", "/predict", "X-Request-Id: a"), get("/livez", "X-Request-Id: a")])
def test_the_client_s_id_is_in_good_answers(other: Uvicorn, request_: bytes) -> None:
    """Under another server good answers repeat the client's request id, too."""
    answer = asked(other.port, request_)
    assert (answer.status, answer.headers["x-request-id"]) == (200, "a")


def test_names_that_need_quoting() -> None:
    """A slash in a service's name is part of the name by either front."""
    names = {"org/model": "org%2Fmodel", "llama:7b": "llama%3A7b", "é %41": "%C3%A9%20%2541"}
    services = [Service(Stage(models.Echo, max_batch_size=8), name=name) for name in names]
    with both_fronts(App(*services)) as (running, other):
        for server in (running, other):
            for nth, address in enumerate(names.values()):
                answer = asked(server.port, post(b'"here"', f"/models/{address}/predict"))
                assert (answer.status, answer.body) == (200, b'"here"'), address
                assert running.outcomes(nth)["ok"] == (1 if server is running else 2)
            assert asked(server.port, post(b"1", "/models/org/model/predict")).status == 404


def test_429_and_504_behind_both(gate: Gate) -> None:
    """Both fronts answer 429 of a full queue with the same `Retry-After`, and 504 of a request that
    is too late.
    """
    with both_fronts(App(small_queue())) as (running, other):
        busy, *queued = clients = [Client(running.port), Client(other.port), Client(running.port)]
        busy.send(job(0, gate, path="/predict"))
        gate.knocked()
        late = [asked(s.port, job(1, None, ID, "X-Request-Timeout-Ms: 50", path="/predict")) for s in (running, other)]
        assert outcome(late[0]) == (504, "deadline_exceeded")
        assert timeless(late[0]) == timeless(late[1])
        for n, client in enumerate(queued):
            client.send(job(n + 1, path="/predict"))
        running.wait_until(lambda: waiting(running.app) == 2)
        full = [asked(server.port, job(3, None, ID, path="/predict")) for server in (running, other)]
        assert outcome(full[0]) == (429, "overloaded")
        assert int(full[0].headers["retry-after"]) >= 1
        assert said(full[0]) == said(full[1])
        gate.open()
        assert [json.loads(client.answer().body)["value"] for client in clients] == [0, 1, 2]
        for client in clients:
            client.close()


def test_408_behind_both(gate: Gate) -> None:
    """The status of a missed deadline, 504 or 408, is a setting of the app, by either front."""
    with both_fronts(App(small_queue(), timeout_status=408)) as (running, other), Client(running.port) as busy:
        busy.send(job(0, gate, path="/predict"))
        gate.knocked()
        late = [asked(s.port, job(1, None, ID, "X-Request-Timeout-Ms: 50", path="/predict")) for s in (running, other)]
        assert outcome(late[0]) == (408, "deadline_exceeded")
        assert timeless(late[0]) == timeless(late[1])
        gate.open()
        assert busy.answer().status == 200


def test_503_while_draining_behind_both(gate: Gate) -> None:
    """While draining both fronts refuse new requests and are not ready; requests inside are
    answered.
    """
    with both_fronts(App(small_queue())) as (running, other), Client(other.port) as inside:
        inside.send(job(0, gate, path="/predict"))
        gate.knocked()
        running.call(running.app.drain)
        for request, code in ((job(1, None, ID, path="/predict"), "draining"), (get("/readyz", ID), "draining")):
            refused = [asked(server.port, request) for server in (running, other)]
            assert outcome(refused[0]) == (503, code)
            assert "retry-after" in refused[0].headers
            assert said(refused[0]) == said(refused[1])
        gate.open()
        assert json.loads(inside.answer().body)["value"] == 0


def test_503_of_lost_workers_behind_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both fronts answer alike when a request kills its worker, and when a stage has failed."""
    monkeypatch.setattr(roster, "MOST_DEATHS", 2)
    with both_fronts(App(Service(Stage(models.Mortal, idempotent=False), name="mortal"))) as (running, other):
        lost = [asked(server.port, post(b'"die"', "/predict", ID)) for server in (running, other)]
        assert outcome(lost[0]) == (503, "worker_lost")
        assert said(lost[0]) == said(lost[1])
        wait_until(lambda: code_of(predict(running.port, "live")) == "stage_failed")
        failed = [asked(server.port, post(b'"live"', "/predict", ID)) for server in (running, other)]
        assert outcome(failed[0]) == (503, "stage_failed")
        assert "retry-after" in failed[0].headers
        assert said(failed[0]) == said(failed[1])


# -- clients that leave


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_client_that_leaves_while_queued(gate: Gate, how: str) -> None:
    """If a client of uvicorn leaves while its request is queued, the model never sees it; those
    before and behind it are answered.
    """
    service = Service(Stage(models.Gated, max_batch_size=1), name="gated")
    with both_fronts(App(service)) as (running, other), Client(other.port) as busy, Client(other.port) as behind_it:
        gone = Client(other.port)
        busy.send(job(1, gate, path="/predict"))
        gate.knocked()
        gone.send(job(666, path="/predict"))
        running.wait_until(lambda: waiting(running.app) == 1)
        behind_it.send(job(2, path="/predict"))
        running.wait_until(lambda: waiting(running.app) == 2)
        gone.reset() if how == "reset" else gone.close()
        running.wait_until(lambda: waiting(running.app) == 1)
        gate.open()
        assert [json.loads(client.answer().body)["value"] for client in (busy, behind_it)] == [1, 2]
        assert json.loads(busy.ask(job(-1, path="/predict")).body)["seen"] == [1, 2, -1]
        assert running.outcomes() == {"ok": 3, "cancelled": 1}


def test_a_client_that_leaves_in_the_middle_of_its_body() -> None:
    """If a client of uvicorn leaves in the middle of its body, nothing reaches the model, and the
    next client is served.
    """
    request = post(b"[" + b"1," * 50_000 + b"1]", "/predict")
    with both_fronts(App(models.echo)) as (running, other):
        ended = []
        answer_of = running.app.admit
        running.app.admit = lambda head: ended.append(head) or answer_of(head)  # type: ignore[method-assign]
        gone = Client(other.port)
        gone.send(request[:-1])
        running.wait_until(lambda: len(ended) == 1)  # its headers have been read
        gone.reset()
        assert asked(other.port, post(b"1")).body == b"1"
        assert running.outcomes() == {"ok": 1}


def test_a_call_that_is_cancelled_while_queued(gate: Gate) -> None:
    """Some servers and middlewares cancel the app's call when a client leaves: its request is taken
    out of the queue all the same.
    """
    with serving(App(small_queue())) as running, Client(running.port) as busy:
        busy.send(job(1, gate, path="/predict"))
        gate.knocked()
        call = Call({"type": "http.request", "body": b'{"value": 666}'})
        done = asyncio.run_coroutine_threadsafe(call.of(running.app, "POST", "/predict"), running.loop)
        running.wait_until(lambda: waiting(running.app) == 1)
        done.cancel()
        running.wait_until(lambda: waiting(running.app) == 0)
        gate.open()
        assert busy.answer().status == 200
        assert running.outcomes() == {"ok": 1, "cancelled": 1}
    assert call.sent == []


def test_a_client_that_has_left_before_its_body() -> None:
    """If the server says that the client has gone before its body came, nothing is run and nobody
    is answered.
    """
    with serving(App(models.echo)) as running:
        call = Call({"type": "http.disconnect"})
        running.wait(call.of(running.app, "POST", "/predict"))
        assert call.sent == []
        assert running.outcomes() == {}


# -- start and end


def test_the_lifespan_starts_and_stops_the_workers(loop: asyncio.AbstractEventLoop) -> None:
    """With a lifespan, workers are ready before the server listens, and gone when it has ended."""
    app = App(models.scale)
    with behind(app, loop, lifespan="on") as server:
        (pid,) = workers_of(app)
        assert asked(server.port, get("/readyz")).status == 200
        assert predict(server.port, 4.0).body == b"8.0"
        assert workers_of(app) == [pid]
    assert not alive(pid)


def test_the_end_waits_for_those_inside(loop: asyncio.AbstractEventLoop, gate: Gate) -> None:
    """At the end of the lifespan requests that run and those in the queue are answered before the
    workers end.
    """
    app = App(small_queue())
    server = Uvicorn(app, loop, lifespan="on")
    wait_until(lambda: server.started)
    (pid,) = workers_of(app)
    with Client(server.port) as running, Client(server.port) as queued, ThreadPoolExecutor(1) as pool:
        running.send(job(1, gate, path="/predict"))
        gate.knocked()
        queued.send(job(2, path="/predict"))
        wait_until(lambda: waiting(app) == 1)
        ended = pool.submit(server.stop)
        wait_until(lambda: not listens(server.port))
        assert alive(pid)
        gate.open()
        assert [json.loads(client.answer().body)["value"] for client in (running, queued)] == [1, 2]
        ended.result(PATIENCE_S)
    assert not alive(pid)


def test_without_a_lifespan_the_first_requests_start_the_workers(loop: asyncio.AbstractEventLoop) -> None:
    """Without a lifespan the first requests start the app, once however many come together, and all
    are answered.
    """
    app = App(models.scale)
    before = set(children(os.getpid()))
    with behind(app, loop) as server, stopped_in_the_end(app, loop):
        assert workers_of(app) == []
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda n: predict(server.port, n), range(8)))
        assert [answer.body for answer in answers] == [b"%d.0" % (2 * n) for n in range(8)]
        (pid,) = workers_of(app)
        assert predict(server.port, 9).body == b"18.0"
        assert set(children(os.getpid())) - before - set(guards_of(os.getpid())) == {pid}
    assert not alive(pid)


def test_without_a_lifespan_a_failed_start_is_logged_and_told(
    loop: asyncio.AbstractEventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a lifespan a failed start refuses each request in our own words, and its cause is in
    the log.
    """
    app = App(models.broken)
    with behind(app, loop) as server:
        answers = [predict(server.port, 1.0) for _ in range(2)]
    assert [outcome(answer) for answer in answers] == [(503, "startup_failed")] * 2
    assert not any(b"weights" in answer.body for answer in answers)
    assert "RuntimeError: no weights" in caplog.text
    assert workers_of(app) == []


def test_a_failed_start_is_told_to_the_lifespan() -> None:
    """A failed start fails the lifespan with the stage, the step and the user's traceback."""
    call = Call({"type": "lifespan.startup"})
    asyncio.run(App(models.broken)({"type": "lifespan"}, call.receive, call.send))
    (told,) = call.sent
    assert told["type"] == "lifespan.startup.failed"
    assert "worker 0 of stage Broken could not start" in told["message"]
    assert "RuntimeError: no weights" in told["message"]


def test_other_protocols_are_refused_with_their_name() -> None:
    """A scope of another protocol, such as a websocket, is refused with what is spoken here."""
    call = Call()
    with pytest.raises(RuntimeError, match="speaks HTTP, not websocket"):
        asyncio.run(App(models.scale)({"type": "websocket"}, call.receive, call.send))
    assert call.sent == []


# -- mounted


def router(app: App, prefix: str, *, strips: bool) -> Callable[..., Awaitable[None]]:
    """Mounts an app, as routers of the present ASGI do, or as those before did, which cut the prefix off the path.

    It has no lifespan, and does not hand one on.
    """

    async def route(scope: dict[str, Any], receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        root = scope["root_path"] + prefix
        assert scope["path"].startswith(root + "/")
        path = scope["path"].removeprefix(root) if strips else scope["path"]
        await app({**scope, "root_path": root, "path": path}, receive, send)

    return route


@slow_where(lambda root, strips: not root or strips)
@pytest.mark.parametrize("strips", [False, True], ids=["root_path", "cut off"])
@pytest.mark.parametrize("root", ["", "/behind a proxy"])
def test_mounted(loop: asyncio.AbstractEventLoop, root: str, strips: bool) -> None:
    """A mounted app answers at the addresses below its mount, whatever is above it, and is started
    by the first request.
    """
    app = App(models.scale, models.two_steps, Service(Stage(models.Echo, max_batch_size=8), name="org/predict"))
    mounted = router(app, "/predict", strips=strips)
    with behind(mounted, loop, root_path=root, lifespan="auto") as server, stopped_in_the_end(app, loop):
        assert predict(server.port, 4.0, "/predict/predict").body == b"8.0"
        assert predict(server.port, 40, "/predict/models/two%20steps/predict").body == b"42"
        assert asked(server.port, get("/predict/readyz")).status == 200
        assert outcome(predict(server.port, 4.0, "/predict/predicted")) == (404, "not_found")
        if not strips:  # else it cannot be told how much was cut off, nor where a name ends
            assert predict(server.port, 7, "/predict/models/org%2fpredict/predict").body == b"7"
            assert outcome(predict(server.port, 4.0, "/predict/predict/predict")) == (404, "not_found")


# -- uvicorn as a program


@pytest.mark.slow
@pytest.mark.parametrize("lifespan", ["on", "off"])
def test_a_signal_ends_uvicorn_and_the_workers(lifespan: str) -> None:
    """When a signal ends uvicorn, a lifespan stops the app; without one the workers notice that
    their server is gone.
    """
    with Program(pids, "--lifespan", lifespan) as program:
        port = program.port()
        answer = json.loads(predict(port, 0.0).body)
        assert alive(answer["pid"])
        program.process.send_signal(signal.SIGTERM)
        program.wait()
        wait_until(lambda: not alive(answer["pid"]))
        assert "Traceback" not in program.log


@pytest.mark.slow
def test_two_server_processes_have_a_worker_each() -> None:
    """Two server processes of uvicorn answer through a worker each, and all of these end with it."""
    with Program(pids, "--workers", "2") as program, ThreadPoolExecutor(16) as pool:
        port = program.port()
        answered: set[int] = set()

        def both_have_answered() -> bool:
            for answer in pool.map(lambda _: predict(port, 0.01), range(32)):
                assert answer.status == 200
                answered.add(json.loads(answer.body)["pid"])
            return len(answered) > 1

        wait_until(both_have_answered)
        assert len(answered) == 2
        program.process.send_signal(signal.SIGTERM)
        program.wait()
        wait_until(lambda: not any(alive(pid) for pid in answered))
        assert "Traceback" not in program.log


@pytest.mark.slow
def test_a_failed_start_ends_uvicorn() -> None:
    """If the app cannot be started uvicorn ends with its own exit status for this, and our text is
    in its log.
    """
    with Program(broken) as program:
        assert program.wait() == 3
        assert "worker 0 of stage Broken could not start" in program.log
        assert "RuntimeError: no weights" in program.log
