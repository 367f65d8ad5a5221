"""Handles of a running service: `AsyncHandle` on the caller's loop, `Handle` for threads, with a loop of its own.

Both turn Python objects into requests and wait for the answers; the driver does the rest. A handle belongs to the
process that started it.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from functools import partial
from threading import Lock, get_ident
from typing import Any

from carpool.clock import monotonic
from carpool.core.journal import Entry, Journal
from carpool.core.life import STARTED_BEFORE, Event, LifeState
from carpool.drive.aio import Driver
from carpool.drive.callers import (
    GRACE_S,
    NO_ANSWER,
    FutureCaller,
    LockCaller,
    error_of,
    request_for,
    result_of,
    with_cause,
)
from carpool.drive.loop_thread import LoopThread
from carpool.drive.output import LineSink
from carpool.drive.streams import AsyncStream, ThreadStream, Window
from carpool.errors import DeadlineExceeded
from carpool.logger import logger
from carpool.observe.stats import ServiceSnapshot
from carpool.policy.one_by_one import MOST_IN_A_HOP
from carpool.request import Request
from carpool.service.assemble import assemble
from carpool.service.declaration import Declaration
from carpool.service.running import Running
from carpool.service.settings import at_least, optional_seconds, valid_priority
from carpool.service.stage import Stage
from carpool.service.weigh import weigher_of
from carpool.worker import affinity, program

_BATCHES_AHEAD = 3  # per worker: one at work, one on its way, one forming
_SMALL_AHEAD = 2 * _BATCHES_AHEAD  # of small items, so that threads wake one another less often
_LEAST_IN_FLIGHT = 64
_SILENT_S = 10.0  # a loop that ends may be busy with its last tasks for so long
_CLOSE = "call close(), or use a block, `with service.run() as s:`"
_CLOSE_ASYNC = "await close(), or use a block, `async with service.run_async() as s:`"


class AsyncHandle:
    """A service on the running loop; made by `Service.run_async`.

    Attributes:
        driver: for those who bring requests of their own making, such as the HTTP app; None until started.
        weigh: how much of a batch an item takes up, if not 1.
    """

    def __init__(self, service: Declaration, *, journal_size: int, output: LineSink) -> None:
        self.service = service
        self.driver: Driver | None = None
        weigher = weigher_of(service.stages[0])
        self.weigh = None if weigher is None else weigher.of
        self._running = Running(service.name, service.timeout_s)
        self._life = self._running.life
        self._journal = Journal(journal_size) if journal_size else None
        self._output = output

    async def __aenter__(self) -> AsyncHandle:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [pid for pool in self._running.pools for pid in pool.pids]

    async def start(self) -> None:
        """Start the workers and wait until all are ready.

        Raises:
            StartupError: a worker could not load its model or run its examples; the text ends with the user's
                traceback.
            Unavailable: the service was closed while it was starting.
            RuntimeError: it was started before.
        """
        if program.in_worker and any(stage.run_in == "process" for stage in self.service.stages):
            raise RuntimeError(
                "a service cannot be started inside a worker process: put the call that starts it under"
                ' `if __name__ == "__main__":`'
            )
        if self._life.state is not LifeState.NEW:
            raise RuntimeError(STARTED_BEFORE)
        began = monotonic()
        made = assemble(self.service, self._journal, self._output)
        self.driver = made.driver
        what_to_do = _CLOSE_ASYNC if self._running.thread is None else _CLOSE
        await self._running.begin(made.driver, made.pools, made.guard, what_to_do)
        weakref.finalize(self, self._running.dropped).atexit = False  # what a program leaves open ends with it
        try:
            self._pin()
            if made.guard is not None:
                made.guard.start()
            await made.driver.start(made.pools, [stage.workers for stage in self.service.stages])
        except BaseException:
            await self.close(drain=False)
            raise
        self._life.happened(Event.OPENED)
        logger.info("service %s is ready after %.2f s", self.service.name, monotonic() - began)

    async def close(self, drain: bool = True) -> None:
        """Stop the service: finish what is inside (or fail it, without `drain`), then end the workers.

        It may be called by several tasks at once, and again: all of them return when everything has ended. In a forked
        child it does nothing.

        Raises:
            RuntimeError: the service was started on another event loop, which is still running.
        """
        if self._life.takes_calls and self._is_elsewhere():
            self._running.abandon()
            return
        closing = self._running.begin_to_close(drain)
        if closing is not None and self._life.state is LifeState.DRAINING:
            await asyncio.shield(closing)

    async def failed(self) -> None:
        """Wait until a stage has failed, so that the service can answer nothing any more."""
        await self.running_driver.failed()

    def kill(self) -> None:
        """End the workers at once, whatever they are doing."""
        self._running.kill()

    async def predict(self, x: Any, *, timeout_s: float | None = None, priority: int = 0) -> Any:
        """The model's answer to one item. Waits while the queue is full.

        Args:
            x: the item. What it holds in buffers of 64 KiB or more (arrays, mostly) is not copied: it must stay as it
                is until the answer is there.
            timeout_s: can only shorten the service's.
            priority: larger goes first, -100 to 100; but each second of being passed over counts for one level.

        Raises:
            CarpoolError: see `carpool.errors`.
            RuntimeError: the service does not run, or runs on another loop or in another process.
        """
        driver = self.running_driver
        loop = driver.loop
        if asyncio.get_running_loop() is not loop:
            self._refuse_other_loops()
        request = self.new_request(x, timeout_s, priority)
        caller = FutureCaller(loop)
        request.caller = caller
        driver.submit(request)
        try:
            return await caller.future
        except asyncio.CancelledError:
            driver.cancel(request)
            raise
        finally:
            del caller, request  # they lead to the error, which holds this frame

    def stream(
        self,
        xs: Iterable[Any] | AsyncIterable[Any],
        *,
        max_in_flight: int | None = None,
        return_exceptions: bool = False,
    ) -> AsyncIterator[Any]:
        """Answers to many items, in their order, with at most `max_in_flight` inside at a time.

        Args:
            xs: the items; taken one by one as there is room. Each is copied when it is read, so the input may use one
                buffer again and again.
            max_in_flight: defaults to what keeps all workers busy.
            return_exceptions: whether an item's error is yielded in its place instead of raised.
        """
        driver = self.running_driver
        self._refuse_other_loops()
        stream = AsyncStream(driver, self.service.timeout_s, self.window(max_in_flight), self.weigh)
        return stream.run(xs, return_exceptions, self)

    def stats(self) -> ServiceSnapshot:
        """What the service has done so far; also after it was closed."""
        driver = self.driver
        if driver is None or self._life.state is LifeState.FORKED:
            raise self._life.refusal()
        return driver.stats.snapshot(driver.clock())

    def story(self, request_id: int) -> list[Entry]:
        """What happened to a request, in order; needs `journal_size`."""
        return [] if self._journal is None else self._journal.story(request_id)

    def new_request(self, x: Any, timeout_s: float | None, priority: int) -> Request:
        """An item as a request that the driver takes. Raises what pickling or weighing it does."""
        own_s = optional_seconds("timeout_s", timeout_s)
        limit_s = self.service.timeout_s if own_s is None else min(own_s, self.service.timeout_s)
        request = request_for(x, self.running_driver.clock() + limit_s, self.weigh)
        if priority != 0:
            request.lane = (valid_priority(priority), None, 0)
        return request

    def window(self, max_in_flight: int | None) -> Window:
        """How many items of a stream may be inside: what the user says, or what keeps every worker busy."""
        if max_in_flight is not None:
            max_in_flight = at_least("max_in_flight", max_in_flight, 1)
            return Window(max_in_flight, max_in_flight)
        stages = self.service.stages
        least = sum(_BATCHES_AHEAD * stage.workers * _most_items(stage, 1) for stage in stages)
        most = sum(_SMALL_AHEAD * stage.workers * _most_items(stage, MOST_IN_A_HOP) for stage in stages)
        return Window(least, max(_LEAST_IN_FLIGHT, most))

    @property
    def state(self) -> LifeState:
        """Where in its life the service is."""
        return self._life.state

    @property
    def running_driver(self) -> Driver:
        """The driver.

        Raises:
            RuntimeError: the service does not run yet, was started by another process, or its loop has ended.
            Unavailable: it has been closed.
        """
        if not self._life.takes_calls:
            raise self._life.refusal()
        return self.driver  # type: ignore[return-value]

    def _refuse_other_loops(self) -> None:
        """Raise RuntimeError in a call from another loop than the service's."""
        if self._is_elsewhere():
            self._running.abandon()
            raise self._life.refusal()

    def _is_elsewhere(self) -> bool:
        """Whether the service's loop has ended, so that this is another one. Raises RuntimeError if it has not."""
        assert self.driver is not None
        if asyncio.get_running_loop() is self.driver.loop:
            return False
        if not self.driver.loop.is_closed():
            raise RuntimeError(
                "this service was started on another event loop: call it there, or start one on this loop"
            )
        return True

    def _pin(self) -> None:
        if self.service.cpus is not None or any(stage.cpus for stage in self.service.stages):
            if not affinity.can_pin():
                logger.warning("this system cannot tie processes to cores: cpus= is ignored")
            self._running.found_cores = affinity.current() if self.service.cpus is not None else None
            affinity.pin(self.service.cpus)


class Handle:
    """A service for threads, on a loop thread of its own; made by `Service.run` and `Service.start`."""

    def __init__(self, service: Declaration, *, journal_size: int, output: LineSink) -> None:
        self.service = service
        self._inner = AsyncHandle(service, journal_size=journal_size, output=output)
        self._thread: LoopThread | None = None
        self._starting = Lock()

    def __enter__(self) -> Handle:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return self._inner.pids

    def start(self) -> Handle:
        """Start the workers and wait until all are ready. Raises what `AsyncHandle.start` raises."""
        if self._inner.state is not LifeState.NEW or not self._starting.acquire(blocking=False):
            raise RuntimeError(STARTED_BEFORE)
        try:
            self._inner._running.thread = self._thread = thread = LoopThread("carpool")
        except BaseException:  # the system has no thread or descriptor to give
            self._starting.release()
            raise
        try:
            thread.run(self._inner.start())
        except BaseException:
            self._end(drain=False)
            if self._inner.state is LifeState.NEW:  # it was refused before anything was started
                self._inner._running.thread = self._thread = None
                self._starting.release()
            raise
        return self

    def close(self, drain: bool = True) -> None:
        """Stop the service: finish what is inside (or fail it, without `drain`), then end the workers.

        It may be called by several threads at once, and again: all of them return when everything has ended. In a
        forked child it does nothing.

        Raises:
            RuntimeError: this is the thread of the service's own loop, which would wait for itself.
            DeadlineExceeded: something of the user's blocks that loop, for longer than the service's time-out. Worker
                processes have been killed; call it again once the loop goes on.
        """
        if self._inner.state not in (LifeState.STARTING, LifeState.OPEN, LifeState.DRAINING):
            return
        self._refuse_own_thread("closed")
        self._end(drain)

    def predict(self, x: Any, *, timeout_s: float | None = None, priority: int = 0) -> Any:
        """The model's answer to one item, from any thread. See `AsyncHandle.predict`."""
        inner = self._inner
        request = inner.new_request(x, timeout_s, priority)
        thread: LoopThread = self._thread  # type: ignore[assignment]
        if get_ident() == thread.ident:
            self._refuse_own_thread("asked")
        caller = LockCaller()
        request.caller = caller
        driver = inner.running_driver
        thread.post(partial(driver.submit, request))
        try:
            caller.wait(request, driver.clock)
        except BaseException:  # KeyboardInterrupt, say: nobody waits for the answer any more
            thread.post(partial(driver.cancel, request))
            raise
        if request.error is not None:
            raise with_cause(error_of(request))
        return result_of(request)

    def stream(
        self, xs: Iterable[Any], *, max_in_flight: int | None = None, return_exceptions: bool = False
    ) -> Iterator[Any]:
        """Answers to many items, in their order. `xs` is read by a thread of the stream; see `AsyncHandle.stream`."""
        inner = self._inner
        window = inner.window(max_in_flight)
        driver = inner.running_driver
        self._refuse_own_thread("asked")
        assert self._thread is not None
        stream = ThreadStream(self._thread, driver, self.service.timeout_s, window, inner.weigh)
        return stream.run(xs, return_exceptions, self)

    def stats(self) -> ServiceSnapshot:
        """What the service has done so far; also after it was closed.

        Raises:
            DeadlineExceeded: the service's loop has not come to it within the service's time-out.
        """
        if self._thread is None or self._inner.state is LifeState.FORKED:
            raise self._inner._life.refusal()
        most_s = self.service.timeout_s + GRACE_S
        try:
            return self._thread.ask(self._inner.stats, most_s)  # policies are asked, and they are no one else's
        except TimeoutError as error:
            raise DeadlineExceeded(NO_ANSWER) from error

    def story(self, request_id: int) -> list[Entry]:
        """What happened to a request, in order; needs `journal_size`."""
        return self._inner.story(request_id)

    def _end(self, drain: bool) -> None:
        """Have the service closed, and wait for it and its loop to end."""
        thread, running = self._thread, self._inner._running
        assert thread is not None
        thread.post(partial(running.begin_to_end, drain))
        try:
            thread.wait_until_ended(max(self.service.timeout_s, _SILENT_S) + GRACE_S)
        except TimeoutError:
            running.kill_processes()
            raise DeadlineExceeded(NO_ANSWER) from None

    def _refuse_own_thread(self, what: str) -> None:
        if self._thread is not None and get_ident() == self._thread.ident:
            raise RuntimeError(
                f"the service cannot be {what} in the thread of its own loop, which would wait for itself:"
                " async models, sinks and size= functions must not call their own service's handle"
            )


def _most_items(stage: Stage, single: int) -> int:
    """Items that one batch of a stage may hold; those without batches take `single` at a time."""
    return min(stage.max_batch_size or single, stage.max_queue_size)
