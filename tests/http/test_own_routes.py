"""`stream_response`: answers in parts in the routes of other frameworks, told as our own server tells them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

import carpool
from carpool import Service, Stage
from carpool.http import own_routes
from tests.support.late import Late
from tests.support.loops import on_a_loop
from tests.support.parts import Counting
from tests.support.waiting import PATIENCE_S

fastapi, applications, routing = Late("fastapi"), Late("starlette.applications"), Late("starlette.routing")

RAISED: Final = [KeyError("x"), asyncio.CancelledError(), StopIteration(), carpool.Overloaded("full")]

Sent = tuple[int, dict[str, str], bytes]


async def sent(app: Any, item: Any, *, accept: str = "", leaves_after: int = -1) -> Sent:
    """The status, headers and body that an app sends to a client, which leaves after so many parts."""
    chunks: list[bytes] = []
    start: dict[str, Any] = {}
    left = asyncio.Event()
    messages = iter([{"type": "http.request", "body": json.dumps(item).encode(), "more_body": False}])
    headers = [(b"accept", accept.encode()), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers, "query_string": b"", "root_path": ""}
    scope |= {"asgi": {"spec_version": "2.3"}, "http_version": "1.1"}

    async def receive() -> Any:
        for each in messages:
            return each
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(told: Any) -> None:
        if told["type"] == "http.response.start":
            start.update(told)
            return
        chunks.append(told["body"])
        if len(chunks) == leaves_after:
            left.set()

    if leaves_after == 0:
        asyncio.get_running_loop().call_later(0.05, left.set)
    await app(scope, receive, send)
    return start["status"], {name.decode(): value.decode() for name, value in start["headers"]}, b"".join(chunks)


@asynccontextmanager
async def routed(framework: str, log: list[Any], **model: Any) -> AsyncIterator[Any]:
    """An app with a route for the parts of a service of its own."""
    service = Service(Stage(Counting, kwargs={"log": log, **model}, run_in="thread", max_batch_size=4))
    async with service.run_async() as running:

        async def answer(request: fastapi.Request) -> Any:
            parts = running.predict_stream(await request.json())
            return await carpool.http.stream_response(parts, request=request)

        app: Any = (
            fastapi.FastAPI()
            if framework == "fastapi"
            else applications.Starlette(routes=[routing.Route("/", answer, methods=["POST"])])
        )
        if framework == "fastapi":
            app.post("/")(answer)
        carpool.http.install_error_handlers(app)
        yield app


@pytest.mark.parametrize("framework", ["fastapi", "starlette"])
@on_a_loop
async def test_parts_are_told_as_our_own_server_tells_them(framework: str) -> None:
    """Events by default, lines for those who ask for them, and an end that says how many there were."""
    async with routed(framework, []) as app:
        status, headers, body = await sent(app, 3)
        assert (status, headers["content-type"], headers["cache-control"]) == (200, "text/event-stream", "no-store")
        assert body == b'data: 1\n\ndata: 2\n\ndata: 3\n\nevent: end\ndata: {"parts": 3}\n\n'
        status, headers, body = await sent(app, 2, accept="application/x-ndjson")
        assert (status, headers["content-type"]) == (200, "application/x-ndjson")
        assert [json.loads(line) for line in body.splitlines()] == [{"part": 1}, {"part": 2}, {"end": {"parts": 2}}]


@pytest.mark.parametrize("framework", ["fastapi", "starlette"])
@on_a_loop
async def test_what_fails_before_the_first_part_has_a_status(framework: str) -> None:
    """A failure before the first part is an ordinary response, by `install_error_handlers`."""
    async with routed(framework, []) as app:
        status, headers, body = await sent(app, {"n": 3, "at": 0, "raise": "no"})
        assert (status, json.loads(body)["error"]["code"]) == (500, "model_error") and "x-request-id" in headers


@on_a_loop
async def test_a_later_failure_is_told_in_the_place_of_the_end() -> None:
    """A broken answer never looks whole."""
    async with routed("fastapi", []) as app:
        status, _, body = await sent(app, {"n": 3, "at": 1, "raise": "no"})
        assert status == 200 and body.startswith(b'data: 1\n\nevent: error\ndata: {"error":{"code":"model_error"')
        assert b"event: end" not in body


@on_a_loop
async def test_a_client_that_leaves_ends_its_request() -> None:
    """The model is told to stop when its client leaves."""
    log: list[Any] = []
    async with routed("fastapi", log, step_s=0.002) as app:
        await sent(app, 100_000, leaves_after=3)
        async with asyncio.timeout(10):
            while ("stop", 100_000) not in log:  # noqa: ASYNC110 # a thread writes it
                await asyncio.sleep(0.002)


@on_a_loop
async def test_a_client_that_leaves_before_the_first_part_ends_its_request() -> None:
    """A request that waits for the place of another is never started once its client has left."""
    log: list[Any] = []
    async with routed("fastapi", log, step_s=0.002) as app:
        others = [asyncio.ensure_future(sent(app, 10**9 + n)) for n in range(4)]
        async with asyncio.timeout(PATIENCE_S):
            while sum(entry[0] == "start" for entry in log) < 4:  # noqa: ASYNC110 # a thread writes it
                await asyncio.sleep(0.002)
            status, _, body = await sent(app, 7, leaves_after=0)
        for other in others:
            other.cancel()
        assert (status, body) == (499, b"") and ("start", 7) not in log


@on_a_loop
async def test_a_silence_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that hears nothing for long is told that the connection is alive, before the first part, too."""
    monkeypatch.setattr(own_routes, "SILENCE_S", 0.02)
    async with routed("fastapi", []) as app:
        _, _, body = await sent(app, {"n": 2, "at": 0, "hang": 0.5})
        assert body.startswith(b": alive\n\n") and b"data: 1\n\n" in body and b"data: 2\n\n" in body
        assert body.endswith(b'event: end\ndata: {"parts": 2}\n\n')


class Broken(AsyncIterator[Any]):
    """Raises what it is given after one part."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.told = error, False

    async def __anext__(self) -> Any:
        if self.told:
            raise self.error
        self.told = True
        return {"a": 1}


@pytest.mark.parametrize(
    "error", [KeyError("x"), asyncio.CancelledError(), StopIteration(), carpool.Overloaded("full")]
)
@on_a_loop
async def test_any_iterator_will_do_whatever_it_raises(error: BaseException) -> None:
    """A generator of one's own is told alike, and no exception of it can look like an end."""
    response = await carpool.http.stream_response(Broken(error))
    _, _, body = await sent(response, None)
    assert body.startswith(b'data: {"a":1}\n\nevent: error\ndata: {"error"')


@on_a_loop
async def test_a_generator_is_closed() -> None:
    """A generator is closed with its response, also by a client that leaves."""
    closed = []

    async def parts() -> AsyncIterator[int]:
        try:
            for n in range(10**9):
                await asyncio.sleep(0)
                yield n
        finally:
            closed.append(True)

    await sent(await carpool.http.stream_response(parts()), None, leaves_after=2)
    assert closed == [True]


@on_a_loop
async def test_what_is_no_iterator_is_refused() -> None:
    """A wrong argument is told by name."""
    with pytest.raises(TypeError, match=r"parts must be an asynchronous iterator, .* not list"):
        await carpool.http.stream_response([1, 2])  # type: ignore[arg-type]
