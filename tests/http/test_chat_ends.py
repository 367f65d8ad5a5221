"""Completions by OpenAI's API: why they end, what they are counted as, and what a text that is none ends as."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

import carpool
from carpool import Service, Stage
from carpool.http.app import App
from carpool.openai import Completion, Delta
from tests.support.http.net import RunningServer, serving
from tests.support.waiting import PATIENCE_S, wait_until

HALF: Final = "\ud83d"


def words(text: str) -> int:
    return len(text.split())


class Yields(carpool.Model):
    """Yields the words of its prompt one by one, as many as it may."""

    def predict(self, item: Completion) -> Iterator[str]:
        for word in str(item.prompt).split()[: item.max_tokens]:
            yield f"{word} "


class YieldsPairs(carpool.Model):
    """Yields two words at a time, and counts them."""

    count_tokens = staticmethod(words)

    def predict(self, item: Completion) -> Iterator[str]:
        told = str(item.prompt).split()[: item.max_tokens]
        for at in range(0, len(told), 2):
            yield " ".join(told[at : at + 2]) + " "


class Returns(carpool.Model):
    """Returns a text, of which nobody knows how many tokens it has."""

    def predict(self, item: Completion) -> str:
        return " ".join(str(item.prompt).split()[: item.max_tokens])


class ReturnsCounted(Returns):
    count_tokens = staticmethod(words)


class Joins(YieldsPairs):
    """Yields, and joins what it has yielded for those who take it whole."""

    def collect(self, parts: list[str]) -> str:
        return "".join(parts)


class Says(carpool.Model):
    """Says itself how many tokens there are, and why it ends."""

    count_tokens = staticmethod(words)

    def predict(self, item: Completion) -> Iterator[Delta]:
        yield Delta("a b ", tokens=2)
        yield Delta("c", finish_reason="content_filter", tokens=4)
        yield Delta("never", tokens=100)


class Breaks(carpool.Model):
    """Yields half of a character after a whole one."""

    def predict(self, item: Completion) -> Iterator[str]:
        yield "x"
        yield HALF


class CountsBadly(Yields):
    """Cannot count what it writes."""

    @staticmethod
    def count_tokens(text: str) -> int:
        if text.startswith("one"):
            return 3
        raise RuntimeError("no such token")


@contextmanager
def served(model: Any, **settings: Any) -> Iterator[RunningServer]:
    stage = Stage(model, run_in="thread")
    with serving(App(Service(stage, name="m", timeout_s=PATIENCE_S, **settings))) as server:
        yield server


def asked(port: int, path: str, body: Any) -> tuple[int, bytes]:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        client.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = client.getresponse()
        return answer.status, answer.read()
    finally:
        client.close()


def completed(port: int, *, stream: bool, **more: Any) -> tuple[str, str, int]:
    """The text of a completion, why it has ended, and how many tokens it has."""
    asks = {"model": "m", "prompt": "one two three four five six", "stream": stream, **more}
    status, body = asked(port, "/v1/completions", {**asks, "stream_options": {"include_usage": True}})
    assert status == 200, body
    if not stream:
        told = json.loads(body)
        (choice,) = told["choices"]
        return choice["text"], choice["finish_reason"], told["usage"]["completion_tokens"]
    *chunks, last = [json.loads(each[6:]) for each in body.split(b"\n\n") if each[:7] == b"data: {"]
    assert body.endswith(b"data: [DONE]\n\n")
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    return text, chunks[-1]["choices"][0]["finish_reason"], last["usage"]["completion_tokens"]


ALL: Final = "one two three four five six"
# the model, what is asked besides, the text, why it ends, and the tokens
ENDS: Final[dict[str, tuple[Any, dict[str, Any], str, str, int]]] = {
    "yields": (Yields, {}, ALL, "stop", 6),
    "yields, cut off": (Yields, {"max_tokens": 3}, "one two three", "length", 3),
    "yields, not cut off": (Yields, {"max_tokens": 7}, ALL, "stop", 6),
    "yields, a stop at its last token": (Yields, {"max_tokens": 3, "stop": "thr"}, "one two", "stop", 3),
    "pairs": (YieldsPairs, {}, ALL, "stop", 6),
    "pairs, cut off": (YieldsPairs, {"max_tokens": 5}, "one two three four five", "length", 5),
    "pairs, by another name": (YieldsPairs, {"max_completion_tokens": 5}, "one two three four five", "length", 5),
    "pairs, stopped": (YieldsPairs, {"stop": "four"}, "one two three", "stop", 3),
    "returns": (Returns, {}, ALL, "stop", 1),
    "returns, nobody knows": (Returns, {"max_tokens": 1}, "one", "stop", 1),
    "returns, counted": (ReturnsCounted, {}, ALL, "stop", 6),
    "returns, counted and cut off": (ReturnsCounted, {"max_tokens": 2}, "one two", "length", 2),
    "returns, counted and stopped": (ReturnsCounted, {"stop": ["five"]}, "one two three four", "stop", 4),
    "joins": (Joins, {}, ALL, "stop", 6),
    "joins, cut off": (Joins, {"max_tokens": 3}, "one two three", "length", 3),
    "says": (Says, {"max_tokens": 6}, "a b c", "content_filter", 6),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("end", ENDS)
def test_why_an_answer_ends_and_how_long_it_is(end: str, stream: bool) -> None:
    """Whole and streamed alike, an answer says that it was cut off, and has the tokens that the model counts in it."""
    model, more, text, reason, tokens = ENDS[end]
    with served(model) as server:
        told, *rest = completed(server.port, stream=stream, **more)
        assert told.strip() == text and rest == [reason, tokens]


class Talks(Says):
    """Talks for ever, unless it is stopped."""

    def predict(self, item: Completion) -> Iterator[Delta]:
        if item.stop:
            while True:
                yield Delta("word ")
        yield Delta("end", finish_reason="length")
        yield Delta("never")


@pytest.mark.parametrize("more", [{}, {"stop": "word word"}], ids=["finish_reason", "stop"])
def test_an_answer_that_has_enough_is_complete(more: dict[str, Any]) -> None:
    """One that ends by `stop`, or by the model's own `finish_reason`, is a good answer, and no client has left."""
    with served(Talks, slo_s=PATIENCE_S) as server:
        assert completed(server.port, stream=True, **more)
        handle = server.app.endpoints[0].handle
        assert handle is not None
        wait_until(lambda: handle.stats().in_flight == 0)
        stats = handle.stats()
        assert stats.streams is not None and stats.streams.goodput == 1.0
        assert {end for end, n in stats.streams.ends.items() if n} == {"complete"}
        assert {outcome: n for outcome, n in stats.outcomes.items() if n} == {"ok": 1}


def test_a_count_that_fails_fails_its_request() -> None:
    """What `count_tokens` raises at the end of an answer ends that answer, and the service goes on."""
    with served(CountsBadly) as server:
        asks = {"model": "m", "prompt": "one two three", "max_tokens": 9}
        for stream in (False, True):
            assert completed(server.port, stream=stream)[2] == 3
        status, body = asked(server.port, "/v1/completions", {**asks, "prompt": [1, 2]})
        assert status == 500 and b"no such token" not in body
        status, body = asked(server.port, "/v1/completions", {**asks, "prompt": [1, 2], "stream": True})
        assert b"model_error" in body and b"[DONE]" not in body
        assert completed(server.port, stream=True)[2] == 3


def half(x: int) -> str:
    return f"x{HALF}"


class Halves(carpool.Model):
    def predict(self, x: int) -> Iterator[str]:
        yield "x"
        yield HALF


COMPLETES: Final = {"model": "m", "prompt": "?"}
TENSOR: Final = {"name": "x", "shape": [1], "datatype": "INT64", "data": [1]}
BROKEN: Final[dict[str, tuple[Any, str, Any]]] = {
    "predict": (half, "/predict", 1),
    "list": (half, "/predict/many", [1]),
    "kserve": (half, "/v1/models/m:predict", {"instances": [1]}),
    "oip": (half, "/v2/models/m/infer", {"inputs": [TENSOR]}),
    "completion": (Breaks, "/v1/completions", COMPLETES),
    "completion in parts": (Breaks, "/v1/completions", {**COMPLETES, "stream": True}),
    "parts": (Halves, "/predict", 1),
}


@pytest.mark.parametrize("way", BROKEN)
def test_half_of_a_character_is_a_bad_result(way: str, caplog: pytest.LogCaptureFixture) -> None:
    """By every protocol the model is blamed for a text that is none, not a protocol."""
    model, path, body = BROKEN[way]
    with served(model) as server:
        status, answer = asked(server.port, path, body)
        assert status == (200 if way in ("completion in parts", "list") else 500)
        assert b"bad_result" in answer or b"does not fit its declaration" in answer
    assert "a protocol" not in caplog.text
