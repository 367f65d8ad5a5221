"""A model's `decode` that asks for whole requests, by its hint: headers, query and path as well as the body."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import carpool
from carpool import HTTPRequest, Service, Stage
from carpool.engine.http_request import Headers, RequestMaker, pack_head
from carpool.http.app import App
from carpool.http.server_state import Limits, ServerState
from carpool.model import traits_of
from tests.http import talkers
from tests.support.http import models
from tests.support.http.both_fronts import Uvicorn, both_fronts
from tests.support.http.front import post
from tests.support.http.net import Client, RunningServer
from tests.support.http.wire import Answer
from tests.support.loops import on_a_loop

PLAIN = "Content-Type: text/plain"


@pytest.fixture(scope="module")
def fronts() -> Iterator[tuple[RunningServer, Uvicorn]]:
    with both_fronts(App(*talkers.ALL, models.echo)) as both:
        yield both


def ask(front: Any, name: str, body: bytes, *headers: str, query: str = "") -> Answer:
    with Client(front.port) as client:
        return client.ask(post(body, f"/models/{name}/predict{query}", *headers))


@pytest.mark.parametrize("front", [0, 1])
def test_decode_sees_all_that_the_client_sent(fronts: Any, front: int) -> None:
    """A `decode` that asks for requests sees the body, the headers in any case and joined, the
    query and the path; the same by either front.
    """
    headers = (PLAIN + "; charset=utf-8", "User-Agent: me", "X-Twice: 1", "x-twice:  2 ", "Cookie: a=1", "Cookie: b")
    answer = ask(fronts[front], "described", b"abc", *headers, query="?a=1&b=%20x&a=&c")
    assert answer.status == 200, answer
    seen = json.loads(answer.body)
    assert seen["body"] == "abc"
    assert seen["content_type"] == "text/plain; charset=utf-8"
    assert seen["headers"].pop("host") == "test"
    assert seen["headers"] == {
        "content-length": "3",
        "content-type": "text/plain; charset=utf-8",
        "user-agent": "me",
        "x-twice": "1, 2",
        "cookie": "a=1; b",
    }
    assert seen["agent"] == "me"
    assert seen["query"] == {"a": ["1", ""], "b": [" x"], "c": [""]}
    assert seen["path"] == "/models/described/predict"


def test_each_request_of_a_batch_has_its_own(fronts: Any) -> None:
    """Each request of a batch has its own headers and query, whether its head is known or new, and
    also if several came one after the other on a connection.
    """
    front, _ = fronts

    def one(n: int) -> None:
        with Client(front.port) as client:
            for again in range(5):
                path = f"/models/described/predict?n={n % 7}"
                answer = client.ask(post(b"%d" % (n + again), path, PLAIN, f"X-Of: {n % 5}"))
                seen = json.loads(answer.body)
                assert (seen["body"], seen["query"]) == (str(n + again), {"n": [str(n % 7)]})
                assert seen["headers"]["x-of"] == str(n % 5)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(64)))


def test_large_and_empty_bodies(fronts: Any) -> None:
    """Bodies that travel beside the head by themselves, and empty ones, arrive in the request."""
    for size in (0, 1, 65_536, 300_000):
        for front in fronts:
            assert len(json.loads(ask(front, "described", b"x" * size, PLAIN).body)["body"]) == size


def test_json_is_the_model_s_own_where_it_says_so(fronts: Any) -> None:
    """A model that accepts JSON itself gets such bodies as bytes, also without a content type,
    which means JSON.
    """
    for headers in ([], ["Content-Type: application/json"]):
        assert json.loads(ask(fronts[0], "described", b"{not json", *headers).body)["body"] == "{not json"


def test_python_callers_do_not_pass_through_decode() -> None:
    """Objects of Python callers go to `predict` as they are, and not through `decode`."""
    with Service(Stage(talkers.Picky, max_batch_size=4, run_in="thread")).run() as service:
        assert service.predict("a") == "a!"


def test_an_error_in_the_place_of_an_item_is_that_item_s(fronts: Any) -> None:
    """In the place of an item, a ValidationError is a 422, a ValueError a 400 and any other error a
    500; if one is raised, the guilty item is found as ever.
    """
    for query, status in (("invalid", 422), ("value", 400), ("key", 500), ("raise", 400), ("", 200)):
        assert ask(fronts[0], "picky", b"x", PLAIN, query=f"?{query}=" if query else "").status == status
    assert b"it does not fit" in ask(fronts[0], "picky", b"x", PLAIN, query="?invalid=1").body


@on_a_loop
async def test_headers_are_kept_for_those_only_who_ask() -> None:
    """In an app of models that want bodies only, requests keep just the headers that carpool itself
    looks at, and nothing is packed.
    """
    assert not App(models.csv).wants_heads
    app = App(models.csv, talkers.described)
    assert app.wants_heads
    app.refusing = None

    from carpool.http.reader import RequestReader

    taken: list[Any] = []

    class Receiver:
        ignoring_input, room, counted_for = False, 10, None

        def has_room_at(self, model: Any) -> bool:
            return True

        def request_received(self, head: Any, body: Any, refusal: Any) -> None:
            taken.append((head, refusal))

    reader = RequestReader(ServerState(app, Limits()), Receiver())  # type: ignore[arg-type]
    for name in ("csv", "described"):
        reader.feed(post(b"1", f"/models/{name}/predict", "Content-Type: application/json", "X-A: 1"))
    (csv, said), (described, also) = taken
    assert said is also is None
    assert csv.ask.packed == b""
    assert csv.route == app._models.predict
    assert RequestMaker().make(described.ask.packed, b"1").headers["x-a"] == "1"


def test_a_request_by_hand() -> None:
    """An `HTTPRequest` can be made by hand, for tests of one's own `decode`."""
    request = HTTPRequest(b"1", headers={"Content-Type": "text/csv"}, query="a=1")
    assert (request.content_type, request.query, request.path) == ("text/csv", {"a": ["1"]}, "/predict")
    assert "text/csv" in repr(request)
    assert HTTPRequest(b"").content_type == ""
    assert "X-a" in Headers([("x-A", "1")])
    assert 3 not in list(Headers({"a": "b"}))


def test_no_two_requests_share_what_can_change() -> None:
    """Requests with equal heads, which are read once, share nothing that can change."""
    maker, packed = RequestMaker(), pack_head(b"/p", b"a=1", [(b"x", b"\xfc")])
    one, other = maker.make(packed, b"1"), maker.make(packed, b"2")
    one.query["a"].append("2")
    assert other.query == {"a": ["1"]}
    assert one.headers is other.headers
    assert other.headers["X"] == "ü"


class Unresolved(carpool.Model):
    """A hint of which a part cannot be resolved."""

    accepts = ("a/b",)

    def decode(self, requests: list[HTTPRequest]) -> list[Nobody]:  # type: ignore[name-defined]  # noqa: F821
        return requests

    def predict(self, xs: list[Any]) -> list[Any]:
        return xs


def test_the_hint_decides() -> None:
    """`decode` gets whole requests if its hint is a list of them, also if the rest of the hints
    cannot be resolved; the hint of a single one is refused.
    """

    class Bodies(carpool.Model):
        accepts = ("a/b",)

        def decode(self, bodies: list[bytes]) -> list[Any]:
            return bodies

        def predict(self, xs: list[Any]) -> list[Any]:
            return xs

    class One(Bodies):
        def decode(self, request: HTTPRequest) -> Any:  # type: ignore[override]
            return request

    assert traits_of(Unresolved, True).decodes_requests
    assert not traits_of(Bodies, True).decodes_requests
    with pytest.raises(TypeError, match=r"decode of One gets all requests .* list\[carpool.HTTPRequest\]"):
        Stage(One)
