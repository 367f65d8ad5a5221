"""Handles of a running service: `AsyncHandle` on the caller's loop, `Handle` for threads, with a loop of its own.

Both turn Python objects into requests and wait for the answers; the driver does the rest. A handle belongs to the
process that started it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterable, Iterator
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, TypeVar

from carpool.core.batcher import Batcher
from carpool.core.journal import Entry, Journal
from carpool.core.pipeline import Pipeline
from carpool.core.queue import Queue
from carpool.core.roster import Starts
from carpool.drive.aio import Driver
from carpool.drive.callers import FutureCaller, LockCaller, request_for, result_of
from carpool.drive.descriptors import fill_standard
from carpool.drive.guard import Guard
from carpool.drive.launch import Launch
from carpool.drive.output import LineSink
from carpool.drive.streams import AsyncStream, ThreadStream, Window
from carpool.drive.workers import WorkerStage, new_roster
from carpool.observe.stats import ServiceSnapshot, Stats
from carpool.policy import OneByOne
from carpool.policy.one_by_one import MOST_IN_A_HOP
from carpool.request import Request
from carpool.settings import check_priority, positive
from carpool.stage import Stage
from carpool.warmup import warm_up_sizes
from carpool.weigh import weigher_of
from carpool.wire.payload import size_of
from carpool.worker import affinity, program
from carpool.worker.setup import Setup

if TYPE_CHECKING:
    from carpool.service import Service

logger = logging.getLogger("carpool")
T = TypeVar("T")

_LOOK_UP_S = 0.5  # a thread that waits for the loop looks for signals that came just before it slept
_generation = 0  # counts forks: a handle of the parent is of no use in the child
_HANG_SHARE = 3  # `max_batch_time_s` defaults to this part of the service's time-out
_BATCHES_AHEAD = 3  # per worker: one at work, one on its way, one forming
_SMALL_AHEAD = 2 * _BATCHES_AHEAD  # of small items, so that threads wake one another less often
_LEAST_IN_FLIGHT = 64
_LEAST_STARTS = 2  # at a time: a model that never ends loading must not hold up all others


class AsyncHandle:
    """A service on the running loop; made by `Service.run_async`.

    Attributes:
        driver: for those who bring requests of their own making, such as the HTTP app; None until started.
        weigh: how much of a batch an item takes up, if not 1.
    """

    def __init__(self, service: Service, *, journal_size: int, output: LineSink) -> None:
        self.service = service
        self.driver: Driver | None = None
        weigher = weigher_of(service.stages[0])
        self.weigh = None if weigher is None else weigher.of
        self._journal = Journal(journal_size) if journal_size else None
        self._output = output
        self._stages: list[WorkerStage] = []
        self._guard: Guard | None = None
        self._found_cores: affinity.Cores | None = None
        self._generation = _generation

    async def __aenter__(self) -> AsyncHandle:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [pid for stage in self._stages for pid in stage.pids]

    async def start(self) -> None:
        """Start the workers and wait until all are ready.

        Raises:
            StartupError: a worker could not load its model or run its examples; the text ends with the user's
                traceback.
        """
        if program.in_worker and any(stage.run_in == "process" for stage in self.service.stages):
            raise RuntimeError(
                "a service cannot be started inside a worker process: put the call that starts it under"
                ' `if __name__ == "__main__":`'
            )
        if self.driver is not None:
            raise RuntimeError("this handle was started before; call run or run_async again for a new one")
        starts_at_a_time = self.service.max_parallel_starts or max(_LEAST_STARTS, affinity.available())
        guard = Guard() if any(stage.run_in == "process" for stage in self.service.stages) else None
        launches = [_launch(self.service, index, guard) for index in range(len(self.service.stages))]
        self._pin()
        self.driver = driver = Driver(*_pipeline_and_stats(self.service, self._journal))
        rosters = [stage.roster for stage in driver.stats.stages]
        starts = Starts([roster for roster in rosters if roster is not None], starts_at_a_time)
        self._stages = [
            WorkerStage(index, launch, driver, roster, starts, self._output)
            for index, (launch, roster) in enumerate(zip(launches, rosters, strict=True))
            if roster is not None
        ]
        if guard is not None:
            guard.start()
        self._guard = guard
        try:
            await driver.start(self._stages, [stage.workers for stage in self.service.stages])
        except BaseException:
            await self.close(drain=False)
            raise

    async def close(self, drain: bool = True) -> None:
        """Stop the service: finish what is inside (or fail it, without `drain`), then end the workers."""
        if self.driver is not None:
            await self.driver.stop(drain=drain, timeout_s=self.service.timeout_s)
        if self._guard is not None:
            await self._guard.close()
            self._guard = None
        affinity.pin(self._found_cores)

    async def failed(self) -> None:
        """Wait until a stage has failed, so that the service can answer nothing any more."""
        await self.running_driver.failed()

    def kill(self) -> None:
        """End the workers at once, whatever they are doing."""
        for stage in self._stages:
            stage.kill_all()

    async def predict(self, x: Any, *, timeout_s: float | None = None, priority: int = 0) -> Any:
        """The model's answer to one item. Waits while the queue is full.

        Args:
            x: the item.
            timeout_s: can only shorten the service's.
            priority: larger goes first, -100 to 100; but each second of being passed over counts for one level.

        Raises:
            CarpoolError: see `carpool.errors`.
        """
        loop = asyncio.get_running_loop()
        request = self.new_request(x, timeout_s, priority)
        caller = FutureCaller(loop)
        request.caller = caller
        self.running_driver.submit(request)
        try:
            return await caller.future
        except asyncio.CancelledError:
            self.running_driver.cancel(request)
            raise

    def stream(
        self,
        xs: Iterable[Any] | AsyncIterable[Any],
        *,
        max_in_flight: int | None = None,
        return_exceptions: bool = False,
    ) -> AsyncIterator[Any]:
        """Answers to many items, in their order, with at most `max_in_flight` inside at a time.

        Args:
            xs: the items; taken one by one as there is room.
            max_in_flight: defaults to what keeps all workers busy.
            return_exceptions: whether an item's error is yielded in its place instead of raised.
        """
        stream = AsyncStream(self.running_driver, self.service.timeout_s, self.window(max_in_flight), self.weigh)
        return stream.run(xs, return_exceptions)

    def stats(self) -> ServiceSnapshot:
        """What the service has done so far."""
        driver = self.running_driver
        return driver.stats.snapshot(driver.clock())

    def story(self, request_id: int) -> list[Entry]:
        """What happened to a request, in order; needs `journal_size`."""
        return [] if self._journal is None else self._journal.story(request_id)

    def new_request(self, x: Any, timeout_s: float | None, priority: int) -> Request:
        """An item as a request that the driver takes. Raises what pickling or weighing it does."""
        positive("timeout_s", timeout_s)
        limit_s = self.service.timeout_s if timeout_s is None else min(timeout_s, self.service.timeout_s)
        request = request_for(x, self.running_driver.clock() + limit_s, self.weigh)
        if priority != 0:
            check_priority(priority)
            request.lane = (priority, None, 0)
        return request

    def window(self, max_in_flight: int | None) -> Window:
        """How many items of a stream may be inside: what the user says, or what keeps every worker busy."""
        if max_in_flight is not None:
            if max_in_flight < 1:
                raise ValueError(f"max_in_flight must be at least 1, not {max_in_flight!r}")
            return Window(max_in_flight, max_in_flight)
        stages = self.service.stages
        least = sum(_BATCHES_AHEAD * stage.workers * _most_items(stage, 1) for stage in stages)
        most = sum(_SMALL_AHEAD * stage.workers * _most_items(stage, MOST_IN_A_HOP) for stage in stages)
        return Window(least, max(_LEAST_IN_FLIGHT, most))

    @property
    def running_driver(self) -> Driver:
        """The driver. Raises RuntimeError if the service does not run, or runs in another process."""
        if self.driver is None:
            raise RuntimeError("the service is not running: use it inside `with service.run() as s:`")
        if self._generation != _generation:
            raise RuntimeError("this service was started by another process; start one in this process")
        return self.driver

    def _pin(self) -> None:
        if self.service.cpus is not None or any(stage.cpus for stage in self.service.stages):
            if not affinity.can_pin():
                logger.warning("this system cannot tie processes to cores: cpus= is ignored")
            self._found_cores = affinity.current() if self.service.cpus is not None else None
            affinity.pin(self.service.cpus)


class Handle:
    """A service for threads, on a loop thread of its own; made by `Service.run` and `Service.start`."""

    def __init__(self, service: Service, *, journal_size: int, output: LineSink) -> None:
        self.service = service
        self._inner = AsyncHandle(service, journal_size=journal_size, output=output)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

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
        if self._thread is not None:
            raise RuntimeError("this handle was started before; call run again for a new one")
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="carpool", daemon=True)
        self._thread.start()
        try:
            self._call(self._inner.start())
        except BaseException:
            self._call(self._inner.close(drain=False))
            self._end_loop()
            raise
        return self

    def close(self, drain: bool = True) -> None:
        """Stop the service: finish what is inside (or fail it, without `drain`), then end the workers."""
        if self._loop is None:
            return
        self._call(self._inner.close(drain))
        self._end_loop()

    def predict(self, x: Any, *, timeout_s: float | None = None, priority: int = 0) -> Any:
        """The model's answer to one item, from any thread. See `AsyncHandle.predict`."""
        request = self._inner.new_request(x, timeout_s, priority)
        caller = LockCaller()
        request.caller = caller
        loop, driver = self._running_loop, self._inner.running_driver
        loop.call_soon_threadsafe(driver.submit, request)
        try:
            caller.wait()
        except BaseException:  # KeyboardInterrupt, say: nobody waits for the answer any more
            loop.call_soon_threadsafe(driver.cancel, request)
            raise
        return result_of(request)

    def stream(
        self, xs: Iterable[Any], *, max_in_flight: int | None = None, return_exceptions: bool = False
    ) -> Iterator[Any]:
        """Answers to many items, in their order. `xs` is read by a thread of the stream; see `AsyncHandle.stream`."""
        window = self._inner.window(max_in_flight)
        inner = self._inner
        stream = ThreadStream(self._running_loop, inner.running_driver, self.service.timeout_s, window, inner.weigh)
        return stream.run(xs, return_exceptions)

    def stats(self) -> ServiceSnapshot:
        """What the service has done so far."""
        if self._loop is None or threading.current_thread() is self._thread:
            return self._inner.stats()
        return self._call(self._stats())

    def story(self, request_id: int) -> list[Entry]:
        """What happened to a request, in order; needs `journal_size`."""
        return self._inner.story(request_id)

    async def _stats(self) -> ServiceSnapshot:
        """In the loop's thread: policies are asked, and they are no one else's."""
        return self._inner.stats()

    @property
    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise RuntimeError("the service is not running: use it inside `with service.run() as s:`")
        return self._loop

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            while not wait([future], timeout=_LOOK_UP_S).done:
                pass
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _end_loop(self) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = None


def _forked() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_forked)


def _new_loop() -> asyncio.AbstractEventLoop:
    """A uvloop where it is installed, else asyncio's."""
    fill_standard()
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _most_items(stage: Stage, single: int) -> int:
    """Items that one batch of a stage may hold; those without batches take `single` at a time."""
    return min(stage.max_batch_size or single, stage.max_queue_size)


def _pipeline_and_stats(service: Service, journal: Journal | None) -> tuple[Pipeline, Stats]:
    batchers = [_batcher(service, stage) for stage in service.stages]
    pipeline = Pipeline(batchers, slo_s=service.slo_s, measure=size_of, journal=journal)  # type: ignore[arg-type]
    rosters = [new_roster(stage.workers) for stage in service.stages]
    singles = [isinstance(batcher.policy, OneByOne) for batcher in batchers]
    return pipeline, Stats(service.name, pipeline, rosters, singles, service.slo_s)


def _batcher(service: Service, stage: Stage) -> Batcher:
    weigher = weigher_of(stage)
    return Batcher(
        stage.name,
        stage.new_policy(service.overload, service.slo_s),
        Queue(stage.max_queue_size, stage.max_queue_bytes),
        max_batch_time_s=stage.max_batch_time_s or service.timeout_s / _HANG_SHARE,
        idempotent=stage.idempotent,
        weigh=None if weigher is None else weigher.of_encoded,
    )


def _launch(service: Service, index: int, guard: Guard | None) -> Launch:
    stage: Stage = service.stages[index]
    everywhere = affinity.current()
    warm_up = warm_up_sizes(stage)
    root = logging.getLogger()
    setup = Setup(
        program=program.describe(),
        model=program.pack_model(stage.model, stage.kwargs) if stage.run_in == "process" else b"",
        stage=stage.name,
        worker=0,
        batched=stage.max_batch_size is not None,
        allowed_batch_sizes=tuple(sizes) if (sizes := stage.new_policy().allowed_batch_sizes) else None,
        warm_up=tuple(warm_up),
        first=index == 0,
        last=index == len(service.stages) - 1,
        isolate_errors=stage.isolate_errors,
        halve=stage.idempotent or stage.isolate_errors,
        oom_errors=stage.oom_errors,
        cores=None,
        log_level=root.level if root.handlers else None,
    )
    # a worker always sets its affinity, also to "everywhere": it would inherit a pinned coordinator's
    cores = stage.cpus or (everywhere if stage.run_in == "process" else None,) * stage.workers
    return Launch(stage.run_in, setup, stage.model, stage.kwargs, cores, stage.env, warm_up, guard)
