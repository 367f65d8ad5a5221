"""Batch functions whose callers are tasks, and whose batches are tasks.

They are made of an `async def`, or with `run_in="thread"` of a `def`, which a thread of the event
loop's default executor calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import chain
from math import inf
from threading import get_ident
from typing import Any, Generic, Self, TypeVar, cast, overload

from carpool.batch_function.base import Bindable, Settings, Shares, invoker_of, live_functions
from carpool.engine.call import merge as merging
from carpool.engine.call.invoke import Invoker
from carpool.engine.call.lock import ExecutionLock, execution_lock, is_async_lock
from carpool.engine.call.results import Trouble, run_now
from carpool.engine.clock import monotonic
from carpool.engine.core.core import Core
from carpool.engine.drive.aio import Driver
from carpool.engine.drive.failures import BatchOutcome, as_outcome, for_all
from carpool.engine.drive.task_pool import AwaitedRequest, InnerRequest, Run, TaskDriver, TaskPool, drivers_around
from carpool.engine.fast_paths import fast_path
from carpool.engine.foreign import as_model_error
from carpool.engine.logger import logger
from carpool.engine.observe.function_stats import FunctionSnapshot, FunctionStats, snapshot, together
from carpool.engine.observe.stats import explained
from carpool.engine.request import Request
from carpool.errors import Unavailable

A = TypeVar("A")
B = TypeVar("B")

_LOCK_WAIT_S = 60.0  # at a time, for the execution lock of a thread

_OTHER_LOOP_S = 0.01  # how often a task looks whether the task of another loop is done

_drivers_around = drivers_around.get  # bound once: a look-up of the method for each call takes time

SharedWork = asyncio.Task[BaseException | None]
"""Work that several callers wait for; its result is its error, or None."""


class _Drivers:
    """The drivers of one async function, one for each event loop that has called it.

    Each loop runs in a thread of its own, and only that thread adds its driver. What the other
    threads do with the dict meanwhile is one atomic step each, so there is no lock, which a fork
    could leave locked.

    Attributes:
        latest: The driver that was used last, if its loop has the private `_thread_id` by which
            `__call__` sees that it runs in this thread; else None.
        closed_because: Why there are to be no more calls; None while there may be.
    """

    __slots__ = ("by_loop", "closed_because", "ends", "gone", "latest")

    def __init__(self) -> None:
        self.closed_because: Unavailable | None = None
        self.by_loop: dict[asyncio.AbstractEventLoop, Driver] = {}
        self.ends: dict[asyncio.AbstractEventLoop, SharedWork] = {}
        self.latest: Driver | None = None
        self.gone: list[FunctionSnapshot] = []

    def listed(self) -> list[Driver]:
        """Return the drivers that there are now, as a list that other threads do not change."""
        return list(self.by_loop.values())

    def drop_closed(self) -> int:
        """Forget the drivers of closed loops; return how many of their calls have no answer."""
        lost = 0
        for loop in list(self.by_loop):
            if loop.is_closed():
                gone = self.by_loop.pop(loop, None)  # another thread may have been faster
                if gone is not None:
                    lost += gone.core.unanswered
                    self.gone = [together("", [*self.gone, _snapshot(gone)])]
        return lost

    def clear(self) -> None:
        self.by_loop.clear()
        self.ends.clear()
        self.gone = []
        self.latest = None


class AsyncBatch(Bindable, Generic[A, B]):
    """An async function whose callers, tasks, share its calls; made by `carpool.batch`."""

    def __init__(
        self,
        function: Any,
        settings: Settings,
        invoker: Invoker,
        drivers: _Drivers | None = None,
        *,
        run_batch: Run | None = None,
        needs_setup: bool = False,
    ) -> None:
        super().__init__(function, settings)
        self._invoker = invoker
        self._drivers = drivers or _Drivers()
        self._needs_setup = needs_setup  # the model's `setup` is still to be awaited, which takes a loop
        self._torn_down = False
        self._setup_task: SharedWork | None = None
        self._setup_lock = threading.Lock()  # two loops may make their first calls at the same time
        self._in_thread = settings.run_in == "thread"
        self._run_here = self._run_in_thread if self._in_thread else self._run  # calls the function for a batch
        self._run_batch = run_batch or self._run_here  # what drivers call: of a method, it finds the instance first
        self._merging = bool(settings.merge)
        self._asks_many = _asks_many(settings)
        self._shares = None if settings.each_counts_as_one else settings.shares
        lock = settings.execution_lock
        self._lock: Any = contextlib.nullcontext()
        self._thread_lock: ExecutionLock | None = None
        if is_async_lock(lock):
            self._lock = lock
        elif lock is not None:
            self._thread_lock = execution_lock(lock, self.__name__)
        self._timeout_s = settings.timeout_s
        if drivers is None:
            live_functions.add(self)

    async def many(self, xs: Iterable[A], *, priority: int = 0) -> list[B]:
        """Return the results for several items of one caller, in the order of the items.

        Args:
            xs: The items, or chunks of rows with `merge`.
            priority: That of all of them, as in a call.

        Raises:
            Exception: The error of the first item that failed; otherwise as in a call.
        """
        if not self._merging:
            return cast("list[B]", await self._run_all(list(xs), priority))
        pieces = [self._settings.pieces(x) for x in xs]
        results = await self._run_all(list(chain.from_iterable(pieces)), priority)
        return merging.joined_by_caller(results, pieces)

    async def __call__(self, x: A, *, priority: int = 0) -> B:
        """Return the function's result for one item.

        Args:
            x: The item, or a chunk of rows with `merge`.
            priority: From -100 to 100. Larger goes first; an item that is passed over rises by a
                level a second.

        Raises:
            DeadlineExceeded: `timeout_s` passed before the item's batch was done.
            Unavailable: The function is closed.
            Overloaded: The item could not be answered within `slo_s`, and the policy refuses such
                items.
            RuntimeError: This is a call from inside the function itself.
            Exception: The function raised it. Each caller of a batch that raised gets it.
        """
        if self._asks_many or priority:
            return (await self.many([x], priority=priority))[0]
        driver = self._drivers.latest
        # Most calls come from the loop of the last one, so what has to be
        # known is whether that loop is running in this thread, now. Only the loop's own private
        # record says so: `is_running` is about any thread, a thread that we had noted could run
        # another loop meanwhile, and `asyncio.get_running_loop` makes a system call in Python 3.11.
        # Loops without the record take the slow path.
        if driver is None or driver.loop._thread_id != get_ident():  # type: ignore[attr-defined]
            driver = self._driver()
        around = _drivers_around()
        if around is not None and driver in around:
            raise self._reentry_error()
        deadline = inf if self._timeout_s is None else driver.clock() + self._timeout_s
        request = AwaitedRequest(x, deadline) if around is None else InnerRequest(x, deadline, around)
        request.patient = True
        request.wakeup = None
        request._loop = driver.loop
        if self._shares is not None:
            _set_shares([request], self._shares([x]))
        driver.submit(request)
        try:
            await request
        except asyncio.CancelledError:
            driver.cancel(request)
            raise
        if request.error is not None:
            raise request.error
        return request.result  # type: ignore[return-value]

    def stats(self) -> FunctionSnapshot:
        """Return its figures so far, on all event loops; of a method, for its instance."""
        drivers = self._drivers
        return together(self.__name__, [*drivers.gone, *[_snapshot(driver) for driver in drivers.listed()]])

    def explain(self) -> dict[str, Any]:
        """Return why the policy decides as it does on the event loop that called last."""
        driver = self._drivers.latest
        if driver is None:
            return explained(self._settings.new_policy(), monotonic())
        (batcher,) = driver.core.crews
        return explained(batcher.lobby.policy, monotonic(), batcher)

    async def _run_all(self, items: list[Any], priority: int) -> list[Any]:
        """Submit items and wait for all results. Raises the error of the first item that failed."""
        driver = self._driver()
        around = _drivers_around()
        if around is not None and driver in around:
            raise self._reentry_error()
        deadline = inf if self._timeout_s is None else driver.clock() + self._timeout_s
        requests = [AwaitedRequest(x, deadline) if around is None else InnerRequest(x, deadline, around) for x in items]
        _set_shares(requests, self._settings.shares(items, priority))
        for request in requests:
            request.patient = True
            request.wakeup = None
            request._loop = driver.loop
        driver.submit_all(requests)
        try:
            for request in requests:  # whichever comes last, all of them are waited for
                await request
        except asyncio.CancelledError:
            for request in requests:
                driver.cancel(request)
            raise
        for request in requests:
            if request.error is not None:
                raise request.error
        return [request.result for request in requests]

    async def close(self) -> None:
        """Refuse new calls on any loop, and wait for the calls of this loop.

        A model that was set up by `carpool.batch` is then torn down. It may be called several
        times, and by several tasks at once.

        Raises:
            RuntimeError: This is a call from inside the function itself.
            Exception: The model's `teardown` raised it.
        """
        drivers, loop = self._drivers, asyncio.get_running_loop()
        around = _drivers_around()
        if around is not None and not around.isdisjoint(drivers.listed()):
            raise RuntimeError(f"{self.__name__} was closed from inside itself: close() would wait for its own caller")
        if drivers.closed_because is None:
            drivers.closed_because = self._closed_error()
        here = drivers.by_loop.get(loop)
        if here is not None:
            here.poll()  # calls that were made before this one are still served
        for driver in drivers.listed():
            driver.core.close(drivers.closed_because)
            if driver is not here:
                with contextlib.suppress(RuntimeError):  # its loop is closed
                    driver.loop.call_soon_threadsafe(driver.poll)  # its policy need not wait for more items
        end = drivers.ends.get(loop)
        if end is None or end.done():
            end = drivers.ends[loop] = loop.create_task(_failure_of(functools.partial(self._end, loop, here)))
        await _wait_for(end)

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Self: ...
    def __get__(self, instance: object | None, owner: type | None = None) -> Self:
        if instance is None:
            return self
        bound = self._over_items(functools.partial(self._function, instance))
        drivers = self._of_instance(instance, _Drivers)
        invoker = invoker_of(bound, self._settings, is_async=not self._in_thread, sibling=self._invoker)
        run_batch = functools.partial(self._run_for, weakref.ref(instance))
        method = type(self)(self._function, self._settings, invoker, drivers, run_batch=run_batch)
        self._bind(method, instance)
        return method

    # -- inside

    def _reentry_error(self) -> RuntimeError:
        return RuntimeError(
            f"{self.__name__} was called from inside itself: the call would wait for the batch that makes it."
            " Call the plain function instead"
        )

    def _driver(self) -> Driver:
        loop = asyncio.get_running_loop()
        driver = self._drivers.by_loop.get(loop) or self._open(loop)
        self._note_latest(driver)
        return driver

    @fast_path("same_loop", declined=False)
    def _note_latest(self, driver: Driver) -> bool:
        """Keep a driver for the next call, which mostly comes from the same loop; report whether
        that can be found out.

        Fast path of `_driver`: the same outcome, see tests/batch_function/test_fast_paths.py.
        """
        has_record = hasattr(driver.loop, "_thread_id")  # which is private; see `__call__`
        if has_record:
            self._drivers.latest = driver
        return has_record

    def _open(self, loop: asyncio.AbstractEventLoop) -> Driver:
        """Make a driver for a loop that has none, and forget those of loops that are closed.

        Raises:
            RuntimeWarning: The function was called before the fork of this process, and filters of
                the program make warnings errors.
        """
        self._note_process()  # a forked child has no drivers, so its first call comes here
        drivers = self._drivers
        lost = drivers.drop_closed()
        if lost:
            logger.warning("%d calls of %s were never answered: their event loop is closed", lost, self.__name__)
        core = Core([self._settings.new_batcher(self.__name__)], slo_s=self._settings.slo_s)
        driver = TaskDriver(core, FunctionStats(self.__name__, core))
        pool = TaskPool(driver, self._run_batch, self._settings.max_in_flight_batches)
        driver.executors = [pool]
        pool.start()
        drivers.by_loop[loop] = driver
        # This comes last: another thread that closes the function has set `closed_because` before,
        # or it finds this driver.
        if drivers.closed_because is not None:
            core.close(drivers.closed_because)
        return driver

    def start_anew(self) -> None:
        self._setup_lock = threading.Lock()
        self._setup_task = None
        self._drivers.clear()
        for _, drivers in list(self._bound.values()):  # the program may hold bound methods
            drivers.clear()

    async def _run(self, items: list[Any]) -> BatchOutcome:
        if self._needs_setup:
            await self._set_up()
        trouble: list[Trouble] = []
        async with self._lock:
            return as_outcome(await self._invoker.run(items, trouble, all_ok=True), trouble)

    async def _run_in_thread(self, items: list[Any]) -> BatchOutcome:
        async with self._lock:
            return await asyncio.to_thread(self._run_in_this_thread, items)

    def _run_in_this_thread(self, items: list[Any]) -> BatchOutcome:
        """Run a batch. It raises nothing: a future would refuse a StopIteration."""
        trouble: list[Trouble] = []
        lock = self._thread_lock
        try:
            if lock is None:
                return as_outcome(self._invoker.run_now(items, trouble), trouble)
            while not lock.acquire(timeout=_LOCK_WAIT_S):
                pass
            try:
                return as_outcome(self._invoker.run_now(items, trouble), trouble)
            finally:
                lock.release()
        except BaseException as error:
            return for_all(error, len(items))

    async def _run_for(self, instance: weakref.ref[Any], items: list[Any]) -> BatchOutcome:
        """Run a batch of an instance's method; callers keep the instance alive, not the driver."""
        return await self.__get__(instance())._run_here(items)

    async def _set_up(self) -> None:
        """Await the model's `setup` once, before the first batch of any loop.

        If it fails, that batch fails, and the next one tries again.
        """
        loop = asyncio.get_running_loop()
        while self._needs_setup:
            if self._torn_down:
                raise self._closed_error()
            with self._setup_lock:
                task = self._setup_task
                # its loop may have stopped in the midst of it, or it was cancelled before it began
                if task is None or task.done() or not task.get_loop().is_running():
                    task = self._setup_task = loop.create_task(_failure_of(self._set_up_here))
            if task.get_loop() is loop:
                await _wait_for(task)
            else:
                await asyncio.sleep(_OTHER_LOOP_S)

    async def _set_up_here(self) -> None:
        try:
            await self._invoker.set_up()
            self._needs_setup = False
        finally:
            self._setup_task = None

    async def _end(self, loop: asyncio.AbstractEventLoop, here: Driver | None) -> None:
        try:
            if here is not None:
                await here.stop(timeout_s=None)
                here.core.close(self._closed_error())  # instead of the text for a service, which `stop` has set
            if isinstance(self._function, type) and not self._needs_setup:
                self._needs_setup = self._torn_down = True
                await self._tear_down(loop)
        finally:
            self._drivers.ends.pop(loop, None)

    async def _tear_down(self, loop: asyncio.AbstractEventLoop) -> None:
        """Tear the model down. What it raises goes to the callers of `close`.

        GeneratorExit and CancelledError from the model would look like the end of this task, so
        they become a ModelError.
        """
        me = asyncio.current_task()
        assert me is not None
        try:
            if self._in_thread:
                failure = await asyncio.to_thread(self._tear_down_in_thread)
                if failure is not None:
                    raise failure
            else:
                await self._invoker.tear_down()
        except (GeneratorExit, asyncio.CancelledError) as error:
            if me.cancelling() or asyncio.current_task(loop) is not me:
                raise
            raise as_model_error(error, f"teardown of {self.__name__}") from error

    def _tear_down_in_thread(self) -> BaseException | None:
        try:
            run_now(self._invoker.tear_down())
        except BaseException as error:
            return error
        return None


def _set_shares(requests: Sequence[Request], shares: Shares) -> None:
    for i, request in enumerate(requests):
        if shares.sizes is not None:
            request.size = shares.sizes[i]
        if shares.lengths is not None:
            request.length = shares.lengths[i]
        if shares.lanes is not None:
            request.lane = shares.lanes[i]


def _snapshot(driver: Driver) -> FunctionSnapshot:
    assert isinstance(driver.stats, FunctionStats)
    return snapshot(driver.stats.name, driver.core, driver.stats.counts)


async def _failure_of(work: Callable[[], Awaitable[None]]) -> BaseException | None:
    """Do some work and return its error, or None.

    A task that raised KeyboardInterrupt or SystemExit would end the loop.

    Args:
        work: Begins the work. It is called here, not before, since a loop that ends may cancel this
            coroutine before its first step.
    """
    try:
        await work()
    except BaseException as error:
        return error
    return None


async def _wait_for(work: SharedWork) -> None:
    """Wait for shared work and raise its error; cancelling the caller does not end it."""
    failure = await asyncio.shield(work)
    if failure is not None:
        raise failure


@fast_path("one_task", declined=True)
def _asks_many(settings: Any) -> bool:
    """Report whether a call with one item is one of `many`.

    Fast path of `AsyncBatch.many`: the same outcome, see tests/batch_function/test_fast_paths.py.
    """
    return bool(settings.merge)
