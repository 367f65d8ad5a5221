"""Both fronts of an app side by side: our own server, and a uvicorn on a loop in another thread."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from carpool.http.app import App
from tests.support.http.front import post
from tests.support.http.net import Client, RunningServer, serving
from tests.support.http.wire import Answer
from tests.support.waiting import PATIENCE_S, wait_until


class Uvicorn:
    """An app behind uvicorn, on a loop that runs in another thread.

    Args:
        app: Any ASGI app.
        loop: Where it runs.
        options: Of uvicorn; without a lifespan, unless they say otherwise.
    """

    def __init__(self, app: Any, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._sock.getsockname()[1]
        config = uvicorn.Config(app, log_config=None, ws="none", **{"lifespan": "off", **options})
        self._server = uvicorn.Server(config)
        self._ended = asyncio.run_coroutine_threadsafe(self._server.serve([self._sock]), loop)

    @property
    def started(self) -> bool:
        return self._server.started

    def stop(self) -> None:
        """End the server as a signal would."""
        self._server.should_exit = True
        self._ended.result(PATIENCE_S)


@contextmanager
def behind(app: Any, loop: asyncio.AbstractEventLoop, **options: Any) -> Iterator[Uvicorn]:
    """An app behind a uvicorn that is up."""
    server = Uvicorn(app, loop, **options)
    try:
        wait_until(lambda: server.started)
        yield server
    finally:
        server.stop()


def asked(port: int, data: bytes, method: str = "POST") -> Answer:
    """The answer on a connection of its own."""
    with Client(port) as client:
        return client.ask(data, method)


def said(answer: Answer) -> tuple[int, dict[str, str], bytes]:
    """What the app has said: without what each server adds of its own, and without the number of the request."""
    own = {"date", "server", "connection"}
    if re.fullmatch(r"[0-9a-f]{12}-[0-9]+", answer.headers.get("x-request-id", "")):
        own.add("x-request-id")
    return answer.status, {name: value for name, value in answer.headers.items() if name not in own}, answer.body


@contextmanager
def both_fronts(app: App) -> Iterator[tuple[RunningServer, Uvicorn]]:
    """One app behind our own server and behind uvicorn."""
    with serving(app) as running, behind(app, running.loop) as other:
        yield running, other


@contextmanager
def stopped_in_the_end(app: App, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Without a lifespan nobody else stops the app, short of the end of the process."""
    try:
        yield
    finally:
        asyncio.run_coroutine_threadsafe(app.stop(), loop).result(PATIENCE_S)


def workers_of(app: App) -> list[int]:
    """Their process ids; none before the app is started."""
    handle = app.endpoints[0].handle
    return [] if handle is None else handle.pids


def ask(port: int, path: str, body: Any, *headers: str) -> Answer:
    """Post a body on a connection of its own, as JSON if it is not bytes; return the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with Client(port) as client:
        return client.ask(post(data, path, *headers))
