"""A route that raises is a 500 of its own request, whatever it raises and through whichever front it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from carpool import Model, Service, Stage
from carpool.errors import CarpoolError, Overloaded, ValidationError
from carpool.http.app import App
from carpool.http.exchange import Exchange
from tests.support.http.front import Front, get, nothing, post
from tests.support.http.jump import on_a_jumping_loop, turns
from tests.support.http.net import code_of
from tests.support.http.wire import Answer
from tests.support.kinds import KINDS, MuteError


class Raising(App):
    """Has an address at which something is raised."""

    kind: type[BaseException] = ValueError

    def _make_routes(self, *of: Any) -> Any:
        return {**super()._make_routes(*of), b"/raise": {b"GET": (self._raise, None, None)}}

    def _raise(self, exchange: Exchange) -> None:
        raise self.kind


@pytest.mark.fault("F61")
@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize("known", [False, True])
@on_a_jumping_loop
async def test_a_route_that_raises(kind: type[BaseException], known: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: its request was never answered, nor anything behind it; from the second time on it was cut off."""
    front = Front(app=Raising)
    front.app.kind = kind  # type: ignore[attr-defined]
    if known:
        front.connect().send(get("/raise"))
    wire = front.connect()
    wire.send(get("/raise") + post(b"1") + get("/raise") + get("/livez"))
    await turns(10)
    assert [a.status for a in wire.answers()] == [500, 200, 500, 200]
    assert code_of(wire.answers()[0]) == "internal_error"
    assert not wire.ended
    assert b"/raise" in next(iter(front.state.heads))
    assert "could not be answered" in caplog.text
    assert kind.__name__ in caplog.text


class Call:
    """One call of an app as an ASGI server makes it.

    Attributes:
        sent: What the app has sent.
    """

    def __init__(self, receive: Callable[[], Awaitable[dict[str, Any]]] | None = None, body: bytes = b"") -> None:
        self.sent: list[dict[str, Any]] = []
        self._first: dict[str, Any] | None = {"type": "http.request", "body": body}
        self._receive = receive

    async def of(self, app: App, path: str, method: str = "GET") -> Answer:
        """Make a request, and return its answer."""
        scope = {"type": "http", "method": method, "path": path, "headers": []}
        await app(scope, self.receive, self.send)
        start, end = self.sent
        return Answer(start["status"], {}, end["body"])

    async def receive(self) -> dict[str, Any]:
        message, self._first = self._first, None
        if message is not None:
            return message
        if self._receive is not None:
            return await self._receive()
        raise AssertionError("there is no more")

    async def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


@pytest.mark.fault("F61")
@pytest.mark.parametrize("kind", KINDS.values())
@on_a_jumping_loop
async def test_a_route_that_raises_behind_asgi(kind: type[BaseException]) -> None:
    """A route that raises behind an ASGI server gives the same answer as by our own, and the server
    hears of nothing.
    """
    front = Front(app=Raising)
    front.app.kind = kind  # type: ignore[attr-defined]
    answer = await Call().of(front.app, "/raise")
    assert (answer.status, code_of(answer)) == (500, "internal_error")


@pytest.mark.fault("F61")
@pytest.mark.parametrize("kind", KINDS.values())
@on_a_jumping_loop
async def test_an_asgi_server_whose_receive_raises(kind: type[BaseException]) -> None:
    """When the server's `receive` raises, the server hears of it, the request is taken out, nothing
    is left running, and the next one is served.
    """

    async def fail() -> dict[str, Any]:
        raise kind

    front = Front(cost_s=None)
    busy = front.connect()
    busy.send(post(b"1"))
    await turns()
    call = Call(fail, b"2")
    with pytest.raises(RuntimeError if kind is StopIteration else kind):  # Python's, of coroutines
        await call.of(front.app, "/predict", "POST")
    assert front.driver.core.unanswered == 1
    front.worker.finish()
    await turns()
    assert front.worker.seen == [b"1"]
    assert front.outcomes == {"ok": 1}
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


@pytest.mark.fault("F61")
@pytest.mark.parametrize("kind", [ValueError, MemoryError, asyncio.CancelledError, MuteError])
@on_a_jumping_loop
async def test_an_asgi_server_whose_send_raises(kind: type[BaseException]) -> None:
    """When the server's `send` raises, the server hears of its own exception; for carpool the
    request has been answered.
    """

    class Failing(Call):
        async def send(self, message: dict[str, Any]) -> None:
            raise kind

    front = Front()
    with pytest.raises(kind):
        await Failing(body=b"1").of(front.app, "/predict", "POST")
    assert front.driver.core.unanswered == 0
    assert front.outcomes == {"ok": 1}


def odd(kind: type[CarpoolError], **attributes: Any) -> CarpoolError:
    """An error of a class that somebody has derived from ours."""
    return type("Odd", (kind,), attributes)("odd")


ODD = {
    "no text": odd(ValidationError, __str__=MuteError.__str__),
    "no such status": odd(CarpoolError, status=999),
    "a status that is none": odd(CarpoolError, status="400"),
    "an endless wait": odd(Overloaded, __init__=lambda self, text: None, retry_after_s=float("inf")),
    "a wait that is none": odd(Overloaded, __init__=lambda self, text: None, retry_after_s="soon"),
    "a code that is none": odd(CarpoolError, code=[]),
}


@pytest.mark.parametrize("name", ODD)
@on_a_jumping_loop
async def test_an_error_that_cannot_be_told(name: str) -> None:
    """Whatever a `size=` raises in the guise of an error of ours, also one that cannot be shown,
    its caller is answered.
    """

    def size(x: Any) -> int:
        raise ODD[name]

    front = Front(app=lambda service, **settings: App(sized(size), **settings))  # type: ignore[arg-type]
    wire = front.connect()
    wire.send(post(b"1") + get("/livez"))
    await turns()
    answers = wire.answers()
    assert [a.status for a in answers] == [422 if name == "no text" else 500, 200]


def sized(size: Callable[[Any], int]) -> Service:
    """A service that weighs its items."""
    return Service(Stage(nothing, name="echo", max_batch_size=64, size=size))


@pytest.mark.fault("F62")
@pytest.mark.parametrize("kind", KINDS.values())
@on_a_jumping_loop
async def test_a_size_function_that_raises(kind: type[BaseException]) -> None:
    """Regression: its request hung, and with SystemExit the loop ended, where the size could not be had."""

    def size(x: Any) -> int:
        raise kind

    front = Front(app=lambda service, **settings: App(sized(size), **settings))  # type: ignore[arg-type]
    wire = front.connect()
    wire.send(post(b"1") + get("/livez"))
    await turns()
    answers = wire.answers()
    assert [a.status for a in answers] == [500, 200]
    assert code_of(answers[0]) == "model_error"


@on_a_jumping_loop
async def test_metrics_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the metrics cannot be made the answer is 500, and everything else goes on."""
    front = Front()
    monkeypatch.setattr("carpool.engine.observe.prometheus.render", None)
    wire = front.connect()
    wire.send(get("/metrics") * 3 + get("/livez"))
    await turns()
    assert [a.status for a in wire.answers()] == [500, 500, 500, 200]


@pytest.mark.fault("F61")
@on_a_jumping_loop
async def test_examples_that_json_cannot_express() -> None:
    """Regression: `/openapi.json` was never answered; such examples are left out of it, and only such."""

    class Odd(Model):
        examples = (object(), 1.5, {(1, 2): 3}, "two", float("nan"), 4)

        def predict(self, x: Any) -> Any:
            return x

    front = Front(app=lambda service, **settings: App(Service(Odd), **settings))  # type: ignore[arg-type]
    wire = front.connect()
    wire.send(get("/openapi.json"))
    (answer,) = wire.answers()
    assert answer.status == 200
    operation = json.loads(answer.body)["paths"]["/predict"]["post"]
    examples = operation["requestBody"]["content"]["application/json"]["examples"]
    assert examples == {"example_1": {"value": 1.5}, "example_2": {"value": "two"}, "example_3": {"value": None}}
