"""Several services in one app, and services of several stages."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from carpool import Service, Stage
from carpool.http.app import App
from tests.support.http import models
from tests.support.http.front import get, post
from tests.support.http.net import Client, RunningServer, predict, serving


def test_each_has_its_address(server: RunningServer) -> None:
    """Each service answers at its own address, and the first one at `/predict`, too."""
    assert predict(server.port, 1.0).body == b"2.0"
    assert predict(server.port, 1.0, "/models/scale/predict").body == b"2.0"
    assert predict(server.port, 1.0, "/models/echo/predict").body == b"1.0"
    assert predict(server.port, [1.0], "/models/csv/predict").body == b"1.0,1"


def test_a_name_that_needs_quoting(server: RunningServer) -> None:
    """A name that needs quoting is quoted in its address, and two stages answer as one service."""
    assert predict(server.port, 40, "/models/two%20steps/predict").body == b"42"


def test_all_of_them_on_one_connection(server: RunningServer) -> None:
    """Pipelined requests to several services are answered each by its own model, in order."""
    paths = ["/predict", "/models/echo/predict", "/models/two%20steps/predict", "/models/csv/predict"]
    with Client(server.port) as client:
        for n in range(20):
            body = b"[%d]" % n if "csv" in paths[n % 4] else b"%d" % n
            client.send(post(body, paths[n % 4]) + get())
        for n in range(20):
            expected = [f"{2.0 * n}", f"{n}", f"{n + 2}", f"{float(n)},"][n % 4]
            body = client.answer().body.decode()
            assert body.startswith(expected) if n % 4 == 3 else body == expected
            assert client.answer().body == b"ok\n"


def test_many_clients_through_two_stages(server: RunningServer) -> None:
    """Many clients through two stages each get their own answers."""
    with ThreadPoolExecutor(32) as pool:
        answers = pool.map(lambda n: predict(server.port, n, "/models/two%20steps/predict"), range(500))
    assert [json.loads(answer.body) for answer in answers] == [n + 2 for n in range(500)]


def test_one_that_fails_does_not_touch_the_others() -> None:
    """When a worker of one service dies, the other services go on answering."""
    mortal = Service(Stage(models.Mortal), name="mortal")
    with serving(App(models.scale, mortal)) as running, Client(running.port) as doomed:
        doomed.send(post(b'"die"', "/models/mortal/predict"))
        for n in range(50):
            assert predict(running.port, n).body == str(2.0 * n).encode()
        assert doomed.answer().status == 500  # two workers died with it
        assert running.outcomes(0) == {"ok": 50}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"when_full": "maybe"}, '"refuse" or "wait"'),
        ({"timeout_status": 500}, "504 or 408"),
        ({"max_body_bytes": 0}, "at least 1"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], text: str) -> None:
    """A setting of the app that cannot work is refused with a text that says what would do."""
    with pytest.raises(ValueError, match=text):
        App(models.scale, **settings)  # type: ignore[arg-type]


def test_services_are_checked() -> None:
    """An app without services, or with two of one name, is an error at once."""
    with pytest.raises(ValueError, match="at least one"):
        App()
    with pytest.raises(ValueError, match="two services are called 'scale'"):
        App(models.scale, models.echo, models.scale)
