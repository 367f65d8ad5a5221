"""A list of items in one request, at an address that ends in /many: results and errors of their own, in order."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from carpool import Service, Stage
from carpool.engine.allowance import Allowance
from carpool.engine.wire.payload import JSON, MSGPACK
from carpool.http.app import App
from carpool.http.items import split
from tests.support.http import models, routed
from tests.support.http.both_fronts import ask, both_fronts
from tests.support.http.front import get, post
from tests.support.http.jobs import job
from tests.support.http.net import Client, Gate, serving, waiting

MSGPACK_TYPE = "Content-Type: application/msgpack"


def weigh(x: float) -> int:
    if x == 13:
        raise RuntimeError("unlucky")
    return int(x)


weighed = Service(Stage(models.Scale, max_batch_size=100, size=weigh), name="weighed")


@pytest.fixture(scope="module")
def doors() -> Iterator[Any]:
    services = (models.scale, routed.pictures, routed.answers, weighed, models.csv)
    with both_fronts(App(*services, max_body_bytes=10**6)) as both:
        yield both


def test_each_item_has_its_result_in_order(port: int) -> None:
    """A list of items is answered with the list of their results, in JSON and in msgpack."""
    items = [float(n) for n in range(200)]
    answer = ask(port, "/predict/many", items)
    assert (answer.status, json.loads(answer.body)) == (200, [2 * x for x in items])
    assert answer.headers["content-type"] == "application/json"
    packed = ask(port, "/models/scale/predict/many", msgspec.msgpack.encode(items), MSGPACK_TYPE)
    assert (packed.status, msgspec.msgpack.decode(packed.body)) == (200, [2 * x for x in items])
    mixed = ask(port, "/predict/many", items, "Accept: application/msgpack")
    assert msgspec.msgpack.decode(mixed.body) == [2 * x for x in items]
    assert (ask(port, "/predict/many", []).status, ask(port, "/predict/many", b" [ ] ").body) == (200, b"[]")


def test_each_item_has_its_own_error(port: int) -> None:
    """What is wrong with one item is an object in its place, with what its own answer would have
    said and the status; the others have their results.
    """
    answer = ask(port, "/predict/many", [1, "two", None, 4], "X-Request-Id: mine")
    assert answer.status == 200
    one, two, three, four = json.loads(answer.body)
    assert (one, four) == (2.0, 8.0)
    for entry in (two, three):
        error = entry["error"]
        assert (error["status"], error["code"], error["request_id"]) == (422, "invalid_item", "mine")
    alone = json.loads(ask(port, "/predict", "two", "X-Request-Id: mine").body)["error"]
    assert two["error"] == {**alone, "status": 422}
    packed = ask(port, "/predict/many", msgspec.msgpack.encode([1, "two"]), MSGPACK_TYPE)
    assert msgspec.msgpack.decode(packed.body)[1]["error"]["status"] == 422


def test_a_model_may_answer_in_its_own_way(port: int) -> None:
    """The value of a `Response` stands in its place; a body of another type is that item's error."""
    answer = ask(port, "/models/answers/predict/many", ["a", "created", "picture", "nothing", "raise"])
    assert answer.status == 200
    *values, picture, nothing, raised = json.loads(answer.body)
    assert values == ["a", "made"]
    assert (picture["error"]["code"], picture["error"]["status"]) == ("bad_result", 500)
    assert nothing is None
    assert raised["error"]["code"] == "model_error"
    assert b"secret" not in answer.body


def test_addresses_of_a_service_take_lists_too(port: int) -> None:
    """A service's own addresses have their lists, too, and bytes are base64 in them, as in JSON."""
    answer = ask(port, "/classify_url/many", [{"url": "abc"}, {"url": "broken"}, {"url": "a", "times": 2}])
    first, second, third = json.loads(answer.body)
    assert (first[0], third[0]) == (3, 2)
    assert second["error"]["code"] == "model_error"
    assert [length for length, _, _ in json.loads(ask(port, "/classify/many", ["YWJj", ""]).body)] == [3, 0]


def test_items_are_weighed(port: int) -> None:
    """With `size=` an item that cannot be weighed fails alone, also where no other is left."""
    answer = ask(port, "/models/weighed/predict/many", [1, 13, "x", 50])
    first, unlucky, unfit, last = json.loads(answer.body)
    assert (first, last) == (2.0, 100.0)
    assert (unlucky["error"]["status"], unfit["error"]["status"]) == (500, 422)
    alone = json.loads(ask(port, "/models/weighed/predict/many", ["x"]).body)
    assert alone[0]["error"]["status"] == 422


def test_a_model_with_a_format_of_its_own_takes_lists_of_json(port: int) -> None:
    """Where a body is not the item but text of the model's own, a list is JSON all the same."""
    answer = ask(port, "/models/csv/predict/many", [[1, 2], [3]])
    assert (answer.status, [total for total, _ in json.loads(answer.body)]) == (200, [3.0, 3.0])
    assert ask(port, "/models/csv/predict/many", b"1,2", "Content-Type: text/csv").status == 415


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"7", 422, "invalid_item"),
        (b'{"a": 1}', 422, "invalid_item"),
        (b"[1, 2", 400, "invalid_request"),
        (b"[1, 2]]", 400, "invalid_request"),
        (b"", 400, "invalid_request"),
        (b"[" * 3000, 400, "invalid_request"),
        (b"[" + b",".join([b"1"] * 1025) + b"]", 413, "too_large"),
        (b"[" + b",".join([b"1"] * 400_000) + b"]", 413, "too_large"),
    ],
)
def test_what_is_no_list_is_refused_as_a_whole(port: int, body: bytes, status: int, code: str) -> None:
    """A body that is no list, or a longer one than the queue holds, is one error, and the next
    request is served.
    """
    answer = ask(port, "/predict/many", body)
    assert (answer.status, json.loads(answer.body)["error"]["code"]) == (status, code), answer
    assert ask(port, "/predict/many", [1]).body == b"[2.0]"


@pytest.mark.parametrize("commas", ["[0,0]", '{"a":[1,2],"b":","}', '"a,\\"],b"', "1"])
def test_only_items_of_the_list_count(commas: str) -> None:
    """A list of as many items as the queue holds is taken, whatever commas its items have."""
    item = commas.encode()
    body = b" [" + b" , ".join([item] * 10) + b"]"
    assert split(body, JSON, Allowance(100, 10)) == [item] * 10
    with pytest.raises(Exception, match="more than 9 items"):
        split(body, JSON, Allowance(100, 9))
    packed = msgspec.msgpack.encode([json.loads(item)] * 20)
    assert len(split(packed, MSGPACK, Allowance(100, 20))) == 20
    with pytest.raises(Exception, match="more than 19 items"):
        split(packed, MSGPACK, Allowance(100, 19))


def test_a_list_is_admitted_whole_or_not_at_all() -> None:
    """A list for which the queue has no room is 429 as a whole, and one that fits is answered as a
    whole; requests before and after it are not touched.
    """
    gated = Service(Stage(models.Gated, max_batch_size=1, max_queue_size=4), name="gated")
    with serving(App(gated)) as running, Gate() as gate:
        with Client(running.port) as first, Client(running.port) as second, Client(running.port) as third:
            first.send(job(0, gate, path="/predict"))
            gate.knocked()
            second.send(post(json.dumps([{"value": 1}, {"value": 2}]).encode(), "/predict/many"))
            running.wait_until(lambda: waiting(running.app) == 2)
            refused = third.ask(post(json.dumps([{"value": n} for n in (3, 4, 5)]).encode(), "/predict/many"))
            assert refused.status == 429
            assert int(refused.headers["retry-after"]) >= 1
            told = json.loads(refused.body)["error"]
            assert (told["code"], told["reason"]) == ("overloaded", "queue_full")
            assert waiting(running.app) == 2
            third.send(post(json.dumps([{"value": 6}, {"value": 7}]).encode(), "/predict/many"))
            running.wait_until(lambda: waiting(running.app) == 4)
            gate.open()
            assert first.answer().status == 200
            assert [each["value"] for each in json.loads(second.answer().body)] == [1, 2]
            assert [each["value"] for each in json.loads(third.answer().body)] == [6, 7]
            seen = json.loads(ask(running.port, "/predict", {"value": -1}).body)["seen"]
        assert seen == [0, 1, 2, 6, 7, -1]
        outcomes = running.app.endpoints[0].driver.stats.outcomes
        assert (outcomes["ok"], outcomes["overloaded"]) == (6, 3)


@pytest.mark.parametrize("when_full", ["refuse", pytest.param("wait", marks=pytest.mark.slow)])
def test_a_client_that_leaves_takes_its_items_along(when_full: str) -> None:
    """The items of a client that leaves are taken out of the queue, or from before its door."""
    gated = Service(Stage(models.Gated, max_batch_size=1, max_queue_size=4), name="gated")
    with serving(App(gated, when_full=when_full)) as running, Gate() as gate:
        with Client(running.port) as first:
            first.send(job(0, gate, path="/predict"))
            gate.knocked()
            gone = [Client(running.port) for _ in range(2 if when_full == "wait" else 1)]
            for client in gone:
                client.send(post(json.dumps([{"value": n} for n in (1, 2, 3)]).encode(), "/predict/many"))
            core = running.app.endpoints[0].driver.core
            running.wait_until(lambda: core.waiting == 3 * len(gone))
            for client in gone:
                client.reset()
            running.wait_until(lambda: core.waiting == 0)
            gate.open()
            assert first.answer().status == 200
        assert running.app.endpoints[0].driver.stats.cancelled == 3 * len(gone)


def test_the_deadline_is_that_of_all(doors: Any) -> None:
    """The time-out of the request is that of each of its items, and those that were late say so."""
    gated = Service(Stage(models.Gated, max_batch_size=1), name="gated")
    with serving(App(gated)) as running, Gate() as gate, Client(running.port) as first:
        first.send(job(0, gate, path="/predict"))
        gate.knocked()
        began = time.monotonic()
        late = ask(running.port, "/predict/many", [{"value": 1}, {"value": 2}], "X-Request-Timeout-Ms: 100")
        assert time.monotonic() - began < 10
        assert [entry["error"]["status"] for entry in json.loads(late.body)] == [504, 504]
        gate.open()
        assert first.answer().status == 200


def test_pipelined_lists_are_answered_in_order(port: int) -> None:
    """Lists and single items of one connection are answered in the order in which they came."""
    with Client(port) as client:
        client.send(
            post(b"[1,2]", "/predict/many") + post(b"3") + post(b"[4]", "/predict/many") + post(b"[]", "/predict/many")
        )
        assert [client.answer().body for _ in range(4)] == [b"[2.0,4.0]", b"6.0", b"[8.0]", b"[]"]


def test_the_document_has_lists(port: int) -> None:
    """/openapi.json says that a body is a list, and that an answer has a result or an error each."""
    with Client(port) as client:
        document = json.loads(client.ask(get("/openapi.json")).body)
    operation = document["paths"]["/predict/many"]["post"]
    taken = operation["requestBody"]["content"]["application/json"]
    assert taken["schema"] == {"type": "array", "items": {"type": "number"}}
    assert taken["examples"]["example_1"]["value"] == [1.5, 2]
    given = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert given["items"]["anyOf"] == [{"type": "number"}, {"$ref": "#/components/schemas/CarpoolItemError"}]
    assert "status" in document["components"]["schemas"]["CarpoolItemError"]["properties"]["error"]["required"]
