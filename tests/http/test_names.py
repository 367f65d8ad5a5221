"""Who is asked: the model that a request names, and no other one.

What is named must exist (404). Where none is named, it is clear which one is meant, or the error lists the names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx
import pytest

import carpool
from carpool.http.app import App
from carpool.http.protocols import BUILT_IN
from carpool.http.protocols.base import HttpProtocol
from carpool.http.protocols.vertex import HEALTH_ROUTE, PREDICT_ROUTE, Vertex
from carpool.openai import Chat, Completion

FIRST, SECOND = 1.0, 2.0
"""The answers of two models, by which one sees who has answered."""


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
OF_THE_FIRST = {
    "own": ("/predict", 0.0),
    "own lists": ("/predict/many", [0.0]),
    "sagemaker": ("/invocations", {"instances": [0.0]}),
    "sagemaker, one item": ("/invocations", 0.0),
    "vertex": ("/vertex", {"instances": [0.0]}),
}
"""The addresses that name none and are those of the first service of a server, by its declaration."""


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


def other(x: dict[str, int]) -> dict[str, int]:
    """A model of a type that no protocol names."""
    return x


async def asked(app: App, path: str, body: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        return await client.post(path, json=body)


def named(way: Way, name: str | None) -> tuple[str, Any]:
    """Where and how a model of a name is asked; None to name none."""
    if not way.member:
        return way.path.format(name), way.body
    assert isinstance(way.body, dict)
    return way.path, {**way.body, **({} if name is None else {"model": name})}


def test_every_protocol_is_walked() -> None:
    """Each protocol that carpool knows is asked below, by the name of a model or as the first one's."""
    walked = {name.split()[0].rstrip(",") for name in (*WAYS, *OF_THE_FIRST)}
    assert set(BUILT_IN) <= walked


@pytest.mark.parametrize("name", WAYS)
def test_who_is_named_is_asked_and_no_other_one(name: str) -> None:
    """A model that is named answers; one that there is not, or no more, is 404, and nobody answers in its place."""
    way = WAYS[name]

    async def ask_all() -> None:
        app = App(service("one", way, FIRST), service("two", way, SECOND), protocols=protocols())
        for known, number in (("one", FIRST), ("two", SECOND)):
            answer = await asked(app, *named(way, known))
            assert answer.status_code == 200 and str(number) in answer.text, answer.text
        for unknown in ("three", "ONE", "one ", ""):
            assert (await asked(app, *named(way, unknown))).status_code == 404, unknown
        await app.admin._services.remove("one")
        assert (await asked(app, *named(way, "one"))).status_code == 404
        answer = await asked(app, *named(way, "two"))
        assert answer.status_code == 200 and str(SECOND) in answer.text
        await app.stop()

    asyncio.run(ask_all())


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if way.member])
@pytest.mark.parametrize("null", [False, True], ids=["left out", "null"])
def test_who_is_not_named_is_not_guessed(name: str, null: bool) -> None:
    """Where the body names no model, the only one that fits answers, or the error lists the names of those that fit."""
    way = WAYS[name]
    path, body = named(way, None)
    body = {**body, **({"model": None} if null else {})}

    async def ask_all() -> None:
        alone = App(carpool.Service(carpool.Stage(other, run_in="thread")), service("one", way, FIRST))
        answer = await asked(alone, path, body)
        assert answer.status_code == way.nameless[0]
        assert ("1.0" if answer.status_code == 200 else "one") in answer.text
        await alone.stop()
        several = App(service("one", way, FIRST), service("two", way, SECOND))
        answer = await asked(several, path, body)
        assert answer.status_code == way.nameless[1] and "one, two" in answer.text, answer.text
        await several.stop()
        unfit = App(carpool.Service(carpool.Stage(other, run_in="thread")))
        assert (await asked(unfit, path, body)).status_code in (400, 404)
        await unfit.stop()

    asyncio.run(ask_all())


@pytest.mark.parametrize("name", OF_THE_FIRST)
def test_the_first_service_is_not_followed_by_another_one(name: str) -> None:
    """Addresses that name no model are the first service's; once it has been removed they are 404, and tell the names,
    until another service is added.
    """
    path, body = OF_THE_FIRST[name]
    way = Way(float, float, "", 0.0)

    async def ask_all() -> None:
        app = App(service("one", way, FIRST), service("two", way, SECOND), protocols=protocols())
        answer = await asked(app, path, body)
        assert answer.status_code == 200 and "1.0" in answer.text
        await app.admin._services.remove("one")
        answer = await asked(app, path, body)
        assert answer.status_code == 404 and "two" in answer.text, answer.text
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            assert path not in (await client.get("/openapi.json")).json()["paths"]
        await app.stop()

    asyncio.run(ask_all())
