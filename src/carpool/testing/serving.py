"""Serves services for a test, on a port of their own, and gives the test a client of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from carpool.client.sync import Client
from carpool.http.app import App
from carpool.http.server import Server
from carpool.service.service import Service

_PATIENCE_S = 60.0


@contextmanager
def served(*services: Service, **settings: Any) -> Iterator[Client]:
    """Serve services over HTTP while the block runs: `with served(service) as client`.

    The client asks the first one; `client.url` is where the server is.

    Args:
        services: Those to serve.
        settings: Those of `carpool.http.App`.

    Raises:
        StartupError: A service could not start.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="carpool served", daemon=True)
    thread.start()

    def wait(work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, loop).result(_PATIENCE_S)

    app = App(*services, **settings)
    server = Server(app, port=0)
    try:
        wait(server.listen())
        try:
            wait(app.start())
            with Client(f"http://127.0.0.1:{server.port}") as client:
                yield client
        finally:
            wait(server.stop())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
