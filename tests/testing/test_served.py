"""`carpool.testing.served` and the fixture `serve`: a server for a test."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("httpx", reason="clients need carpool[client]")

from carpool import Service, Stage
from carpool.testing import served
from carpool.testing.fixtures import serve as serve
from tests.support.http import models

scale = Service(Stage(models.Scale, max_batch_size=8, run_in="thread"), name="scale")


def test_a_block_serves_a_service() -> None:
    """The client of the block asks a real server, which is gone afterwards."""
    with served(scale) as client:
        assert client.predict(2) == 4.0 and client.url.startswith("http://127.0.0.1:")
    with pytest.raises(RuntimeError, match="closed"):
        client.predict(2)


def test_a_fixture_serves_until_the_end_of_the_test(serve: Any) -> None:
    """The fixture gives a client for each call, with settings of the app."""
    one, two = serve(scale), serve(scale, when_full="wait")
    assert one.predict(1) == two.predict(1) == 2.0 and one.url != two.url
