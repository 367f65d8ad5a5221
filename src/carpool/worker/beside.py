"""Asynchronous generators of one worker that run beside each other on its event loop.

A worker process has no loop, and does not import this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from carpool.worker.generators import Own, next_of


class TasksBeside:
    """Has asynchronous generators run beside each other.

    Args:
        news: Waits until an order has come.
    """

    def __init__(self, news: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._news = news
        self._tasks: set[asyncio.Task[None]] = set()

    def apart(self, generator: Any, own: Own) -> Apart:
        """Return what runs a generator in a task of its own."""
        return Apart(generator, own, self._tasks)

    def end(self) -> None:
        """Cancel what generators await, and have them closed: their worker has ended."""
        for task in self._tasks:
            task.cancel()

    async def first_of(self, asked: Sequence[tuple[Any, Any]]) -> None:
        """Ask generators to go on, and wait until one of them has yielded, or an order has come.

        Args:
            asked: Each with what its present `yield` returns; others than those of `apart` are left
                out.
        """
        apart = [(each, told) for each, told in asked if type(each) is Apart]
        if not apart:
            return
        coming = [each.ask(told) for each, told in apart]
        watching = asyncio.ensure_future(self._news())
        try:
            await asyncio.wait((*coming, watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()


class Apart:
    """An asynchronous generator in a task of its own, in which all of its code runs.

    Args:
        generator: The generator.
        own: Copies what it yields, since others run before that is taken.
        tasks: Those of its worker, to which its own is added for as long as it lives.
    """

    def __init__(self, generator: Any, own: Own, tasks: set[asyncio.Task[None]]) -> None:
        self._generator = generator
        self._own = own
        self._tasks = tasks
        self._told: Any = None
        self._asked = asyncio.Event()
        self._coming: asyncio.Future[Any] | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None  # of its end

    def ask(self, told: Any) -> asyncio.Future[Any]:
        """Return what will have a result once there is something to `take`.

        Args:
            told: What its present `yield` returns, unless it goes on already.
        """
        if self._coming is None:
            loop = asyncio.get_running_loop()
            self._coming, self._told = loop.create_future(), told
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
        """Cancel what it awaits, and close it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        await self._generator.aclose()  # unless its task has never begun, it is closed already
        if self._failure is not None:
            raise self._failure

    async def _live(self) -> None:
        """Go on whenever it is asked. Nothing is raised, since some kinds would end the loop."""
        me = asyncio.current_task()
        assert me is not None
        try:
            while not me.cancelling():
                await self._asked.wait()
                self._asked.clear()
                part: Any = None
                failure: BaseException | None = None
                try:
                    part = self._own(await next_of(self._generator, self._told))
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
