"""Types of items, declared in every way there is, over real HTTP: read, checked, and written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from carpool.http.app import App
from tests.http import typed
from tests.http.door import post
from tests.http.net import Client, RunningServer, predict, serving


@pytest.fixture(scope="module")
def typed_server() -> Iterator[RunningServer]:
    """One worker for each model of `typed`."""
    with serving(App(typed.shift, typed.measure, typed.greet, typed.double, typed.total, typed.checked)) as running:
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
    ("total", [1, 2, 3], 6),
    ("total", [[1], [2]], 3),
    ("checked", {"x": 5}, 5),
]


@pytest.mark.parametrize(("model", "item", "result"), ITEMS)
def test_an_item(typed_server: RunningServer, model: str, item: Any, result: Any) -> None:
    """The same in JSON and in msgpack."""
    path = f"/models/{model}/predict"
    answer = predict(typed_server.port, item, path)
    assert (answer.status, json.loads(answer.body)) == (200, result)
    with Client(typed_server.port) as client:
        packed = client.ask(post(msgspec.msgpack.encode(item), path, "Content-Type: application/msgpack"))
    assert (packed.status, msgspec.msgpack.decode(packed.body)) == (200, result)


@pytest.mark.parametrize("x", [13, 99, 100])
def test_a_result_is_checked_too(typed_server: RunningServer, x: int) -> None:
    """What the model returns has to fit what it promises: over its own limits, or of another type, it is a 500."""
    model, status = ("checked", 500 if x == 13 else 200) if x != 100 else ("shift", 500)
    assert predict(typed_server.port, {"x": x}, f"/models/{model}/predict").status == status
