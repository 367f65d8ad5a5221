"""A request to a wrong address, with a wrong method or in a wrong form is told what would be right."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from carpool import Service, Stage
from carpool.errors import InvalidRequest
from carpool.http.app import AdminApp, App
from carpool.http.exchange import Head


def lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


def doubled(rows: list[np.ndarray]) -> list[Any]:
    return [2 * row for row in rows]


def service(name: str, model: Any = lengths) -> Service:
    return Service(Stage(model, max_batch_size=4, run_in="thread"), name=name)


def refused(app: App | AdminApp, path: str, method: str = "POST") -> tuple[int, str, dict[str, str]]:
    """The status, message and headers with which a request is refused."""
    response = app.admit(Head(method.encode(), path.encode(), {}))
    assert response is not None
    body = json.loads(response.body)
    message = body["error"]["message"] if isinstance(body["error"], dict) else body["error"]
    return response.status, message, {name.decode(): value.decode() for name, value in response.headers}


def test_a_404_names_the_addresses_that_there_are() -> None:
    """Whoever asks where nothing is hears where models answer, and where all addresses are listed."""
    told = "There is nothing at this address. Models answer POST requests at"
    one, two = App(service("digits")), App(service("digits"), service("a b"), root_path="/api")
    more = "; GET / lists all addresses."
    assert refused(one, "/predictions")[:2] == (404, f"{told} /models/digits/predict and /predict{more}")
    assert refused(two, "/predictions")[1] == (
        f"{told} /api/models/digits/predict, /api/predict and /api/models/a%20b/predict; GET /api/ lists all addresses."
    )


def test_a_404_names_a_few_addresses_of_many() -> None:
    """However many models there are, and whatever they are called, the text of a 404 is short."""
    app = App(*[service(f"{{m}}{i}") for i in range(20)])
    message = refused(app, "/{}/none")[1]
    assert "/models/%7Bm%7D6/predict and others; GET /" in message
    assert "%7Bm%7D7" not in message


def test_a_404_below_a_protocol_names_its_addresses() -> None:
    """Where a protocol could have an address and has not, the text names those that it has."""
    app = App(service("digits"))
    assert "The protocol oip has /v2/health/live, /v2/health/ready, " in refused(app, "/v2/model/digits/infer")[1]


def test_a_404_of_the_operators_address_names_its_pages() -> None:
    """At the address of those who run the server there are no models."""
    app = App(service("digits"), has_admin_address=True)
    message = refused(AdminApp(app, None), "/predict")[1]
    assert "There are /livez, /readyz, /metrics" in message
    assert "/models" not in message and "GET / " not in message


@pytest.mark.parametrize(
    ("path", "method", "methods"),
    [
        ("/predict", "GET", "POST, OPTIONS"),
        ("/livez", "DELETE", "GET, HEAD, OPTIONS"),
        ("/admin/reload", "GET", "POST, OPTIONS"),
        ("/v2/models/digits/infer", "PUT", "POST, OPTIONS"),
    ],
)
def test_a_405_names_the_methods(path: str, method: str, methods: str) -> None:
    """A wrong method is told the right ones, in `Allow` and in the text."""
    status, message, headers = refused(App(service("digits")), path, method)
    assert (status, headers["allow"]) == (405, methods)
    assert message == f"This address does not support the method; it supports {methods}."


@pytest.mark.parametrize(
    ("model", "path", "kinds", "others"),
    [
        (lengths, "/predict", {"text/plain", "multipart/form-data", "application/x-ndjson"}, {"application/x-npy"}),
        (doubled, "/predict", {"application/x-npy", "multipart/form-data", "application/x-ndjson"}, {"text/plain"}),
        (doubled, "/predict/many", set(), {"application/x-npy", "multipart/form-data", "application/x-ndjson"}),
    ],
)
def test_a_415_names_the_forms_that_an_address_reads_itself(
    model: Any, path: str, kinds: set[str], others: set[str]
) -> None:
    """A wrong content type is told every right one: forms, lines and .npy files, too, where they are read."""
    (endpoint,) = App(service("model", model)).endpoints
    (address,) = [each for each in endpoint.addresses if each.path == path]
    with pytest.raises(InvalidRequest) as refusal:
        address.choose(b"application/xml", None)
    named = set(str(refusal.value).partition("it reads ")[2].split(", "))
    assert refusal.value.status == 415
    assert {"application/json", "application/msgpack", *kinds} <= named
    assert named.isdisjoint(others)
