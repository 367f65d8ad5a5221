"""Graphs for the random worlds: what a stage makes of an item, and what a request may come to, without any of the core.

A result depends on nothing but the stage and the item. So all that a request may come to can be worked out by `Fate`:
one result, or any of several errors and early answers; and what is run on the way there.

What is declared is a number of a stage, a list of such, or ("parallel", branches), ("route", branches) by `choose`,
("turn", branches) by what the stage before has said, and ("each", body). A parallel that keeps errors is ("keep",
branches), each of them a line of stages, and a route that refuses where there is no room is ("refuse", branches).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

from carpool.engine.core.graph import Declared, Each, Fork, Switch
from carpool.errors import ModelError

Shape: TypeAlias = Any


class Early(NamedTuple):
    """What a stage makes of an item that ends its request."""

    value: Any


class Made(NamedTuple):
    """How often, of a hundred items, a stage makes errors and early answers; and whether it makes parts."""

    errors: int = 0
    early: int = 0
    in_parts: bool = False


def dice(*what: Any) -> int:
    """A number below 100 that depends on nothing but this."""
    return crc32(repr(what).encode()) % 100


def compute(made: Made, stage: int, item: Any) -> Any:
    """What a stage makes of an item: a result, a ModelError, an `Early`, or the number of its parts."""
    x = dice("result", stage, item)
    if x < made.errors:
        return ModelError(f"of {stage} at {dice('text', item)}")
    if made.in_parts:
        return 1 + x % 3
    if x < made.errors + made.early:
        return Early(("early", stage, dice("text", item)))
    return [(stage, item), (stage, item), (item, stage, x), (item,), ()][dice("kind", stage, item) % 5]


def choose(n: int) -> Callable[[Any], str]:
    """The function that chooses one of `n` branches by an item, and now and then none of them."""

    def chosen(item: Any) -> str:
        x = dice("choose", item)
        return f"b{x % n}" if x < 96 else "nowhere"

    return chosen


class Fate:
    """What a request with an item may come to, as far as it is not for lack of time or workers."""

    def __init__(self, stages: Sequence[Made], shape: Shape, item: Any) -> None:
        self.runs: Counter[tuple[int, str]] = Counter()
        self._stages = stages
        self._ends: set[tuple[str, str]] = set()
        value = self._follow(shape, item)
        self.outcomes = self._ends or {("ok", repr(value))}

    def _ended(self, kind: str, what: str) -> Any:
        self._ends.add((kind, what))
        return _NOTHING

    def _follow(self, shape: Shape, item: Any) -> Any:
        """What an item comes to; `_NOTHING` if it ends."""
        if isinstance(shape, int):
            self.runs[shape, repr(item)] += 1
            made = compute(self._stages[shape], shape, item)
            if isinstance(made, ModelError):
                return self._ended("error", str(made))
            return self._ended("ok", repr(made.value)) if isinstance(made, Early) else made
        if isinstance(shape, list):
            for each in shape:
                item = self._follow(each, item)
                if item is _NOTHING:
                    break
            return item
        kind, inner = shape
        if kind == "keep":
            return self._kept(inner, item)
        if kind in ("route", "turn", "refuse"):
            name = choose(len(inner))(item)
            return self._ended("error", "nowhere") if name == "nowhere" else self._follow(inner[int(name[1:])], item)
        if kind == "each" and not isinstance(item, list | tuple):
            return self._ended("error", "list")
        found = [self._follow(inner, x) for x in item] if kind == "each" else [self._follow(x, item) for x in inner]
        if any(x is _NOTHING for x in found):
            return _NOTHING
        return found if kind == "each" else tuple(found)

    def _kept(self, branches: Sequence[Shape], item: Any) -> Any:
        """What branches come to of which errors are values; an early answer ends the request all the same."""
        found, before = [], self._ends
        for branch in branches:
            self._ends = set()
            value = self._follow(branch, item)
            if value is _NOTHING:
                ((kind, text),) = self._ends
                value: Any = failed(text)
                if kind == "ok":
                    before.add((kind, text))
                    value = _NOTHING
            found.append(value)
        self._ends = before
        return _NOTHING if any(x is _NOTHING for x in found) else tuple(found)


def failed(text: str) -> str:
    """What stands for an error that is a value: no list."""
    return f"failed {text}"


_NOTHING = object()


def declared(shape: Shape, crews: Sequence[Any]) -> Declared:
    """What the core is told of a graph."""
    if isinstance(shape, int):
        return crews[shape]  # type: ignore[no-any-return]
    if isinstance(shape, list):
        return [declared(each, crews) for each in shape]
    kind, inner = shape
    if kind == "each":
        return Each(declared(inner, crews))
    if kind in ("parallel", "keep"):
        return Fork([declared(branch, crews) for branch in inner], keeps_errors=kind == "keep")
    ways = {f"b{i}": declared(branch, crews) for i, branch in enumerate(inner)}
    return Switch(ways, None if kind == "turn" else choose(len(inner)), refuses=kind == "refuse")


def a_shape(random: Random, stages: Sequence[Made], most: int = 9) -> Shape:
    """A graph of about so many nodes at most, three deep, with any stage anywhere; what makes parts is the last."""
    batched = [i for i, made in enumerate(stages) if not made.in_parts]
    left = most

    def line(depth: int, least: int, *, is_open: bool) -> list[Shape]:
        """Elements in a row; `is_open`: nothing follows but the end or a join, so it may end in parts."""
        found: list[Shape] = []
        for _ in range(random.randint(least, 3)):
            if left > 0:
                found.append(element(depth, has_turn=bool(found) and isinstance(found[-1], int)))
        in_parts = [i for i, made in enumerate(stages) if made.in_parts]
        if is_open and in_parts and random.random() < 0.4:
            found.append(random.choice(in_parts))
        return found

    def element(depth: int, *, has_turn: bool) -> Shape:
        nonlocal left
        kinds = ["stage", "stage", "stage", "parallel", "keep", "route", "refuse", "each", *["turn"] * has_turn]
        kind = random.choice(kinds) if depth and batched else "stage"
        if kind == "stage" and not batched:
            left -= 1
            return []
        if kind == "stage":
            left -= 1
            return random.choice(batched)
        if kind == "keep":
            left -= 2
            return (kind, [[random.choice(batched) for _ in range(random.randint(0, 2))] for _ in range(2)])
        if kind == "each":
            return (kind, line(depth - 1, 1, is_open=True))
        return (kind, [line(depth - 1, 0, is_open=kind == "parallel") for _ in range(random.randint(1, 3))])

    return line(3, 1, is_open=True) or [0]
