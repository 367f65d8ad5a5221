"""Batches as tasks of the running loop, for batch functions whose callers are tasks.

What a batch waits for may in the end be the batch itself, through the batch of another function. So
each request carries the drivers from inside whose batches it was made, and a batch is inside those
of all its requests. One case is not found in this way, and ends with a time-out: a batch that
waits *behind* one that waits for it.
"""

from __future__ import annotations

import asyncio
import contextvars
import types
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, ClassVar

from carpool.clock import monotonic
from carpool.core.batch import Batch
from carpool.core.reply import Reply
from carpool.drive.aio import Driver
from carpool.drive.failures import BatchOutcome, for_all
from carpool.request import Request

Run = Callable[[list[Any]], Awaitable[BatchOutcome]]
"""Calls the user's function for the items of a batch."""

drivers_around: contextvars.ContextVar[frozenset[Driver] | None] = contextvars.ContextVar(
    "carpool_drivers_around", default=None
)
"""The drivers whose batches wait for the code that runs here, which so must not wait for theirs.

Tasks inherit the variable.
"""


class TaskPool:
    """The executor of a stage whose batches run as tasks.

    Args:
        driver: takes readiness and results.
        run: calls the user's function.
        slots: how many batches may run at a time.
    """

    def __init__(self, driver: Driver, run: Run, slots: int) -> None:
        self._driver = driver
        self._run = run
        self._slots = slots
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}  # the last one of each place

    def start(self) -> None:
        """Report every place as ready: there is nothing to load."""
        for place in range(self._slots):
            self._driver.worker_ready(0, place)

    def run(self, batch: Batch) -> None:
        """Start a task for a batch, in a fresh context: no caller's context variables are set."""
        answering = self._answer(batch)
        answering.send(None)  # as far as `_until_run`
        try:
            # the task copies the context; not every task factory takes one
            self._tasks[batch.place] = contextvars.Context().run(self._loop.create_task, answering)
        except Exception as error:  # of the loop's task factory
            answering.close()
            self._loop.call_soon(self._answered, batch, for_all(error, len(batch)))

    def kill(self, place: int) -> None:
        """Do nothing: no batch is ever given up, since there is no limit on its time."""

    async def stop(self, grace_s: float) -> None:
        """End what still runs."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _answer(self, batch: Batch) -> None:
        """Run a batch, and answer its requests whatever the function raises."""
        try:
            await _until_run()
        except asyncio.CancelledError as error:  # before its first step, which a coroutine would not notice
            self._answered(batch, for_all(error, len(batch)))
            return
        requests = batch.requests
        drivers_around.set(self._drivers_around(requests))
        me = asyncio.current_task()
        started = monotonic()
        try:
            outcome = await self._run([request.item for request in requests])
        except BaseException as error:
            if asyncio.current_task(self._loop) is not me:  # the task is not run but thrown away
                raise
            outcome = for_all(error, len(batch))
        unheard = None if outcome.errors is None else _unheard(requests, outcome.errors)
        outcome.busy_s = monotonic() - started
        try:
            if outcome.trouble:
                self._driver.troubled(0, batch.place, batch.id, outcome.trouble)
        finally:
            self._answered(batch, outcome)
        if unheard is not None:
            raise unheard

    def _answered(self, batch: Batch, outcome: BatchOutcome) -> None:
        reply = Reply(0, batch.place, batch.id, batch.ids, outcome.results, outcome.errors, outcome.busy_s)
        self._driver.completed(reply)

    def _drivers_around(self, requests: Sequence[Request]) -> frozenset[Driver]:
        """Return the drivers whose batches wait for a batch of these requests, its own included."""
        here = frozenset((self._driver,))
        if not InnerRequest.were_made:
            return here
        return here.union(*[request.drivers_around for request in requests if isinstance(request, InnerRequest)])


@types.coroutine
def _until_run() -> Generator[None]:
    """Stop here until a task runs the coroutine that awaits this."""
    yield


def _unheard(requests: Sequence[Request], errors: dict[int, Exception]) -> BaseException | None:
    """Return an exception meant to end the program, if no caller is left to get it."""
    unheard: BaseException | None = None
    for i, error in errors.items():
        if isinstance(error, KeyboardInterrupt | SystemExit):
            if not requests[i].future.done():  # type: ignore[attr-defined]
                return None
            unheard = error
    return unheard


class AwaitedRequest(Request):
    """A request that a task awaits; its answer is a plain object, and no `caller` is needed.

    Attributes:
        future: gets the answer; it is to be set before the request is submitted.
    """

    __slots__ = ("future",)

    future: asyncio.Future[Any]

    def tell(self) -> None:
        """Give the answer to the future. It never raises, since the batch has other requests."""
        try:
            if self.error is None:
                self.future.set_result(self.result)
            else:
                self.future.set_exception(self.error)
        except Exception:
            if not self.future.done():  # it refuses the error; else its task was cancelled or its loop is closed
                kind = type(self.error).__name__
                self.future.set_exception(RuntimeError(f"{kind} cannot be raised in a task that awaits"))


class InnerRequest(AwaitedRequest):
    """A request from inside a batch of another function.

    Attributes:
        drivers_around: the drivers whose batches wait for it.
        were_made: whether there ever was one in this process; if not, none is looked for.
    """

    __slots__ = ("drivers_around",)

    were_made: ClassVar[bool] = False

    def __init__(self, item: object, deadline: float, drivers_around: frozenset[Driver]) -> None:
        super().__init__(item, deadline)
        InnerRequest.were_made = True
        self.drivers_around = drivers_around
