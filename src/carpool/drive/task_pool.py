"""Batches as tasks of the running loop: for `async def` functions, and callers that await plain objects.

What a batch waits for may in the end be the batch itself, through the batch of another function. So requests tell from
inside which lines they come, and a batch is inside all lines that its requests come from. What is not seen that way, a
batch that waits *behind* one that waits for it, ends with a time-out.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar

from carpool.call.retry import Trouble
from carpool.clock import monotonic
from carpool.core.batch import Batch
from carpool.core.reply import Reply
from carpool.drive.aio import Driver
from carpool.drive.failures import for_all
from carpool.request import Request

Run = Callable[[list[Any], list[Trouble]], Awaitable[tuple[list[Any], dict[int, Exception] | None]]]
"""The results of a batch, and the errors that stand in for some of them; what else there is to tell is appended."""

inside: contextvars.ContextVar[frozenset[Driver] | None] = contextvars.ContextVar("carpool_inside", default=None)
"""The lines whose batches wait for what runs here, which must not wait for theirs. Tasks inherit it."""


class TaskPool:
    """The executor of a stage whose batches run as tasks.

    Args:
        driver: told of readiness and results.
        run: the user's function.
        slots: how many batches may run at a time.
    """

    def __init__(self, driver: Driver, run: Run, slots: int) -> None:
        self._driver = driver
        self._run = run
        self._slots = slots
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}  # the last one of each slot

    def start(self) -> None:
        """There is nothing to load."""
        for slot in range(self._slots):
            self._driver.worker_ready(0, slot)

    def run(self, batch: Batch) -> None:
        """Start a task for a batch, in a context that is no caller's."""
        answering = self._answer(batch)
        try:
            # the task copies the context; not every task factory takes one
            self._tasks[batch.place] = contextvars.Context().run(self._loop.create_task, answering)
        except Exception as error:  # of the loop's task factory
            answering.close()
            self._loop.call_soon(self._answered, batch, *for_all(error, len(batch)), 0.0)

    def kill(self, place: int) -> None:
        """A task is not killed: there is no limit on the time of a batch here."""

    async def stop(self, grace_s: float) -> None:
        """End what still runs."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _answer(self, batch: Batch) -> None:
        """Run a batch. Its callers are answered whatever the function raises."""
        requests = batch.requests
        inside.set(self._lines_around(requests))
        me = asyncio.current_task()
        started = monotonic()
        trouble: list[Trouble] = []
        results: Sequence[object]
        try:
            results, errors = await self._run([request.item for request in requests], trouble)
        except BaseException as error:
            if asyncio.current_task(self._loop) is not me:  # nobody runs this task: it is being thrown away
                raise
            results, errors = for_all(error, len(batch))
        ends = None if errors is None else _unheard(requests, errors)
        try:
            if trouble:
                self._driver.troubled(0, batch.place, batch.id, trouble)
        finally:
            self._answered(batch, results, errors, monotonic() - started)
        if ends is not None:
            raise ends

    def _answered(
        self, batch: Batch, results: Sequence[object], errors: dict[int, Exception] | None, busy_s: float
    ) -> None:
        self._driver.completed(Reply(0, batch.place, batch.id, batch.ids, results, errors, busy_s))

    def _lines_around(self, requests: Sequence[Request]) -> frozenset[Driver]:
        here = frozenset((self._driver,))
        if not InnerRequest.were_made:
            return here
        return here.union(*[request.inside for request in requests if isinstance(request, InnerRequest)])


def _unheard(requests: Sequence[Request], errors: dict[int, Exception]) -> BaseException | None:
    """What is to end the program, where every caller who would have heard it has gone."""
    unheard: BaseException | None = None
    for i, error in errors.items():
        if isinstance(error, KeyboardInterrupt | SystemExit):
            if not requests[i].future.done():  # type: ignore[attr-defined]
                return None
            unheard = error
    return unheard


class AwaitedRequest(Request):
    """A request that a task awaits; it is its own caller, and its answer a plain object.

    Attributes:
        future: completed with the answer; to be set before it is submitted.
    """

    __slots__ = ("future",)

    future: asyncio.Future[Any]

    def tell(self) -> None:
        """Never raises: others of the batch are to be told, too."""
        try:
            if self.error is None:
                self.future.set_result(self.result)
            else:
                self.future.set_exception(self.error)
        except Exception:
            if not self.future.done():  # it refuses what it is given; else its task was cancelled or its loop is closed
                self.future.set_exception(RuntimeError(f"{type(self.error).__name__} cannot be raised to who awaits"))


class InnerRequest(AwaitedRequest):
    """One from inside a batch of another function.

    Attributes:
        inside: the lines that wait for it.
        were_made: whether there ever was one in this process; where none was, nobody has to look for them.
    """

    __slots__ = ("inside",)

    were_made: ClassVar[bool] = False

    def __init__(self, item: object, deadline: float, inside: frozenset[Driver]) -> None:
        super().__init__(item, deadline)
        InnerRequest.were_made = True
        self.inside = inside
