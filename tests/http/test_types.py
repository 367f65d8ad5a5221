"""Types of items, declared in every way there is, over real HTTP: read, checked, and written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from carpool import Model, Service, Stage
from carpool.http import openapi
from carpool.http.app import App
from tests.support.http import typed
from tests.support.http.front import post
from tests.support.http.net import Client, RunningServer, predict, serving


@pytest.fixture(scope="module")
def typed_server() -> Iterator[RunningServer]:
    """One worker for each model of `typed`."""
    services = (typed.shift, typed.measure, typed.greet, typed.double, typed.total, typed.checked, typed.book)
    with serving(App(*services, typed.twice, typed.reciprocal, typed.reciprocals)) as running:
        yield running


ITEMS: list[tuple[str, Any, Any]] = [
    ("shift", {"x": 1}, {"x": 2, "color": "red", "tags": ["shifted"]}),
    ("shift", {"x": 99, "color": "blue", "tags": ["a"]}, {"x": 100, "color": "blue", "tags": ["a", "shifted"]}),
    ("measure", {"width": 2, "height": 1.5}, {"area": 3.0, "in_batch": 1}),
    ("measure", {"width": 2, "height": 1.5, "colour": "any"}, {"area": 3.0, "in_batch": 1}),
    (
        "greet",
        {"name": "Ann", "age": 3, "address": {"city": "Bonn"}},
        {"name": "Dr. Ann", "age": 3, "address": {"city": "Bonn"}},
    ),
    ("double", [1, 2.5], [2.0, 5.0]),
    ("double", [[1, 2], [3, 4]], [[2.0, 4.0], [6.0, 8.0]]),
    ("double", [], []),
    ("twice", [1, 2.5], [2.0, 5.0]),
    ("twice", [[1], [3]], [[2.0], [6.0]]),
    ("twice", 4, 8.0),
    ("total", [1, 2, 3], 6),
    ("total", [[1], [2]], 3),
    ("checked", {"x": 5}, 5),
]


@pytest.mark.parametrize(("model", "item", "result"), ITEMS)
def test_an_item(typed_server: RunningServer, model: str, item: Any, result: Any) -> None:
    """An item of each declared type comes through alike in JSON and in msgpack."""
    path = f"/models/{model}/predict"
    answer = predict(typed_server.port, item, path)
    assert (answer.status, json.loads(answer.body)) == (200, result)
    with Client(typed_server.port) as client:
        packed = client.ask(post(msgspec.msgpack.encode(item), path, "Content-Type: application/msgpack"))
    assert (packed.status, msgspec.msgpack.decode(packed.body)) == (200, result)


@pytest.mark.fault("F36")
@pytest.mark.parametrize("item", ["abc", ["a"], {}, None, [[1], [2, 3]], [1e300]])
def test_what_is_no_row_of_an_array_is_refused(typed_server: RunningServer, item: Any) -> None:
    """With the hint of an array for the batch, an item that cannot be one of its rows gets 422."""
    assert predict(typed_server.port, item, "/models/twice/predict").status == 422


@pytest.mark.fault("F40")
@pytest.mark.parametrize("x", [13, 99, 100])
def test_a_result_is_checked_too(typed_server: RunningServer, x: int) -> None:
    """A result that does not fit what the model promises, by its type or its limits, is a 500."""
    model, status = ("checked", 500 if x == 13 else 200) if x != 100 else ("shift", 500)
    assert predict(typed_server.port, {"x": x}, f"/models/{model}/predict").status == status


def test_pydantic_speaks_its_own_json(typed_server: RunningServer) -> None:
    """pydantic's strict dates are taken as text, and its results have aliases and computed fields
    and are not read back.
    """
    answer = predict(typed_server.port, {"when": "2026-11-22T10:00:00", "n": 2}, "/models/book/predict")
    assert (answer.status, json.loads(answer.body)) == (
        200,
        {"when": "2026-11-22T10:00:00", "n": 2, "pin": "**********", "day": "Sunday"},
    )
    assert predict(typed_server.port, {"when": 3.5, "n": 2}, "/models/book/predict").status == 422


@pytest.mark.parametrize(("model", "item"), [("reciprocal", 0), ("reciprocals", [1, 0])])
def test_nan_is_no_json(typed_server: RunningServer, model: str, item: Any) -> None:
    """A result with NaN or infinity, a number or in an array, is a 500 in JSON, which has no words
    for them; msgpack has.
    """
    path = f"/models/{model}/predict"
    refused = predict(typed_server.port, item, path)
    assert (refused.status, json.loads(refused.body)["error"]["code"]) == (500, "bad_result")
    with Client(typed_server.port) as client:
        packed = client.ask(post(msgspec.msgpack.encode(item), path, "Content-Type: application/msgpack"))
    assert packed.status == 200
    assert repr(msgspec.msgpack.decode(packed.body)) in ("nan", "[1.0, inf]")


@pytest.mark.parametrize("item", [[1e300], [[0, -1e39]]])
def test_a_number_beyond_the_dtype_is_the_clients_fault(typed_server: RunningServer, item: Any) -> None:
    """A number beyond an array's dtype is the client's fault, and does not silently become
    infinity.
    """
    assert predict(typed_server.port, item, "/models/double/predict").status == 422


def lengths(xs: list[str | bytes]) -> list[int]:
    """A union that msgspec cannot read."""
    return [len(x) for x in xs]


def mixed(xs: list[Any]) -> list[typed.Box | typed.Booking]:
    """A union that msgspec cannot check."""
    return xs


def shapes(x: complex) -> int:
    """A type that nothing in JSON reads as."""
    return 1


class Csv(Model):
    """A union with a format of its own, so that the hint does not matter."""

    accepts = "text/csv"

    def decode(self, bodies: list[bytes]) -> list[str]:
        return [body.decode() for body in bodies]

    def predict(self, xs: list[str | bytes]) -> list[int]:
        return [len(x) for x in xs]


@pytest.mark.fault("F77")
@pytest.mark.parametrize(
    ("model", "told"),
    [
        (Stage(lengths, max_batch_size=8), r"model lengths takes str \| bytes by its hint, .* str-like"),
        (Stage(mixed, max_batch_size=8), r"model mixed returns .*Box \| .*Booking by its hint, .* leave the hint out"),
        (Stage(shapes), "model shapes takes complex by its hint, .* no JSON value can be read as complex"),
    ],
)
def test_a_hint_that_cannot_be_checked_is_refused_by_the_app(model: Stage, told: str) -> None:
    """An app refuses a hint that cannot be checked, with the name of the model, before anything
    starts.
    """
    with pytest.raises(TypeError, match=told):
        App(Service(model))


def test_a_format_of_ones_own_needs_no_hint_that_can_be_checked() -> None:
    """A model with a format of its own may have a hint that cannot be checked: it reads the body
    itself, and the document says nothing of JSON that nobody sends.
    """
    service = Service(Stage(Csv, max_batch_size=8))
    body = openapi.document(App(service).endpoints, 504, 1)["paths"]["/predict"]["post"]["requestBody"]
    assert body["content"] == {
        "text/csv": {},
        "application/json": {"schema": {}},
        "application/msgpack": {"schema": {}},
    }


def test_python_callers_need_no_hint_that_can_be_checked() -> None:
    """With Python callers a hint need not be one that can be checked: their items are not read from
    bytes, and the service starts and answers, with sizes too.
    """
    stage = Stage(lengths, max_batch_size=8, size=len, run_in="thread")
    with Service(stage, Stage(mixed, max_batch_size=8, run_in="thread")).run() as service:
        assert service.predict(b"abc") == 3


@pytest.mark.parametrize(
    ("settings", "kind", "told"),
    [
        ({"max_body_bytes": 0}, ValueError, "max_body_bytes must be a whole number of at least 1, not 0"),
        ({"max_body_bytes": "1"}, ValueError, "max_body_bytes must be a whole number"),
        ({"idle_check_s": "1"}, ValueError, "idle_check_s must be 0 or more seconds, not '1'"),
        ({"debug": "no"}, TypeError, "debug must be True or False"),
        ({"output": "stderr"}, TypeError, "output must be a function"),
    ],
)
def test_an_app_refuses_what_cannot_be(settings: dict[str, Any], kind: type[Exception], told: str) -> None:
    """An app refuses settings that cannot work, and the text names each."""
    with pytest.raises(kind, match=told):
        App(typed.shift, **settings)


def test_an_app_is_of_services() -> None:
    """An app is made of services; a model by itself is refused."""
    with pytest.raises(TypeError, match=r"App takes services, not <.*wrap a model as App\(Service\(model\)\)"):
        App(lengths)  # type: ignore[arg-type]
