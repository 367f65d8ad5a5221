"""Models that write to their items, and answer with the same memory again and again.

An item is `(kind, value)`, or with array hints an array; all numbers in it are the same. Each answer has twice its
number in all places.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import carpool

KINDS = ("small", "large", "list", "dict", "nested")
BAD = 5.0
"""An item that fails, for the models that have bad items."""
LARGE = 20_000
"""Elements of an array that travels beside its pickle."""


def make(kind: str, x: float) -> Any:
    """A value of a kind, with this number in all its places."""
    match kind:
        case "small":
            return np.full(4, x)
        case "large":
            return np.full(LARGE, x)
        case "list":
            return [x, x]
        case "dict":
            return {"a": x, "b": [x]}
        case _:
            return {"rows": [np.full(4, x), [x]], "image": np.full(LARGE, x)}


def fill(value: Any, x: float) -> None:
    """Put a number into all places of a value."""
    if isinstance(value, np.ndarray):
        value[:] = x
        return
    for key, each in value.items() if type(value) is dict else enumerate(value):
        if type(each) is float:
            value[key] = x
        else:
            fill(each, x)


def numbers(value: Any) -> set[float]:
    """The numbers in a value; one if nobody has written into a part of it."""
    if isinstance(value, np.ndarray):
        return set(value.ravel().tolist())
    if type(value) is float:
        return {value}
    found: set[float] = set()
    return found.union(*map(numbers, value.values() if type(value) is dict else value))


class Wrote(ValueError):
    """The number of a bad item, in the memory that the model answers with."""


class Reuses(carpool.Model):
    """What all of these models have in common.

    Args:
        bad: Whether it refuses `BAD`.
        most: How many items fit into memory.
    """

    def __init__(self, bad: bool = False, most: int = 99) -> None:
        self.bad, self.most = bad, most
        self.outs: dict[tuple[str, int], Any] = {}

    def take(self, item: Any) -> tuple[str, float]:
        """Read an item, and write over it."""
        kind, value = item
        (x,) = numbers(value)
        assert x >= 0, "an item that has been written over was given again"
        fill(value, -1.0)
        return kind, x

    def give(self, at: int, kind: str, x: float) -> Any:
        """An answer, in memory that is used for all answers of this kind at this place of a batch."""
        out = self.outs.setdefault((kind, at), make(kind, 0.0))
        fill(out, x)
        return out

    def check(self, xs: list[tuple[str, float]]) -> None:
        """Raise for a batch with a bad item, or for one that is too large."""
        if self.bad and any(x == BAD for _, x in xs):
            raise Wrote(self.give(0, "small", BAD))
        if len(xs) > self.most:
            raise MemoryError


class Batch(Reuses):
    def predict(self, items: list[Any]) -> list[Any]:
        xs = list(map(self.take, items))
        self.check(xs)
        return [self.give(at, kind, 2 * x) for at, (kind, x) in enumerate(xs)]


class BatchAsync(Batch):
    async def predict(self, items: list[Any]) -> list[Any]:  # type: ignore[override]
        return super().predict(items)


class Single(Reuses):
    def predict(self, item: Any) -> Any:
        kind, x = self.take(item)
        self.check([(kind, x)])
        return self.give(0, kind, 2 * x)


class SingleAsync(Single):
    async def predict(self, item: Any) -> Any:
        return super().predict(item)


class Hooked(Reuses):
    """Hooks that write to what they get, and return the same memory again and again."""

    def preprocess(self, item: Any) -> Any:
        kind, x = self.take(item)
        return [kind, self.give(-1, kind, x)]

    def postprocess(self, y: Any, item: Any) -> Any:
        (x,) = numbers(y[1])
        fill(y[1], -1.0)
        return self.give(-1, y[0], x)


class HookedBatch(Hooked):
    def predict(self, items: list[Any]) -> list[Any]:
        xs = list(map(self.take, items))
        self.check(xs)
        return [[kind, self.give(at, kind, 2 * x)] for at, (kind, x) in enumerate(xs)]


class HookedBatchAsync(HookedBatch):
    async def predict(self, items: list[Any]) -> list[Any]:  # type: ignore[override]
        return super().predict(items)


class HookedSingle(Hooked):
    def predict(self, item: Any) -> Any:
        kind, x = self.take(item)
        return [kind, self.give(-1, kind, 2 * x)]


class HookedSingleAsync(HookedSingle):
    async def predict(self, item: Any) -> Any:
        return super().predict(item)


class Arrays(Reuses):
    """Gets one array for each kind of items, writes to it, and answers from one memory for all kinds."""

    def predict(self, xs: NDArray[np.float64]) -> list[Any]:
        before = xs.copy()
        xs[:] = -1.0
        self.check([("", float(x[0])) for x in before])
        out = self.outs.setdefault(("", 0), np.zeros((8, LARGE)))
        out[: len(xs), : xs.shape[1]] = 2 * before
        return [row[: xs.shape[1]] for row in out[: len(xs)]]


class ArraysAsync(Arrays):
    async def predict(self, xs: NDArray[np.float64]) -> list[Any]:  # type: ignore[override]
        return super().predict(xs)


class Passes(Reuses):
    """Hands on what the next stage gets."""

    def predict(self, items: list[Any]) -> list[Any]:
        xs = list(map(self.take, items))
        return [(kind, self.give(at, kind, x)) for at, (kind, x) in enumerate(xs)]


class PassesAsync(Passes):
    async def predict(self, items: list[Any]) -> list[Any]:  # type: ignore[override]
        return super().predict(items)


PARTS = 3
"""How many parts an answer has; in part j its number is greater by j."""


class Yields(Reuses):
    def predict(self, item: Any) -> Iterator[Any]:
        kind, x = self.take(item)
        for j in range(PARTS):
            yield self.give(0, kind, 2 * x + j)


class YieldsAsync(Reuses):
    async def predict(self, item: Any) -> AsyncIterator[Any]:
        kind, x = self.take(item)
        for j in range(PARTS):
            yield self.give(0, kind, 2 * x + j)


class HookedYields(Hooked):
    def predict(self, item: Any) -> Iterator[Any]:
        kind, x = self.take(item)
        for j in range(PARTS):
            yield [kind, self.give(0, kind, 2 * x + j)]


class HookedYieldsAsync(Hooked):
    async def predict(self, item: Any) -> AsyncIterator[Any]:
        kind, x = self.take(item)
        for j in range(PARTS):
            yield [kind, self.give(0, kind, 2 * x + j)]


class YieldsLists(Reuses):
    def predict(self, items: list[Any]) -> Iterator[list[Any]]:
        xs = list(map(self.take, items))
        for j in range(PARTS):
            yield [self.give(at, kind, 2 * x + j) for at, (kind, x) in enumerate(xs)]


class YieldsListsAsync(Reuses):
    async def predict(self, items: list[Any]) -> AsyncIterator[list[Any]]:
        xs = list(map(self.take, items))
        for j in range(PARTS):
            yield [self.give(at, kind, 2 * x + j) for at, (kind, x) in enumerate(xs)]


class Steps(Reuses):
    """Steps that write to items and to the parts that they are resumed with; a bad item fails the step of all."""

    def start(self, items: list[Any]) -> list[Any]:
        xs = list(map(self.take, items))
        if len(xs) > self.most:
            raise ValueError("start them in halves")
        return [[kind, x, 0] for kind, x in xs]

    def resume(self, items: list[Any], parts: list[list[Any]]) -> list[Any]:
        states = self.start(items)
        for state, said in zip(states, parts, strict=True):
            assert [numbers(part) for part in said] == [{2 * state[1] + j} for j in range(len(said))], said
            for part in said:
                fill(part, -1.0)
            state[2] = len(said)
        return states

    def step(self, states: list[Any]) -> list[Any]:
        for state in states:
            state[2] += 1
        self.check([(kind, x) for kind, x, said in states if said == 2])
        parts: list[Any] = []
        for at, (kind, x, said) in enumerate(states):
            part = self.give(at, kind, 2 * x + said - 1)
            parts.append(carpool.Last(part) if said == PARTS else part)
        return parts

    def stop(self, state: Any) -> None:
        for (_, at), out in self.outs.items():
            if at >= 0:
                fill(out, -2.0)  # what was given has been taken


class StepsAsync(Steps):
    async def step(self, states: list[Any]) -> list[Any]:  # type: ignore[override]
        return super().step(states)


class HookedSteps(Hooked, Steps):
    def step(self, states: list[Any]) -> list[Any]:
        parts: list[Any] = []
        for part, state in zip(super().step(states), states, strict=True):
            is_last = type(part) is carpool.Last
            parts.append(carpool.Last([state[0], part.value]) if is_last else [state[0], part])
        return parts

    def resume(self, items: list[Any], parts: list[list[Any]]) -> list[Any]:
        return super().resume(items, [[value for _, value in said] for said in parts])


class HookedStepsAsync(HookedSteps):
    async def step(self, states: list[Any]) -> list[Any]:  # type: ignore[override]
        return super().step(states)


class Collects(Steps):
    """Collects the parts in one memory, after having written over them."""

    def postprocess(self, part: Any) -> Any:
        (x,) = numbers(part)
        fill(part, -1.0)
        return self.give(-1, "small", x)

    def collect(self, parts: list[Any]) -> Any:
        found = [numbers(part) for part in parts]
        for part in parts:
            fill(part, -1.0)
        return self.give(-2, "large", sum(x for (x,) in found))


class CollectsAsync(Collects):
    async def step(self, states: list[Any]) -> list[Any]:  # type: ignore[override]
        return super().step(states)


class BatchOfExamples(Batch):
    examples = tuple((kind, make(kind, 1.0)) for kind in KINDS)


class SingleOfExamples(Single):
    examples = BatchOfExamples.examples


class StepsOfExamples(Steps):
    examples = BatchOfExamples.examples


class BatchOfExamplesAsync(BatchAsync):
    examples = BatchOfExamples.examples


class SingleOfExamplesAsync(SingleAsync):
    examples = BatchOfExamples.examples


class StepsOfExamplesAsync(StepsAsync):
    examples = BatchOfExamples.examples
