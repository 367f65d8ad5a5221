"""Who is asked: the model that a request names, and no other one.

What is named must exist (404). Where none is named, it is clear which one is meant, or the error lists the names.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

import carpool
from carpool.http.app import App
from carpool.http.protocols import BUILT_IN
from tests.http.asked_by_name import WAYS, Way, named, protocols, service

FIRST, SECOND = 1.0, 2.0
"""The answers of two models, by which one sees who has answered."""


OF_THE_FIRST = {
    "own": ("/predict", 0.0),
    "own lists": ("/predict/many", [0.0]),
    "sagemaker": ("/invocations", {"instances": [0.0]}),
    "sagemaker, one item": ("/invocations", 0.0),
    "vertex": ("/vertex", {"instances": [0.0]}),
}
"""The addresses that name none and are those of the first service of a server, by its declaration."""


def other(x: dict[str, int]) -> dict[str, int]:
    """A model of a type that no protocol names."""
    return x


async def asked(app: App, path: str, body: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        return await client.post(path, json=body)


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
