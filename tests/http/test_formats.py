"""Formats of items: JSON, msgpack, raw bytes and a model's own, in and out, by what the client says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from carpool import Model, Service, Stage
from carpool.errors import InvalidRequest
from carpool.http.app import App
from carpool.http.codec import Formats
from carpool.model import AnyModel
from tests.support.http import routed
from tests.support.http.front import chunked, post
from tests.support.http.net import Client, Gate, RunningServer, serving, waiting
from tests.support.http.wire import Answer
from tests.support.waiting import PATIENCE_S

JSON, MSGPACK, RAW, CSV = (
    "application/json",
    "application/msgpack",
    "application/octet-stream",
    "text/csv; charset=utf-8",
)
ECHO, REVERSE, SUM = "/models/echo/predict", "/models/reverse/predict", "/models/csv/predict"


def len_of(text: str) -> int:
    return len(text)


VALUE = {"a": [1, 2.5, None, True, "\u00fc\u4e2d"], "b": {}}


def send(server: RunningServer, path: str, body: bytes, kind: str = "", accept: str = "") -> Answer:
    """Post a body of some type, wanting some type."""
    fields = [f"Content-Type: {kind}"] * bool(kind) + [f"Accept: {accept}"] * bool(accept)
    with Client(server.port) as client:
        return client.ask(post(body, path, *fields))


def load(answer: Answer) -> object:
    """The result, by the answer's own content type."""
    assert answer.status == 200, answer
    kind = answer.headers["content-type"]
    return msgspec.msgpack.decode(answer.body) if kind == MSGPACK else json.loads(answer.body)


@pytest.mark.parametrize(
    ("kind", "accept", "out"),
    [
        ("", "", JSON),
        (JSON, "", JSON),
        (JSON, "*/*", JSON),
        (JSON, MSGPACK, MSGPACK),
        (JSON, "text/html", JSON),
        (JSON, "text/html, application/msgpack;q=0.9, application/json", MSGPACK),
        (JSON, "APPLICATION/MSGPACK", MSGPACK),
        (MSGPACK, "", MSGPACK),
        (MSGPACK, "*/*", MSGPACK),
        (MSGPACK, JSON, JSON),
        ("application/x-msgpack", "", MSGPACK),
        ("application/vnd.msgpack", "application/x-msgpack", MSGPACK),
        ("text/json", "", JSON),
        ("application/problem+json", "", JSON),
    ],
)
def test_json_and_msgpack(server: RunningServer, kind: str, accept: str, out: str) -> None:
    """`Content-Type` says how a body is read and `Accept` how the answer is written; without that
    the answer has the format of the request.
    """
    body = msgspec.msgpack.encode(VALUE) if "msgpack" in kind else json.dumps(VALUE).encode()
    answer = send(server, ECHO, body, kind, accept)
    assert answer.headers["content-type"] == out
    assert load(answer) == VALUE


@pytest.mark.parametrize("kind", [RAW, "image/png", "audio/wav", "text/plain", "text/csv"])
def test_raw_bytes(server: RunningServer, kind: str) -> None:
    """Where the item is `bytes`, the body is the item, and a result is written as it is."""
    answer = send(server, REVERSE, b"\x00\xffabc", kind)
    assert (answer.status, answer.headers["content-type"], answer.body) == (200, RAW, b"cba\xff\x00")


def test_raw_bytes_of_every_size(server: RunningServer) -> None:
    """Raw bodies of every size arrive whole: empty ones, ones that are received beside the parser,
    and ones that travel beside their frame.
    """
    for size in (0, 1, 65_535, 65_536, 65_537, 2**20):
        body = bytes(n % 251 for n in range(min(size, 1000))) * (size // 1000 + 1)
        answer = send(server, REVERSE, body[:size], RAW)
        assert answer.body == body[:size][::-1]
        with Client(server.port) as client:
            data = chunked(*[body[:size][i : i + 9999] for i in range(0, size, 9999)], path=REVERSE)
            data = data.replace(b"Host", b"Content-Type: image/png\r\nHost", 1)
            assert client.ask(data).body == body[:size][::-1]


def test_bytes_in_json_and_msgpack(server: RunningServer) -> None:
    """Bytes are base64 in JSON and bin in msgpack, and either can be asked for."""
    assert load(send(server, REVERSE, b'"YWJj"')) == "Y2Jh"
    assert load(send(server, REVERSE, msgspec.msgpack.encode(b"abc"), MSGPACK)) == b"cba"
    assert send(server, REVERSE, b'"YWJj"', JSON, RAW).body == b"cba"
    assert load(send(server, REVERSE, b"abc", RAW, JSON)) == "Y2Jh"
    assert send(server, REVERSE, b'"a"', JSON).status in (400, 422)


TEXT = "text/plain; charset=utf-8"


@pytest.fixture(scope="module")
def texts() -> Iterator[RunningServer]:
    """Models of text: one that answers with text, one with a number, one that weighs its items, and one of its own."""
    stages = {
        "shout": Stage(routed.shout, max_batch_size=8),
        "count": Stage(len_of),
        "heavy": Stage(routed.shout, max_batch_size=80, size=len),
    }
    services = [Service(stage, name=name) for name, stage in stages.items()]
    with serving(App(*services, Service(len_of, name="route", routes={"/count": routed.itself}))) as running:
        yield running


@pytest.mark.parametrize("name", ["shout", "heavy"])
@pytest.mark.parametrize("kind", ["text/plain", TEXT, "text/markdown", "TEXT/PLAIN; charset=us-ascii"])
def test_a_text_is_the_item_of_a_model_of_texts(texts: RunningServer, kind: str, name: str) -> None:
    """Where the item is `str`, a text is the item, and a text answers it; JSON is so on request."""
    path = f"/models/{name}/predict"
    answer = send(texts, path, "grüß".encode(), kind)
    assert (answer.status, answer.headers["content-type"], answer.body.decode()) == (200, TEXT, "GRÜSS")
    assert load(send(texts, path, b"a", kind, JSON)) == "A"
    assert send(texts, path, b'"a"', JSON, "text/plain").body == b"A"
    assert load(send(texts, path, b'"a"', JSON)) == "A"


def test_what_is_no_text_is_refused(texts: RunningServer) -> None:
    """Bytes that are not UTF-8 are 400, other encodings 415; a model of other items reads no text."""
    for name in ("shout", "heavy"):
        path = f"/models/{name}/predict"
        refused = send(texts, path, b"\xff", TEXT)
        assert refused.status == 400
        assert b"not valid text: byte 0" in refused.body
        assert send(texts, path, b"a", "text/plain; charset=latin-1").status == 415
        assert b"text/*" in send(texts, path, b"a", "image/png").body
    assert send(texts, "/models/count/predict", b"abc", TEXT).headers["content-type"] == JSON
    assert load(send(texts, "/count", b"abc", TEXT)) == 3


def test_only_bytes_are_raw(server: RunningServer) -> None:
    """A model whose items are not bytes does not read raw bodies, and cannot be asked for raw
    answers.
    """
    assert send(server, ECHO, b"abc", RAW).status == 415
    assert send(server, ECHO, b"1", JSON, RAW).headers["content-type"] == JSON


def test_a_format_of_one_s_own(server: RunningServer) -> None:
    """`decode` reads the types that `accepts` names, and `encode` writes the one that `produces`
    names, unless JSON is asked for.
    """
    answer = send(server, SUM, b"1,2,3", "text/csv")
    assert (answer.status, answer.headers["content-type"], answer.body) == (200, CSV, b"6.0,1")
    assert send(server, SUM, b"1,2", "Text/CSV; charset=utf-8").body == b"3.0,1"
    assert load(send(server, SUM, b"1,2", "text/csv", JSON)) == [3.0, 1]
    assert send(server, SUM, b"[1, 2]").body == b"3.0,1"
    assert load(send(server, SUM, msgspec.msgpack.encode([4.0]), MSGPACK, MSGPACK)) == [4.0, 1]


def test_its_own_format_can_be_asked_for(server: RunningServer) -> None:
    """A model's own format can be asked for by its name without parameters, and comes before others
    that would do as well.
    """
    assert send(server, SUM, b"[1]", JSON, "text/csv, application/json").headers["content-type"] == CSV
    assert send(server, SUM, b"[1]", JSON, "application/json, text/csv").headers["content-type"] == JSON


def test_a_body_its_decode_does_not_like(server: RunningServer) -> None:
    """A ValueError in `decode` is the client's fault: 400 for that body alone."""
    assert send(server, SUM, b"1,x", "text/csv").status == 400


def test_all_formats_in_one_batch(server: RunningServer, gate: Gate) -> None:
    """Requests in all formats share a call of the model; each client gets its own format, and bad
    bodies their own error.
    """
    gated = "/models/gated/predict"
    sound = {"value": 7}
    requests = [
        (json.dumps(sound).encode(), JSON, JSON, 200),
        (json.dumps(sound).encode(), JSON, MSGPACK, 200),
        (msgspec.msgpack.encode(sound), MSGPACK, MSGPACK, 200),
        (msgspec.msgpack.encode(sound), MSGPACK, JSON, 200),
        (b"\xc1", MSGPACK, JSON, 400),
        (b"{", JSON, MSGPACK, 400),
        (b"{}", JSON, JSON, 422),
    ]
    with ThreadPoolExecutor(len(requests) + 1) as pool:
        first = pool.submit(send, server, gated, json.dumps({"value": 0, "gate": gate.path}).encode(), JSON)
        gate.knocked()
        answers = [pool.submit(send, server, gated, body, kind, accept) for body, kind, accept, _ in requests]
        server.wait_until(lambda: waiting(server.app, 2) == len(requests))
        gate.open()
        assert first.result(PATIENCE_S).status == 200
        for answer, (_, _, accept, status) in zip(answers, requests, strict=True):
            got = answer.result(PATIENCE_S)
            assert got.status == status
            if status == 200:
                assert got.headers["content-type"] == accept
                assert load(got) == {"value": 7, "batch": 4, "seen": []}
            else:
                assert got.headers["content-type"] == JSON


@pytest.mark.fault("F40")
def test_a_custom_batch_is_decoded_and_encoded_at_once(server: RunningServer) -> None:
    """Bodies of many clients are decoded and encoded in one call each, and every client gets the
    sum of its own numbers.
    """
    with ThreadPoolExecutor(16) as pool:
        kinds = ["text/csv", JSON, MSGPACK]
        bodies = [lambda n: b"%d,1" % n, lambda n: b"[%d, 1]" % n, lambda n: msgspec.msgpack.encode([float(n), 1.0])]
        answers = list(pool.map(lambda n: send(server, SUM, bodies[n % 3](n), kinds[n % 3]), range(300)))
    assert [float(a.body.split(b",")[0]) for a in answers if a.headers["content-type"] == CSV] == [
        n + 1 for n in range(300)
    ]


@pytest.mark.parametrize(
    ("path", "kinds"),
    [
        (REVERSE, ["application/octet-stream", "image/*", "audio/*", "text/*", "application/json"]),
        (SUM, ["text/csv", "application/json", "text/json", "application/*+json", "application/x-msgpack"]),
    ],
)
def test_a_415_names_all_that_is_read(server: RunningServer, path: str, kinds: list[str]) -> None:
    """A refusal of a content type names all types, and families of types, that would be taken."""
    answer = send(server, path, b"abc", "application/x-www-form-urlencoded")
    named = json.loads(answer.body)["error"]["message"].partition("it reads ")[2].split(", ")
    assert answer.status == 415
    assert set(kinds) <= set(named), named
    for kind in set(named) - {"application/x-ndjson"}:  # answered in parts: tests/http/test_bulk.py
        assert send(server, path, b"abc", kind.replace("*", "x")).status != 415, kind


def lengths(bodies: list[bytes]) -> list[int]:
    return [len(body) for body in bodies]


def numbers(xs: list[float]) -> list[float]:
    return xs


class Table(Model):
    """Reads a format of its own beside JSON, so that either may have been meant."""

    accepts = ("text/csv",)

    def decode(self, bodies: list[bytes]) -> list[float]:
        return [float(body) for body in bodies]

    def predict(self, xs: list[float]) -> list[float]:
        return xs


@pytest.mark.parametrize(
    ("model", "wanted"),
    [(lengths, "application/octet-stream"), (numbers, "application/json"), (Table, "TYPE'; it reads text/csv")],
)
def test_a_forgotten_type_is_told_as_the_option_of_curl(model: AnyModel, wanted: str) -> None:
    """A form that curl sends without a header of its user is 415 with the header to add."""
    stage = Stage(model, max_batch_size=4)
    formats = Formats(stage.traits, stage.traits)
    with pytest.raises(InvalidRequest, match=f"curl sends .* by itself, .* add -H 'Content-Type: {wanted}") as refused:
        formats.choose(b"application/x-www-form-urlencoded", None)
    assert refused.value.status == 415
    with pytest.raises(InvalidRequest, match=r"it reads (text/csv, )?application/json"):
        formats.choose(b"x/y", None)
