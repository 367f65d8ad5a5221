"""Bad input to each protocol: the documented status in the protocol's own words, and nobody else
notices. Bulk is not among them, since a wrong line is an error of its own (`test_bulk.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from carpool import Model, Service, Stage
from carpool.http.app import App
from carpool.http.protocols import BUILT_IN
from carpool.http.protocols.instances import Vertex
from carpool.openai import Chat
from tests.http.bad_input import CASES, LARGEST_BODY, PROTOCOLS, Bad
from tests.support.http.net import Client, RunningServer, serving
from tests.support.http.served import Answer, Double, Rows, ask
from tests.support.peaks import forget_peaks, peak_of

MOST_MEMORY = 48 * 2**20
"""How much more memory the server or a worker may ever take for these requests. The largest body
is 1 MiB, and the largest declared 10 GB."""


class Embed(Model):
    """Vectors of texts."""

    def predict(self, texts: list[str]) -> list[list[float]]:
        return [[float(len(text))] for text in texts]


class Parrot(Model):
    """Says the last message again."""

    def predict(self, chats: list[Chat]) -> list[str]:
        return [chat.messages[-1].text for chat in chats]


class Score(Model):
    """Scores of pairs of texts."""

    def predict(self, pairs: list[tuple[str, str]]) -> list[float]:
        return [1.0 for _ in pairs]


def services() -> list[Service]:
    """Models of numbers and arrays in worker processes, and the others in a thread."""
    processes: Any = {"workers": 1}
    return [
        Service(
            Stage(model, max_batch_size=64, **(processes if model in (Double, Rows) else {"run_in": "thread"})),
            name=model.__name__.lower(),
        )
        for model in (Double, Rows, Embed, Parrot, Score)
    ]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    environ = {"AIP_HEALTH_ROUTE": "/vertex/health", "AIP_PREDICT_ROUTE": "/vertex/predict"}
    protocols = [Vertex(environ), *(name for name in BUILT_IN if name != "vertex")]
    app = App(*services(), max_body_bytes=LARGEST_BODY, protocols=protocols, accept_compressed=True)
    with serving(app) as running:
        yield running


def in_our_words(answer: Answer, told: Any) -> bool:
    error = told["error"]
    return {"code", "message", "request_id"} <= error.keys() <= {"code", "message", "request_id", "details"}


def as_a_text(answer: Answer, told: Any) -> bool:
    return list(told) == ["error"] and isinstance(told["error"], str)


def as_openai_has_them(answer: Answer, told: Any) -> bool:
    has_all = told["error"].keys() == {"message", "type", "param", "code"}
    return has_all and told["error"]["type"] == "invalid_request_error" and answer.headers["x-should-retry"] == "false"


def as_cohere_and_tei_have_them(answer: Answer, told: Any) -> bool:
    return told.keys() == {"message", "error"} and isinstance(told["message"], str)


WORDS: dict[str, Callable[[Answer, Any], bool]] = {
    "native": in_our_words,
    "oip": as_a_text,
    "kserve-v1": as_a_text,
    "sagemaker": as_a_text,
    "vertex": as_a_text,
    "openai": as_openai_has_them,
    "rerank": as_cohere_and_tei_have_them,
}

X = {"name": "input", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
GOOD: dict[str, tuple[str, Any]] = {
    "native": ("/models/rows/predict", [1, 2]),
    "oip": ("/v2/models/rows/infer", {"inputs": [X]}),
    "kserve-v1": ("/v1/models/double:predict", {"instances": [1]}),
    "sagemaker": ("/invocations", {"instances": [1]}),
    "vertex": ("/vertex/predict", {"instances": [1]}),
    "openai": ("/v1/embeddings", {"model": "embed", "input": "a"}),
    "rerank": ("/v1/rerank", {"query": "a", "documents": ["b"]}),
}


def test_nothing_is_left_out() -> None:
    """Each protocol has each case, or says why it cannot have it."""
    assert PROTOCOLS.keys() == WORDS.keys() == GOOD.keys() == {"native", *BUILT_IN}
    for name, cases in PROTOCOLS.items():
        assert set(cases) == set(CASES), name
        assert all(cases.values())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_bad_input(server: RunningServer, protocol: str, case: str) -> None:
    """It has its status, told in the protocol's words, within little memory; the next request is
    served by the same workers.
    """
    bad = PROTOCOLS[protocol][case]
    if isinstance(bad, str):
        return
    pids = server.pids
    before = forget_peaks(pids)
    for each in bad:
        answer = answer_to(server.port, each)
        told = json.loads(answer.body)
        assert answer.status == each.status, (each.data[:300], answer.body)
        assert WORDS[protocol](answer, told), told
        path, body = GOOD[protocol]
        assert ask(server.port, path, body).status == 200
    assert server.pids == pids
    for process, least in before.items():
        assert peak_of(process) - least < MOST_MEMORY, process


def answer_to(port: int, bad: Bad) -> Answer:
    with Client(port) as client:
        return client.ask(bad.data)


def test_arrays_are_what_they_were(server: RunningServer) -> None:
    """The good requests of the table above are answered rightly."""
    answer = ask(server.port, *GOOD["oip"])
    assert json.loads(answer.body)["outputs"][0]["data"] == [2.0, 4.0]
    assert np.allclose(json.loads(ask(server.port, *GOOD["native"]).body), [2, 4])
