"""The running parts of a handle, and how they end.

It ends when the handle closes it, or because the handle or the loop is gone. It has no reference to
its handle. So a handle that nothing refers to any more is collected, and what it has started is
ended then (`dropped`). The loop does that: the collector may run in any thread and at any moment,
so nothing may be waited for there. An errand that the loop does not come to, since it ends or has
ended, is thrown away by the loop, and ends the workers as that happens.

A loop that ends closes the asynchronous generators that have begun on it and waits for them
(`asyncio.run` and `asyncio.Runner` do). Each service has such a generator, only to notice the end
of its loop.

A task that waits for the end of the loop was rejected: programs that gather all tasks would wait
for it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import warnings
import weakref
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any

from carpool.engine.core.life import Act, Event, Life, LifeState
from carpool.engine.drive.aio import Driver
from carpool.engine.drive.changes import Upkeep
from carpool.engine.drive.gate import Gate
from carpool.engine.drive.guard import Guard
from carpool.engine.drive.loop_thread import LoopThread
from carpool.engine.drive.worker_pool import WorkerPool
from carpool.engine.logger import logger
from carpool.engine.worker.address import JoinAddress
from carpool.engine.worker.place import Cores, can_pin, current_cores, pin
from carpool.service.declaration import Declaration
from carpool.service.elsewhere import Site

_WHERE_IT_WAS_DROPPED = 3  # frames from here: `weakref.finalize` is in between


class Running:
    """One service's driver, workers and guard, and where in its life it is.

    Attributes:
        gate: Where workers join that come by themselves, while the service is open.
        site: Where its worker processes run, if not on this machine.
        gate_address: The address of that, once it was opened.
        found_cores: Those on which the loop's thread ran before it was pinned.
        thread: The loop's, if it was started for this service and is to end with it.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        self.name = name
        self.life = Life()
        self.driver: Driver | None = None
        self.pools: Sequence[WorkerPool] = ()
        self.guard: Guard | None = None
        self.upkeep: Upkeep | None = None
        self.gate: Gate | None = None
        self.site: Site | None = None
        self.gate_address: JoinAddress | None = None
        self.found_cores: Cores | None = None
        self.thread: LoopThread | None = None
        self._timeout_s = timeout_s
        self._closing: asyncio.Task[None] | None = None
        self._process = os.getpid()
        self._how_to_close = ""
        self._collected: weakref.finalize[[], Any] | None = None
        self._watch = self._watch_loop()
        _lives.add(self.life)

    async def begin(
        self, driver: Driver, pools: Sequence[WorkerPool], guard: Guard | None, upkeep: Upkeep, how_to_close: str
    ) -> None:
        """Take note, on the service's loop, of the parts that are being started.

        Args:
            how_to_close: For the warning if it is never closed.
        """
        self.driver, self.pools, self.guard, self.upkeep = driver, pools, guard, upkeep
        self._process, self._how_to_close = os.getpid(), how_to_close
        await anext(self._watch)
        self.life.happened(Event.START)  # from here on other threads' calls are let through, and need the driver

    def end_with(self, handle: object) -> None:
        """Have everything ended when the handle is collected, if it is not by then."""
        self._collected = weakref.finalize(handle, self.dropped)
        self._collected.atexit = False  # at exit the workers end with the program

    def pin(self, service: Declaration) -> None:
        """Tie the thread of the loop to the cores of a service, until the service has ended."""
        if service.cpus is None and not any(stage.cpus for stage in service.stages):
            return
        if not can_pin():
            logger.warning("this system cannot tie processes to cores: cpus= is ignored", extra={"model": self.name})
        self.found_cores = current_cores() if service.cpus is not None else None
        pin(service.cpus)

    def begin_to_close(self, drain: bool) -> asyncio.Task[None] | None:
        """Have the service closed, on its loop, by a task that ends when everything has ended.

        Args:
            drain: Whether requests inside are finished; if not, they fail.

        Returns:
            The task, which may have been started before; None if the service was never started.
        """
        act = self.life.happened(Event.CLOSE if drain else Event.HURRY)
        if act is Act.END:
            self._closing = asyncio.ensure_future(self._end(drain))
            self._closing.add_done_callback(self._ended)
        elif act is Act.HURRY and self.driver is not None:
            self.driver.abort()
        return self._closing

    def begin_to_end(self, drain: bool) -> None:
        """Have the service closed, on its loop, and the loop's thread ended after that."""
        closing, thread = self.begin_to_close(drain), self.thread
        if thread is None:
            return
        if closing is None or closing.done():
            thread.stop()
        else:  # also if a failed start closes it: nothing else may come to stop the loop
            closing.add_done_callback(lambda _: thread.stop())

    def kill(self) -> None:
        """End the workers at once, in the midst of their batches."""
        for pool in self.pools:
            pool.kill_all()

    def kill_processes(self) -> None:
        """End the worker processes from another thread, since something blocks the loop."""
        for pool in self.pools:
            for pid in pool.pids:  # the loop reaps them, so their numbers are still theirs
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)

    def abandon(self) -> None:
        """End the workers of a service that is not closed although its loop ends or has ended."""
        if self.life.happened(Event.LOOP_GONE) is Act.KILL:
            self._let_go()
            self._forget_handle()

    def dropped(self) -> None:
        """Have everything ended, if it is not, since the handle has been collected in some thread.

        It waits for nothing. In a forked child it does nothing, even if the handle is collected
        before the fork is noticed.
        """
        if os.getpid() != self._process or self.life.state not in (LifeState.STARTING, LifeState.OPEN):
            return
        assert self.driver is not None
        loop = self.driver.loop
        if not loop.is_running() and not loop.is_closed():
            for pool in self.pools:  # it may never run again
                pool.dismiss()
        with suppress(RuntimeError):  # the loop is closed, and throws the errand away
            loop.call_soon_threadsafe(_Errand(self))
        self._warn("handle", "was dropped", _WHERE_IT_WAS_DROPPED)

    async def _watch_loop(self) -> AsyncGenerator[None, None]:
        """Wait for the end: resumed when the service is closed, closed if its loop ends before."""
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
        text = f"the {what} of service {self.name} {has_gone} before the service was closed, so its workers are ended"
        warnings.warn(f"{text}: {self._how_to_close}", ResourceWarning, stacklevel + 1)

    async def _end(self, drain: bool) -> None:
        assert self.driver is not None
        if self.upkeep is not None:
            self.upkeep.stop()
        if self.gate is not None:
            self.gate.close()
            self.gate = None
        try:
            await self.driver.stop(drain=drain, timeout_s=self._timeout_s)
            if self.site is not None:
                await self.site.close()
                self.site = None
            if self.guard is not None:
                await self.guard.close()
                self.guard = None
            await anext(self._watch, None)
        finally:
            pin(self.found_cores)

    def _ended(self, closing: asyncio.Task[None]) -> None:
        """Finish the closing; at once and by force if it was cancelled or has failed."""
        if self.life.state is not LifeState.DRAINING:
            return
        error = None if closing.cancelled() else closing.exception()
        if error is not None:  # the code that dropped a handle does not wait for it
            logger.error(
                "service %s was not closed in good order", self.name, exc_info=error, extra={"model": self.name}
            )
        if closing.cancelled() or error is not None:
            assert self.driver is not None
            self.driver.abort()
            self._let_go()
        self.life.happened(Event.ENDED)
        self._forget_handle()
        logger.info("service %s is closed", self.name, extra={"model": self.name})

    def _forget_handle(self) -> None:
        """Wait no longer for the end of the handle.

        Until then the interpreter holds this object, and what refers to it is never collected.
        """
        if self._collected is not None:
            self._collected.detach()

    def _let_go(self) -> None:
        """End the workers at once and wait for nothing that needs the loop."""
        for pool in self.pools:
            pool.abandon()
        if self.gate is not None:
            self.gate.abandon()
            self.gate = None
        if self.site is not None:
            self.site.abandon()
            self.site = None
        if self.guard is not None:
            self.guard.abandon()
            self.guard = None


class _Errand:
    """Has a loop end a service, the handle of which is gone.

    If the loop throws it away, it ends the workers.
    """

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
"""The lives of this process's services, which a fork ends for the child."""


def _forked() -> None:
    for life in list(_lives):
        life.happened(Event.FORKED)


os.register_at_fork(after_in_child=_forked)
