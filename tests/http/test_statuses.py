"""Every row of the status table, by real HTTP against real worker processes."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from carpool import Service, Stage
from carpool.engine.core import roster
from carpool.http.app import App
from tests.effort import slow_where
from tests.support.http import models, typed
from tests.support.http.front import chunked, post
from tests.support.http.jobs import GATED, job, outcome, small_queue
from tests.support.http.net import Client, Gate, RunningServer, code_of, predict, serving, waiting
from tests.support.waiting import PATIENCE_S, wait_until

MOODY, CHECKED = "/models/moody/predict", "/models/checked/predict"


@pytest.fixture(scope="module")
def of_types() -> Iterator[RunningServer]:
    """A server of models of many types, for the tests that ask what fits them."""
    with serving(App(typed.shift, typed.measure, typed.greet, typed.double, typed.total, typed.checked)) as running:
        yield running


def test_200(server: RunningServer) -> None:
    """The body of a request is the item, and the body of its answer is the result."""
    answer = predict(server.port, 3.0)
    assert (answer.status, answer.body, answer.headers["content-type"]) == (200, b"6.0", "application/json")


@pytest.mark.parametrize("body", [b"{", b"[1,", b"nul", b""])
def test_400_bad_syntax(server: RunningServer, body: bytes) -> None:
    """The message of a 400 says in one line what is wrong with the syntax, and where."""
    with Client(server.port) as client:
        answer = client.ask(post(body, "/models/echo/predict"))
    assert outcome(answer) == (400, "invalid_request")
    assert "JSON" in json.loads(answer.body)["error"]["message"]


def test_400_nested_too_deep(server: RunningServer) -> None:
    """A body that is nested too deep gets 400, and costs us no recursion."""
    with Client(server.port) as client:
        answer = client.ask(post(b"[" * 100_000 + b"]" * 100_000, "/models/echo/predict"))
    assert outcome(answer) == (400, "invalid_request")


def test_413_by_length_and_by_counting(server: RunningServer) -> None:
    """A body one byte over the limit is refused whether it says so or not; one at the limit is read."""
    largest = b'"' + b"x" * (2**20 - 2) + b'"'
    with Client(server.port) as client:
        assert len(client.ask(post(largest, "/models/echo/predict")).body) == 2**20
    with Client(server.port) as client:
        assert outcome(client.ask(post(largest + b" ", "/models/echo/predict"))) == (413, "too_large")
    with Client(server.port) as client:
        parts = [largest[i : i + 10_000] for i in range(0, len(largest), 10_000)]
        assert outcome(client.ask(chunked(*parts, b" ", path="/models/echo/predict"))) == (413, "too_large")


def test_413_over_the_queue_s_bytes() -> None:
    """A body that no queue could ever take gets 413 at once, also with when_full="wait"."""
    service = Service(Stage(models.Echo, max_batch_size=8, max_queue_bytes=1000), name="small")
    with serving(App(service, when_full="wait")) as running:
        assert outcome(predict(running.port, "x" * 1000)) == (413, "too_large")
        assert predict(running.port, "x" * 900).status == 200


def test_415(server: RunningServer) -> None:
    """A content type that the model does not read gets 415, with those that it does."""
    with Client(server.port) as client:
        answer = client.ask(post(b"1", "/predict", "Content-Type: text/csv"))
    assert outcome(answer) == (415, "unsupported_media_type")
    assert "application/json, application/msgpack" in json.loads(answer.body)["error"]["message"]


def test_422_names_the_field(of_types: RunningServer) -> None:
    """A 422 says what is wrong and where, for every kind of type."""
    for item, path, words in (
        ({"x": "1"}, "shift", ["int", "$.x"]),
        ({"x": 101}, "shift", ["100", "$.x"]),
        ({}, "shift", ["`x`"]),
        ({"x": 1, "y": 2}, "shift", ["unknown field", "`y`"]),
        ({"x": 1, "color": "green"}, "shift", ["$.color"]),
        ({"x": 1, "tags": ["a", 2]}, "shift", ["str", "$.tags[1]"]),
        ({"width": 1}, "measure", ["`height`"]),
        ({"width": 1, "height": "2"}, "measure", ["float", "$.height"]),
        ({"name": "A", "age": -1, "address": {"city": "B"}}, "greet", ["greater than or equal", ".age"]),
        ({"name": "A", "age": 1, "address": {"city": ""}}, "greet", ["at least 1", ".address.city"]),
        ([[1, 2], [3]], "double", ["array"]),
        (["a"], "double", ["array of numbers"]),
        ([1.5], "total", ["int64", "decimal"]),
        ([1e30], "total", ["int64"]),
        (10**30, "total", ["number"]),
    ):
        answer = predict(of_types.port, item, f"/models/{path}/predict")
        assert outcome(answer) == (422, "invalid_item"), item
        message = json.loads(answer.body)["error"]["message"]
        assert [word for word in words if word not in message] == [], message
        assert len(answer.body) < 1024


def test_422_tells_every_fault(of_types: RunningServer) -> None:
    """A 422 lists each fault with its place and kind, for types of msgspec and pydantic, in JSON
    and msgpack; other errors have no list.
    """
    for item, path, places in (
        ({"x": 101, "color": "green", "tags": [1]}, "shift", [["x"], ["color"], ["tags", 0]]),
        ({"y": 1}, "shift", [["x"], ["y"]]),
        ({"age": -1, "address": {"city": ""}}, "greet", [["name"], ["age"], ["address", "city"]]),
        (["a"], "double", [[]]),
    ):
        packed = post(msgspec.msgpack.encode(item), f"/models/{path}/predict", "Content-Type: application/msgpack")
        with Client(of_types.port) as client:
            answers = [predict(of_types.port, item, f"/models/{path}/predict"), client.ask(packed)]
        for answer in answers:
            error = json.loads(answer.body)["error"]
            assert (answer.status, [each["loc"] for each in error["details"]]) == (422, places)
            assert all(each["msg"] and each["type"] for each in error["details"])
            assert "\n" not in error["message"]
    with Client(of_types.port) as client:
        malformed = client.ask(post(b"{", "/models/shift/predict"))
    assert outcome(malformed) == (400, "invalid_request")
    assert "details" not in json.loads(malformed.body)["error"]


@pytest.mark.fault("F36")
def test_422_leaves_batch_mates_alone(server: RunningServer, gate: Gate) -> None:
    """In a batch with sound items only those that do not fit their type get 422."""
    items = [b'{"value": 1}', b'{"value": "no"}', b'{"value": 3}', b"{", b'{"value": 5}', b'{"valu": 6}']
    with ThreadPoolExecutor(len(items) + 1) as pool:
        clients = [Client(server.port) for _ in range(len(items) + 1)]
        first = pool.submit(clients[0].ask, job(0, gate))
        gate.knocked()
        before = server.call(lambda: waiting(server.app, 2))
        answers = [pool.submit(c.ask, post(item, GATED)) for c, item in zip(clients[1:], items, strict=True)]
        server.wait_until(lambda: waiting(server.app, 2) == before + len(items))
        gate.open()
        assert first.result(PATIENCE_S).status == 200
        results = [answer.result(PATIENCE_S) for answer in answers]
        for client in clients:
            client.close()
    assert [r.status for r in results] == [200, 422, 200, 400, 200, 422]
    assert [json.loads(r.body) for r in results if r.status == 200] == [
        {"value": value, "batch": 3, "seen": []} for value in (1, 3, 5)
    ]
    assert "$.value" in json.loads(results[1].body)["error"]["message"]


def test_422_that_the_model_raises(server: RunningServer) -> None:
    """A `carpool.ValidationError` in an item's place is the client's fault, with the model's words,
    cut to a length.
    """
    answer = predict(server.port, "invalid", MOODY)
    assert outcome(answer) == (422, "invalid_item")
    told = json.loads(answer.body)["error"]
    assert told["message"] == "the mood is not one of ours"
    assert told["details"] == [{"loc": [], "msg": "the mood is not one of ours", "type": "value_error"}]
    long = predict(server.port, "long", MOODY)
    assert long.status == 422
    assert len(long.body) < 1024


@pytest.mark.parametrize(
    ("mood", "code"), [("raise", "model_error"), ("fails", "model_error"), ("wrong", "bad_result")]
)
def test_500(server: RunningServer, mood: str, code: str, caplog: pytest.LogCaptureFixture) -> None:
    """User code that raises for the batch or in an item's place, or whose result does not fit, is a
    500 in our words only.
    """
    with caplog.at_level(logging.ERROR):
        answer = predict(server.port, mood, MOODY)
    assert outcome(answer) == (500, code)
    assert b"secret" not in answer.body and b"number" not in answer.body
    assert answer.headers["x-request-id"] in caplog.text
    (record,) = [each for each in caplog.records if hasattr(each, "request_id")]
    told = {name: getattr(record, name) for name in ("request_id", "code", "model")}
    assert told == {"request_id": answer.headers["x-request-id"], "code": code, "model": "moody"}
    assert ("RuntimeError: the secret is 1234" in caplog.text) == (mood != "wrong")
    assert predict(server.port, "fine", MOODY).body == b"4"


def test_debug_shows_the_texts() -> None:
    """With `debug` the texts of exceptions are shown, but never a traceback."""
    with serving(App(models.moody, debug=True)) as running:
        raised, wrong = predict(running.port, "raise"), predict(running.port, "wrong")
    assert json.loads(raised.body)["error"]["message"] == "the secret is 1234"
    assert "int" in json.loads(wrong.body)["error"]["message"]
    assert b"Traceback" not in raised.body + wrong.body


@pytest.mark.fault("F36")
def test_500_leaves_batch_mates_alone(of_types: RunningServer) -> None:
    """A result that does not fit its type is a 500 for its item alone."""
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda x: predict(of_types.port, {"x": x}, CHECKED), range(20)))
    assert [a.status for a in answers] == [500 if x == 13 else 200 for x in range(20)]
    assert [int(a.body) for a in answers if a.status == 200] == [x for x in range(20) if x != 13]


def test_429_when_the_queue_is_full(gate: Gate) -> None:
    """A request to a full queue gets 429 at once, with the time after which to come again; those
    inside are not disturbed.
    """
    with serving(App(small_queue())) as running:
        clients = [Client(running.port) for _ in range(4)]
        clients[0].send(job(0, gate, path="/predict"))
        gate.knocked()
        for n in (1, 2):
            clients[n].send(job(n, path="/predict"))
        running.wait_until(lambda: waiting(running.app) == 2)
        refused = clients[3].ask(job(3, path="/predict"))
        assert outcome(refused) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        assert not refused.closes
        gate.open()
        assert [json.loads(c.answer().body)["value"] for c in clients[:3]] == [0, 1, 2]
        assert json.loads(clients[3].ask(job(4, path="/predict")).body)["value"] == 4
        assert running.outcomes() == {"ok": 4, "overloaded": 1}
        for client in clients:
            client.close()


def test_when_full_wait(gate: Gate) -> None:
    """With when_full="wait" nobody is refused: all get in as room is made, and in order."""
    with serving(App(small_queue(), when_full="wait")) as running:
        clients = [Client(running.port) for _ in range(8)]
        clients[0].send(job(0, gate, path="/predict"))
        gate.knocked()
        for n in range(1, 8):
            clients[n].send(job(n, path="/predict"))
            running.wait_until(lambda n=n: waiting(running.app) == n)
        gate.open()
        assert [json.loads(c.answer().body)["value"] for c in clients] == list(range(8))
        seen = json.loads(clients[0].ask(job(-1, path="/predict")).body)["seen"]
        assert seen == [*range(8), -1]
        for client in clients:
            client.close()


@slow_where(lambda status, when_full: (status == 408) is (when_full == "wait"))
@pytest.mark.parametrize("when_full", ["refuse", "wait"])
@pytest.mark.parametrize("status", [504, 408])
def test_504_or_408(gate: Gate, status: int, when_full: str) -> None:
    """A deadline that passes in the queue, at the door or at the worker gets 504, or 408 if so set;
    what was queued is never run.
    """
    with serving(App(small_queue(), timeout_status=status, when_full=when_full)) as running:
        waiting = 5 if when_full == "wait" else 3
        clients = [Client(running.port) for _ in range(waiting)]
        clients[0].send(job(0, gate, "X-Request-Timeout-Ms: 1000", path="/predict"))
        gate.knocked()
        for n in range(1, waiting):
            clients[n].send(job(n, None, "X-Request-Timeout-Ms: 100", path="/predict"))
        for client in clients:
            assert outcome(client.answer()) == (status, "deadline_exceeded")
        gate.open()
        assert json.loads(clients[0].ask(job(-1, path="/predict")).body)["seen"] == [0, -1]
        assert running.outcomes() == {"ok": 1, "expired": waiting}
        for client in clients:
            client.close()


def test_the_service_s_own_time_out(gate: Gate) -> None:
    """The time-out header of a request can only shorten the service's own."""
    service = Service(Stage(models.Gated, max_batch_size=1, max_batch_time_s=10.0), name="gated", timeout_s=1.0)
    with serving(App(service)) as running, Client(running.port) as client:
        assert client.ask(job(0, gate, "X-Request-Timeout-Ms: 60000", path="/predict")).status == 504
        gate.knocked()
        gate.open()


def test_503_while_starting(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server answers 503 before its models are ready, and names the one that is asked; it serves
    them as soon as they are.
    """
    monkeypatch.setenv("CARPOOL_TEST_GATE", gate.path)
    running = RunningServer(App(models.slow_to_load))
    running.listen()
    try:
        with ThreadPoolExecutor(1) as pool:
            start = pool.submit(running.start)
            gate.knocked()
            answer = predict(running.port, 1.0)
            assert outcome(answer) == (503, "starting")
            told = json.loads(answer.body)["error"]
            assert (told["message"], told["models"]) == (
                "The service is starting: slow is starting",
                {"slow": "slow is starting"},
            )
            assert int(answer.headers["retry-after"]) >= 1
            gate.open()
            start.result(PATIENCE_S)
        assert predict(running.port, 1.0).body == b"1.0"
    finally:
        running.stop()


def test_503_while_draining(gate: Gate) -> None:
    """While draining, new requests get 503 with the time to come again, also on open connections,
    and those inside are answered.
    """
    with serving(App(small_queue())) as running:
        inside, queued, late = Client(running.port), Client(running.port), Client(running.port)
        inside.send(job(0, gate, path="/predict"))
        gate.knocked()
        queued.send(job(1, path="/predict"))
        running.wait_until(lambda: waiting(running.app) == 1)
        running.call(running.app.drain)
        for answer in (late.ask(job(2, path="/predict")), predict(running.port, {"value": 3})):
            assert outcome(answer) == (503, "draining")
            assert int(answer.headers["retry-after"]) >= 1
        gate.open()
        assert [json.loads(c.answer().body)["value"] for c in (inside, queued)] == [0, 1]
        for client in (inside, queued, late):
            client.close()


def test_500_when_the_request_has_crashed_two_workers() -> None:
    """A request whose worker dies is run once more; if that kills a worker too, it gets 500 that
    says so, and the service goes on.
    """
    service = Service(Stage(models.Mortal), name="mortal")
    with serving(App(service)) as running:
        answer = predict(running.port, "die")
        assert outcome(answer) == (500, "request_crashed_worker")
        assert "retry-after" not in answer.headers
        assert predict(running.port, "live").body == b'"live"'


def test_503_when_the_worker_dies() -> None:
    """A request that must not be run again gets 503 if its worker dies, and the service goes on."""
    service = Service(Stage(models.Mortal, idempotent=False), name="mortal")
    with serving(App(service)) as running:
        answer = predict(running.port, "die")
        assert outcome(answer) == (503, "worker_lost")
        assert int(answer.headers["retry-after"]) >= 1
        assert predict(running.port, "live").body == b'"live"'


def test_503_after_a_stage_has_failed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """When a stage has failed because its workers died too often, every request gets 503 at once,
    and the server is not ready.
    """
    monkeypatch.setattr(roster, "MOST_DEATHS", 1)
    with serving(App(Service(Stage(models.Mortal, idempotent=False), name="mortal"))) as running:
        with caplog.at_level(logging.CRITICAL):
            assert predict(running.port, "die").status == 503
            wait_until(lambda: "has failed" in caplog.text)
        assert outcome(predict(running.port, "live")) == (503, "stage_failed")
        with Client(running.port) as client:
            assert client.ask(post(b"").replace(b"POST /predict", b"GET /readyz")).status == 503


def test_503_of_a_failed_stage_says_when_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 503 of a failed stage has a `Retry-After`, as every 503 has."""
    monkeypatch.setattr(roster, "MOST_DEATHS", 1)
    with serving(App(Service(Stage(models.Mortal, idempotent=False), name="mortal"))) as running:
        predict(running.port, "die")
        wait_until(lambda: code_of(predict(running.port, "live")) == "stage_failed")
        assert "retry-after" in predict(running.port, "live").headers


def test_a_504_tells_where_the_time_went(gate: Gate) -> None:
    """A 504 says how long the request was in a queue and how long in a worker, and these seconds
    add up to the whole.
    """
    with serving(App(small_queue())) as running, Client(running.port) as first, Client(running.port) as second:
        first.send(job(0, gate, "X-Request-Timeout-Ms: 300", path="/predict"))
        gate.knocked()
        second.send(job(1, None, "X-Request-Timeout-Ms: 100", path="/predict"))
        told = [json.loads(client.answer().body)["error"]["message"] for client in (second, first)]
        gate.open()

    spent = r"no answer within (\d+\.\d{3}) s: (\d+\.\d{3}) s waiting for Gated"
    (queued,) = re.findall(spent + "$", told[0])
    (running_,) = re.findall(spent + r", (\d+\.\d{3}) s in Gated$", told[1])
    assert queued[0] == queued[1]
    assert float(queued[0]) >= 0.099
    assert float(running_[0]) == pytest.approx(float(running_[1]) + float(running_[2]), abs=0.0021)


def test_priority_goes_first(gate: Gate) -> None:
    """Waiting requests are run in the order of their priority, and within one in the order of their
    arrival.
    """
    service = Service(Stage(models.Gated, max_batch_size=1), name="gated")
    with serving(App(service)) as running:
        order = [(1, "-5"), (2, "0"), (3, "100"), (4, "+5"), (5, "5"), (6, "-100")]
        clients = [Client(running.port) for _ in range(len(order) + 1)]
        clients[0].send(job(0, gate, path="/predict"))
        gate.knocked()
        for client, (value, priority) in zip(clients[1:], order, strict=True):
            client.send(job(value, None, f"X-Request-Priority: {priority}", path="/predict"))
            running.wait_until(lambda v=value: waiting(running.app) == v)
        gate.open()
        assert [json.loads(c.answer().body)["value"] for c in clients] == [0, 1, 2, 3, 4, 5, 6]
        seen = json.loads(clients[0].ask(job(-1, path="/predict")).body)["seen"]
        assert seen == [0, 3, 4, 5, 2, 1, 6, -1]
        for client in clients:
            client.close()


def test_every_error_has_an_id_of_its_own(server: RunningServer) -> None:
    """Every error has an id, the same in its header and its body, which is the client's if that
    gave one.
    """
    answers = [
        predict(server.port, "x"),
        predict(server.port, "x"),
        predict(server.port, "x", "/predict", "X-Request-Id: a"),
    ]
    ids = [json.loads(a.body)["error"]["request_id"] for a in answers]
    assert ids == [a.headers["x-request-id"] for a in answers]
    assert len(set(ids)) == 3
    assert ids[2] == "a"
