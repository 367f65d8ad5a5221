"""Addresses are the same however they are quoted, and each says which methods it has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import carpool
from carpool.http.app import App
from tests.support.http import models
from tests.support.http.both_fronts import asked, behind
from tests.support.http.front import get, post
from tests.support.http.net import serving


@pytest.fixture(params=["our own", "uvicorn"])
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
        "  curl --json 1.5 http://HOST:PORT/models/scale/predict",
        "",
        "GET /dashboard /docs /livez /metrics /openapi.json /readyz",
        "protocol kserve-v1:",
        "  POST /v1/models/scale:predict",
        "  GET /v1/models /v1/models/scale",
    ]


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
