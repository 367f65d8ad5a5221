"""The parts of a running service, and how they end, with or without being closed.

They do not know the handle that has started them. So a handle that nobody holds any more is
collected, and what it has started is ended then (`dropped`). The loop does that, because the
collector may run in any thread and at any moment, where nothing may be waited for. It gets an
errand. A loop that is about to end, or has ended, throws its errands away undone, and an errand
that is thrown away ends the workers.

A loop that ends (in `asyncio.run` or a `Runner`) closes the asynchronous generators that have begun
on it and waits for them. That is how its end is noticed: each service has a generator that does
nothing else.
"""

from __future__ import annotations

import asyncio
import os
import signal
import warnings
import weakref
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

from carpool.core.life import Act, Event, Life, LifeState
from carpool.drive.aio import Driver
from carpool.drive.guard import Guard
from carpool.drive.loop_thread import LoopThread
from carpool.drive.worker_pool import WorkerPool
from carpool.logger import logger
from carpool.worker import affinity

_WHERE_IT_WAS_DROPPED = 3  # frames from the warning to the code that dropped the handle, past `weakref.finalize`

_lives: weakref.WeakSet[Life] = weakref.WeakSet()
"""The lives of the services of this process. A fork ends them, in the child."""


def _forked() -> None:
    for life in list(_lives):
        life.happened(Event.FORKED)


os.register_at_fork(after_in_child=_forked)


class Running:
    """The driver, workers and guard of one running service, and the state of its life.

    Args:
        name: The name of the service.
        timeout_s: The longest time in seconds that requests have, and so the closing, too.

    Attributes:
        name: The name of the service.
        life: The states from new to closed; both handles ask it.
        driver: Drives the pipeline; None until started.
        pools: The workers of each stage, first to last.
        guard: Ends the worker processes if this process is killed; None if there are none.
        found_cores: The cores that the loop's thread could use before it was pinned; None if it
            was not.
        thread: The thread of the loop, if it was started for this service and ends with it.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name = name
        self.life = Life()
        self.driver: Driver | None = None
        self.pools: Sequence[WorkerPool] = ()
        self.guard: Guard | None = None
        self.found_cores: affinity.Cores | None = None
        self.thread: LoopThread | None = None
        self._timeout_s = timeout_s
        self._closing: asyncio.Task[None] | None = None
        self._process = os.getpid()
        self._how_to_close = ""
        self._watch = self._watch_loop()
        _lives.add(self.life)

    async def begin(self, driver: Driver, pools: Sequence[WorkerPool], guard: Guard | None, how_to_close: str) -> None:
        """Note that the service is being started. Call it on the service's loop.

        Args:
            driver: Will drive the pipeline.
            pools: The workers of each stage.
            guard: Will guard the worker processes, if there are any.
            how_to_close: Tells users who drop the handle what to do instead, for the warning.
        """
        self.driver, self.pools, self.guard = driver, pools, guard
        self._process, self._how_to_close = os.getpid(), how_to_close
        await anext(self._watch)
        self.life.happened(Event.START)  # from here on calls from other threads come in, and need the driver

    def begin_to_close(self, drain: bool) -> asyncio.Task[None] | None:
        """Have a task close the service, unless one does already. Call it on the service's loop.

        Args:
            drain: Whether requests inside are finished, or fail now. A second call can hurry the
                first one.

        Returns:
            The task, which ends when everything has ended; None if the service was never started.
        """
        act = self.life.happened(Event.CLOSE if drain else Event.HURRY)
        if act is Act.END:
            self._closing = asyncio.ensure_future(self._end(drain))
            self._closing.add_done_callback(self._ended)
        elif act is Act.HURRY and self.driver is not None:
            self.driver.abort()
        return self._closing

    def begin_to_end(self, drain: bool) -> None:
        """Have the service closed, and then the loop's own thread ended. Call it on the loop."""
        closing, thread = self.begin_to_close(drain), self.thread
        if thread is None:
            return
        if closing is None or closing.done():
            thread.stop()
        else:  # a start that has failed closes the service, too, and nobody else may come to stop the loop
            closing.add_done_callback(lambda _: thread.stop())

    def kill(self) -> None:
        """End the workers at once, whatever they are doing."""
        for pool in self.pools:
            pool.kill_all()

    def kill_processes(self) -> None:
        """End the worker processes at once, from another thread, while the loop is blocked."""
        for pool in self.pools:
            for pid in pool.pids:  # only the loop reaps them, so these pids cannot have been reused
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)

    def abandon(self) -> None:
        """End the workers, as the loop ends, or has ended, before the service was closed."""
        if self.life.happened(Event.LOOP_GONE) is Act.KILL:
            self._let_go()

    def dropped(self) -> None:
        """Have everything ended, as the handle was collected before it was closed.

        Any thread may call it; it waits for nothing. In a forked child it does nothing, even if the
        handle is collected before the child knows that it is one.
        """
        if os.getpid() != self._process or self.life.state not in (LifeState.STARTING, LifeState.OPEN):
            return
        assert self.driver is not None
        loop = self.driver.loop
        if not loop.is_running() and not loop.is_closed():
            for pool in self.pools:  # the loop stands still and may never run again
                pool.dismiss()
        with suppress(RuntimeError):  # the loop is closed, and throws the errand away
            loop.call_soon_threadsafe(_Errand(self))
        self._warn("handle", "was dropped", _WHERE_IT_WAS_DROPPED)

    async def _watch_loop(self) -> AsyncGenerator[None, None]:
        """Wait to be resumed, as the service is closed, or to be closed, as the loop ends first."""
        try:
            yield
        except GeneratorExit:
            if self._closing is not None and not self._closing.done():
                self._closing.cancel()
                await asyncio.wait([self._closing])
            left_open = self.life.state in (LifeState.STARTING, LifeState.OPEN)
            self.abandon()
            if left_open:
                self._warn("event loop", "has ended")
            raise

    def _warn(self, what: str, happening: str, stacklevel: int = 1) -> None:
        text = f"the {what} of service {self.name} {happening} before the service was closed, so its workers are ended"
        warnings.warn(f"{text}: {self._how_to_close}", ResourceWarning, stacklevel + 1)

    async def _end(self, drain: bool) -> None:
        assert self.driver is not None
        try:
            await self.driver.stop(drain=drain, timeout_s=self._timeout_s)
            if self.guard is not None:
                await self.guard.close()
                self.guard = None
            await anext(self._watch, None)
        finally:
            affinity.pin(self.found_cores)

    def _ended(self, closing: asyncio.Task[None]) -> None:
        """Note that the closing is over. If it failed or was cancelled, end the workers at once."""
        if self.life.state is not LifeState.DRAINING:
            return
        error = None if closing.cancelled() else closing.exception()
        if error is not None:  # nobody may be waiting to get it, if the handle was dropped
            logger.error("service %s could not be closed in order; its workers are ended", self.name, exc_info=error)
        if closing.cancelled() or error is not None:
            assert self.driver is not None
            self.driver.abort()
            self._let_go()
        self.life.happened(Event.ENDED)
        logger.info("service %s is closed", self.name)

    def _let_go(self) -> None:
        """End the workers at once and wait for nothing that needs the loop."""
        for pool in self.pools:
            pool.abandon()
        if self.guard is not None:
            self.guard.abandon()
            self.guard = None


class _Errand:
    """Asks a loop to end a service whose handle is gone; if dropped undone, it ends the workers."""

    __slots__ = ("_running",)

    def __init__(self, running: Running) -> None:
        self._running: Running | None = running

    def __call__(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.begin_to_end(drain=False)

    def __del__(self) -> None:
        if self._running is not None:
            self._running.abandon()
