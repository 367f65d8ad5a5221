"""The models that the tests of protocols ask, and how they are asked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from carpool import Model, Service, Stage
from carpool.http.app import App
from tests.support.http.front import get, post
from tests.support.http.net import Client
from tests.support.http.wire import Answer


class Rows(Model):
    """Whole arrays in and out: each number times two."""

    examples = (np.array([1.0, 2.0, 3.0], np.float32),)

    def predict(self, xs: NDArray[np.float32]) -> NDArray[np.float32]:
        return xs * np.float32(2)


class Sum(TypedDict):
    """Attributes:
    total: of the numbers.
    label: repeated so often.
    """

    total: float
    label: str


class Pair(TypedDict):
    """Attributes:
    numbers: some numbers.
    label: a text.
    """

    numbers: list[float]
    label: str


class Named(Model):
    """Several inputs and outputs, by name."""

    def predict(self, xs: list[Pair]) -> list[Sum]:
        return [{"total": sum(x["numbers"]), "label": x["label"] * 2} for x in xs]


@dataclass
class Frame:
    """Attributes:
    pixels: bytes as numbers.
    gain: what they are multiplied with.
    """

    pixels: NDArray[np.uint8]
    gain: int = 1


class Lit(Model):
    """A dataclass with an array in it."""

    def predict(self, xs: list[Frame]) -> list[Any]:
        return [x.pixels.astype(np.int64) * x.gain for x in xs]


def shout(text: str) -> str:
    """A model of texts."""
    return text.upper()


def flip(data: bytes) -> bytes:
    """A model of bytes."""
    return data[::-1]


class Anything(Model):
    """A model without hints, which gives back what it gets."""

    def predict(self, xs: list[Any]) -> list[Any]:
        if any(x == "raise" for x in xs if isinstance(x, str)):
            raise RuntimeError("the secret is 1234")
        return xs


class Double(Model):
    """Numbers."""

    def predict(self, xs: list[float]) -> list[float]:
        return [2 * x for x in xs]


def union(x: dict[str, list[int]]) -> int:
    """Takes what is no row of a tensor."""
    return len(x)


def services() -> list[Service]:
    """All of them, each with one worker in this process."""
    return [
        Service(
            Stage(model, max_batch_size=64 if isinstance(model, type) else None, run_in="thread", workers=1), name=name
        )
        for name, model in (
            ("double", Double),
            ("rows", Rows),
            ("named", Named),
            ("lit", Lit),
            ("shout", shout),
            ("flip", flip),
            ("any", Anything),
            ("union", union),
            ("a/b", Double),
        )
    ]


def app(**options: Any) -> App:
    """An app of all of them."""
    return App(*services(), **options)


def asked(port: int, data: bytes, method: str = "POST") -> Answer:
    """The answer on a connection of its own."""
    with Client(port) as client:
        return client.ask(data, method)


def ask(port: int, path: str, body: Any, *headers: str) -> Answer:
    """The answer to a body, which goes as JSON if it is not bytes."""
    return asked(port, post(body if isinstance(body, bytes) else json.dumps(body).encode(), path, *headers))


def fetched(port: int, path: str) -> tuple[int, Any]:
    """The status and the JSON at an address."""
    answer = asked(port, get(path), "GET")
    return answer.status, json.loads(answer.body)


def posted(port: int, path: str, body: Any, *headers: str) -> tuple[int, Any]:
    """The status and the JSON in the answer to a body."""
    answer = ask(port, path, body, *headers)
    return answer.status, json.loads(answer.body)


__all__ = ["Answer", "app", "ask", "fetched", "posted", "services"]
