"""Makes a model of steps out of a `predict` that yields, so that a worker runs nothing but steps.

A generator for each item is a state of its own. A generator for a batch is shared by its items: one
step takes one list from it, and a stream that is not stepped, as its reader lags, has its parts
kept until it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from carpool.call.results import as_results
from carpool.parts import END, Last
from carpool.worker.own import own_part

Predict = Callable[[Any], Any]
IsFatal = Callable[[BaseException], bool]
Own = Callable[[Any], Any]


class ItemGenerators:
    """A generator for each item.

    Args:
        predict: Makes one of an item.
        is_fatal: Whether an exception ends the worker instead of failing an item.
        own: Copies a part before user code is called again, which may fill the same memory.
    """

    def __init__(self, predict: Predict, is_fatal: IsFatal, own: Own = own_part) -> None:
        self._predict = predict
        self._is_fatal = is_fatal
        self._own = own

    def start(self, xs: list[Any]) -> list[Any]:
        """Make the generators; none of them has begun when this returns."""
        return [self._predict(x) for x in xs]

    async def step(self, generators: list[Any]) -> list[Any]:
        """Return what each of them yields next, or the exception that it raises."""
        parts: list[Any] = []
        for generator in generators:
            if parts:
                parts[-1] = self._own(parts[-1])
            parts.append(await self._next(generator))
        return parts

    async def stop(self, generator: Any) -> None:
        """Close a generator."""
        await _close(generator)

    async def _next(self, generator: Any) -> Any:
        try:
            return await _next_of(generator, None)
        except BaseException as error:
            if self._is_fatal(error):
                raise
            return error


class _Group:
    """The items of one batch, which share a generator.

    Attributes:
        generator: Yields a list of parts, one for each item that there was at first.
        kept: By place, the parts that were made for items which were not stepped.
        alive: The places of the items that still run.
        has_begun: Whether something was taken from the generator.
    """

    def __init__(self, generator: Any, n: int) -> None:
        self.generator = generator
        self.kept: list[deque[Any]] = [deque() for _ in range(n)]
        self.alive = set(range(n))
        self.has_begun = False


class _Member:
    """The state of one stream: its group, and its place in it."""

    __slots__ = ("group", "place")

    def __init__(self, group: _Group, place: int) -> None:
        self.group = group
        self.place = place


class BatchGenerators:
    """A generator for each batch.

    What a generator's `yield` returns is the set of the places that still run, so that it can leave
    out those whose answers have ended or whose callers have gone.

    Args:
        predict: Makes a generator of a list of items.
        own: See `ItemGenerators`.
    """

    def __init__(self, predict: Predict, own: Own = own_part) -> None:
        self._predict = predict
        self._own = own

    def start(self, xs: list[Any]) -> list[_Member]:
        """Make a generator of the items, which has not begun when this returns."""
        group = _Group(self._predict(xs), len(xs))
        return [_Member(group, place) for place in range(len(xs))]

    async def step(self, members: list[_Member]) -> list[Any]:
        """Return one part of each, from one list of each generator.

        Raises:
            BaseException: A generator raised it, so nobody knows what it still holds.
        """
        for group in {id(member.group): member.group for member in members}.values():
            if any(not group.kept[member.place] for member in members if member.group is group):
                await self._advance(group)
        return [member.group.kept[member.place].popleft() for member in members]

    async def stop(self, member: _Member) -> None:
        """Note that a stream has ended; with the last one of its batch the generator is closed."""
        group = member.group
        group.alive.discard(member.place)
        group.kept[member.place].clear()
        if not group.alive:
            await _close(group.generator)

    async def _advance(self, group: _Group) -> None:
        """Take the next list from a generator, or the end of all that still run."""
        n = len(group.kept)
        yielded = await _next_of(group.generator, frozenset(group.alive) if group.has_begun else None)
        group.has_begun = True
        parts = [END] * n if yielded is END else as_results(yielded, n)
        for place in group.alive:
            kept = group.kept[place]
            if not (kept and _is_end(kept[-1])):
                kept.append(self._own(parts[place]))


def _is_end(part: Any) -> bool:
    return part is END or type(part) is Last or issubclass(type(part), BaseException)


async def _next_of(generator: Any, told: Any) -> Any:
    """Return what a generator yields next, or `END`.

    Args:
        generator: May be asynchronous.
        told: What its present `yield` returns.
    """
    if hasattr(generator, "asend"):
        try:
            return await generator.asend(told)
        except StopAsyncIteration:
            return END
    try:
        return generator.send(told)
    except StopIteration:
        return END


async def _close(generator: Any) -> None:
    if hasattr(generator, "aclose"):
        await generator.aclose()
    else:
        generator.close()
