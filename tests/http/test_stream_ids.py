"""The id of the error that ends a stream is the one in its head, which its client has, and the one in the log."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from carpool import Service, Stage
from carpool.http.app import App
from carpool.openai import Chat, Completion
from tests.support.http.both_fronts import both_fronts
from tests.support.waiting import PATIENCE_S


def fails(x: float) -> Iterator[float]:
    yield x
    raise RuntimeError("no more")


def completes(x: Completion) -> Iterator[str]:
    yield "a"
    raise RuntimeError("no more")


def chats(x: Chat) -> Iterator[str]:
    yield "a"
    raise RuntimeError("no more")


def refuses(x: float) -> float:
    raise RuntimeError("none")


STREAMS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "events": ("/models/fails/predict", {"json": 1}, {"Accept": "text/event-stream"}),
    "lines": ("/models/fails/predict", {"json": 1}, {"Accept": "application/x-ndjson"}),
    "bulk": ("/models/refuses/predict", {"content": b"1\n2\n"}, {"Content-Type": "application/x-ndjson"}),
    "completion": ("/v1/completions", {"json": {"model": "completes", "prompt": "a", "stream": True}}, {}),
    "chat": (
        "/v1/chat/completions",
        {"json": {"model": "chats", "messages": [{"role": "user", "content": "a"}], "stream": True}},
        {},
    ),
}


@pytest.fixture(scope="module")
def doors() -> Iterator[Any]:
    models = (fails, completes, chats, refuses)
    services = [Service(Stage(model, run_in="thread"), name=model.__name__) for model in models]
    with both_fronts(App(*services)) as both:
        yield both


@pytest.mark.parametrize("given", [{}, {"X-Request-Id": "mine"}], ids=["an id of ours", "the client's id"])
@pytest.mark.parametrize("name", STREAMS)
def test_an_error_has_the_id_of_its_stream(
    port: int, name: str, given: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """An error that ends a stream, or a line of it, has the id that the head has, and so has its line in the log."""
    path, body, headers = STREAMS[name]
    answer = httpx.post(f"http://127.0.0.1:{port}{path}", headers={**headers, **given}, timeout=PATIENCE_S, **body)
    assert answer.status_code == 200
    id = answer.headers["x-request-id"]
    assert id == "mine" if given else re.fullmatch(r"[0-9a-f]{12}-[0-9]+", id)
    errors = [json.loads(each) for each in re.findall(r'\{"error":.*\}', answer.text)]
    assert errors and {each["error"]["request_id"] for each in errors} == {id}
    logged = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert logged and all(f"request {id}:" in line for line in logged)
