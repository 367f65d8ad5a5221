"""What a handle has started, and how it ends: closed by the handle, or because the handle or the loop has gone.

It does not know its handle. So a handle that nobody holds any more is collected, and what it has started is ended then
(`dropped`). The loop does that: the collector may run in any thread and at any moment, so nothing may be waited for
there. An errand that the loop does not come to, since it ends or has ended, is thrown away by the loop, and ends the
workers as that happens.

A loop that ends closes the asynchronous generators that have begun on it, and waits for them (`asyncio.run` does, and
`Runner`). That is how its end is noticed: each service has one that does nothing else.
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

_WHERE_IT_WAS_DROPPED = 3  # frames from here: `weakref.finalize` is in between


class Running:
    """One service's driver, workers and guard, and where in its life it is.

    Args:
        name: the service's.
        timeout_s: the service's.

    Attributes:
        driver, stages, guard: what has been started.
        found_cores: where the loop's thread ran before it was pinned.
        thread: the loop's, if it was started for this service and is to end with it.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name = name
        self.life = Life()
        self.driver: Driver | None = None
        self.stages: Sequence[WorkerPool] = ()
        self.guard: Guard | None = None
        self.found_cores: affinity.Cores | None = None
        self.thread: LoopThread | None = None
        self._timeout_s = timeout_s
        self._closing: asyncio.Task[None] | None = None
        self._process = os.getpid()
        self._what_to_do = ""
        self._watch = self._watch_loop()
        _lives.add(self.life)

    async def begin(self, driver: Driver, stages: Sequence[WorkerPool], guard: Guard | None, what_to_do: str) -> None:
        """On the service's loop: it is being started.

        Args:
            driver, stages, guard: what will run.
            what_to_do: for whoever lets it run and goes, how it is closed.
        """
        self.driver, self.stages, self.guard = driver, stages, guard
        self._process, self._what_to_do = os.getpid(), what_to_do
        await anext(self._watch)
        self.life.happened(Event.START)  # from here on other threads' calls are let through, and need the driver

    def begin_to_close(self, drain: bool) -> asyncio.Task[None] | None:
        """On the service's loop: see that it is being closed, by a task that ends when everything has ended.

        Returns:
            The task, whoever has caused it to be started; None if the service was never started.
        """
        act = self.life.happened(Event.CLOSE if drain else Event.HURRY)
        if act is Act.END:
            self._closing = asyncio.ensure_future(self._end(drain))
            self._closing.add_done_callback(self._ended)
        elif act is Act.HURRY and self.driver is not None:
            self.driver.abort()
        return self._closing

    def begin_to_end(self, drain: bool) -> None:
        """On the service's loop: see that it is being closed, and its thread ended after that."""
        closing, thread = self.begin_to_close(drain), self.thread
        if thread is None:
            return
        if closing is None or closing.done():
            thread.stop()
        else:  # also if it is the start that closes, since it has failed: nobody else may come to stop the loop
            closing.add_done_callback(lambda _: thread.stop())

    def kill(self) -> None:
        """End the workers at once, whatever they are doing."""
        for stage in self.stages:
            stage.kill_all()

    def kill_processes(self) -> None:
        """From another thread, while something blocks the loop: end the worker processes at once."""
        for stage in self.stages:
            for pid in stage.pids:  # the loop reaps them, so their numbers are still theirs
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)

    def abandon(self) -> None:
        """The service's loop ends, or has ended, before it was closed: nobody is left inside; the workers are ended."""
        if self.life.happened(Event.LOOP_GONE) is Act.KILL:
            self._let_go()

    def dropped(self) -> None:
        """The handle has been collected, in whatever thread: have everything ended, if nobody has. Waits for nothing.

        In a forked child nothing is done, even where it is collected before the child knows what it is.
        """
        if os.getpid() != self._process or self.life.state not in (LifeState.STARTING, LifeState.OPEN):
            return
        assert self.driver is not None
        loop = self.driver.loop
        if not loop.is_running() and not loop.is_closed():
            for stage in self.stages:  # it may never run again
                stage.dismiss()
        with suppress(RuntimeError):  # the loop is closed, and throws the errand away
            loop.call_soon_threadsafe(_Errand(self))
        self._warn("handle", "was dropped", _WHERE_IT_WAS_DROPPED)

    async def _watch_loop(self) -> AsyncGenerator[None, None]:
        """It is resumed when the service has been closed, and closed where the loop ends before that."""
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

    def _warn(self, what: str, has_gone: str, stacklevel: int = 1) -> None:
        text = f"the {what} of service {self.name} {has_gone} without its being closed, so its workers are ended"
        warnings.warn(f"{text}: {self._what_to_do}", ResourceWarning, stacklevel + 1)

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
        """The closing is over; or all tasks were cancelled, and there is no time for a good order."""
        if self.life.state is not LifeState.DRAINING:
            return
        error = None if closing.cancelled() else closing.exception()
        if error is not None:  # whoever has dropped a handle does not wait to hear of it
            logger.error("service %s could not be closed in good order", self.name, exc_info=error)
        if closing.cancelled() or error is not None:
            assert self.driver is not None
            self.driver.abort()
            self._let_go()
        self.life.happened(Event.ENDED)
        logger.info("service %s is closed", self.name)

    def _let_go(self) -> None:
        """End the workers at once and wait for nothing that needs the loop."""
        for stage in self.stages:
            stage.abandon()
        if self.guard is not None:
            self.guard.abandon()
            self.guard = None


class _Errand:
    """Has a loop end a service whose handle has gone. It is not lost with its loop."""

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


_lives: weakref.WeakSet[Life] = weakref.WeakSet()
"""Those that a fork ends, for the child."""


def _forked() -> None:
    for life in list(_lives):
        life.happened(Event.FORKED)


os.register_at_fork(after_in_child=_forked)
