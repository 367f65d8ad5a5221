"""Clients of another ASGI server that take nothing, or take little at a time: whatever we send, it is not for ever."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

import carpool
from carpool import Service, Stage
from carpool.http import asgi
from carpool.http.app import App
from carpool.openai import Completion
from tests.support.late import Late
from tests.support.loops import on_a_loop
from tests.support.waiting import PATIENCE_S

fastapi = Late("fastapi")

LONG: Final = 200_000  # characters: more than three pieces


class Endless(carpool.Model):
    """Yields texts for ever, of which it notes how many run.

    Args:
        running: Has an entry for each answer under way.
    """

    def __init__(self, running: list[int]) -> None:
        self.running = running

    def predict(self, n: int) -> Iterator[str]:
        self.running.append(n)
        try:
            while True:
                yield "x" * n
        finally:
            self.running.remove(n)


class Novels(Endless):
    """Writes texts for ever for OpenAI's clients."""

    def predict(self, item: Completion) -> Iterator[str]:  # type: ignore[override]
        yield from super().predict(len(item.prompt))


def long_text(n: int) -> str:
    return "x" * n


STREAM: Final = (b"accept", b"text/event-stream")
LINES: Final = (b"accept", b"application/x-ndjson")
OF_LINES: Final = (b"content-type", b"application/x-ndjson")
COMPLETION: Final = {"model": "m", "prompt": "x" * 1000, "stream": True}
# the model, the address, the body and the headers
WAYS: Final[dict[str, tuple[Any, str, bytes, list[tuple[bytes, bytes]]]]] = {
    "events": (Endless, "/predict", b"1000", [STREAM]),
    "lines": (Endless, "/predict", b"1000", [LINES]),
    "completions": (Novels, "/v1/completions", json.dumps(COMPLETION).encode(), []),
    "own route": (Endless, "/own", b"1000", [STREAM]),
    "whole": (long_text, "/predict", b"%d" % LONG, []),
    "bulk": (long_text, "/predict", b"%d\n" % LONG * 8, [OF_LINES]),
    "a list": (long_text, "/predict/many", b"[%d]" % LONG, []),
    "an error": (long_text, "/predict", b'"no number"', []),
    "an unknown address": (long_text, "/nothing", b"", []),
}
STALLS: Final = ["http.response.start", "http.response.body"]


@asynccontextmanager
async def app_of(way: str, running: list[int]) -> AsyncIterator[Any]:
    """The app that a way asks."""
    model, path, _, _ = WAYS[way]
    kwargs = {"running": running} if isinstance(model, type) else {}
    service = Service(Stage(model, kwargs=kwargs, run_in="thread"), name="m", timeout_s=PATIENCE_S)
    if path == "/own":
        async with service.run_async() as handle:
            api = fastapi.FastAPI()

            @api.post("/own")
            async def own() -> Any:
                return await carpool.http.stream_response(handle.predict_stream(1000))

            yield api
        return
    app = App(service)
    try:
        yield app
    finally:
        await app.stop()


class Reader:
    """A client of a server that has so much room for an answer.

    Args:
        way: What it asks, see `WAYS`.
        stalls_at: The kind of message from which on it takes nothing.

    Attributes:
        pieces: The bodies that it has taken.
    """

    def __init__(self, way: str, stalls_at: str = "") -> None:
        _, self._path, body, self._headers = WAYS[way]
        self._messages = [{"type": "http.request", "body": body}]
        self._stalls_at = stalls_at
        self.pieces: list[bytes] = []

    async def ask(self, app: Any) -> None:
        given = [(b"host", b"localhost"), *self._headers]
        if not any(name == b"content-type" for name, _ in given):
            given.append((b"content-type", b"application/json"))
        scope = {"type": "http", "method": "POST", "path": self._path, "headers": given, "query_string": b""}
        await app(scope, self.receive, self.send)

    async def receive(self) -> dict[str, Any]:
        return self._messages.pop(0) if self._messages else await asyncio.Future()

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == self._stalls_at:
            await asyncio.Future()
        if message["type"] == "http.response.body":
            self.pieces.append(message["body"])


@pytest.mark.parametrize("stalls_at", STALLS)
@pytest.mark.parametrize("way", WAYS)
@on_a_loop
async def test_a_client_that_takes_nothing_is_given_up(way: str, stalls_at: str, monkeypatch: Any) -> None:
    """The call ends once the client has taken nothing for the time that it has, and nothing runs for it any more."""
    monkeypatch.setattr(asgi, "SEND_S", 0.05)
    running: list[int] = []
    async with app_of(way, running) as app, asyncio.timeout(PATIENCE_S):
        await Reader(way, stalls_at).ask(app)
        while running:  # noqa: ASYNC110 # a thread writes it
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("way", ["whole", "bulk", "a list"])
@on_a_loop
async def test_answers_are_sent_in_pieces(way: str) -> None:
    """No piece is larger than what a slow client can take in its time, and together they are the answer."""
    async with app_of(way, []) as app:
        reader = Reader(way)
        await reader.ask(app)
        assert max(map(len, reader.pieces)) <= 64 * 1024
        answer = json.dumps(long_text(LONG)).encode()
        whole = {"whole": answer, "bulk": (answer + b"\n") * 8, "a list": b"[" + answer + b"]"}
        assert b"".join(reader.pieces) == whole[way]


@on_a_loop
async def test_what_a_server_raises_is_its_own() -> None:
    """A `TimeoutError` of the server's `send` is raised in the server, as no limit of ours is up."""

    async def send(message: Any) -> None:
        raise TimeoutError("the server's")

    async with app_of("whole", []) as app:
        reader = Reader("whole")
        reader.send = send  # type: ignore[method-assign]
        with pytest.raises(TimeoutError, match="the server's"):
            await reader.ask(app)
