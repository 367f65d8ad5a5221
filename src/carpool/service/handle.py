"""The handle of a running service for the tasks of its loop; that for threads has one of these.

A handle belongs to the process that started it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from math import inf
from typing import Any, Literal, TypedDict

from carpool.engine.clock import monotonic
from carpool.engine.core.journal import Entry, Journal
from carpool.engine.core.life import STARTED_BEFORE, Event, LifeState
from carpool.engine.drive.aio import Driver
from carpool.engine.drive.callers import AsyncParts, TaskCaller, request_for, result_of
from carpool.engine.drive.changes import GRACE_S as GRACE_OF_STREAMS_S
from carpool.engine.drive.lending import Lending
from carpool.engine.drive.pools import BatchPool
from carpool.engine.drive.streams import AsyncStream, StreamWindow
from carpool.engine.logger import logger
from carpool.engine.observe.log import LineSink, print_line
from carpool.engine.observe.shown import counted
from carpool.engine.observe.snapshot import ServiceSnapshot
from carpool.engine.policy.one_by_one import MOST_IN_A_HOP
from carpool.engine.request import Lane, Request, Stream
from carpool.engine.wire.payload import Memory
from carpool.engine.worker import program
from carpool.errors import Unavailable
from carpool.service.assemble import Assembly, assemble
from carpool.service.checks import (
    at_least,
    check_callable,
    check_range,
    flag,
    numbers_of_workers,
    optional_seconds,
    seconds,
    valid_priority,
    when_full_waits,
)
from carpool.service.declaration import Declaration
from carpool.service.elsewhere import Elsewhere, elsewhere_of
from carpool.service.join import Join, join_of, open_gate
from carpool.service.running import Running
from carpool.service.stage import Stage
from carpool.service.weigh import weigher_of

_HOW_TO_CLOSE = "call close(), or use a block, `with service.run() as s:`"
_HOW_TO_CLOSE_ASYNC = "await close(), or use a block, `async with service.run_async() as s:`"


class RunSettings(TypedDict, total=False):
    """The settings of a run, which `Service.run_async` explains."""

    journal_size: int
    output: LineSink
    when_full: Literal["wait", "refuse"]
    join: str | Join | None
    on: Literal["ray"] | Elsewhere | None


class AsyncHandle:
    """A service for the tasks of one event loop; made by `Service.run_async`.

    Use it as `async with service.run_async() as s:`, or `start` it and `close` it.

    Attributes:
        service: The declaration of the service.
        driver: Takes the requests of callers that make their own, such as the HTTP app; None until
            the service is started.
        weigh: Writes on a request what its item counts for; None if each counts as 1.

    Raises:
        ValueError: A setting is out of range, or does not fit the service.
        TypeError: A setting is of the wrong kind, or there is no such setting.
        ImportError: `on="ray"`, and Ray is not installed.
    """

    def __init__(self, service: Declaration, settings: RunSettings) -> None:
        known = RunSettings.__optional_keys__
        for name in settings:
            if name not in known:
                raise TypeError(f"a run of a service has no setting {name!r}; there are {', '.join(sorted(known))}")
        self._output = settings.get("output", print_line)
        check_callable("output", self._output, "a worker's name, whether it is an error, and a line")
        self._waits = when_full_waits(settings.get("when_full", "wait"))  # instead of being refused
        self._join = join_of(service, settings.get("join"))
        self._on = elsewhere_of(settings.get("on"))
        journal_size = at_least("journal_size", settings.get("journal_size", 0), 0)
        self.service = service = service if self._on is None else self._on.moved(service)
        self.driver: Driver | None = None
        weigher = weigher_of(service.first)
        self.weigh = None if weigher is None else weigher.weigh
        self._running = Running(service.name, service.timeout_s)
        self._life = self._running.life
        self._journal = Journal(journal_size) if journal_size else None
        self._made: Assembly | None = None
        self._memory = Memory()  # of items, on the service's loop

    def __repr__(self) -> str:
        return f"<AsyncHandle {self.in_short()}>"

    def _repr_html_(self) -> str:
        return self.service.as_html(f"AsyncHandle {self.in_short()}")

    def in_short(self) -> str:
        """Return the service's name, its state and the number of its workers, for people."""
        pools = self._running.pools
        n = sum(len(pool.roster.established) for pool in pools)
        workers = counted(n if pools else sum(stage.least_workers for stage in self.service.stages), "worker")
        return f"{self.service.name}: {self._life.state.name.lower()}, {workers}"

    async def __aenter__(self) -> AsyncHandle:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    @property
    def join_address(self) -> str | None:
        """Where workers join, with the port that was taken; None if nothing listens for them."""
        return None if self._running.gate_address is None else str(self._running.gate_address)

    @property
    def pids(self) -> list[int]:
        """The process ids of the live workers that this process has started."""
        return [pid for pool in self._running.pools for pid in pool.pids]

    async def start(self) -> None:
        """Start the workers and wait until all of them are ready.

        Raises:
            StartupError: A worker could not load its model or run its examples; the text ends with
                the traceback of the user's code. Or the address at which workers join cannot be
                listened on.
            Unavailable: The service was closed while it was starting.
            RuntimeError: It has been started before, or this is a worker process.
        """
        self._check_startable()
        began = monotonic()
        made = await self._assemble()
        how_to_close = _HOW_TO_CLOSE_ASYNC if self._running.thread is None else _HOW_TO_CLOSE
        await self._running.begin(made.driver, made.pools, made.guard, made.upkeep, how_to_close)
        self._running.end_with(self)
        try:
            await self._start_workers(made)
        except BaseException:
            await self.close(drain=False)
            raise
        made.upkeep.start()
        if self._running.site is not None:
            self._running.site.observe(made.driver.stats)
        self._life.happened(Event.OPENED)
        about = {"model": self.service.name}
        logger.info("service %s is ready after %.2f s", self.service.name, monotonic() - began, extra=about)

    def _check_startable(self) -> None:
        if program.in_worker and any(stage.run_in == "process" for stage in self.service.stages):
            raise RuntimeError(
                "a service cannot be started inside a worker process: put the call that starts it under"
                ' `if __name__ == "__main__":`'
            )
        if self._life.state is not LifeState.NEW:
            raise RuntimeError(STARTED_BEFORE)

    async def _assemble(self) -> Assembly:
        on = self._on
        site = None if on is None else await on.open(self.service)
        try:
            made = assemble(self.service, self._journal, self._output, site)
        except BaseException:
            if site is not None:
                site.abandon()
            raise
        self._made, self.driver, self._running.site = made, made.driver, site
        return made

    async def _start_workers(self, made: Assembly) -> None:
        self._running.pin(self.service)
        if made.guard is not None:
            made.guard.start()
        if self._join is not None:
            running = self._running
            running.gate, running.gate_address = open_gate(self._join, self.service, made.pools)
        await made.driver.start(made.pools, [stage.least_workers for stage in self.service.stages])
        thread = self._running.thread
        pool = made.pools[0]
        is_plain = len(made.pools) == 1 and self.service.is_line and self.weigh is None and self._journal is None
        if thread is not None and is_plain and isinstance(pool, BatchPool):
            made.driver.lender = Lending(made.driver, pool, thread.post)

    async def close(self, drain: bool = True) -> None:
        """Close the service: refuse new requests, finish those inside, then end the workers.

        Several tasks may call it at once, and again; each call returns when everything has ended.
        In a forked child it does nothing.

        Args:
            drain: Whether requests inside are finished, for up to the service's `timeout_s`;
                otherwise they fail at once with `Unavailable`.

        Raises:
            RuntimeError: The service was started on another event loop, which is still open.
        """
        if self._life.takes_calls and self._is_elsewhere():
            self._running.abandon()
            return
        closing = self._running.begin_to_close(drain)
        if closing is not None and self._life.state is LifeState.DRAINING:
            await asyncio.shield(closing)

    async def scale(self, stage: str, workers: int | tuple[int, int], *, grace_s: float = GRACE_OF_STREAMS_S) -> None:
        """Change the number of workers of a stage while it runs; no request is lost.

        It returns when the new workers are ready, or those that go have finished what they have.

        Args:
            stage: The name of the stage.
            workers: How many there are to be; or a pair of the fewest and the most, between which
                the number follows the load from now on.
            grace_s: How long answers in parts may go on in a worker that goes, in seconds. Then
                they go on in another worker, or fail if the model cannot resume them.

        Raises:
            StartupError: A new worker could not load; then none was added.
            ValueError: There is no such stage, or `workers` is not a number of at least 1; or the
                workers of the stage all come by themselves.
            Unavailable: The service is stopping or has failed.
            RuntimeError: The service has not been started.
        """
        numbers = numbers_of_workers(workers)
        grace_s = seconds("grace_s", grace_s)
        made, index = self._changeable(), self._index_of(stage)
        if not self.service.stages[index].most_workers:
            raise ValueError(
                f"stage {stage} has only workers that join by themselves: start or stop them where they run"
            )
        upkeep = made.upkeep.stages[index]
        if isinstance(numbers, tuple):
            check_range(numbers, self.service.stages[index].traits)
            upkeep.scale_between(*numbers)
            made.upkeep.start()
            return
        upkeep.keep_fixed()
        await made.changes.scale(index, numbers, grace_s)

    async def reload(self, *, rolling: bool = False, grace_s: float = GRACE_OF_STREAMS_S) -> None:
        """Replace all workers by new ones, which load the model's code and weights anew.

        The new workers are started beside the old ones. Once all of them have loaded and have run
        their examples they take over, and the old ones finish what they have. No request is lost
        for it, and none is answered by old and new workers together. What the service and its
        stages declare stays as it is, and so does code that runs in this process.

        Args:
            rolling: Whether one worker at a time is replaced, each old one going before the new one
                is started, because there is no memory for both.
            grace_s: How long answers in parts may go on in an old worker, in seconds. Then they go
                on in a new one, or fail if the model cannot resume them.

        Raises:
            StartupError: A new worker could not load. The old ones go on, except that with
                `rolling` those replaced before are new.
            Unavailable: The service is stopping or has failed.
            RuntimeError: The service has not been started.
        """
        grace_s = seconds("grace_s", grace_s)
        await self._changeable().changes.reload(rolling=flag("rolling", rolling), grace_s=grace_s)

    def _changeable(self) -> Assembly:
        if asyncio.get_running_loop() is not self.running_driver.loop:
            self._refuse_other_loops()
        if self._life.state is LifeState.STARTING:
            raise Unavailable("the service is starting: change it once it is ready", code="starting")
        assert self._made is not None
        return self._made

    def _index_of(self, stage: str) -> int:
        names = [each.name for each in self.service.stages]
        if stage not in names:
            raise ValueError(f"service {self.service.name} has no stage {stage!r}; it has {', '.join(names)}")
        return names.index(stage)

    async def failed(self) -> None:
        """Wait until a stage has failed for good, so that the service cannot answer any more."""
        await self.running_driver.failed()

    def kill(self) -> None:
        """End the workers at once; none is replaced."""
        self._running.kill()

    async def predict(
        self,
        x: Any,
        *,
        timeout_s: float | None = None,
        priority: int = 0,
        on_part: Callable[[Any], object] | None = None,
    ) -> Any:
        """Return the model's answer to one item. Waits while the queue is full.

        Args:
            x: The item. It is copied, so you may change it while you await the answer.
            timeout_s: The longest time to wait, in seconds. It can only shorten the service's own.
            priority: From -100 to 100. Larger goes first, but each second that a request is passed
                over counts as one level.
            on_part: Called with each part of the answer as it comes, and nobody else is given it;
                a model that returns whole answers gives one part.

        Raises:
            ModelError: The model failed for this item.
            ValidationError: The model refused this item.
            DeadlineExceeded: The answer was not ready within `timeout_s`.
            Overloaded: The answer could not have been ready in time, so the item was refused.
            Unavailable: The service is closing, or its workers were lost.
            RuntimeError: The service has not been started, or it runs on another loop or in another
                process.
            ValueError: `timeout_s` or `priority` is out of range.
        """
        if on_part is not None:
            return await self._predict_in_parts(x, timeout_s, priority, on_part)
        driver = self.running_driver
        loop = driver.loop
        if asyncio.get_running_loop() is not loop:
            self._refuse_other_loops()
        request = self.new_request(x, timeout_s, priority, self._memory)
        caller = TaskCaller(loop)
        request.caller = caller
        driver.submit(request)
        try:
            await caller.done
            return result_of(request)
        except asyncio.CancelledError:
            driver.cancel(request)
            raise
        finally:
            del caller, request  # they lead to the error and so to this frame, which would be a reference cycle

    def predict_stream(self, x: Any, *, timeout_s: float | None = None, priority: int = 0) -> AsyncParts[Any]:
        """Return the parts of the model's answer to one item, as they come.

        Use it as `async with s.predict_stream(x) as parts: async for part in parts: ...`. The
        request is made when the block is entered, and cancelled if the block is left before the
        answer is complete. Errors are raised where the next part is awaited. Of a model that
        returns whole answers, the answer is the only part.

        Args:
            x: The item; see `predict`.
            timeout_s: The longest time until the answer is complete, in seconds. The service's own
                bounds each silence: before the first part, and between parts.
            priority: See `predict`.

        Raises:
            CarpoolError: See `predict`.
            RuntimeError: See `predict`.
            ValueError: `timeout_s` or `priority` is out of range.
        """
        driver = self.running_driver
        self._refuse_other_loops()
        return AsyncParts(driver, self.new_stream(x, timeout_s, priority), self)

    async def _predict_in_parts(
        self, x: Any, timeout_s: float | None, priority: int, on_part: Callable[[Any], object]
    ) -> Any:
        driver = self.running_driver
        self._refuse_other_loops()
        request = self.new_stream(x, timeout_s, priority, is_told_both=self.service.gives.collects)
        taken: AsyncParts[Any] = AsyncParts(driver, request, self)
        async with taken as parts:
            got = []
            async for part in parts:
                returned = on_part(part)
                if hasattr(returned, "__await__"):
                    await returned
                got.append(part)
            return parts.whole(got)

    def stream(
        self,
        xs: Iterable[Any] | AsyncIterable[Any],
        *,
        max_in_flight: int | None = None,
        return_exceptions: bool = False,
    ) -> AsyncIterator[Any]:
        """Yield the answers to many items, in the order of the items.

        Args:
            xs: The items, read one by one as there is room. Each is copied when it is read, so the
                input may use one buffer again and again.
            max_in_flight: The largest number of items inside at a time. Defaults to what keeps all
                workers busy. No more are read while 16 MiB of results wait to be taken.
            return_exceptions: Whether an item's error is yielded in place of its answer. Otherwise
                it is raised, which ends the stream.

        Raises:
            CarpoolError: See `predict`.
            RuntimeError: See `predict`.
            ValueError: `max_in_flight` is not a whole number of at least 1.
        """
        driver = self.running_driver
        self._refuse_other_loops()
        stream = AsyncStream(driver, self.service.timeout_s, self.window(max_in_flight), self.weigh)
        return stream.run(xs, return_exceptions, self)

    def stats(self) -> ServiceSnapshot:
        """Return the figures of the service so far, even after it was closed.

        Raises:
            RuntimeError: The service has not been started, or was started by another process.
        """
        driver = self.driver
        if driver is None or self._life.state is LifeState.FORKED:
            raise self._life.refusal()
        return driver.snapshot()

    def story(self, request_id: int | None = None) -> list[Entry]:
        """Return the events of a request, in order; empty without a `journal_size`.

        Args:
            request_id: The number of the request; a service counts them from 1 as they come. None
                for the one that came last.
        """
        return [] if self._journal is None else self._journal.story(request_id)

    def new_request(self, x: Any, timeout_s: float | None, priority: int, memory: Memory | None = None) -> Request:
        """Make a request of an item. Raises the errors of pickling and weighing the item."""
        wanted_s = optional_seconds("timeout_s", timeout_s)
        limit_s = self.service.timeout_s if wanted_s is None else min(wanted_s, self.service.timeout_s)
        request = request_for(x, self.running_driver.clock() + limit_s, self.weigh, memory)
        request.patient = self._waits
        if priority != 0:
            request.lane = Lane(valid_priority(priority), request.lane.key, 0)
        return request

    def new_stream(self, x: Any, timeout_s: float | None, priority: int, *, is_told_both: bool = False) -> Request:
        """Make a request of an item, of which the caller takes the answer in parts.

        Args:
            is_told_both: Whether the caller takes the whole answer as well, as the model makes it.
        """
        if not self.service.gives.in_parts:
            return self.new_request(x, timeout_s, priority, Memory())
        wanted_s = optional_seconds("timeout_s", timeout_s)
        request = self.new_request(x, None, priority, Memory())
        request.stream = Stream(until=inf if wanted_s is None else self.running_driver.clock() + wanted_s)
        request.stream.is_told_both = is_told_both
        return request

    def window(self, max_in_flight: int | None) -> StreamWindow:
        """Return how many items of a stream may be inside at a time.

        Args:
            max_in_flight: The user's number; None for as many as keep every worker busy.
        """
        return window_of(self.service.stages, max_in_flight)

    @property
    def state(self) -> LifeState:
        """The state of the service, from new to closed."""
        return self._life.state

    @property
    def takes_calls(self) -> bool:
        """Whether the service runs, in this process, and has not been closed."""
        return self._life.takes_calls

    @property
    def running_driver(self) -> Driver:
        """The driver, of a service that runs.

        Raises:
            RuntimeError: The service has not been started, was started by another process, or its
                loop has ended.
            Unavailable: It has been closed.
        """
        if not self._life.takes_calls:
            raise self._life.refusal()
        return self.driver  # type: ignore[return-value]

    def _refuse_other_loops(self) -> None:
        if self._is_elsewhere():
            self._running.abandon()
            raise self._life.refusal()

    def _is_elsewhere(self) -> bool:
        """Report whether the running loop is another one, since the service's has ended.

        Raises:
            RuntimeError: It is another one, and the service's has not ended.
        """
        assert self.driver is not None
        if asyncio.get_running_loop() is self.driver.loop:
            return False
        if not self.driver.loop.is_closed():
            raise RuntimeError(
                "this service was started on another event loop: call it there, or start one on this loop"
            )
        return True


_BATCHES_IN_FLIGHT = 3  # batches of a stream per worker: one at work, one on its way, one forming
_SMALL_BATCHES_IN_FLIGHT = 2 * _BATCHES_IN_FLIGHT  # with small items, so that threads wake one another less often
_LEAST_IN_FLIGHT = 64


def window_of(stages: Sequence[Stage], max_in_flight: int | None) -> StreamWindow:
    """Return how many items of a stream may be inside at a time.

    Args:
        max_in_flight: The user's number; None for as many as keep every worker busy.

    Raises:
        ValueError: `max_in_flight` is not a whole number of at least 1.
    """
    if max_in_flight is not None:
        max_in_flight = at_least("max_in_flight", max_in_flight, 1)
        return StreamWindow(max_in_flight, max_in_flight)
    least = sum(_BATCHES_IN_FLIGHT * max(1, stage.most_workers) * _most_items(stage, 1) for stage in stages)
    small = _SMALL_BATCHES_IN_FLIGHT
    most = sum(small * max(1, stage.most_workers) * _most_items(stage, MOST_IN_A_HOP) for stage in stages)
    return StreamWindow(least, max(_LEAST_IN_FLIGHT, most))


def _most_items(stage: Stage, single: int) -> int:
    """Return how many items one batch of a stage may hold; `single` if the stage has no batches."""
    return min(stage.max_batch_size or single, stage.max_queue_size)
