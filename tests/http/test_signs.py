"""Values that look like signs, by every way in which answers stand side by side: each arrives as it is."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

import carpool
from carpool import Response, Service, Stage
from carpool.http.app import App
from tests.http.streamed import Reply
from tests.http.test_bulk import bulk, lines
from tests.support.http.both_fronts import asked, both_fronts
from tests.support.http.front import post
from tests.support.signs import SIGNS
from tests.support.waiting import PATIENCE_S
from tests.wire.test_entries import result_of

BODIES = (b"", b"1\n2", b"[1,\n2]", b'{ "error" :\n1 }', b"1,2", b'"a\nb"', b"{", b'"\xff"', b"\n")
"""What a model may send as JSON of its own, valid or not."""

PARTS = [x for x, sign in enumerate(SIGNS) if sign is not None]
"""Those that can be parts: None says that there is no part this time (docs/streaming.md)."""


def plain(xs: list[int]) -> list[Any]:
    return [SIGNS[x] for x in xs]


def responses(xs: list[int]) -> list[Any]:
    return [Response(SIGNS[x], status=201) for x in xs]


def raws(xs: list[int]) -> list[Any]:
    return [msgspec.Raw(json.dumps(SIGNS[x], indent=1).replace("\n", "\r\n").encode()) for x in xs]


def inner(xs: list[int]) -> list[Any]:
    return [{"n": x, "raw": msgspec.Raw(b"[\n%d ]" % x)} for x in xs]


def bodies(xs: list[int]) -> list[Any]:
    return [Response(BODIES[x], content_type="application/json") for x in xs]


@dataclass
class Told:
    error: str


def told(xs: list[int]) -> list[Told]:
    return [Told("fine") for x in xs]


def parts(x: int) -> Iterator[Any]:
    yield SIGNS[x]
    yield msgspec.Raw(json.dumps(SIGNS[x], indent=1).encode())
    yield SIGNS[x]


@pytest.fixture(scope="module")
def app() -> App:
    models = (plain, responses, raws, inner, bodies, told)
    services = [Service(Stage(each, max_batch_size=4, run_in="thread"), name=each.__name__) for each in models]
    return App(*services, Service(Stage(parts, run_in="thread"), name="parts"))


@pytest.fixture(scope="module")
def ports(app: App) -> Iterator[list[int]]:
    with both_fronts(app) as (own, other):
        yield [own.port, other.port]


@pytest.fixture(params=[0, 1], ids=["our server", "uvicorn"])
def port(request: pytest.FixtureRequest, ports: list[int]) -> int:
    return ports[request.param]


def by_lines(port: int, model: str, n: int) -> list[Any]:
    with bulk(port, f"/models/{model}/predict") as asking:
        asking.send(lines(*range(n)))
        asking.end()
        return [json.loads(line) for line in asking.reply().lines()]


def by_list(port: int, model: str, n: int) -> list[Any]:
    answer = asked(port, post(json.dumps([*range(n)]).encode(), f"/models/{model}/predict/many"))
    return json.loads(answer.body)  # type: ignore[no-any-return]


def by_msgpack(port: int, model: str, n: int) -> list[Any]:
    kind = "Content-Type: application/msgpack"
    answer = asked(port, post(msgspec.msgpack.encode([*range(n)]), f"/models/{model}/predict/many", kind))
    return msgspec.msgpack.decode(answer.body)  # type: ignore[no-any-return]


@pytest.mark.parametrize("by", [by_lines, by_list, by_msgpack])
@pytest.mark.parametrize("model", ["plain", "responses", "raws"])
def test_a_value_that_looks_like_a_sign_is_a_result(
    port: int, model: str, by: Callable[[int, str, int], list[Any]]
) -> None:
    """Whatever a model returns, and in whatever form, is read as the result of its item."""
    if (model, by) == ("raws", by_msgpack):
        pytest.skip("what is raw is JSON")
    assert [result_of(entry) for entry in by(port, model, len(SIGNS))] == list(SIGNS)


@pytest.mark.parametrize("by", [by_lines, by_list])
def test_what_is_raw_inside_takes_one_line(port: int, by: Callable[[int, str, int], list[Any]]) -> None:
    """JSON that a model brings ready-made inside of a result has no line ends left."""
    assert by(port, "inner", 5) == [{"n": x, "raw": [x]} for x in range(5)]


@pytest.mark.parametrize("by", [by_lines, by_list])
def test_a_body_of_the_models_own_is_one_value(port: int, by: Callable[[int, str, int], list[Any]]) -> None:
    """A body that is one value of JSON stands in its place, in whatever layout; any other one is that item's error,
    and those after it keep their places.
    """
    wanted = [None, "an error", [1, 2], {"error": 1}, *["an error"] * 5]
    assert [result_of(entry) for entry in by(port, "bodies", len(BODIES))] == wanted
    assert {e["error"]["code"] for e in by(port, "bodies", len(BODIES)) if result_of(e) == "an error"} == {"bad_result"}


def test_only_errors_are_errors(port: int) -> None:
    """A record whose only field is called `error` is a result, and a wrong item among them an error."""
    with bulk(port, "/models/told/predict") as asking:
        asking.send(b'1\n"x"\n2\n')
        asking.end()
        one, two, three = (json.loads(line) for line in asking.reply().lines())
    assert one == three == {"result": {"error": "fine"}}
    assert result_of(two) == "an error" and two["error"]["status"] == 422


@pytest.mark.parametrize("sign", PARTS, ids=lambda i: repr(SIGNS[i]))
@pytest.mark.parametrize("accept", ["application/x-ndjson", "text/event-stream"])
def test_parts_that_look_like_ends_are_parts(port: int, accept: str, sign: int) -> None:
    """A part is told in a form that no end and no error has, on one line."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
        sock.sendall(post(b"%d" % sign, "/models/parts/predict", f"Accept: {accept}"))
        reply = Reply(sock)
        if accept == "text/event-stream":
            found = list(reply.events())
            assert [each for each in found if each[0] == "message"] == [("message", SIGNS[sign])] * 3
            assert found[-1] == ("end", {"parts": 3}) and len(found) == 4
        else:
            told = [json.loads(line) for line in reply.lines()]
            assert told == [*[{"part": SIGNS[sign]}] * 3, {"end": {"parts": 3}}]


@pytest.mark.parametrize("model", ["plain", "responses", "raws"])
def test_clients_read_values_that_look_like_signs(ports: list[int], model: str) -> None:
    """`predict_many` yields what `predict` returns, and no result is an error."""
    with carpool.Client(f"http://127.0.0.1:{ports[0]}", model=model) as client:
        assert list(client.predict_many(range(len(SIGNS)), return_exceptions=True)) == list(SIGNS)
    with carpool.Client(f"http://127.0.0.1:{ports[0]}", model="parts") as client:
        assert [list(client.predict_stream(x)) for x in PARTS] == [[SIGNS[x]] * 3 for x in PARTS]


def test_the_python_api_needs_no_signs(app: App) -> None:
    """Streams yield each value as it is."""
    with Service(Stage(plain, max_batch_size=4, run_in="thread")).run() as s:
        assert list(s.stream(range(len(SIGNS)))) == list(SIGNS)
