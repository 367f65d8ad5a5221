"""A service as an ASGI app, which looks to the actors like a handle: they ask it in JSON, without a server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import carpool
from carpool.http import App
from tests.fuzz.models import Sent

_ERRORS: dict[int, Any] = {
    429: carpool.Overloaded,
    500: carpool.ModelError,
    503: carpool.Unavailable,
    504: carpool.DeadlineExceeded,
}
_PAGES = ("/", "/livez", "/readyz", "/metrics", "/openapi.json")


class Front:
    """Like an `AsyncHandle`, for what the two have in common.

    Args:
        app: which nobody serves.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self.pids: list[int] = []
        self._asked = 0

    async def start(self) -> None:
        """Start all services, as a lifespan does."""
        await self.app.ensure_started(anew=True)

    async def close(self, drain: bool = True) -> None:
        """Stop all services."""
        await self.app.stop(drain)

    async def predict(self, x: Sent, *, timeout_s: float | None = None, priority: int = 0) -> Sent:
        """POST an item. Raises the error that the status stands for."""
        headers = [(b"content-type", b"application/json"), (b"x-request-priority", b"%d" % priority)]
        if timeout_s is not None:
            headers.append((b"x-request-timeout-ms", b"%d" % max(1, int(1000 * timeout_s))))
        self._asked += 1
        if self._asked % 3 == 0:
            return await self._predict_in_a_list(x, headers)
        status, body = await self._ask("POST", "/predict", headers, json.dumps(x).encode())
        if status == 200:
            return Sent(*json.loads(body))
        raise _ERRORS[status](body.decode())

    async def _predict_in_a_list(self, x: Sent, headers: list[Any]) -> Sent:
        """The same, with the item as the only one of a list."""
        status, body = await self._ask("POST", "/predict/many", headers, json.dumps([x]).encode())
        if status != 200:
            raise _ERRORS[status](body.decode())
        (entry,) = json.loads(body)
        if type(entry) is dict:
            raise _ERRORS[entry["error"]["status"]](json.dumps(entry))
        return Sent(*entry)

    async def stream(
        self, xs: Any, *, max_in_flight: int | None = None, return_exceptions: bool = False
    ) -> AsyncIterator[Any]:
        """The items one after the other."""
        source = xs if hasattr(xs, "__aiter__") else _one_by_one(xs)
        async with contextlib.aclosing(source):
            async for x in source:
                try:
                    yield await self.predict(x)
                except carpool.CarpoolError as error:
                    if not return_exceptions:
                        raise
                    yield error

    async def stats(self) -> None:
        """Ask for all addresses that there are besides."""
        for page in _PAGES:
            status, _ = await self._ask("GET", page, [], b"")
            if status not in (200, 503):
                raise AssertionError(f"GET {page} is answered {status}")

    def story(self, request_id: int) -> None:
        """There is no story through a front."""

    async def _ask(self, method: str, path: str, headers: list[Any], body: bytes) -> tuple[int, bytes]:
        sent: list[dict[str, Any]] = []
        asked = [{"type": "http.request", "body": body}]

        async def receive() -> dict[str, Any]:
            if not asked:
                await asyncio.get_running_loop().create_future()  # the client stays
            return asked.pop()

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": headers}
        await self.app(scope, receive, send)
        head, *rest = sent
        return head["status"], b"".join(message["body"] for message in rest)


async def _one_by_one(xs: Any) -> AsyncIterator[Any]:
    for x in xs:
        yield x
