"""A service behind a real server, which looks to the actors like a handle: they ask it with carpool's own clients."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import carpool
from carpool.engine.drive.loop_thread import LoopThread
from carpool.http import App
from carpool.http.server import Server
from tests.fuzz.models import Sent

READY_S = 0.5
"""How long a client waits until a server is ready."""

_MOST_SILENT_S = 120.0


class Serving:
    """A server of one service, in a thread with a loop of its own.

    Args:
        service: What it serves.
        loop: On which it runs; made for it.
    """

    def __init__(self, service: carpool.Service, loop: asyncio.AbstractEventLoop) -> None:
        self.app = App(service)
        self._server = Server(self.app, port=0)
        self._server.bind()
        self.url = f"http://127.0.0.1:{self._server.port}"
        self.stopped: Future[None] = Future()
        self._stopping: asyncio.Task[None] | None = None
        self._speaks = threading.Event()
        self._is_up = False
        self._pid = os.getpid()
        self._thread = LoopThread("fuzz server", loop)

    @property
    def is_parents(self) -> bool:
        """Whether this process is a forked child."""
        return os.getpid() != self._pid

    @property
    def pids(self) -> list[int]:
        """The worker processes."""
        handles = [endpoint.handle for endpoint in self.app.endpoints]
        return [pid for handle in handles if handle is not None for pid in handle.pids]

    def start(self) -> Future[None]:
        """Begin to serve."""
        started: Future[None] = Future()
        self._thread.post(lambda: self._begin_start(started))
        return started

    def stop(self, drain: bool) -> None:
        """Begin to stop, for good; `stopped` is done when that is done."""
        self._speaks.set()
        self._thread.post(lambda: self._begin_stop(drain))

    def fall_silent(self) -> None:
        """Have a server that has started do nothing any more, with all its connections open, until it is stopped."""
        self._thread.post(self._be_silent)

    def _be_silent(self) -> None:
        if self._is_up:
            self._speaks.wait(_MOST_SILENT_S)

    def _begin_start(self, started: Future[None]) -> None:
        if self._stopping is not None:
            started.set_exception(carpool.Unavailable("the server was stopped before it has started", code="closed"))
            return
        self._starting = self._thread.loop.create_task(self._start(started))

    async def _start(self, started: Future[None]) -> None:
        try:
            await self._server.listen()
            await self.app.start()
        except BaseException as error:
            self.stop(drain=False)
            started.set_exception(error)
        else:
            self._is_up = True
            started.set_result(None)

    def _begin_stop(self, drain: bool) -> None:
        if self._stopping is None:
            self._stopping = self._thread.loop.create_task(self._stop(drain))

    async def _stop(self, drain: bool) -> None:
        try:
            await self._server.stop(drain)
        except BaseException as error:
            self.stopped.set_exception(error)
        else:
            self.stopped.set_result(None)
        finally:
            self._thread.stop()


class _Asking:
    """What clients for threads and for tasks have in common.

    Args:
        serving: The server.
        timeout_s: Of the clients.
    """

    kind: Any

    def __init__(self, serving: Serving, timeout_s: float) -> None:
        self._serving, self._timeout_s = serving, timeout_s
        self._client: Any = None

    @property
    def client(self) -> Any:
        """The present client, which all actors share; a new one after it was hung up."""
        if (client := self._client) is None:
            client = self._client = self.kind(self._serving.url, timeout_s=self._timeout_s)
        return client

    @property
    def pids(self) -> list[int]:
        """The server's worker processes."""
        return self._serving.pids

    def fall_silent(self) -> None:
        """Have the server do nothing any more."""
        self._serving.fall_silent()

    def predict_stream(self, x: Any, *, timeout_s: float | None = None) -> Any:
        """Ask for the answer in parts."""
        return self.client.predict_stream(x, timeout_s=timeout_s)

    def stream(self, xs: Any, *, return_exceptions: bool, timeout_s: float | None) -> Any:
        """Ask for the answers to many items."""
        return self.client.predict_many(xs, as_type=Sent, return_exceptions=return_exceptions, timeout_s=timeout_s)

    def story(self, request_id: int) -> None:
        """There is no story of a request; retries are counted."""
        if self.client.budget.retries < 0:
            raise AssertionError("a client has retried less than never")


class Served(_Asking):
    """Like a `Handle`: asks the server with a `carpool.Client`."""

    kind = carpool.Client

    def start(self) -> None:
        """Begin to serve."""
        self._serving.start().result()

    def close(self, drain: bool = True) -> None:
        """Stop the server; in a forked child, which has none, close the client."""
        if self._serving.is_parents:
            self.client.close()
            return
        self._serving.stop(drain)
        self._serving.stopped.result()

    def hang_up(self, drops: bool) -> None:
        """Close the client, or drop it; others have a new one then. Raises AssertionError."""
        client = self.client
        if not drops:
            client.close()
            with _refused():
                client.predict(None)
        if self._client is client:
            self._client = None

    def predict(
        self, x: Any, *, timeout_s: float | None = None, priority: int = 0, on_part: Callable[[Any], Any] | None = None
    ) -> Any:
        """Ask for the answer to an item."""
        if on_part is None:
            return self.client.predict(x, as_type=Sent, timeout_s=timeout_s, priority=priority)
        part: Any = None
        for part in self.predict_stream(x, timeout_s=timeout_s):
            on_part(part)
        return Sent(*part)

    def stats(self) -> None:
        """Ask whether the server is ready."""
        self.client.wait_until_ready(READY_S)


class ServedAsync(_Asking):
    """Like an `AsyncHandle`: asks the server with a `carpool.AsyncClient`."""

    kind = carpool.AsyncClient

    async def start(self) -> None:
        """Begin to serve."""
        await asyncio.wrap_future(self._serving.start())

    async def close(self, drain: bool = True) -> None:
        """Stop the server; in a forked child, which has none, close the client."""
        if self._serving.is_parents:
            await self.client.close()
            return
        self._serving.stop(drain)
        await asyncio.shield(asyncio.wrap_future(self._serving.stopped))

    async def hang_up(self, drops: bool) -> None:
        """Close the client, or drop it; others have a new one then. Raises AssertionError."""
        client = self.client
        if not drops:
            await client.close()
            with _refused():
                await client.predict(None)
        if self._client is client:
            self._client = None

    async def predict(
        self, x: Any, *, timeout_s: float | None = None, priority: int = 0, on_part: Callable[[Any], Any] | None = None
    ) -> Any:
        """Ask for the answer to an item."""
        if on_part is None:
            return await self.client.predict(x, as_type=Sent, timeout_s=timeout_s, priority=priority)
        part: Any = None
        async for part in self.predict_stream(x, timeout_s=timeout_s):
            on_part(part)
        return Sent(*part)

    async def stats(self) -> None:
        """Ask whether the server is ready."""
        await self.client.wait_until_ready(READY_S)


@contextmanager
def _refused() -> Iterator[None]:
    """Around a call of a closed client."""
    try:
        yield
    except RuntimeError:
        return
    raise AssertionError("a closed client has taken a call")
