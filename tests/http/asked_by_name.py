"""The ways to ask a model that has a name, in each protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import carpool
from carpool.http.protocols import BUILT_IN
from carpool.http.protocols.base import HttpProtocol
from carpool.http.protocols.instances import HEALTH_ROUTE, PREDICT_ROUTE, Vertex
from carpool.openai import Chat, Completion


class Way(NamedTuple):
    """A way to ask a model.

    Attributes:
        takes: The type of the models' items.
        gives: That of their answers.
        path: Where it is asked, with the name of the model or without it.
        body: What is sent.
        member: Whether the body names the model.
        nameless: What becomes of a request that names none, with one model that fits, and with several.
    """

    takes: Any
    gives: Any
    path: str
    body: Mapping[str, Any] | float
    member: bool = False
    nameless: tuple[int, int] = (0, 0)


SAYS = {"messages": [{"role": "user", "content": "x"}]}
TENSOR = {"inputs": [{"name": "input", "datatype": "FP64", "shape": [1], "data": [0.0]}]}
PAIR = {"query": "x", "documents": ["x"]}
WAYS = {
    "own": Way(float, float, "/models/{}/predict", 0.0),
    "own lists": Way(float, list[float], "/models/{}/predict/many", [0.0]),  # type: ignore[arg-type]
    "kserve-v1": Way(float, float, "/v1/models/{}:predict", {"instances": [0.0]}),
    "kserve-v1 versions": Way(float, float, "/v1/models/{}/versions/1:predict", {"instances": [0.0]}),
    "oip": Way(float, float, "/v2/models/{}/infer", TENSOR),
    "oip versions": Way(float, float, "/v2/models/{}/versions/1/infer", TENSOR),
    "openai embeddings": Way(str, list[float], "/v1/embeddings", {"input": "x"}, True, (400, 400)),
    "openai chats": Way(Chat, str, "/v1/chat/completions", SAYS, True, (400, 400)),
    "openai completions": Way(Completion, str, "/v1/completions", {"prompt": "x"}, True, (400, 400)),
    "rerank": Way(tuple[str, str], float, "/v1/rerank", PAIR, True, (200, 400)),
    "rerank of TEI": Way(tuple[str, str], float, "/rerank", {"query": "x", "texts": ["x"]}, True, (200, 400)),
    "rerank v2": Way(tuple[str, str], float, "/v2/rerank", PAIR, True, (200, 400)),
}


def protocols() -> list[HttpProtocol]:
    vertex = Vertex({PREDICT_ROUTE: "/vertex", HEALTH_ROUTE: "/vertex/health"}, always=True)
    return [vertex if kind is Vertex else kind() for kind in BUILT_IN.values()]


def service(name: str, way: Way, number: float) -> carpool.Service:
    """A service whose answers have a number of its own."""
    answer = str(number) if way.gives is str else [number] if way.gives == list[float] else number

    def predict(x: Any) -> Any:
        return answer

    predict.__annotations__ = {"x": way.takes, "return": way.gives}
    return carpool.Service(carpool.Stage(predict, run_in="thread"), name=name)


def named(way: Way, name: str | None) -> tuple[str, Any]:
    """Where and how a model of a name is asked; None to name none."""
    if not way.member:
        return way.path.format(name), way.body
    assert isinstance(way.body, dict)
    return way.path, {**way.body, **({} if name is None else {"model": name})}
