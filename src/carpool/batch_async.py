"""`@carpool.batch` over an `async def`: callers are tasks, and a batch is a task."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any, Generic, TypeVar, cast, overload

from carpool import merge as merging
from carpool.batched import Bindable, Settings, alive, invoker_of, shared_out
from carpool.core.batcher import INFINITY
from carpool.core.pipeline import Pipeline
from carpool.drive.aio import Driver
from carpool.drive.tasks import AwaitedRequest, TaskStage
from carpool.errors import Unavailable
from carpool.invoke import Invoker
from carpool.logger import logger
from carpool.observe.stats import NoStats
from carpool.parts import Trouble

A = TypeVar("A")
B = TypeVar("B")

_inside: contextvars.ContextVar[Any] = contextvars.ContextVar("carpool_inside", default=None)


class _Drivers:
    """The lines of one async function, one for each event loop that has called it.

    Attributes:
        latest: the one that was asked for last, of a loop that tells in which thread it runs.
        closed: why there are to be no more calls.
    """

    __slots__ = ("by_loop", "closed", "latest")

    def __init__(self) -> None:
        self.closed: Unavailable | None = None
        self.by_loop: dict[asyncio.AbstractEventLoop, Driver] = {}
        self.latest: Driver | None = None

    def clear(self) -> None:
        """Forget them all."""
        self.by_loop.clear()
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
        self._setting_up: asyncio.Future[None] | None = None
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
            return cast(B, await self._merged(x))
        driver = self._drivers.latest
        # the loop's own record of its thread: to ask asyncio costs Python 3.11 a system call
        if driver is None or driver.loop._thread_id != get_ident():  # type: ignore[attr-defined]
            driver = self._driver()
        if _inside.get() is driver:
            raise self._reentry()
        request = AwaitedRequest(x, INFINITY if self._timeout_s is None else driver.clock() + self._timeout_s)
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
        driver = self._driver()
        if _inside.get() is driver:
            raise self._reentry()
        items = list(xs)
        deadline = INFINITY if self._timeout_s is None else driver.clock() + self._timeout_s
        requests = [AwaitedRequest(x, deadline) for x in items]
        for request, size in zip(requests, self._settings.sizes(items) or [1] * len(items), strict=True):
            request.patient = True
            request.size = size
            request.future = driver.loop.create_future()
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
        return cast("list[B]", done)

    async def close(self) -> None:
        """Wait for the calls of this loop and refuse new ones of any; a model that was set up here is torn down."""
        drivers = self._drivers
        drivers.closed = self._closed()
        here = drivers.by_loop.get(asyncio.get_running_loop())
        if here is not None:
            here.poll()  # those who have called before this are to be served
        for loop, driver in drivers.by_loop.items():
            driver.pipeline.close(drivers.closed)
            if driver is not here:
                with contextlib.suppress(RuntimeError):  # it is closed
                    loop.call_soon_threadsafe(driver.poll)  # nothing waits for company any more
        if here is not None:
            await here.stop(timeout_s=None)
            here.pipeline.close(drivers.closed)  # in our words, not those of a service
        if isinstance(self._function, type) and not self._unset:
            self._unset = True  # torn down once
            await self._invoker.tear_down()

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
        one._run_batch = functools.partial(self._run_for, weakref.ref(instance))
        return one

    # -- inside

    def _reentry(self) -> RuntimeError:
        return RuntimeError(
            f"{self.__name__} was called from inside itself: the call would wait for the batch that makes it."
            " Call the plain function instead"
        )

    async def _merged(self, x: Any) -> Any:
        pieces = self._settings.pieces(x)
        results = await self.many(pieces)
        return results[0] if len(results) == 1 else merging.merge(results)

    def _driver(self) -> Driver:
        """The running loop's line."""
        loop = asyncio.get_running_loop()
        driver = self._drivers.by_loop.get(loop) or self._open(loop)
        if hasattr(loop, "_thread_id"):
            self._drivers.latest = driver
        return driver

    def _open(self, loop: asyncio.AbstractEventLoop) -> Driver:
        """A line for a loop that has none. Lines of loops that are gone end here."""
        drivers = self._drivers.by_loop
        for other in [other for other in drivers if other.is_closed()]:
            lost = drivers.pop(other).pipeline.unanswered
            if lost:
                logger.warning("%d calls of %s were never answered: their event loop is closed", lost, self.__name__)
        pipeline = Pipeline([self._settings.batcher(self.__name__)], slo_s=self._settings.slo_s)
        driver = Driver(pipeline, NoStats(self.__name__, pipeline))
        stage = TaskStage(driver, functools.partial(self._run_batch, driver), self._settings.max_in_flight_batches)
        driver.executors = [stage]
        stage.start()
        if self._drivers.closed is not None:
            pipeline.close(self._drivers.closed)
        drivers[loop] = driver
        return driver

    def start_anew(self) -> None:
        """In a forked child: the parent's loops and their tasks are not here."""
        self._drivers.clear()
        for _, drivers in self._bound.values():
            drivers.clear()
        self._bound.clear()

    async def _run(
        self, driver: Driver, items: list[Any], trouble: list[Trouble]
    ) -> tuple[list[Any], dict[int, Exception] | None]:
        _inside.set(driver)
        if self._unset:
            await self._set_up()
        async with self._lock:
            return shared_out(await self._invoker.run(items, trouble, sound=True))

    async def _run_for(
        self, instance: weakref.ref[Any], driver: Driver, items: list[Any], trouble: list[Trouble]
    ) -> Any:
        """`_run` of a method: its line must not keep the instance alive, its callers do."""
        return await self.__get__(instance())._run(driver, items, trouble)

    async def _set_up(self) -> None:
        """Once, before the first batch; if it fails, that batch fails and the next one tries again."""
        if self._setting_up is None:
            self._setting_up = asyncio.ensure_future(self._invoker.set_up())
        try:
            await asyncio.shield(self._setting_up)
            self._unset = False
        finally:
            self._setting_up = None
