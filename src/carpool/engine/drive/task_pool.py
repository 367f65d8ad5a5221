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
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from typing import Any, ClassVar, cast

from carpool.engine.clock import monotonic
from carpool.engine.core.batch import Batch, Reply
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.drive.aio import Driver
from carpool.engine.drive.failures import BatchOutcome, for_all
from carpool.engine.observe.stats import Stats
from carpool.engine.request import DONE, Request

Run = Callable[[list[Any]], Awaitable[BatchOutcome]]
"""Calls the user's function for the items of a batch."""

drivers_around: contextvars.ContextVar[frozenset[Driver] | None] = contextvars.ContextVar(
    "carpool_drivers_around", default=None
)
"""The drivers whose batches wait for the code that runs here, which so must not wait for theirs.

Tasks inherit the variable.
"""


class TaskPool:
    """The executor of a stage whose batches run as tasks, `slots` at a time."""

    def __init__(self, driver: Driver, run: Run, slots: int) -> None:
        self._driver = driver
        self._run = run
        self._slots = slots
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}  # the last one of each place

    def start(self) -> None:
        for place in range(self._slots):
            self._driver.worker_ready(0, place)

    def run(self, batch: Batch) -> None:
        """Start a task for a batch, in a fresh context."""
        answering = self._answer(batch)
        answering.send(None)  # as far as `_until_run`
        try:
            # the task copies the context; not every task factory takes one
            self._tasks[batch.place] = contextvars.Context().run(self._loop.create_task, answering)
        except Exception as error:  # of the loop's task factory
            answering.close()
            self._loop.call_soon(self._answered, batch, for_all(error, len(batch)))

    def kill(self, place: int) -> None:
        """Do nothing: a batch has no limit on its time."""

    async def stop(self, grace_s: float) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _answer(self, batch: Batch) -> None:
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
                batcher = cast(Batcher, self._driver.core.crews[0])
                self._driver.troubled(batcher, batch.place, batch.id, outcome.trouble)
        finally:
            self._answered(batch, outcome)
        if unheard is not None:
            raise unheard

    def _answered(self, batch: Batch, outcome: BatchOutcome) -> None:
        reply = Reply(0, batch.place, batch.id, batch.ids, outcome.results, outcome.errors, outcome.busy_s)
        self._driver.completed(reply)

    def _drivers_around(self, requests: Sequence[Request]) -> frozenset[Driver]:
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
            if not requests[i].is_abandoned:  # type: ignore[attr-defined]
                return None
            unheard = error
    return unheard


class AwaitedRequest(Request):
    """A request that a task awaits; its answer is a plain object, and no `caller` is needed.

    To its task it is a future, with as much of one as a task asks for: real futures would cost a
    callback for each task, while `TaskDriver` wakes all those of a batch in one.

    Attributes:
        wakeup: Wakes the task that awaits it, in its `context`; None where none does, which is to
            be set before the request is submitted.
    """

    __slots__ = ("_asyncio_future_blocking", "_loop", "context", "wakeup")

    wakeup: Callable[[Any], object] | None
    context: contextvars.Context

    # by these names asyncio asks each future for its loop, and whether it is being awaited
    _loop: asyncio.AbstractEventLoop | None
    _asyncio_future_blocking: bool

    def __await__(self) -> Generator[Any, None, None]:
        if self.state != DONE:
            self._asyncio_future_blocking = True
            yield self

    @property
    def is_abandoned(self) -> bool:
        return self.state == DONE or self._loop is None

    # -- what its task calls

    def add_done_callback(self, wakeup: Callable[[Any], object], *, context: contextvars.Context) -> None:
        self.wakeup = wakeup
        self.context = context

    def cancel(self, msg: object = None) -> bool:
        """Wake the task with a CancelledError; return False if it is being woken already."""
        wakeup, loop = self.wakeup, self._loop
        if wakeup is None or loop is None:
            return False
        self.wakeup = self._loop = None
        cancelled = loop.create_future()
        cancelled.cancel(msg)
        loop.call_soon(wakeup, cancelled, context=self.context)
        return True


class InnerRequest(AwaitedRequest):
    """A request from inside a batch of another function.

    Attributes:
        drivers_around: The drivers whose batches wait for it.
        were_made: Whether there ever was one in this process; if not, none is looked for.
    """

    __slots__ = ("drivers_around",)

    were_made: ClassVar[bool] = False

    def __init__(self, item: object, deadline: float, drivers_around: frozenset[Driver]) -> None:
        super().__init__(item, deadline)
        InnerRequest.were_made = True
        self.drivers_around = drivers_around


class TaskDriver(Driver):
    """Drives the core of a batch function whose callers are tasks; its requests are all
    `AwaitedRequest`s.
    """

    def __init__(self, core: Core, stats: Stats) -> None:
        super().__init__(core, stats)
        self._done = self.loop.create_future()  # what tasks that are woken take for what they have waited for
        self._done.set_result(None)

    def _deliver(self, requests: Sequence[Request]) -> None:
        try:
            self.loop.call_soon(self._wake_tasks, iter(requests))  # type: ignore[arg-type] # no others come
        except RuntimeError:
            if not self.loop.is_closed():  # else no task will ever run
                raise

    def _wake_tasks(self, requests: Iterator[AwaitedRequest]) -> None:
        """Run the tasks that wait for these requests as far as they go.

        A task raises nothing here but KeyboardInterrupt and SystemExit.
        """
        done = self._done
        try:
            for request in requests:
                wakeup = request.wakeup
                if wakeup is not None:
                    request.wakeup = None
                    request.context.run(wakeup, done)
        except BaseException:
            self.loop.call_soon(self._wake_tasks, requests)  # should the loop be run once more, the others go on
            raise
