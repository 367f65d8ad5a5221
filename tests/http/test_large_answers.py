"""Large answers and bodies are written and read beside the loop, whatever the way; small ones at once."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from random import Random
from typing import Any

import httpx
import pytest

import carpool
from carpool.http import routes
from carpool.http.app import App
from carpool.http.compression import Compression
from carpool.http.exchange import LARGE, Exchange
from carpool.testing import served
from tests.effort import slow_where
from tests.support.waiting import PATIENCE_S

_LARGE = 20_000
_OIP_INPUT = {"name": "input", "datatype": "BYTES", "shape": [2]}
WAYS: dict[str, tuple[str, Any]] = {
    "a list": ("/predict/many", ["{n}", "{n}"]),
    "V1": ("/v1/models/wide:predict", {"instances": ["{n}", "{n}"]}),
    "OIP": ("/v2/models/wide/infer", {"inputs": [{**_OIP_INPUT, "data": ["{n}", "{n}"]}]}),
    "OpenAI": ("/v1/embeddings", {"model": "wide", "input": ["{n}", "{n}"]}),
    "SageMaker": ("/invocations", {"instances": ["{n}", "{n}"]}),
    "compressed": ("/predict", "{n}"),
}


def wide(texts: list[str]) -> list[list[float]]:
    return [[1 / (i + 1.7) for i in range(int(text))] for text in texts]


def _filled(shape: Any, n: int) -> Any:
    if isinstance(shape, dict):
        return {key: _filled(value, n) for key, value in shape.items()}
    if isinstance(shape, list):
        return [_filled(value, n) for value in shape]
    return shape.replace("{n}", str(n)) if isinstance(shape, str) else shape


@slow_where(lambda way: way in ("V1", "SageMaker", "OpenAI"))
@pytest.mark.parametrize("way", WAYS)
def test_a_large_answer_is_written_beside_the_loop(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """By each way a large answer is made and compressed in a thread, and a small one on the loop."""
    threads: dict[str, set[str]] = {"made": set(), "compressed": set()}
    made, compressed = Exchange._made, Compression.compressed

    def note_made(*args: Any) -> Any:
        threads["made"].add(threading.current_thread().name)
        return made(*args)

    def note_compressed(self: Compression, response: Any, accepted: bytes) -> Any:
        answer = compressed(self, response, accepted)
        if answer.body is not response.body:
            threads["compressed"].add(threading.current_thread().name)
        return answer

    monkeypatch.setattr(Exchange, "_made", note_made)
    monkeypatch.setattr(Compression, "compressed", note_compressed)
    path, shape = WAYS[way]
    stage = carpool.Stage(wide, max_batch_size=4, run_in="thread")
    answers: list[tuple[int, set[str]]] = []
    with served(carpool.Service(stage), compress="gzip") as client:
        for n in (_LARGE, 2):
            for kind in threads.values():
                kind.clear()
            answer = httpx.post(client.url + path, json=_filled(shape, n), timeout=PATIENCE_S)
            assert answer.status_code == 200, answer.text
            answers.append((len(answer.content), threads["made"] | threads["compressed"]))
            if n == _LARGE:
                assert answer.headers["content-encoding"] == "gzip"
                assert answer.headers["vary"] == "accept-encoding"
    (_, of_large), (_, of_small) = answers
    assert of_large and not of_large & of_small, answers


def test_what_raises_beside_the_loop_is_an_answer() -> None:
    """A protocol that raises over large results answers 500, as it does over small ones."""

    def texts(names: list[str]) -> list[Any]:
        return ["x" * LARGE for _ in names]

    with served(carpool.Service(carpool.Stage(texts, max_batch_size=4, run_in="thread"))) as client:
        body = {"model": "texts", "input": ["a"]}
        answer = httpx.post(f"{client.url}/v1/embeddings", json=body, timeout=PATIENCE_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "bad_result"), answer.text


_called: list[int] = []


def echo(texts: list[str]) -> list[int]:
    _called.extend(map(len, texts))
    return [len(text) for text in texts]


def by_length(text: str) -> int:
    return max(1, len(text) // 1000)


_JSON = "application/json"
_FORM = (b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n', b"\r\n--b--\r\n")
_OIP_BODY = (b'{"inputs": [{"name": "input", "datatype": "BYTES", "shape": [1], "data": ["', b'"]}]}')
READ: dict[str, tuple[str, tuple[bytes, bytes], dict[str, str]]] = {
    "weighed": ("/models/weighed/predict", (b'"', b'"'), {"content-type": _JSON}),
    "a list": ("/models/echo/predict/many", (b'["', b'"]'), {"content-type": _JSON}),
    "a weighed list": ("/models/weighed/predict/many", (b'["', b'"]'), {"content-type": _JSON}),
    "a form": ("/models/echo/predict", _FORM, {"content-type": "multipart/form-data; boundary=b"}),
    "V1": ("/v1/models/echo:predict", (b'{"instances": ["', b'"]}'), {"content-type": _JSON}),
    "OIP": ("/v2/models/echo/infer", _OIP_BODY, {"content-type": _JSON}),
    "SageMaker": ("/invocations", (b'{"instances": ["', b'"]}'), {"content-type": _JSON}),
    "compressed": ("/models/echo/predict", (b'"', b'"'), {"content-type": _JSON, "content-encoding": "gzip"}),
}


def _echoing(**settings: Any) -> Any:
    stages = (
        carpool.Service(carpool.Stage(echo, max_batch_size=4, run_in="thread"), name="echo"),
        carpool.Service(carpool.Stage(echo, max_batch_size=4, run_in="thread", size=by_length), name="weighed"),
    )
    return served(*stages, **settings)


@slow_where(lambda way: way in ("V1", "SageMaker", "a weighed list"))
@pytest.mark.parametrize("way", READ)
def test_a_large_body_is_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """By each way a large body is read in threads, and a small one on the loop."""
    threads: set[str] = set()
    read_beside = Exchange.read_beside

    def note_read(self: Exchange, responder: Any, nbytes: int, read: Any, *more: Any) -> None:
        def noted() -> Any:
            threads.add(threading.current_thread().name)
            return read()

        read_beside(self, responder, nbytes, noted, *more)

    monkeypatch.setattr(Exchange, "read_beside", note_read)
    path, (begin, end), headers = READ[way]
    found: list[set[str]] = []
    with _echoing(accept_compressed=True) as client:
        for n in (2 * LARGE, 10):
            threads.clear()
            body = begin + bytes(Random(n).choices(b"abcdefghijklmnop", k=n)) + end
            if "content-encoding" in headers:
                body = gzip.compress(body)
            answer = httpx.post(client.url + path, content=body, headers=headers, timeout=PATIENCE_S)
            assert answer.status_code == 200, answer.text
            assert str(n) in answer.text
            found.append(set(threads))
    assert found[0] and not found[0] & found[1] and found[1] == {"carpool served"}, found


def _large_list(client: Any) -> socket.socket:
    """Send a request with a large list; return its connection."""
    body = json.dumps(["x" * LARGE]).encode()
    connection = socket.create_connection(("127.0.0.1", httpx.URL(client.url).port or 0), PATIENCE_S)
    head = b"POST /models/echo/predict/many HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    return connection


def test_a_body_whose_client_leaves_while_it_is_read_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items of a client that has left while a thread reads them are never submitted."""
    is_reading, go_on, has_left = threading.Event(), threading.Event(), threading.Event()
    split, cancel = routes.split, App.cancel
    _called.clear()

    def slow_split(*args: Any) -> Any:
        is_reading.set()
        assert go_on.wait(PATIENCE_S)
        return split(*args)

    def noted_cancel(self: App, exchange: Exchange) -> None:
        cancel(self, exchange)
        has_left.set()

    monkeypatch.setattr(routes, "split", slow_split)
    monkeypatch.setattr(App, "cancel", noted_cancel)
    with _echoing() as client:
        with _large_list(client):
            assert is_reading.wait(PATIENCE_S)
        assert has_left.wait(PATIENCE_S)
        go_on.set()
        answer = httpx.post(client.url + "/models/echo/predict/many", json=["x" * LARGE], timeout=PATIENCE_S)
    assert answer.json() == [LARGE]
    assert _called == [LARGE]


def test_what_a_reader_raises_beside_the_loop_is_a_500(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of a reader of large bodies is answered, as it is where the body is small."""

    def broken(*args: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(routes, "split", broken)
    with _echoing() as client:
        for n in (LARGE, 10):
            answer = httpx.post(client.url + "/models/echo/predict/many", json=["x" * n], timeout=PATIENCE_S)
            assert answer.status_code == 500, answer.text
