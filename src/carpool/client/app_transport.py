"""Lets httpx ask an ASGI app in the same process, with bodies in both directions as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from typing import Any
from urllib.parse import unquote

import httpx

from carpool.client.messages import broken
from carpool.client.waits import end
from carpool.http.asgi import BrokenAnswer

_MOST_WAITING = 16  # messages of the app that wait for the client


class AppTransport(httpx.AsyncBaseTransport):
    """Asks an app instead of a server.

    Args:
        app: The ASGI app.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Begin to answer a request, up to the head of the answer."""
        asking = _Asking(self._app, request)
        try:
            status, headers = await asking.head()
        except BaseException:
            await asking.aclose()
            raise
        return httpx.Response(status, headers=headers, stream=asking)

    async def aclose(self) -> None:
        """Stop the app, if it can be stopped."""
        stop = getattr(self._app, "stop", None)
        if stop is not None:
            await stop()


class _Asking(httpx.AsyncByteStream):
    """One request to the app; it is the body of its answer.

    Args:
        app: The ASGI app.
        request: The request.
    """

    def __init__(self, app: Any, request: httpx.Request) -> None:
        self._body = aiter(request.stream)  # type: ignore[arg-type]
        self._has_body_ended = False
        self._reading: asyncio.Future[bytes | None] | None = None
        self._has_left = asyncio.Event()
        self._messages: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue(_MOST_WAITING)
        path = request.url.raw_path.partition(b"?")[0]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": request.method,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "scheme": request.url.scheme,
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": request.url.query,
            "root_path": "",
            "server": (request.url.host, request.url.port),
            "client": ("127.0.0.1", 0),
        }
        self._running = asyncio.ensure_future(self._run(app, scope))

    async def head(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Return status and headers. Raises what the app raises before them."""
        message = await self._next()
        return message["status"], list(message["headers"])

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            message = await self._next()
            yield message.get("body", b"")
            if not message.get("more_body"):
                return

    async def _next(self) -> MutableMapping[str, Any]:
        """Return the next message of the app, or raise what it has raised, or that it broke off."""
        getting = asyncio.ensure_future(self._messages.get())
        try:
            await asyncio.wait([getting, self._running], return_when=asyncio.FIRST_COMPLETED)
            if not getting.done() and not self._messages.empty():
                await asyncio.wait([getting])
            if getting.done():
                return getting.result()
        finally:
            getting.cancel()
        failure = self._running.exception()
        if failure is not None and not isinstance(failure, BrokenAnswer):
            raise failure
        raise broken("the answer")

    async def aclose(self) -> None:
        """Leave, as a client that closes its connection."""
        self._has_left.set()
        await end(self._running)
        if self._reading is not None:  # the app may have a task of its own that waits for it
            await end(self._reading)

    async def _run(self, app: Any, scope: dict[str, Any]) -> None:
        await app(scope, self._receive, self._messages.put)

    async def _receive(self) -> dict[str, Any]:
        if not self._has_body_ended:
            self._reading = asyncio.ensure_future(anext(self._body, None))
            data = await self._reading
            self._has_body_ended = data is None
            return {"type": "http.request", "body": data or b"", "more_body": data is not None}
        await self._has_left.wait()
        return {"type": "http.disconnect"}
