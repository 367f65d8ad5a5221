"""Addresses are the same however they are quoted, and each says which methods it has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import carpool
from carpool.http.app import App
from carpool.http.openapi import overview
from tests.support.http import models
from tests.support.http.both_fronts import asked, behind
from tests.support.http.front import get, post
from tests.support.http.net import serving


@pytest.fixture(params=["our own", "uvicorn"], scope="module")
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of either front of an app."""
    app = App(models.scale, protocols=["kserve-v1"])
    with serving(app) as running:
        if request.param == "our own":
            yield running.port
        else:
            with behind(app, running.loop) as server:
                yield server.port


@pytest.mark.parametrize("path", ["/models/sc%61le/predict", "/%6dodels/scale/predict", "/predic%74", "/%70redict"])
def test_quoted_letters(port: int, path: str) -> None:
    """A letter of a path that is percent-encoded is that letter (RFC 3986, 6.2.2.2)."""
    assert asked(port, post(b"3.0", path)).body == b"6.0"
    assert asked(port, get("/live%7A"), "GET").status == 200
    assert asked(port, post(b"3.0", "/models%2Fscale/predict")).status == 404
    assert asked(port, post(b"3.0", "/models/sc%2561le/predict")).status == 404


def test_the_first_page_says_what_is_where(port: int) -> None:
    """`/` lists the models with their addresses, a command to begin with, and the other pages."""
    answer = asked(port, get("/"), "GET")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    lines = answer.body.decode().splitlines()
    assert lines[0] == f"carpool {carpool.__version__}"
    assert lines[2:] == [
        "scale: Scale",
        "  POST /models/scale/predict",
        "  POST /models/scale/predict/many  (a list of items)",
        "  POST /predict",
        "  POST /predict/many  (a list of items)",
        "  GET /models/scale/ready",
        "  curl --json 1.5 test/models/scale/predict",
        "",
        "GET /dashboard /docs /livez /metrics /openapi.json /readyz",
        "protocol kserve-v1:",
        "  POST /v1/models/scale:predict",
        "  GET /v1/models /v1/models/scale",
    ]


def floats(xs: list[float]) -> list[float]:
    return xs


def pictures(bodies: list[bytes]) -> list[int]:
    return [len(body) for body in bodies]


def anything(items: list[dict[str, int]]) -> list[int]:
    return [len(item) for item in items]


def counts(n: int) -> Iterator[int]:
    yield from range(n)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (floats, ["curl --json 1.0 {}"]),
        (pictures, ["curl -H 'Content-Type: application/octet-stream' --data-binary @FILE {}"]),
        (anything, ["curl --json @item.json {}"]),
        (counts, ["curl --json 1 {}", "curl -N -H 'Accept: text/event-stream' --json 1 {}"]),
    ],
)
def test_the_first_page_has_a_command_for_each_kind_of_model(model: Any, expected: list[str]) -> None:
    """There is a command for models without examples, and one more that streams where the model does."""
    limits = {} if model is counts else {"max_batch_size": 4}
    service = carpool.Service(carpool.Stage(model, **limits))
    app = App(service)
    text = overview(app.endpoints, [], host=b"example.org:8000")
    url = f"example.org:8000/models/{model.__name__}/predict"
    assert [line.strip() for line in text.splitlines() if "curl" in line] == [line.format(url) for line in expected]


@pytest.mark.parametrize("host", [b"", b"a b", b"x;rm -rf ~", b"<b>", b"a:123456", b"$(id)"])
def test_the_first_page_repeats_no_host_that_is_none(host: bytes) -> None:
    """What a client sends as `Host` is in the command only if it is a name with a port at most."""
    text = overview(App(models.scale).endpoints, [], host=host, root_path="/ml", needs_key=True)
    assert """  curl -H "Authorization: Bearer $CARPOOL_KEY" --json 1.5 HOST:PORT/ml/models/scale/predict""" in text
    secure = overview(App(models.scale).endpoints, [], host=b"[::1]:8000", is_tls=True)
    assert "curl --json 1.5 https://[::1]:8000/models" in secure


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("*", "GET, HEAD, POST, OPTIONS"),
        ("/predict", "POST, OPTIONS"),
        ("/models/scale/predict", "POST, OPTIONS"),
        ("/livez", "GET, HEAD, OPTIONS"),
    ],
)
def test_options(port: int, path: str, methods: str) -> None:
    """OPTIONS of an address, or of the whole server, is answered with the methods there are."""
    answer = asked(port, get(path, method="OPTIONS"), "OPTIONS")
    assert (answer.status, answer.body, answer.headers["allow"]) == (204, b"", methods)
    assert asked(port, get("/nowhere", method="OPTIONS"), "OPTIONS").status == 404
