"""`@carpool.batch` over an `async def`: callers are tasks, and a batch is a task."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterable
from itertools import chain
from math import inf
from threading import get_ident
from typing import Any, Generic, TypeVar, cast, overload

from carpool.batch_function.batched import Bindable, Settings, alive, invoker_of
from carpool.call import merge as merging
from carpool.call.invoke import Invoker
from carpool.call.retry import Trouble
from carpool.core.pipeline import Pipeline
from carpool.drive.aio import Driver
from carpool.drive.failures import shared_out
from carpool.drive.task_pool import AwaitedRequest, InnerRequest, TaskPool, inside
from carpool.errors import Unavailable
from carpool.foreign import as_model_error
from carpool.logger import logger
from carpool.observe.stats import NoStats

A = TypeVar("A")
B = TypeVar("B")

_ELSEWHERE_S = 0.01  # between two looks at what another loop does


_lines_around = inside.get  # a method of what is imported would be looked up anew for each call

Work = asyncio.Task[BaseException | None]
"""What several callers wait for; it results in what it has raised."""


class _Drivers:
    """The lines of one async function, one for each event loop that has called it.

    Loops run in threads of their own, and only a loop's own thread adds its line. What the others do with the dict
    meanwhile is one step each, so there is no lock, which a fork could leave locked.

    Attributes:
        latest: the one that was asked for last, of a loop that tells in which thread it runs.
        closed: why there are to be no more calls.
        ends: by loop, the task that closes its line.
    """

    __slots__ = ("by_loop", "closed", "ends", "latest")

    def __init__(self) -> None:
        self.closed: Unavailable | None = None
        self.by_loop: dict[asyncio.AbstractEventLoop, Driver] = {}
        self.ends: dict[asyncio.AbstractEventLoop, Work] = {}
        self.latest: Driver | None = None

    def all(self) -> list[Driver]:
        """Those that there are at this moment."""
        return list(self.by_loop.values())

    def drop_closed(self) -> int:
        """Forget the lines of loops that are gone. Returns how many of their calls were never answered."""
        lost = 0
        for loop in list(self.by_loop):
            if loop.is_closed():
                gone = self.by_loop.pop(loop, None)  # another thread may have been faster
                lost += 0 if gone is None else gone.pipeline.unanswered
        return lost

    def clear(self) -> None:
        """Forget them all."""
        self.by_loop.clear()
        self.ends.clear()
        self.latest = None


class AsyncBatch(Bindable, Generic[A, B]):
    """An async function whose callers, tasks, share its calls. Made by `batch`."""

    def __init__(
        self,
        function: Any,
        settings: Settings,
        invoker: Invoker,
        drivers: _Drivers | None = None,
        *,
        unset: bool = False,
    ) -> None:
        super().__init__(function, settings)
        self._invoker = invoker
        self._drivers = drivers or _Drivers()
        self._unset = unset  # the model's `setup` is still to be awaited, which takes a loop
        self._torn_down = False
        self._setting_up: Work | None = None
        self._set_up_lock = threading.Lock()  # two loops may come at once
        self._run_batch: Callable[..., Any] = self._run
        self._merging = bool(settings.merge)
        self._weigh = None if settings.size is None else settings.weigh
        lock = settings.execution_lock
        self._lock = contextlib.nullcontext() if lock is None else lock
        self._timeout_s = settings.timeout_s
        if drivers is None:
            alive.add(self)

    async def __call__(self, x: A) -> B:
        """The function's result for one item. Raises what `ThreadBatch` raises."""
        if self._merging:
            return (await self.many([x]))[0]
        driver = self._drivers.latest
        # the loop's own record of its thread: to ask asyncio costs Python 3.11 a system call
        if driver is None or driver.loop._thread_id != get_ident():  # type: ignore[attr-defined]
            driver = self._driver()
        around = _lines_around()
        if around is not None and driver in around:
            raise self._reentry()
        deadline = inf if self._timeout_s is None else driver.clock() + self._timeout_s
        request = AwaitedRequest(x, deadline) if around is None else InnerRequest(x, deadline, around)
        request.patient = True
        request.future = asyncio.Future(loop=driver.loop)
        if self._weigh is not None:
            request.size = self._weigh(x)
        driver.submit(request)
        try:
            return await request.future  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            driver.cancel(request)
            raise

    async def many(self, xs: Iterable[A]) -> list[B]:
        """The results for several items of one caller, in their order. If one failed, its error is raised."""
        if not self._merging:
            return cast("list[B]", await self._all(list(xs)))
        pieces = [self._settings.pieces(x) for x in xs]
        results = await self._all(list(chain.from_iterable(pieces)))
        return merging.joined_by_caller(results, pieces)

    async def _all(self, items: list[Any]) -> list[Any]:
        driver = self._driver()
        around = _lines_around()
        if around is not None and driver in around:
            raise self._reentry()
        deadline = inf if self._timeout_s is None else driver.clock() + self._timeout_s
        requests = [AwaitedRequest(x, deadline) if around is None else InnerRequest(x, deadline, around) for x in items]
        sizes, lanes = self._settings.places(items)
        for i, request in enumerate(requests):
            request.patient = True
            request.future = driver.loop.create_future()
            if sizes is not None:
                request.size = sizes[i]
            if lanes is not None:
                request.lane = lanes[i]
        driver.submit_all(requests)
        try:
            done = await asyncio.gather(*[request.future for request in requests], return_exceptions=True)
        except asyncio.CancelledError:
            for request in requests:
                driver.cancel(request)
            raise
        for request in requests:
            if request.error is not None:
                raise request.error
        return done

    async def close(self) -> None:
        """Wait for the calls of this loop and refuse new ones of any; a model that was set up here is torn down.

        It may be called several times, also at once.

        Raises:
            RuntimeError: this is a call from inside the function itself.
        """
        drivers, loop = self._drivers, asyncio.get_running_loop()
        around = _lines_around()
        if around is not None and not around.isdisjoint(drivers.all()):
            raise RuntimeError(f"{self.__name__} was closed from inside itself: close() would wait for its own caller")
        if drivers.closed is None:
            drivers.closed = self._closed()
        here = drivers.by_loop.get(loop)
        if here is not None:
            here.poll()  # those who have called before this are to be served
        for driver in drivers.all():
            driver.pipeline.close(drivers.closed)
            if driver is not here:
                with contextlib.suppress(RuntimeError):  # its loop is closed
                    driver.loop.call_soon_threadsafe(driver.poll)  # nothing waits for company any more
        end = drivers.ends.get(loop)
        if end is None or end.done():
            end = drivers.ends[loop] = loop.create_task(_failure_of(functools.partial(self._end, loop, here)))
        await _done(end)

    @overload
    def __get__(self, instance: None, owner: type) -> AsyncBatch[A, B]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> AsyncBatch[A, B]: ...
    def __get__(self, instance: object | None, owner: type | None = None) -> AsyncBatch[A, B]:
        if instance is None:
            return self
        bound = functools.partial(self._function, instance)
        drivers = self._line_of(instance, _Drivers)
        invoker = invoker_of(bound, self._settings, is_async=True, like=self._invoker)
        one: AsyncBatch[A, B] = AsyncBatch(self._function, self._settings, invoker, drivers)
        self._bind(one, instance)
        one._run_batch = functools.partial(self._run_for, weakref.ref(instance))
        return one

    # -- inside

    def _reentry(self) -> RuntimeError:
        return RuntimeError(
            f"{self.__name__} was called from inside itself: the call would wait for the batch that makes it."
            " Call the plain function instead"
        )

    def _driver(self) -> Driver:
        """The running loop's line."""
        loop = asyncio.get_running_loop()
        driver = self._drivers.by_loop.get(loop) or self._open(loop)
        if hasattr(loop, "_thread_id"):
            self._drivers.latest = driver
        return driver

    def _open(self, loop: asyncio.AbstractEventLoop) -> Driver:
        """A line for a loop that has none. Lines of loops that are gone end here."""
        drivers = self._drivers
        lost = drivers.drop_closed()
        if lost:
            logger.warning("%d calls of %s were never answered: their event loop is closed", lost, self.__name__)
        pipeline = Pipeline([self._settings.batcher(self.__name__)], slo_s=self._settings.slo_s)
        driver = Driver(pipeline, NoStats(self.__name__, pipeline))
        stage = TaskPool(driver, self._run_batch, self._settings.max_in_flight_batches)
        driver.executors = [stage]
        stage.start()
        drivers.by_loop[loop] = driver
        if drivers.closed is not None:  # asked last: a thread that closes now finds the line, or has said so before
            pipeline.close(drivers.closed)
        return driver

    def start_anew(self) -> None:
        """In a forked child: the parent's loops and their tasks are not here."""
        self._set_up_lock = threading.Lock()
        self._setting_up = None
        self._drivers.clear()
        for _, drivers in list(self._bound.values()):  # of bound methods, which may have been kept
            drivers.clear()

    async def _run(self, items: list[Any], trouble: list[Trouble]) -> tuple[list[Any], dict[int, Exception] | None]:
        if self._unset:
            await self._set_up()
        async with self._lock:
            return shared_out(await self._invoker.run(items, trouble, all_ok=True))

    async def _run_for(self, instance: weakref.ref[Any], items: list[Any], trouble: list[Trouble]) -> Any:
        """`_run` of a method: its line must not keep the instance alive, its callers do."""
        return await self.__get__(instance())._run(items, trouble)

    async def _set_up(self) -> None:
        """Once, before the first batch of any loop; if it fails, that batch fails and the next one tries again."""
        loop = asyncio.get_running_loop()
        while self._unset:
            if self._torn_down:
                raise self._closed()
            with self._set_up_lock:
                task = self._setting_up
                if task is None or not task.get_loop().is_running():  # it went away in the midst of it
                    task = self._setting_up = loop.create_task(_failure_of(self._set_up_here))
            if task.get_loop() is loop:
                await _done(task)
            else:
                await asyncio.sleep(_ELSEWHERE_S)

    async def _set_up_here(self) -> None:
        try:
            await self._invoker.set_up()
            self._unset = False
        finally:
            self._setting_up = None

    async def _end(self, loop: asyncio.AbstractEventLoop, here: Driver | None) -> None:
        """Close this loop's line, if there is one, and tear the model down, once."""
        try:
            if here is not None:
                await here.stop(timeout_s=None)
                here.pipeline.close(self._closed())  # in our words, not those of a service
            if isinstance(self._function, type) and not self._unset:
                self._unset = self._torn_down = True
                await self._tear_down(loop)
        finally:
            self._drivers.ends.pop(loop, None)

    async def _tear_down(self, loop: asyncio.AbstractEventLoop) -> None:
        """What the model raises goes to those who close, through a task, which takes two kinds for its own end."""
        me = asyncio.current_task()
        assert me is not None
        try:
            await self._invoker.tear_down()
        except (GeneratorExit, asyncio.CancelledError) as error:
            if me.cancelling() or asyncio.current_task(loop) is not me:
                raise
            raise as_model_error(error, f"teardown of {self.__name__}") from error


async def _failure_of(work: Callable[[], Awaitable[None]]) -> BaseException | None:
    """What some work raises: KeyboardInterrupt and SystemExit, left to a task, would end the loop.

    The work is begun here: a loop that ends may cancel this before its first step.
    """
    try:
        await work()
    except BaseException as error:
        return error
    return None


async def _done(work: Work) -> None:
    """Wait for work that others wait for too, and raise what it has raised. Who is cancelled goes alone."""
    failure = await asyncio.shield(work)
    if failure is not None:
        raise failure
