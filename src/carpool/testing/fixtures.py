"""Fixtures for pytest. A conftest.py imports them: `from carpool.testing.fixtures import serve`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from carpool.client.sync import Client
from carpool.testing.serving import served

Serve = Callable[..., Client]
"""The type of the fixture `serve`: takes services and settings of `carpool.http.App`."""


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve services until the end of the test: `client = serve(service)`."""
    with ExitStack() as stack:
        yield lambda *services, **settings: stack.enter_context(served(*services, **settings))
