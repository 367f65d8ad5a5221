"""One request to an ASGI app without any server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


async def ask(app: Callable[..., Awaitable[None]], body: bytes) -> tuple[int, bytes]:
    """Return the status and the body of the answer to one request."""
    sent: list[dict[str, Any]] = []
    incoming = [{"type": "http.request", "body": body}]

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await asyncio.sleep(30)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/predict", "raw_path": b"/predict", "headers": []}
    await app(scope, receive, send)
    return sent[0]["status"], sent[1]["body"]
