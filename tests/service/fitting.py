"""Models of which examples or results fit, or do not, for workers that import nothing else."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Protocol

from carpool import Model, Response


class Texts(Model):
    examples = (1, 2)

    def predict(self, xs: list[int]) -> list[int]:
        return ["a" for _ in xs]  # type: ignore[misc]


class Lists(Model):
    examples = ([1], [2, 3])

    def predict(self, x: list[int]) -> list[int]:
        return x if x == [1] else ["a"]  # type: ignore[list-item]


class Same(Model):
    examples = (1,)

    def predict(self, x: int) -> int:
        return x


class Misfit(Model):
    examples = (1, "b")

    def predict(self, xs: list[int]) -> list[int]:
        return [len(str(x)) for x in xs]


class HandsOnALock(Model):
    examples = (1,)

    def predict(self, x: int) -> Any:
        return threading.Lock()


class Picture:
    """Something that JSON and msgpack cannot express."""


class Duck(Protocol):
    def quack(self) -> None: ...


@dataclass
class Point:
    x: float


class OfPictures(Model):
    examples = (Picture(),)

    def predict(self, x: Picture) -> Picture:
        return x


class OfManyPictures(Model):
    examples = ([Picture()],)

    def predict(self, x: list[Picture]) -> dict[str, Picture]:
        return {"first": x[0]}


class OfDucks(Model):
    examples = (Picture(),)

    def predict(self, x: Duck) -> Duck:
        return x


class Unhinted(Model):
    examples = (Picture(),)

    def predict(self, x):  # type: ignore[no-untyped-def]
        return x


class OfNan(Model):
    examples = (float("nan"),)

    def predict(self, x: float) -> float:
        return x


class OfPoints(Model):
    examples = (Point(1.0),)

    def predict(self, x: Point) -> Point:
        return x


class Responds(Model):
    examples = (1,)

    def predict(self, x: int) -> Response:
        return Response({"x": x}, status=201)


class RawResponds(Model):
    examples = (b"a",)

    def predict(self, x: bytes) -> bytes:
        return x


class OwnFormat(Model):
    accepts, produces = "text/csv", "text/csv"
    examples = (Picture(),)

    def decode(self, bodies: list[bytes]) -> list[Picture]:
        return [Picture() for _ in bodies]

    def predict(self, x: str) -> Picture:
        return x  # type: ignore[return-value]

    def encode(self, results: list[Picture]) -> list[bytes]:
        return [b"1,2" for _ in results]


class WrongPicture(OfPictures):
    examples = ("a path",)  # type: ignore[assignment]


class PictureOrText(OfPictures):
    def predict(self, x: Picture) -> Picture:
        return "a"  # type: ignore[return-value]


class TextForBytes(RawResponds):
    def predict(self, x: bytes) -> bytes:
        return "abcd"  # type: ignore[return-value]


class TextAsBytes(RawResponds):
    examples = ("abcd",)  # type: ignore[assignment]


class BrokenFormat(OwnFormat):
    def encode(self, results: list[Picture]) -> list[bytes]:
        raise ZeroDivisionError("no room")
