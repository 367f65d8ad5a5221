"""`carpool.Response`: a result that carries a status, headers or a body of its own, for its item alone."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from carpool import ModelError, Response, Service, Stage
from carpool.engine.wire.outcome import pack_response, unpack_response
from carpool.http.app import App
from carpool.model import traits_of
from tests.http import talkers
from tests.support.http.both_fronts import both_fronts, said
from tests.support.http.front import post
from tests.support.http.net import Client, code_of
from tests.support.http.wire import Answer

JSON, MSGPACK, RAW = "application/json", "application/msgpack", "application/octet-stream"
EXPECTED: dict[str, tuple[int, str | None, bytes, dict[str, str]]] = {
    "plain": (200, JSON, b"1.5", {}),
    "created": (201, JSON, b"2.5", {"location": "/things/7", "x-of": "7"}),
    "bytes": (200, "image/png", b"\x89PNG", {"set-cookie": "a=1, b=2"}),
    "nameless": (299, RAW, b"abc", {}),
    "nothing": (204, None, b"", {"x-why": "empty"}),
    "unchanged": (304, None, b"", {}),
    "start again": (205, JSON, b"", {}),
    "large": (200, RAW, b"x" * 300_000, {}),
    "refused": (409, JSON, b"0.5", {}),
}
BAD = {"wrong": (500, "bad_result"), "boom": (500, "model_error")}


@pytest.fixture(scope="module")
def fronts() -> Iterator[Any]:
    with both_fronts(App(*talkers.ALL)) as both:
        yield both


def ask(front: Any, name: str, item: str, *headers: str) -> Answer:
    with Client(front.port) as client:
        answer = client.ask(post(json.dumps(item).encode(), f"/models/{name}/predict", *headers))
        again = client.ask(post(b'"plain"', f"/models/{name}/predict"))  # the connection goes on in step
        assert again.status == 200
        return answer


def check(got: Answer, status: int, kind: str | None, body: bytes, headers: dict[str, str]) -> None:
    _, found, _ = said(got)
    assert (got.status, got.body) == (status, body)
    assert found.get("content-type") == kind
    for name, value in headers.items():
        assert found[name] == value


@pytest.mark.parametrize("model", ["answering", "single"])
@pytest.mark.parametrize("item", EXPECTED)
def test_every_kind_of_response_by_every_front(fronts: Any, model: str, item: str) -> None:
    """Every kind of response arrives by every front: from a process in a batch and from a thread
    alone, by our own server and by another.
    """
    for front in fronts:
        check(ask(front, model, item), *EXPECTED[item])


def test_it_is_for_its_item_alone(fronts: Any) -> None:
    """In a batch with responses of all kinds each client gets its own."""
    items = [*EXPECTED, *BAD] * 12
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda item: ask(fronts[0], "answering", item), items))
    for item, got in zip(items, answers, strict=True):
        if item in BAD:
            assert (got.status, code_of(got)) == BAD[item]
        else:
            check(got, *EXPECTED[item])


def test_its_value_is_written_as_the_client_accepts(fronts: Any) -> None:
    """The value of a response is written as the client accepts it, and checked against the hint, in
    which `Response` does not appear.
    """
    got = ask(fronts[0], "answering", "created", f"Accept: {MSGPACK}")
    assert (got.status, got.headers["content-type"], msgspec.msgpack.decode(got.body)) == (201, MSGPACK, 2.5)
    assert ask(fronts[0], "answering", "bytes", f"Accept: {MSGPACK}").body == b"\x89PNG"
    assert traits_of(talkers.Answering, True).output_type is float


def test_with_a_format_of_one_s_own(fronts: Any) -> None:
    """With a format of the model's own, `encode` writes the values of responses, does not see
    bytes, and may give responses itself.
    """
    check(ask(fronts[0], "lines", "created"), 201, "text/lines", b"<2.5>", {"location": "/things/7"})
    check(ask(fronts[0], "lines", "bytes"), *EXPECTED["bytes"])
    check(ask(fronts[0], "lines", "late"), 202, "text/late", b"late", {})
    check(ask(fronts[0], "lines", "nothing"), *EXPECTED["nothing"])


def test_several_formats_of_one_s_own(fronts: Any) -> None:
    """Of several own formats the answer has the one that is asked for, else that of the request,
    else the first; an error in a body's place is that item's.
    """
    for name, body in (("two", b"x"), ("far", b'"x"')):
        kinds = [("Content-Type: text/b", "text/b"), ("Content-Type: text/a", "text/a; v=1")] if name == "two" else []
        for sent, kind in [*kinds, ("X: y", "text/a; v=1"), ("Accept: text/b;q=1, text/a", "text/b")]:
            with Client(fronts[0].port) as client:
                plain = sent.startswith("Content")
                got = client.ask(post(body if plain else b'"x"', f"/models/{name}/predict", sent))
                assert (got.status, got.headers["content-type"], got.body) == (200, kind, f"{kind}:x".encode())
    assert code_of(ask(fronts[0], "two", "bad")) == "model_error"
    assert json.loads(ask(fronts[0], "far", "x", "Accept: application/json").body) == "x"


def test_only_the_last_stage_answers(fronts: Any) -> None:
    """A response of any stage but the last fails its item, and the error says what to do."""
    assert ask(fronts[0], "chain", "word").body == b'"word?"'
    got = ask(fronts[0], "chain", "answer")
    assert (got.status, code_of(got)) == (500, "bad_result")
    with (
        Service(Stage(talkers.first, run_in="thread"), Stage(talkers.second, run_in="thread")).run() as service,
        pytest.raises(ModelError, match="only the last stage may return a Response: return a value"),
    ):
        service.predict("answer")


def test_it_counts_as_answered(fronts: Any) -> None:
    """Whatever its status, a response is counted as answered: the model has done what it should."""
    before = fronts[0].outcomes(2).get("ok", 0)
    ask(fronts[0], "answering", "refused")
    assert fronts[0].outcomes(2)["ok"] == before + 2


@pytest.mark.parametrize("run_in", ["process", "thread"])
def test_python_callers_get_the_object(run_in: Any) -> None:
    """Python callers get the `Response` object as it is."""
    with Service(Stage(talkers.Answering, max_batch_size=4, run_in=run_in)).run() as service:
        assert service.predict("created") == Response(2.5, status=201, headers={"Location": "/things/7", "X-Of": "7"})
        assert service.predict("plain") == 1.5


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"status": 101}, ValueError, "status must be from 200 to 599, not 101"),
        ({"status": 600}, ValueError, "from 200 to 599"),
        ({"status": "200"}, TypeError, "status must be a whole number, not '200'"),
        ({"status": True}, TypeError, "whole number"),
        ({"value": 1, "status": 204}, ValueError, "a response with status 204 has no body"),
        ({"value": b"x", "status": 304}, ValueError, "status 304 has no body"),
        ({"status": 205, "content_type": "a/b"}, ValueError, "status 205 has no body"),
        ({"headers": {"X": "a\r\nY: b"}}, ValueError, "the header 'X' cannot be"),
        ({"headers": {"X": "a\n"}}, ValueError, "one line"),
        ({"headers": {"X": "\0"}}, ValueError, "one line"),
        ({"headers": {"X": "☃"}}, ValueError, "ASCII"),
        ({"headers": {"X y": "a"}}, ValueError, "a header cannot be called 'X y'"),
        ({"headers": {"": "a"}}, ValueError, "cannot be called ''"),
        ({"headers": {"X:": "a"}}, ValueError, "cannot be called"),
        ({"headers": {"Content-Length": "3"}}, ValueError, "'Content-Length' is written by the server itself"),
        ({"headers": {"Transfer-Encoding": "chunked"}}, ValueError, "written by the server itself"),
        ({"headers": {"connection": "close"}}, ValueError, "written by the server itself"),
        ({"headers": {"content-type": "a/b"}}, ValueError, "use content_type="),
        ({"headers": {"X": 3}}, TypeError, "headers must be a mapping of str to str"),
        ({"headers": ["X"]}, TypeError, "headers must be a mapping of str to str"),
        ({"headers": {"X": "a" * 20_000}}, ValueError, "over the limit of 16384"),
        ({"value": 1, "content_type": "a/b"}, TypeError, "content_type describes bytes, but value is int"),
        ({"value": b"", "content_type": "csv"}, ValueError, "content_type must be one like 'text/csv'"),
        ({"value": b"", "content_type": "a/b\r\nX: y"}, ValueError, "content_type must be one like"),
        ({"value": b"", "content_type": 3}, TypeError, "content_type must be text"),
    ],
)
def test_what_cannot_be_sent_is_refused_where_it_is_made(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    """A response that cannot be sent is refused where it is made, and the text names what is wrong."""
    with pytest.raises(error, match=text):
        Response(**arguments)


def test_a_head_from_a_worker_is_checked_once_more() -> None:
    """The head of a response is checked once more when it comes from a worker, whose bytes
    anybody's code may have made.
    """
    good = Response(b"x", status=201, headers={"A": "b"})
    packed = pack_response(good, b"x")
    assert unpack_response(packed) == (201, b"x", b"application/octet-stream", ((b"a", b"b"),))
    for head in (
        b"",
        b"\xc1",
        msgspec.msgpack.encode([100, None, []]),
        msgspec.msgpack.encode([200, "a/b\r\n\r\n", []]),
        msgspec.msgpack.encode([200, None, [["content-length", "0"]]]),
        msgspec.msgpack.encode([200, None, [["a", "b\r\nc: d"]]]),
        msgspec.msgpack.encode([204, None, []]),
        msgspec.msgpack.encode(["200", None, []]),
    ):
        with pytest.raises(ValueError):
            unpack_response([head, b"body"])
    for broken in (b"x", [packed[0]], [*packed, b""]):
        with pytest.raises(ValueError, match="a head and a body"):
            unpack_response(broken)  # type: ignore[arg-type]


def test_it_can_be_pickled_and_compared() -> None:
    """Equal responses compare as equal, and one can be pickled."""
    one = Response({"a": 1}, status=404, headers={"x": "y"})
    assert pickle.loads(pickle.dumps(one)) == one != Response({"a": 1})
