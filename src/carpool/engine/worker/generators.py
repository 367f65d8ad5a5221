"""Makes a model of steps out of a `predict` that yields, so that a worker runs nothing but steps.

A generator for each item is a state of its own. A generator for a batch is shared by its items: one
step takes one list from it, and a stream that is not stepped, as its reader lags, has its parts
kept until it is. On an event loop each asynchronous generator runs in a task of its own: none waits
for what another one awaits, and a step ends once one of them has yielded, or an order has come. A
worker process has no loop, and does not import asyncio.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from carpool.engine.call.results import OF_A_YIELD, as_results
from carpool.engine.parts import END, ends_answer
from carpool.engine.worker.own import own_part

if TYPE_CHECKING:
    import asyncio

Predict = Callable[[Any], Any]
IsFatal = Callable[[BaseException], bool]
Own = Callable[[Any], Any]


class ItemGenerators:
    """A generator for each item, which `predict` makes.

    `is_fatal` says whether an exception ends the worker instead of failing an item, `own` copies a
    part before user code is called again, which may fill the same memory, and `beside` has
    asynchronous generators run beside each other; it is None where there is no loop.
    """

    def __init__(self, predict: Predict, is_fatal: IsFatal, own: Own = own_part, beside: Beside | None = None) -> None:
        self._predict = predict
        self._is_fatal = is_fatal
        self._own = own
        self._beside = beside

    def start(self, xs: list[Any]) -> list[Any]:
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
    """

    def __init__(self, generator: Any, n: int) -> None:
        self.generator = generator
        self.kept: list[deque[Any]] = [deque() for _ in range(n)]
        self.alive = set(range(n))
        self.has_begun = False

    @property
    def sent(self) -> frozenset[int] | None:
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
    """

    def __init__(self, predict: Predict, own: Own = own_part, beside: Beside | None = None) -> None:
        self._predict = predict
        self._own = own
        self._beside = beside

    def start(self, xs: list[Any]) -> list[_Member]:
        # the parts of a list that it yields are copied one by one
        group = _Group(_apart(self._predict(xs), lambda parts: parts, self._beside), len(xs))
        return [_Member(group, place) for place in range(len(xs))]

    async def step(self, members: list[_Member]) -> list[Any]:
        """Return one part of each, from one list of each generator; None where one still awaits
        something.

        Raises:
            BaseException: A generator raised it, so what it still holds is not defined.
        """
        groups = list({id(member.group): member.group for member in members if not member.kept}.values())
        if self._beside is not None and not any(member.kept for member in members):
            await self._beside.first_of([(group.generator, group.sent) for group in groups])
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
        n = len(group.kept)
        if hasattr(group.generator, "take"):
            yielded = group.generator.take()
            if yielded is None:
                return
        else:
            yielded = await next_of(group.generator, group.sent)
        group.has_begun = True
        parts = [END] * n if yielded is END else as_results(yielded, n, OF_A_YIELD)
        for place in group.alive:
            kept = group.kept[place]
            if not (kept and ends_answer(kept[-1])):
                kept.append(self._own(parts[place]))


async def next_of(generator: Any, sent: Any) -> Any:
    """Return what a generator, which may be asynchronous, yields next, or `END`; its present
    `yield` returns `sent`.
    """
    if hasattr(generator, "asend"):
        try:
            return await generator.asend(sent)
        except StopAsyncIteration:
            return END
    try:
        return generator.send(sent)
    except StopIteration:
        return END


def _apart(generator: Any, own: Own, beside: Beside | None) -> Any:
    return generator if beside is None or not hasattr(generator, "asend") else beside.apart(generator, own)


async def _close(generator: Any) -> None:
    if hasattr(generator, "aclose"):
        await generator.aclose()
    else:
        generator.close()


# -- on an event loop


class Beside:
    """Has asynchronous generators run beside each other.

    Args:
        news: Waits until an order has come.
    """

    def __init__(self, news: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._news = news
        self._tasks: set[asyncio.Task[None]] = set()

    def apart(self, generator: Any, own: Own) -> Apart:
        return Apart(generator, own, self._tasks)

    def end(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def first_of(self, asked: Sequence[tuple[Any, Any]]) -> None:
        """Ask generators of `apart` to go on, each with what its present `yield` returns, and wait
        until one of them has yielded, or an order has come.
        """
        apart = [(each, sent) for each, sent in asked if type(each) is Apart]
        if not apart:
            return
        import asyncio

        coming = [each.ask(sent) for each, sent in apart]
        watching = asyncio.ensure_future(self._news())
        try:
            await asyncio.wait((*coming, watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()


class Apart:
    """An asynchronous generator in a task of its own, in which all of its code runs. What it yields
    is copied, since others run before that is taken; the task is among those of its worker for as
    long as it lives.
    """

    def __init__(self, generator: Any, own: Own, tasks: set[asyncio.Task[None]]) -> None:
        import asyncio

        self._generator = generator
        self._own = own
        self._tasks = tasks
        self._sent: Any = None
        self._asked = asyncio.Event()
        self._coming: asyncio.Future[Any] | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None  # of its end

    def ask(self, sent: Any) -> asyncio.Future[Any]:
        """Return what will have a result once there is something to `take`; unless it goes on
        already, its present `yield` returns `sent`.
        """
        if self._coming is None:
            import asyncio

            loop = asyncio.get_running_loop()
            self._coming, self._sent = loop.create_future(), sent
            if self._task is None:
                self._task = loop.create_task(self._live())
                self._tasks.add(self._task)
                self._task.add_done_callback(self._tasks.discard)
            self._asked.set()
        return self._coming

    def take(self) -> Any:
        """Return what it has yielded, `END`, or None if it still awaits something.

        Raises:
            BaseException: It has raised this.
        """
        if self._coming is None or not self._coming.done():
            return None
        (part, error), self._coming = self._coming.result(), None
        if error is not None:
            raise error
        return part

    async def aclose(self) -> None:
        if self._task is not None:
            import asyncio

            self._task.cancel()
            await asyncio.wait((self._task,))
        await self._generator.aclose()  # unless its task has never begun, it is closed already
        if self._failure is not None:
            raise self._failure

    async def _live(self) -> None:
        """Go on whenever it is asked. Nothing is raised, since some kinds would end the loop."""
        import asyncio

        me = asyncio.current_task()
        assert me is not None
        try:
            while not me.cancelling():
                await self._asked.wait()
                self._asked.clear()
                part: Any = None
                failure: BaseException | None = None
                try:
                    part = self._own(await next_of(self._generator, self._sent))
                except BaseException as error:
                    failure = error
                if self._coming is not None:
                    self._coming.set_result((part, failure))
        except asyncio.CancelledError:
            pass
        finally:
            try:
                await self._generator.aclose()
            except BaseException as error:
                self._failure = error
