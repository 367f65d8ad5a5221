"""One server for all tests that only ask, and a gate for those that must hold a model back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import uvloop

from carpool.http.app import App
from tests.support.http import models
from tests.support.http.doors import doors, ours, port
from tests.support.http.net import Gate, RunningServer, serving
from tests.support.waiting import PATIENCE_S

__all__ = ["doors", "gate", "loop", "ours", "port", "server"]

_SERVICES = (models.scale, models.echo, models.gated, models.moody, models.csv, models.reverse, models.two_steps)


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """Several models, each with a worker process; default settings, but for the body limit of 1 MiB."""
    with serving(App(*_SERVICES, max_body_bytes=2**20)) as running:
        yield running


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Where `models.Gated` waits."""
    with Gate() as one:
        yield one


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop in a thread of its own."""
    one = uvloop.new_event_loop()
    thread = threading.Thread(target=one.run_forever, daemon=True)
    thread.start()
    yield one
    one.call_soon_threadsafe(one.stop)
    thread.join(PATIENCE_S)
    one.close()
