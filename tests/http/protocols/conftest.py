"""One app with all protocols, behind both fronts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.both_fronts import both_fronts
from tests.http.protocols import served


@pytest.fixture(scope="package")
def doors() -> Iterator[Any]:
    with both_fronts(served.app(max_body_bytes=8_000_000)) as both:
        yield both


@pytest.fixture(params=["our server", "uvicorn"])
def port(request: pytest.FixtureRequest, doors: Any) -> int:
    return int(doors[request.param == "uvicorn"].port)


@pytest.fixture
def ours(doors: Any) -> int:
    """The port of our own server, where the front makes no difference."""
    return int(doors[0].port)
