"""Fixtures: one app behind our own server and behind uvicorn, and the ports at which they answer.

A test module with an app of its own has a fixture `doors` of its own; `port` and `ours` then lead
to that one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.http import served
from tests.support.http.both_fronts import Uvicorn, both_fronts
from tests.support.http.net import RunningServer

Doors = tuple[RunningServer, Uvicorn]


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    """Both fronts of the app with the models that tests of protocols ask."""
    with both_fronts(served.app(max_body_bytes=8_000_000)) as both:
        yield both


@pytest.fixture(params=["our server", "uvicorn"])
def port(request: pytest.FixtureRequest, doors: Doors) -> int:
    """The port of each front in turn."""
    return doors[request.param == "uvicorn"].port


@pytest.fixture
def ours(doors: Doors) -> int:
    """The port of our own server, where the front makes no difference."""
    return doors[0].port
