"""What the clients ask: a server with one model for each protocol."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

import carpool
from carpool.openai import Chat, Completion

_LARGE = np.float32(1e38)
"""Results stay finite, whatever numbers are made up for them: JSON expresses no other ones."""


class Scale(carpool.Model):
    """Rows of numbers, as arrays."""

    examples = (np.zeros(3, np.float32),)

    def predict(self, xs: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.clip(xs, -_LARGE, _LARGE) * np.float32(2)


class Two(TypedDict):
    """Attributes:
    a: some numbers.
    b: more numbers.
    """

    a: NDArray[np.int32]
    b: NDArray[np.int32]


class AddSub(carpool.Model):
    """Several inputs and outputs, as in Triton's examples."""

    def predict(self, xs: list[Two]) -> list[dict[str, Any]]:
        return [_sum_and_difference(x["a"], x["b"]) for x in xs]


def _sum_and_difference(a: NDArray[np.int32], b: NDArray[np.int32]) -> Any:
    if a.shape != b.shape:
        return carpool.ValidationError(f"a has the shape {a.shape} and b has {b.shape}: they must have one shape")
    return {"sum": a + b, "difference": a - b}


class Echo(carpool.Model):
    """Gives back what it gets."""

    examples = (np.zeros(2),)

    def predict(self, xs: list[Any]) -> list[Any]:
        return xs


def shout(text: str) -> str:
    """A model of texts."""
    return text.upper()


def flip(data: bytes) -> bytes:
    """A model of bytes."""
    return data[::-1]


class Embed(carpool.Model):
    """Vectors of texts."""

    @staticmethod
    def count_tokens(text: str) -> int:
        return len(text.split())

    def predict(self, texts: list[str]) -> list[list[float]]:
        return [[float(len(text)), 0.5, -1.25] for text in texts]


class Words(carpool.Model):
    """Goes on with a text."""

    def predict(self, x: Completion) -> Iterator[str]:
        for word in str(x.prompt).split():
            if word == "raise":
                raise RuntimeError("the secret is 1234")
            yield word + " "


class Parrot(carpool.Model):
    """Goes on with a chat."""

    def predict(self, x: Chat) -> Iterator[str]:
        for word in "".join(message.text for message in x.messages[-1:]).split():
            if word == "raise":
                raise RuntimeError("the secret is 1234")
            yield word + " "


def overloaded(text: str) -> list[float]:
    """Refuses the first two requests, as a busy server does."""
    CALLS.append(text)
    if len(CALLS) % 3:
        raise carpool.HTTPError("busy", status=429, code="busy", headers={"Retry-After": "0"})
    return [1.0]


CALLS: list[str] = []


class Row(TypedDict):
    """Attributes:
    rooms: how many.
    area: of all of them.
    """

    rooms: float
    area: float


def price(row: Row) -> float:
    """A model of rows."""
    return min(max(row["rooms"] * row["area"], -1e300), 1e300)


def service(name: str, model: Any, **settings: Any) -> carpool.Service:
    """One of them, in a thread."""
    return carpool.Service(carpool.Stage(model, run_in="thread", workers=1, **settings), name=name)


rows = service("rows", price)
scale = service("scale", Scale, max_batch_size=64)
addsub = service("addsub", AddSub, max_batch_size=64)
echo = service("echo", Echo, max_batch_size=64)
texts = service("texts", shout)
binary = service("binary", flip)
embed = service("embed", Embed, max_batch_size=64)
words = service("words", Words, max_rows=16)
parrot = service("parrot", Parrot, max_rows=16)
busy = service("busy", overloaded)

ALL = ("rows", "scale", "addsub", "echo", "texts", "binary", "embed", "words", "parrot", "busy")
