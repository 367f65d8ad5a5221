"""Silences of slow models: whatever a client has asked for in parts, something comes now and then, and its reader skips
it.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

import carpool
from carpool import Service, Stage
from carpool.http.app import App
from carpool.openai import Completion, Delta
from tests.support.http.both_fronts import both_fronts
from tests.support.waiting import PATIENCE_S

HEARD = threading.Event()
"""Set once the client has got something; until then each model gives nothing to tell."""


def wait() -> None:
    assert HEARD.wait(PATIENCE_S), "the client has heard nothing"


def whole(x: int) -> int:
    wait()
    return x


def with_a_response(x: int) -> Any:
    wait()
    return carpool.Response(b'{\n"x": 1}', content_type="application/json")


def with_a_status(x: int) -> Any:
    wait()
    return carpool.Response(b"gone", status=410, content_type="text/plain")


def failing(x: int) -> int:
    wait()
    raise carpool.HTTPError("no such thing", status=404)


class Parts(carpool.Model):
    """Yields its first part late."""

    def predict(self, x: int) -> Iterator[int]:
        wait()
        yield x


class Thinks(carpool.Model):
    """Yields parts without text until it has thought enough."""

    def predict(self, item: Completion) -> Iterator[Delta]:
        for _ in range(int(PATIENCE_S / 0.02)):
            yield Delta("")
            if HEARD.is_set():
                break
            time.sleep(0.02)
        yield Delta("42")


class Keeps(carpool.Model):
    """Yields text that is kept back, as it may be the beginning of a stop."""

    def predict(self, item: Completion) -> Iterator[str]:
        yield "4"
        wait()
        yield "2"


class Whole(carpool.Model):
    """Returns its text at once."""

    def predict(self, item: Completion) -> str:
        wait()
        return "42"


EVENTS: Final = ("/predict", "application/json", "text/event-stream", b"7")
LINES: Final = ("/predict", "application/json", "application/x-ndjson", b"7")
BULK: Final = ("/predict", "application/x-ndjson", "application/x-ndjson", b"7\n")
TEXT: Final = ("/v1/completions", "application/json", "*/*", b'{"model":"m","prompt":"?","stream":true,"stop":"4x"}')
# the model, what is asked, and what comes after the signs of life
WAYS: Final[dict[str, tuple[Any, tuple[str, str, str, bytes], bytes]]] = {
    "events of parts": (Parts, EVENTS, b'data: 7\n\nevent: end\ndata: {"parts": 1}\n\n'),
    "events of a whole answer": (whole, EVENTS, b'data: 7\n\nevent: end\ndata: {"parts": 1}\n\n'),
    "events of a response": (with_a_response, EVENTS, b'data: {"x":1}\n\nevent: end\ndata: {"parts": 1}\n\n'),
    "events of a status": (with_a_status, EVENTS, b"bad_result"),
    "events of a failure": (failing, EVENTS, b"no such thing"),
    "lines of parts": (Parts, LINES, b'{"part": 7}\n{"end": {"parts": 1}}\n'),
    "lines of a whole answer": (whole, LINES, b'{"part": 7}\n{"end": {"parts": 1}}\n'),
    "bulk": (whole, BULK, b"7\n"),
    "bulk of parts": (Parts, BULK, b"[7]\n"),
    "parts without text": (Thinks, TEXT, b"data: [DONE]\n\n"),
    "text that is kept back": (Keeps, TEXT, b"data: [DONE]\n\n"),
    "a whole text": (Whole, TEXT, b"data: [DONE]\n\n"),
}


def read_through(port: int, asks: tuple[str, str, str, bytes]) -> tuple[int, bytes, bytes]:
    """The status, what came while the model gave nothing, and the rest."""
    path, sent, wanted, body = asks
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        client.request("POST", path, body, {"content-type": sent, "accept": wanted})
        answer = client.getresponse()
        first = answer.read1()
        HEARD.set()
        return answer.status, first, answer.read()
    finally:
        client.close()


@pytest.mark.parametrize("way", WAYS)
def test_a_silence_is_filled_whatever_is_told(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head comes before the model gives anything, with what readers skip; then comes the answer as ever."""
    for module in ("answer_writer", "asgi"):
        monkeypatch.setattr(f"carpool.http.{module}.SILENCE_S", 0.05)
    model, asks, end = WAYS[way]
    sign = b" " if asks[2] == "application/x-ndjson" else b": alive\n\n"
    with both_fronts(App(Service(Stage(model, run_in="thread"), name="m", timeout_s=PATIENCE_S))) as (own, other):
        for port in (own.port, other.port):
            HEARD.clear()
            status, first, rest = read_through(port, asks)
            assert status == 200 and first and not first.replace(sign, b""), first
            told = rest.replace(b": alive\n\n", b"")
            if b"event: " in end or sign == b" ":
                assert told.lstrip(b" ") == end
                continue
            assert end in told
            if asks is EVENTS:
                assert told.startswith(b"event: error\ndata: ")


@pytest.mark.parametrize(
    "way", ["events of a whole answer", "events of a response", "events of a status", "lines of parts"]
)
def test_a_quick_answer_has_no_sign_of_life(way: str) -> None:
    """What is there at once is told as it is, with a status of its own."""
    model, asks, end = WAYS[way]
    with both_fronts(App(Service(Stage(model, run_in="thread"), name="m", timeout_s=PATIENCE_S))) as (own, other):
        for port in (own.port, other.port):
            HEARD.set()
            status, first, rest = read_through(port, asks)
            if way == "events of a status":
                assert (status, first + rest) == (410, b"gone")
            elif way == "events of a response":
                assert (status, json.loads(first + rest)) == (200, {"x": 1})
            else:
                assert (status, first + rest) == (200, end)


@pytest.mark.parametrize("how", ["predict_many", "predict_stream"])
def test_our_own_client_skips_signs_of_life(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results, and errors among them, are what they are without the silence before them."""
    monkeypatch.setattr("carpool.http.answer_writer.SILENCE_S", 0.02)
    release = threading.Timer(0.2, HEARD.set)

    def odd(x: int) -> int:
        wait()
        if x % 2:
            raise carpool.HTTPError("odd", status=418)
        return x

    model: Callable[[int], int] = odd if how == "predict_many" else whole
    HEARD.clear()
    with both_fronts(App(Service(Stage(model, run_in="thread"), name="m", timeout_s=PATIENCE_S))) as (own, _):
        release.start()
        with carpool.Client(f"http://127.0.0.1:{own.port}") as client:
            if how == "predict_stream":
                assert list(client.predict_stream(7)) == [7]
                return
            results = list(client.predict_many([1, 2, 3], return_exceptions=True))
    assert results[1] == 2
    assert [type(each) for each in results] == [carpool.HTTPError, int, carpool.HTTPError]
