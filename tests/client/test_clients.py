"""`carpool.Client` and `carpool.AsyncClient`, asked over TCP, over a Unix socket and straight into an app."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("httpx", reason="clients need carpool[client]")

import carpool
from carpool import Service, Stage
from carpool.client.waits import RetryBudget, is_retried, wait_s
from carpool.http.app import App
from tests.support.http import models
from tests.support.http.net import RunningServer, serving
from tests.support.http.served import Double, Rows
from tests.support.waiting import PATIENCE_S


@dataclass
class Point:
    """Attributes:
    x: to the right.
    y: up.
    """

    x: float
    y: float


def mirrored(p: Point) -> Point:
    """A model of dataclasses."""
    return Point(-p.x, p.y)


def count(n: int) -> Iterator[int]:
    """A model that answers in parts; 13 fails after the first one."""
    for i in range(n):
        if (n, i) == (13, 1):
            raise RuntimeError("the secret is 1234")
        yield i


def services() -> list[Service]:
    return [
        Service(
            Stage(model, max_batch_size=16 if isinstance(model, type) else None, run_in="thread", workers=1), name=name
        )
        for name, model in (
            ("double", Double),
            ("rows", Rows),
            ("points", mirrored),
            ("count", count),
            ("moody", models.Moody),
            ("reverse", models.Reverse),
        )
    ]


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    with serving(App(*services())) as server:
        yield server


@pytest.fixture(scope="module")
def uds(running: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The path of a Unix socket at which the same server listens."""
    path = str(tmp_path_factory.mktemp("uds") / "carpool.sock")

    async def listen() -> asyncio.Server:
        from carpool.http.connection import Connection

        state = running.server.state
        assert state is not None
        return await running.loop.create_unix_server(lambda: Connection(state), path)

    async def end() -> None:
        server.close()

    server = running.wait(listen())
    yield path
    running.wait(end())


@pytest.fixture(params=["tcp", "unix", "app"])
def connect(request: pytest.FixtureRequest, running: RunningServer, uds: str) -> Any:
    """Makes a client in one of the ways."""
    if request.param == "tcp":
        return lambda **options: carpool.Client(f"http://127.0.0.1:{running.port}", **options)
    if request.param == "unix":
        return lambda **options: carpool.Client("http://localhost", uds=uds, **options)
    return lambda **options: carpool.Client(App(*services()), **options)


def test_items_go_there_and_answers_come_back(connect: Any) -> None:
    """Numbers, arrays, dataclasses and bytes are sent as they are, and answers are of the type asked for."""
    with connect() as client:
        assert client.predict(2) == 4.0
    with connect(model="rows") as client:
        assert client.predict(np.ones(3, np.float32)) == [2.0, 2.0, 2.0]
        assert client.predict(np.ones(3, np.float32), as_type=np.ndarray).dtype == np.float64  # numbers have no size
        array = client.predict(np.ones(3, np.float32), as_type=NDArray[np.float32])
        assert array.dtype == np.float32 and array.tolist() == [2, 2, 2]
    with connect(model="points") as client:
        assert client.predict(Point(1, 2)) == {"x": -1.0, "y": 2.0}
        assert client.predict(Point(1, 2), as_type=Point) == Point(-1, 2)
        with pytest.raises(carpool.ValidationError, match="the answer is not"):
            client.predict(Point(1, 2), as_type=float)
    with connect(model="reverse") as client:
        assert client.predict(b"\xffab", as_type=bytes) == b"ba\xff"


@pytest.mark.parametrize("n", [0, 1, 3000])
def test_many_items_are_answered_in_order(connect: Any, n: int) -> None:
    """Any number of items goes in one request, and each has its answer."""
    with connect() as client:
        assert list(client.predict_many(range(n))) == [2.0 * i for i in range(n)]


def test_many_items_are_read_as_there_is_room(connect: Any) -> None:
    """An input without an end is answered as it is read, and closed when nobody wants more."""
    read = itertools.count()
    with connect() as client:
        results = client.predict_many(iter(lambda: next(read), None))
        assert list(itertools.islice(results, 1000)) == [2.0 * i for i in range(1000)]
        results.close()
        assert client.predict(1) == 2.0


def test_a_slow_input_has_its_answers_at_once(connect: Any) -> None:
    """An answer comes before the next item is there."""
    gate = threading.Semaphore(1)

    def slow() -> Iterator[int]:
        for n in range(3):
            assert gate.acquire(timeout=PATIENCE_S)
            yield n

    with connect() as client:
        for n, result in enumerate(client.predict_many(slow())):
            assert result == 2.0 * n
            gate.release()


def test_errors_stand_in_their_places_or_are_raised(connect: Any) -> None:
    """An error of one item leaves the others alone."""
    with connect(model="moody") as client:
        one, two, three = client.predict_many(["a", "raise", "bcd"], return_exceptions=True)
        assert (one, three) == (1, 3) and isinstance(two, carpool.ModelError) and two.request_id
        with pytest.raises(carpool.ModelError):
            list(client.predict_many(["a", "raise"]))
        assert client.predict("abcd") == 4


def test_an_input_that_raises_ends_the_request(connect: Any) -> None:
    """What the input raises is raised, and the client goes on."""

    def broken() -> Iterator[int]:
        yield 1
        raise KeyError("no more")

    with connect() as client:
        with pytest.raises(KeyError, match="no more"):
            list(client.predict_many(broken()))
        assert client.predict(1) == 2.0


def test_parts_come_as_they_are_made(connect: Any) -> None:
    """A stream has all parts, or raises; a model without parts gives one."""
    with connect(model="count") as client:
        assert list(client.predict_stream(4)) == [0, 1, 2, 3]
        parts = client.predict_stream(13)
        assert next(parts) == 0
        with pytest.raises(carpool.ModelError) as failed:
            next(parts)
        assert "1234" not in str(failed.value) and failed.value.request_id
        endless = client.predict_stream(10**9)
        assert next(endless) == 0
        endless.close()
        assert client.predict(2, as_type=list[int]) == [0, 1]
    with connect() as client:
        assert list(client.predict_stream(4, as_type=float)) == [8.0]


def test_each_status_has_its_exception(connect: Any) -> None:
    """The exception is the one that a Python caller gets, with the server's text and request id."""
    with connect() as client:
        with pytest.raises(carpool.ValidationError, match="Expected `float`, got `str`") as unfit:
            client.predict("many")
        assert unfit.value.details[0]["type"] == "wrong_type" and unfit.value.request_id in str(unfit.value)
        with pytest.raises(carpool.DeadlineExceeded):
            client.predict(1, timeout_s=1e-9)
        with pytest.raises(TypeError):
            client.predict(object())
        with pytest.raises(ValueError, match="priority"):
            client.predict(1, priority=1000)
    with connect(model="none") as client, pytest.raises(carpool.InvalidRequest) as missing:
        client.predict(1)
    assert missing.value.status == 404
    with connect(model="none") as client, pytest.raises(carpool.InvalidRequest):
        list(client.predict_many([1]))
    with pytest.raises(RuntimeError, match="closed"):
        client.predict(1)


def test_a_client_waits_until_a_server_is_ready(connect: Any) -> None:
    """A server that is up is ready at once; one that is not there is not."""
    with connect() as client:
        client.wait_until_ready(timeout_s=PATIENCE_S)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    with carpool.Client(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(carpool.DeadlineExceeded, match=r"was not ready within 0.2 s"):
            client.wait_until_ready(timeout_s=0.2)
        with pytest.raises(carpool.Unavailable, match="no connection"):
            client.predict(1)


@pytest.fixture
def _one_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's time is over when the server has answered once, and not before, however late it does."""
    readings = iter([0.0, 0.0])
    monkeypatch.setattr("carpool.client.aio.monotonic", lambda: next(readings, PATIENCE_S))


def test_a_client_waits_for_its_own_model(request: pytest.FixtureRequest) -> None:
    """A client of a model waits until this one can answer, and not until any can."""
    with serving(App(models.scale, Service(models.Fragile, name="fragile"), idle_check_s=0.0)) as running:
        url = f"http://127.0.0.1:{running.port}"
        with carpool.Client(url) as of_any, carpool.Client(url, model="fragile") as of_fragile:
            of_fragile.wait_until_ready(timeout_s=PATIENCE_S)
            with pytest.raises(carpool.ModelError):
                of_fragile.predict("break")
            of_any.wait_until_ready(timeout_s=PATIENCE_S)
            request.getfixturevalue("_one_ask")
            with pytest.raises(carpool.DeadlineExceeded, match=r"was not ready within 20 s: .*not ready"):
                of_fragile.wait_until_ready(timeout_s=PATIENCE_S)


@pytest.mark.usefixtures("_one_ask")
def test_a_client_waits_for_a_model_that_is_not_there(connect: Any) -> None:
    """A server without the model is not ready for the client; the text says what is not there."""
    with connect(model="none") as client, pytest.raises(carpool.DeadlineExceeded, match="/models/none/ready"):
        client.wait_until_ready(timeout_s=PATIENCE_S)


def test_a_client_waits_for_a_server_that_does_not_answer() -> None:
    """If something listens and never answers the text does not say that nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with carpool.Client(url) as client, pytest.raises(carpool.DeadlineExceeded, match="it has not answered"):
            client.wait_until_ready(timeout_s=0.05)


def test_tasks_have_the_same(running: RunningServer) -> None:
    """The client for tasks does all of it, many at a time."""

    async def numbers() -> AsyncIterator[int]:
        for n in range(10):
            await asyncio.sleep(0)
            yield n

    async def main() -> None:
        async with carpool.AsyncClient(f"http://127.0.0.1:{running.port}") as client:
            await client.wait_until_ready()
            assert await asyncio.gather(*[client.predict(n) for n in range(50)]) == [2.0 * n for n in range(50)]
            assert [y async for y in client.predict_many(numbers())] == [2.0 * n for n in range(10)]
            assert [y async for y in client.predict_stream(3)] == [6.0]

    asyncio.run(main())


# -- servers that answer as they please


class Scripted:
    """A server that gives the next of some answers to each request."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = iter(answers)
        self.requests: list[bytes] = []
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for answer in self._answers:
            try:
                connection, _ = self._sock.accept()
            except OSError:
                return
            with connection:
                data = b""
                while b"\r\n\r\n" not in data:
                    data += connection.recv(65536)
                self.requests.append(data)
                connection.sendall(answer)

    def close(self) -> None:
        self._sock.close()


@contextmanager
def scripted(*answers: bytes) -> Iterator[Scripted]:
    server = Scripted(*answers)
    try:
        yield server
    finally:
        server.close()


def answer(status: int, body: Any, *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [
        f"HTTP/1.1 {status} X",
        "content-type: application/json",
        f"content-length: {len(data)}",
        "connection: close",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + data


def error(code: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": "no", "request_id": "r1"}}


def test_an_older_server_tells_of_itself_only() -> None:
    """Where models have no readiness of their own, that of the server is asked, if it has the model."""
    refused = [answer(404, error("not_found")), answer(405, error("method_not_allowed"))]
    unready = answer(503, error("starting"))
    answers = [*refused, unready, *refused, answer(200, "ready")]
    with scripted(*answers) as server, carpool.Client(server.url, model="one") as client:
        client.wait_until_ready(timeout_s=PATIENCE_S)
        asked = [request.split()[1] for request in server.requests]
        assert asked == [b"/models/one/ready", b"/models/one/predict", b"/readyz"] * 2


def test_what_was_not_run_is_sent_again() -> None:
    """After 429 and 503 the client waits as it is told, and tries again."""
    busy = answer(429, error("overloaded"), "retry-after: 0")
    with scripted(busy, answer(503, error("starting")), answer(200, 7)) as server, carpool.Client(server.url) as client:
        assert client.predict(1) == 7
        assert (client.budget.requests, client.budget.retries) == (1, 2)
        assert all(b"x-request-timeout-ms" in request for request in server.requests)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (500, "model_error", carpool.ModelError),
        (503, "worker_lost", carpool.Unavailable),
        (504, "deadline_exceeded", carpool.DeadlineExceeded),
        (422, "invalid_item", carpool.ValidationError),
        (418, "teapot", carpool.HTTPError),
        (401, "unauthorized", carpool.HTTPError),
    ],
)
def test_what_may_have_been_run_is_not(status: int, code: str, kind: type) -> None:
    """Everything else is raised at once."""
    with scripted(answer(status, error(code))) as server, carpool.Client(server.url) as client:
        with pytest.raises(kind) as failed:
            client.predict(1)
        assert failed.value.request_id == "r1" and client.budget.retries == 0


def test_retries_end_with_the_deadline() -> None:
    """A server that wants the client to wait longer than the deadline has its refusal raised at once."""
    body = error("overloaded")
    body["error"]["reason"] = "slo"
    with scripted(answer(429, body, "retry-after: 60")) as server, carpool.Client(server.url) as client:
        with pytest.raises(carpool.Overloaded) as refused:
            client.predict(1, timeout_s=PATIENCE_S)
        assert (refused.value.reason, refused.value.retry_after_s) == ("slo", 60)


def test_an_address_without_its_scheme_is_refused_where_it_is_given() -> None:
    """A client says at once that its url lacks http://, and not that an answer broke off."""
    with pytest.raises(ValueError, match="write http://localhost:8000"):
        carpool.Client("localhost:8000")


def test_retries_can_be_switched_off() -> None:
    """With `retries=False` the first refusal is raised."""
    refusal = answer(429, error("overloaded"), "retry-after: 0")
    with scripted(refusal) as server, carpool.Client(server.url, retries=False) as client:  # noqa: SIM117
        with pytest.raises(carpool.Overloaded):
            client.predict(1)


def test_a_key_is_sent() -> None:
    """`api_key=` goes with each request, as do headers of the user's."""
    with scripted(answer(200, 7)) as server:
        with carpool.Client(server.url, api_key="secret", headers={"x-team": "a"}) as client:
            assert client.predict(1) == 7
        assert (
            b"authorization: bearer secret" in server.requests[0].lower() and b"x-team: a" in server.requests[0].lower()
        )


EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
LINES = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize("body", [b"data: 1\n\n", b"data: 1\n\ndata: 2", b"data: 1\n\nevent: error\ndata: {}\n\n"])
def test_a_broken_stream_never_looks_whole(body: bytes) -> None:
    """A stream without its end raises."""
    with scripted(EVENTS + body) as server, carpool.Client(server.url) as client:
        parts = client.predict_stream(1)
        assert next(parts) == 1
        with pytest.raises(carpool.Unavailable, match="broke off"):
            next(parts)


def test_a_stream_that_fails_amid_its_parts_raises_as_if_there_were_none() -> None:
    """The error after the first part is of the class that its status says."""
    failed = b'event: error\ndata: {"error": {"code": "stopped", "message": "gone", "status": 503}}\n\n'
    with scripted(EVENTS + b"data: 1\n\n" + failed) as server, carpool.Client(server.url) as client:
        parts = client.predict_stream(1)
        assert next(parts) == 1
        with pytest.raises(carpool.Unavailable) as raised:
            next(parts)
        assert raised.value.code == "stopped"


@pytest.mark.parametrize("body", [b"2\r\n1\n\r\n0\r\n\r\n", b"2\r\n1\n\r\n", b"3\r\n1\n2\r\n0\r\n\r\n", b"rubbish"])
def test_a_broken_bulk_answer_never_looks_whole(body: bytes) -> None:
    """An answer with fewer lines than items raises, however it ends."""
    with scripted(LINES + body) as server, carpool.Client(server.url) as client:  # noqa: SIM117
        with pytest.raises(carpool.Unavailable, match=r"broke off|not HTTP"):
            list(client.predict_many([1, 2]))


def test_an_answer_that_ends_before_its_items_do_is_not_whole() -> None:
    """A server that has answered all items so far, and no more, raises where others are to come."""
    going_on = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        going_on.wait(PATIENCE_S)
        yield 2

    with scripted(LINES + b"2\r\n1\n\r\n0\r\n\r\n") as server, carpool.Client(server.url) as client:
        results = client.predict_many(items())
        try:
            assert next(results) == 1
            with pytest.raises(carpool.Unavailable, match="broke off"):
                next(results)
        finally:
            going_on.set()


def test_a_server_that_gives_up_says_so() -> None:
    """A line beyond the answers is the error for which there are no more."""
    body = json.dumps(error("draining") | {}).encode()
    told = json.loads(body)
    told["error"]["status"] = 503
    line = b"1\n" + json.dumps(told).encode() + b"\n"
    with scripted(LINES + b"%x\r\n%b\r\n0\r\n\r\n" % (len(line), line)) as server, carpool.Client(server.url) as client:
        results = client.predict_many(iter([1]), return_exceptions=True)
        with pytest.raises(carpool.Unavailable):
            list(results)


def test_a_server_that_has_ceased_to_read_is_let_go() -> None:
    """Whoever stops in the middle of a bulk request leaves no connection open, sent or not."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        client = carpool.Client(f"http://127.0.0.1:{sock.getsockname()[1]}")
        results = client.predict_many("x" * 10_000 for _ in itertools.count())
        taking = threading.Thread(target=next, args=(results,))
        taking.start()
        connection, _ = sock.accept()
        with connection:
            connection.sendall(LINES + b"2\r\n1\n\r\n")
            taking.join(PATIENCE_S)
            time.sleep(0.05)  # the buffers of both sides fill up
            results.close()
            client.close()  # nobody is left who could send the rest
            connection.settimeout(PATIENCE_S)
            with suppress(ConnectionResetError):
                while connection.recv(1 << 20):
                    pass


# -- the budget


def test_retries_are_a_tenth_of_the_requests() -> None:
    """However often a server refuses, retries stay a share of the requests; a few are lent."""
    budget = RetryBudget()
    for _ in range(1000):
        budget.note_request()
        while budget.take():
            pass
    assert budget.requests == 1000 and 90 <= budget.retries <= 100
    fresh = RetryBudget()
    fresh.note_request()
    assert [fresh.take() for _ in range(5)] == [True, True, True, False, False]


def test_waits_double_and_are_spread() -> None:
    """A client waits what it is told, or twice as long each time, never the same as another one."""
    assert wait_s(1, 2.0, lambda: 0.0) == 2.0 and wait_s(1, 2.0, lambda: 1.0) == 2.5
    assert wait_s(3, None, lambda: 1.0) == 4 * wait_s(1, None, lambda: 1.0)
    assert wait_s(99, None, lambda: 1.0) == 5.0
    assert is_retried(429, "overloaded") and not is_retried(503, "worker_lost") and not is_retried(500, "model_error")
