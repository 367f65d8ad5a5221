"""Batches as tasks of the running loop: for `async def` functions, and callers that await plain objects."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Any

from carpool.clock import monotonic
from carpool.core.batcher import Batch
from carpool.drive.aio import Driver
from carpool.errors import ModelError
from carpool.parts import Trouble
from carpool.request import Request

Run = Callable[[list[Any], list[Trouble]], Awaitable[tuple[list[Any], dict[int, Exception] | None]]]
"""The results of a batch, and the errors that stand in for some of them; what else there is to tell is appended."""


class TaskStage:
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
        self._tasks[batch.worker] = self._loop.create_task(self._answer(batch), context=contextvars.Context())

    def kill(self, worker: int) -> None:
        """A task is not killed: there is no limit on the time of a batch here."""

    async def stop(self, grace_s: float) -> None:
        """End what still runs."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _answer(self, batch: Batch) -> None:
        started = monotonic()
        trouble: list[Trouble] = []
        try:
            results, errors = await self._run([request.item for request in batch.requests], trouble)
        except asyncio.CancelledError:  # by user code, or by the end of the loop
            broken: Exception = ModelError("the batch was broken off: CancelledError", type_name="CancelledError")
            results, errors = [None] * len(batch), dict.fromkeys(range(len(batch)), broken)
        except Exception as error:  # before the function was called
            results, errors = [None] * len(batch), dict.fromkeys(range(len(batch)), error)
        busy_s = monotonic() - started
        if trouble:
            self._driver.troubled(0, batch.worker, batch.id, trouble)
        self._driver.completed(0, batch.worker, batch.id, batch.ids, results, errors, busy_s, 0.0)


class AwaitedRequest(Request):
    """A request that a task awaits; it is its own caller, and its answer a plain object.

    Attributes:
        future: completed with the answer; to be set before the request is submitted.
    """

    __slots__ = ("future",)

    future: asyncio.Future[Any]

    def tell(self) -> None:
        try:
            if self.error is None:
                self.future.set_result(self.result)
            else:
                self.future.set_exception(self.error)
        except asyncio.InvalidStateError:
            pass  # its task has been cancelled
