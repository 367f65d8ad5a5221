"""Addresses of a service's own (`Service(routes=...)`), by both doors and in each kind of worker."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import pytest

from carpool import HTTPRequest, Service, Stage
from carpool.http.app import App
from tests.support import models as plain
from tests.support.http import models, routed
from tests.support.http.both_fronts import ask, both_fronts
from tests.support.http.front import get
from tests.support.http.net import Client


@pytest.fixture(scope="module")
def doors() -> Iterator[Any]:
    with both_fronts(App(routed.pictures, routed.inside, routed.on_the_loop)) as both:
        yield both


RAW = "Content-Type: image/png"


def test_several_addresses_over_one_model(port: int) -> None:
    """An address reads what the hint of its function says, in JSON, msgpack or raw, and the model
    gets what the function makes of it, in the same workers.
    """
    answers = [
        ask(port, "/predict", b"abc", RAW),
        ask(port, "/classify", b"abc", RAW),
        ask(port, "/classify_url", {"url": "abc"}),
        ask(
            port, "/classify_url", msgspec.msgpack.encode({"url": "a", "times": 3}), "Content-Type: application/msgpack"
        ),
        ask(port, "/v1/classify:turned", b"abc", RAW),
        ask(port, "/v1/classify%3Aturned", b"abc", RAW),
        ask(port, "/v1/classify:turned", "YWJj"),
    ]
    assert [answer.status for answer in answers] == [200] * len(answers)
    results = [(msgspec.msgpack if i == 3 else msgspec.json).decode(answer.body) for i, answer in enumerate(answers)]
    assert [length for length, _, _ in results] == [3] * len(answers)
    assert len({pid for _, pid, _ in results}) == 1
    assert results[0][1] != os.getpid()


@pytest.mark.parametrize("path", ["/inside", "/loop"])
def test_adapters_run_where_the_stage_does(port: int, path: str) -> None:
    """Stages in threads and on the loop have addresses of their own, too."""
    answer = ask(port, path, {"url": "abcd"})
    assert (answer.status, json.loads(answer.body)[:2]) == (200, [4, os.getpid()])


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"url": "broken"}, 500, "model_error"),
        ({"url": "refused"}, 409, "foreign"),
        ({"url": "unfit"}, 422, "invalid_item"),
        ({"url": 7}, 422, "invalid_item"),
        ({"address": "x"}, 422, "invalid_item"),
        (b"{", 400, "invalid_request"),
    ],
)
@pytest.mark.parametrize("path", ["/classify_url", "/inside", "/loop"])
def test_a_wrong_body_or_a_function_that_raises_fails_its_item(
    port: int, path: str, body: Any, status: int, code: str
) -> None:
    """What is wrong with a body, or raised by the function of an address, fails that item as it
    would in the model's own hooks, and the next request is served.
    """
    answer = ask(port, path, body)
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (status, code), answer
    assert b"secret" not in answer.body
    if status == 422 and isinstance(body, dict) and body.get("url") != "unfit":
        assert json.loads(answer.body)["error"]["details"][0]["loc"] == ["url"]
    assert ask(port, path, {"url": "fine"}).status == 200


def test_other_content_types_are_refused(port: int) -> None:
    """An address whose function does not take bytes reads JSON and msgpack only."""
    answer = ask(port, "/classify_url", b"abc", RAW)
    assert answer.status == 415
    assert b"image" not in answer.body
    with Client(port) as client:
        assert client.ask(get("/classify_url")).status == 405


def test_metrics_are_those_of_the_model(doors: Any) -> None:
    """What comes in at an address of its own counts for its model as any other request."""
    server = doors[0]

    def counted() -> int:
        outcomes: dict[str, int] = server.app.endpoints[0].driver.stats.outcomes
        return outcomes["ok"]

    before = counted()
    ask(server.port, "/classify_url", {"url": "abc"})
    server.wait_until(lambda: counted() == before + 1)


def test_the_document_has_them(port: int) -> None:
    """/openapi.json has the addresses, each with the schema of what it takes."""
    with Client(port) as client:
        document = json.loads(client.ask(get("/openapi.json")).body)
    operation = document["paths"]["/classify_url"]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Link"}
    assert "image/png" not in operation["requestBody"]["content"]
    assert "application/octet-stream" in document["paths"]["/classify"]["post"]["requestBody"]["content"]
    names = [each["operationId"] for path in document["paths"].values() for each in path.values()]
    assert len(names) == len(set(names))


def takes_two(a: Any, b: Any) -> Any: ...


def takes_a_request(request: HTTPRequest) -> Any: ...


def takes_the_unsendable(model: models.Scale) -> Any: ...


def yields(x: Any) -> Any:
    yield x


SERVED = Stage(models.Scale, max_batch_size=4)
WRONG: list[tuple[Stage, Any, type[Exception], str]] = [
    (SERVED, {"classify": None}, ValueError, "'classify', which is no path: begin it with a slash"),
    (SERVED, {"/a b": None}, ValueError, "is no path"),
    (SERVED, {"/a/../b": None}, ValueError, "is no path"),
    (SERVED, {"/a?b=1": None}, ValueError, "is no path"),
    (SERVED, {"/": None}, ValueError, "is no path"),
    (SERVED, {"/metrics": None}, ValueError, "an address that every app has"),
    (SERVED, {"/models/x/predict": None}, ValueError, "an address that every app has"),
    (SERVED, {"/predict/many": None}, ValueError, "an address that every app has"),
    (SERVED, {f"/{i}": None for i in range(65)}, ValueError, "at most 64"),
    (SERVED, [("/a", None)], TypeError, "routes must be a mapping"),
    (SERVED, {"/a": "fetch"}, TypeError, "routes gives 'fetch' for /a: give a function"),
    (SERVED, {"/a": takes_two}, TypeError, "the function for /a in routes is called with one value"),
    (SERVED, {"/a": takes_a_request}, TypeError, "takes an HTTPRequest"),
    (SERVED, {"/a": takes_the_unsendable}, TypeError, "for /a in routes takes Scale by its hint"),
    (SERVED, {"/a": yields}, TypeError, "the function for /a in routes is a generator"),
    (SERVED, {"/a": routed.fetch_on_the_loop}, TypeError, 'is async, but Scale runs with run_in="process"'),
    (
        Stage(routed.lengths_on_the_loop, max_batch_size=4, run_in="loop"),
        {"/a": routed.fetch},
        TypeError,
        "would block the loop",
    ),
    (Stage(models.Scale, max_batch_size=4, size=int), {"/a": routed.fetch}, ValueError, "size= of Scale"),
]


@pytest.mark.parametrize(("stage", "routes", "kind", "text"), WRONG)
def test_wrong_declarations_are_refused_by_name(stage: Stage, routes: Any, kind: type[Exception], text: str) -> None:
    """What cannot work is refused where the service is declared, by its path and with what to do."""
    with pytest.raises(kind, match=re.escape(text)):
        Service(stage, routes=routes)


def test_an_address_belongs_to_one_service() -> None:
    """Two services of an app cannot have one address, nor can two routes of a service."""
    one = Service(SERVED, name="one", routes={"/scale": None})
    two = Service(Stage(SERVED.model, max_batch_size=4), name="two", routes={"/scale": None})
    with pytest.raises(ValueError, match="routes names /scale twice"):
        App(one, two)
    with pytest.raises(ValueError, match="routes names /scale/many twice"):
        App(Service(SERVED, routes={"/scale": None, "/scale/many": None}))


def test_what_a_worker_cannot_find_is_named() -> None:
    """A function that cannot be sent to a worker process is an error that says so."""
    service = Service(Stage(plain.double), routes={"/a": lambda x: x})
    with pytest.raises(TypeError, match=r"double, or an adapter of its routes, cannot be sent to a worker process"):
        service.start()


def test_a_partial_and_an_object_are_functions_too() -> None:
    """Whatever can be called with one value makes items."""
    Service(SERVED, routes={"/a": partial(takes_two, b=1), "/b": plain.Callable(), "/c": float})
