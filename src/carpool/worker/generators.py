"""Makes a model of steps out of a `predict` that yields, so that a worker runs nothing but steps.

A generator for each item is a state of its own. A generator for a batch is shared by its items: one
step takes one list from it, and a stream that is not stepped, as its reader lags, has its parts
kept until it is. On an event loop each asynchronous generator runs in a task of its own: none waits
for what another one awaits, and a step ends once one of them has yielded, or an order has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from carpool.call.results import OF_A_YIELD, as_results
from carpool.parts import END, Last
from carpool.worker.own import own_part

Predict = Callable[[Any], Any]
IsFatal = Callable[[BaseException], bool]
Own = Callable[[Any], Any]


class Beside(Protocol):
    """Has asynchronous generators run beside each other; see `TasksBeside`."""

    def apart(self, generator: Any, own: Own) -> Any:
        """Return what runs a generator in a task of its own, with `take` for what it yields."""

    async def first_of(self, asked: Sequence[tuple[Any, Any]]) -> None:
        """Ask generators to go on, and wait until one of them has yielded, or an order has come."""


class ItemGenerators:
    """A generator for each item.

    Args:
        predict: Makes one of an item.
        is_fatal: Whether an exception ends the worker instead of failing an item.
        own: Copies a part before user code is called again, which may fill the same memory.
        beside: Has asynchronous generators run beside each other; None where there is no loop.
    """

    def __init__(self, predict: Predict, is_fatal: IsFatal, own: Own = own_part, beside: Beside | None = None) -> None:
        self._predict = predict
        self._is_fatal = is_fatal
        self._own = own
        self._beside = beside

    def start(self, xs: list[Any]) -> list[Any]:
        """Make the generators; none of them has begun when this returns."""
        return [_apart(self._predict(x), self._own, self._beside) for x in xs]

    async def step(self, generators: list[Any]) -> list[Any]:
        """Return what each of them yields next, or the exception that it raises; None for those
        that still await something.
        """
        if self._beside is not None:
            await self._beside.first_of([(generator, None) for generator in generators])
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
            return generator.take() if hasattr(generator, "take") else await next_of(generator, None)
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

    @property
    def told(self) -> frozenset[int] | None:
        """What its present `yield` returns."""
        return frozenset(self.alive) if self.has_begun else None


class _Member:
    """The state of one stream: its group, its place in it, and its parts that were not taken."""

    __slots__ = ("group", "kept", "place")

    def __init__(self, group: _Group, place: int) -> None:
        self.group = group
        self.place = place
        self.kept: deque[Any] = group.kept[place]


class BatchGenerators:
    """A generator for each batch.

    What a generator's `yield` returns is the set of the places that still run, so that it can leave
    out those whose answers have ended or whose callers have gone.

    Args:
        predict: Makes a generator of a list of items.
        own: See `ItemGenerators`.
        beside: Likewise.
    """

    def __init__(self, predict: Predict, own: Own = own_part, beside: Beside | None = None) -> None:
        self._predict = predict
        self._own = own
        self._beside = beside

    def start(self, xs: list[Any]) -> list[_Member]:
        """Make a generator of the items, which has not begun when this returns."""
        group = _Group(_apart(self._predict(xs), _as_it_is, self._beside), len(xs))
        return [_Member(group, place) for place in range(len(xs))]

    async def step(self, members: list[_Member]) -> list[Any]:
        """Return one part of each, from one list of each generator; None where one still awaits
        something.

        Raises:
            BaseException: A generator raised it, so nobody knows what it still holds.
        """
        groups = list({id(member.group): member.group for member in members if not member.kept}.values())
        if self._beside is not None and not any(member.kept for member in members):
            await self._beside.first_of([(group.generator, group.told) for group in groups])
        for group in groups:
            await self._advance(group)
        return [member.kept.popleft() if member.kept else None for member in members]

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
        if hasattr(group.generator, "take"):
            yielded = group.generator.take()
            if yielded is None:
                return
        else:
            yielded = await next_of(group.generator, group.told)
        group.has_begun = True
        parts = [END] * n if yielded is END else as_results(yielded, n, OF_A_YIELD)
        for place in group.alive:
            kept = group.kept[place]
            if not (kept and _is_end(kept[-1])):
                kept.append(self._own(parts[place]))


def _is_end(part: Any) -> bool:
    return part is END or type(part) is Last or issubclass(type(part), BaseException)


async def next_of(generator: Any, told: Any) -> Any:
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


def _apart(generator: Any, own: Own, beside: Beside | None) -> Any:
    """Return a generator, or, where it can await something, what runs it in a task."""
    return generator if beside is None or not hasattr(generator, "asend") else beside.apart(generator, own)


def _as_it_is(parts: Any) -> Any:
    """Return the list that a generator of a batch yields, whose parts are copied one by one."""
    return parts


async def _close(generator: Any) -> None:
    if hasattr(generator, "aclose"):
        await generator.aclose()
    else:
        generator.close()
