"""Models for graphs: small ones, and those of random graphs, whose outcomes `tests/support/shapes.py` foresees."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import carpool
from carpool import Done, ForEach, Model, Parallel, Route, Stage, To
from carpool.errors import ModelError
from carpool.service.graph import Element
from tests.support.shapes import Early, Made, Shape, choose, compute, dice, failed


def plus_one(x: int) -> int:
    return x + 1


def times_ten(x: int) -> int:
    return 10 * x


def total(rows: list[tuple[int, ...]]) -> list[int]:
    return [sum(row) for row in rows]


def up_to(x: int) -> list[int]:
    return list(range(x))


def add_up(x: list[int]) -> int:
    return sum(x)


def parity(x: int) -> str:
    return "even" if x % 2 == 0 else "odd"


def small(xs: list[int]) -> list[Done[int] | int]:
    """A model that is sure of odd items only."""
    return [Done(-x) if x % 2 else x for x in xs]


def to_branch(x: int) -> To[int]:
    return To("small" if x < 5 else "large", x)


def fails(x: int) -> int:
    raise ValueError(f"no {x}")


def fails_on_seven(xs: list[int]) -> list[int]:
    if 7 in xs:
        raise ValueError("seven")
    return [x + 1 for x in xs]


def as_it_is(x: Any) -> Any:
    return x


def slow(x: int) -> int:
    time.sleep(0.02)
    return x


async def plus_one_async(x: int) -> int:
    return x + 1


async def add_up_async(x: tuple[int, ...]) -> int:
    return sum(x)


async def small_async(x: int) -> Done[int] | int:
    return Done(-x) if x % 2 else x


class Lethal(Model):
    """Ends its process for the item 13, once if `folder` is given."""

    def __init__(self, folder: str = "") -> None:
        self.folder = folder

    def predict(self, x: int) -> int:
        if x == 13 and (not self.folder or _is_first(Path(self.folder) / "killed")):
            os._exit(1)
        return x + 1


class Hangs(Model):
    """Never answers the item 13."""

    def predict(self, x: int) -> int:
        if x == 13:
            time.sleep(1000)
        return x


def _is_first(file: Path) -> bool:
    try:
        file.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Foreseen(Model):
    """A stage of a random graph.

    Args:
        stage: Its number.
        errors: As for `Made`.
        early: Likewise.
        n_turns: How many ways the route has that follows at some places, without a `choose`; 0 for none.
        folder: Where it notes for which items its process has ended; empty if it never does.
    """

    def __init__(self, stage: int, errors: int, early: int, n_turns: int = 0, folder: str = "") -> None:
        self.stage = stage
        self.made = Made(errors, early)
        self.n_turns = n_turns
        self.folder = folder

    def predict(self, items: list[Any]) -> list[Any]:
        if self.folder:
            for item in items:
                x = dice("kill", self.stage, item)
                if x < 3 and _is_first(Path(self.folder) / f"{self.stage}-{x}"):
                    os._exit(1)
        return [self.one(plain(item)) for item in items]

    def one(self, item: Any) -> Any:
        made = compute(self.made, self.stage, item)
        if isinstance(made, Early):
            return Done(made.value)
        if self.n_turns and not isinstance(made, ModelError):
            return To(choose(self.n_turns)(made), made)
        return made


class ForeseenAsync(Foreseen):
    async def predict(self, items: list[Any]) -> list[Any]:  # type: ignore[override]
        return super().predict(items)


def plain(item: Any) -> Any:
    """An item in which errors that are values are what `Fate` has for them."""
    if isinstance(item, ModelError):
        return failed(str(item).removeprefix("ModelError: "))
    if isinstance(item, list | tuple):
        return type(item)([plain(each) for each in item])
    return item


class Chooses:
    """The `choose=` of a random graph, which can be sent to a worker."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, item: Any) -> str:
        return choose(self.n)(plain(item))


def element_of(shape: Shape, stages: Sequence[Stage]) -> Element:
    """What a service is declared with for a shape."""
    if isinstance(shape, int):
        return stages[shape]
    if isinstance(shape, list):
        return [element_of(each, stages) for each in shape]
    kind, inner = shape
    if kind == "each":
        return ForEach(element_of(inner, stages))
    branches = [element_of(branch, stages) for branch in inner]
    if kind in ("parallel", "keep"):
        return Parallel(*branches, errors="values" if kind == "keep" else "raise")
    by_name = {f"b{i}": branch for i, branch in enumerate(branches)}
    return Route(by_name, choose=Chooses(len(inner)), when_full="refuse" if kind == "refuse" else "wait")


def stages_for(random: Random, n: int, run_in: Any, folder: str = "") -> tuple[list[Made], list[Stage]]:
    """Stages of a random graph, and what they make."""
    made, stages = [], []
    for i in range(n):
        of_one = Made(random.choice([0, 0, 10]), random.choice([0, 0, 10]))
        kwargs = {"stage": i, "errors": of_one.errors, "early": of_one.early, "folder": folder}
        limit = random.randint(1, 4)
        stage = Stage(
            ForeseenAsync if run_in == "loop" else Foreseen,
            name=f"s{i}",
            kwargs=kwargs,
            run_in=run_in,
            workers=random.randint(1, 2),
            max_batch_size=limit,
            max_queue_size=random.choice([4, 5, 8, 64]),
            policy=random.choice(["adaptive", "greedy"]),
        )
        made.append(of_one)
        stages.append(stage)
    return made, stages


def service_of(*elements: Element, run_in: Any = "thread", **settings: Any) -> carpool.Service:
    """A service of functions, each of which is a stage of single items that runs there."""
    return carpool.Service(*[_with_stages(element, run_in) for element in elements], **settings)


def _with_stages(element: Any, run_in: Any) -> Any:
    if isinstance(element, list):
        return [_with_stages(each, run_in) for each in element]
    return Stage(element, run_in=run_in) if callable(element) else element
