"""Large answers are written beside the loop, whatever asks for them; small ones at once."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

import carpool
from carpool.http.compression import Compression
from carpool.http.exchange import LARGE_ANSWER, Exchange
from carpool.testing import served
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
        return ["x" * LARGE_ANSWER for _ in names]

    with served(carpool.Service(carpool.Stage(texts, max_batch_size=4, run_in="thread"))) as client:
        body = {"model": "texts", "input": ["a"]}
        answer = httpx.post(f"{client.url}/v1/embeddings", json=body, timeout=PATIENCE_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "bad_result"), answer.text
