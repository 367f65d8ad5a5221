"""Models whose items have types of every kind that can be declared."""

from __future__ import annotations

import datetime
import enum
import math
from dataclasses import dataclass
from typing import Annotated, TypedDict

import msgspec
import numpy as np
import pydantic
from numpy.typing import NDArray

from carpool import Model, Service, Stage


class Color(enum.Enum):
    """A closed set."""

    RED = "red"
    BLUE = "blue"


class Point(msgspec.Struct, forbid_unknown_fields=True):
    """A Struct with limits of its own."""

    x: Annotated[int, msgspec.Meta(ge=0, le=100)]
    color: Color = Color.RED
    tags: list[str] = []


class Shift(Model):
    """Struct to Struct."""

    examples = (Point(1), Point(2, Color.BLUE, ["a"]))

    def predict(self, points: list[Point]) -> list[Point]:
        return [Point(p.x + 1, p.color, [*p.tags, "shifted"]) for p in points]


@dataclass
class Box:
    """A dataclass."""

    width: float
    height: float


class Area(TypedDict):
    """A TypedDict."""

    area: float
    in_batch: int


class Measure(Model):
    """Dataclass to TypedDict, with hooks on both sides: the hooks' types count."""

    examples = (Box(1, 2),)

    def preprocess(self, box: Box) -> float:
        return box.width * box.height

    def predict(self, areas: list[float]) -> list[tuple[float, int]]:
        return [(area, len(areas)) for area in areas]

    def postprocess(self, answer: tuple[float, int]) -> Area:
        return {"area": answer[0], "in_batch": answer[1]}


class Address(pydantic.BaseModel):
    """Nested in `Person`."""

    city: str = pydantic.Field(min_length=1)


class Person(pydantic.BaseModel):
    """A pydantic model with another one in it."""

    name: str
    age: int = pydantic.Field(ge=0)
    address: Address


class Greet(Model):
    """A model from pydantic to pydantic."""

    examples = (Person(name="Ann", age=3, address=Address(city="Bonn")),)

    def predict(self, people: list[Person]) -> list[Person]:
        return [Person(name=f"Dr. {p.name}", age=p.age, address=p.address) for p in people]


class Tree(pydantic.BaseModel):
    """Contains itself."""

    leaf: int = 0
    branches: list[Tree] = []


OtherAddress = pydantic.create_model("Address", field=(int, ...))


class Owner(pydantic.BaseModel):
    """Has another `Address` than `Person`."""

    address: OtherAddress  # type: ignore[valid-type]


class Orchard(msgspec.Struct):
    """A Struct with pydantic inside."""

    trees: dict[str, Tree]
    owner: Owner


class Prune(Model):
    """Definitions within definitions."""

    examples = (Orchard({"oak": Tree(branches=[Tree(leaf=2)])}, Owner(address=OtherAddress(field=7))),)

    def predict(self, orchards: list[Orchard]) -> list[Tree]:
        return [orchard.trees["oak"].branches[0] for orchard in orchards]


class Twice(Model):
    """A model that gets one array for the batch."""

    examples = (np.array([1.0, 2.0], dtype=np.float32),)

    def predict(self, xs: NDArray[np.float32]) -> NDArray[np.float32]:
        assert (type(xs), xs.dtype) == (np.ndarray, np.float32)
        return 2 * xs


class Double(Model):
    """Arrays to arrays; the batch is one array."""

    examples = (np.array([1.0, 2.0], dtype=np.float32),)

    def predict(self, xs: list[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        assert all(x.dtype == np.float32 for x in xs)
        return [2 * x for x in xs]


class Total(Model):
    """Arrays to numpy numbers, which count as builtins."""

    def predict(self, xs: list[NDArray[np.int64]]) -> list[int]:
        return np.array([x.sum() for x in xs])  # type: ignore[return-value]


class Booking(pydantic.BaseModel):
    """Strict, writes other fields than it reads, and reads none but its own."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")

    when: datetime.datetime
    guests: int = pydantic.Field(alias="n")
    pin: pydantic.SecretStr = pydantic.SecretStr("1234")
    score: float = pydantic.Field(default=1.0, exclude=True)

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def day(self) -> str:
        return f"{self.when:%A}"


class Book(Model):
    """pydantic with everything that its own JSON does otherwise, in and out."""

    def predict(self, bookings: list[Booking]) -> list[Booking]:
        return bookings


def ratio(xs: list[float]) -> list[float]:
    """A model that returns NaN for 0, as a number."""
    return [math.nan if x == 0 else 1 / x for x in xs]


def ratios(xs: list[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    """A model that returns infinity for 0, in arrays."""
    with np.errstate(divide="ignore"):
        return [1 / x for x in xs]


def check(xs: list[Point]) -> list[int]:
    """Struct to a type that the answer for 13 does not fit."""
    return [str(p.x) if p.x == 13 else p.x for p in xs]  # type: ignore[misc]


shift = Service(Stage(Shift, max_batch_size=8), name="shift")
measure = Service(Stage(Measure, max_batch_size=8, run_in="thread"), name="measure")
greet = Service(Stage(Greet, max_batch_size=8), name="greet")
prune = Service(Stage(Prune, max_batch_size=8, run_in="thread"), name="prune")
double = Service(Stage(Double, max_batch_size=8, run_in="thread"), name="double")
total = Service(Stage(Total, max_batch_size=8), name="total")
checked = Service(Stage(check, max_batch_size=8, run_in="thread"), name="checked")
book = Service(Stage(Book, max_batch_size=8, run_in="thread"), name="book")
reciprocal = Service(Stage(ratio, max_batch_size=8, run_in="thread"), name="reciprocal")
twice = Service(Stage(Twice, max_batch_size=8, run_in="thread"), name="twice")
reciprocals = Service(Stage(ratios, max_batch_size=8, run_in="thread"), name="reciprocals")
