"""What those who run a server bring: collectors of metrics, and modules of services that are added."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from prometheus_client.registry import Collector

from carpool import Service, Stage
from carpool.http.app import App
from carpool.http.serve import _own_metrics
from tests.foreign.table import WAYS, Way, left_out, place
from tests.foreign.ways import AsgiCall
from tests.support.kinds import fail

ONE_WAY = ["thread by ASGI"]
OTHERS = [name for name in WAYS if name not in ONE_WAY]
WHY = "it happens in the app, before and beside all workers: one way stands for all"
COLLECTOR, MODULE = "collectors of metrics", "modules of services that are added"


class BadCollector(Collector):
    """A collector that raises, once it is registered."""

    kind = ""

    def collect(self) -> Iterator[Any]:
        if self.kind:
            fail(self.kind)
        return iter(())


def ten_times(x: int) -> int:
    """The model of the app."""
    return 10 * x


def of_app(check: Callable[[App], Awaitable[None]], **settings: Any) -> None:
    """Check an app that runs; in the end its service answers."""
    app = App(Service(Stage(ten_times, run_in="thread"), name="ten"), **settings)

    async def whole() -> None:
        await app.start()
        try:
            await check(app)
            assert await asked(app, "POST", "/predict", b"4") == (200, b"40")
        finally:
            await app.stop()

    with _own_metrics(app):
        asyncio.run(whole())


async def asked(app: App, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Ask an app once."""
    call = AsgiCall(body)
    await app(call.scope(method, path, {}), call.receive, call.send)
    return call.status, call.body


@place(COLLECTOR, ONE_WAY)
def collector(way: Way, kind: str) -> None:
    """What it would have said is missing from /metrics, which has all else."""
    bad = BadCollector()
    REGISTRY.register(bad)

    async def check(app: App) -> None:
        bad.kind = kind
        status, body = await asked(app, "GET", "/metrics")
        assert (status, b"carpool_requests_total" in body) == (200, True)

    try:
        of_app(check)
    finally:
        REGISTRY.unregister(bad)


@place(MODULE, ONE_WAY)
def module(way: Way, kind: str) -> None:
    """It is not added, whoever orders it is told, and the server is as it was."""

    async def check(app: App) -> None:
        with pytest.raises(ValueError, match="'raises_at_import' cannot be imported"):
            await app.admin._services.add("raises_at_import:service")
        assert [endpoint.name for endpoint in app.endpoints] == ["ten"]

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        (Path(folder) / "raises_at_import.py").write_text(f"from tests.support.kinds import fail\nfail({kind!r})\n")
        sys.path.insert(0, folder)
        stack.callback(sys.path.remove, folder)
        of_app(check)


for name in (COLLECTOR, MODULE):
    left_out(name, OTHERS, WHY)
