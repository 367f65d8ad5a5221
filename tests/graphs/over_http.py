"""Services that are asked over ASGI, without a server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import httpx

from carpool import Service
from carpool.http import App


@contextlib.asynccontextmanager
async def asked(*services: Service) -> AsyncIterator[httpx.AsyncClient]:
    app = App(*services)
    await app.start()
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            yield client
    finally:
        await app.stop()
