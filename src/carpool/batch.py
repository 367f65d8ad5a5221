"""`@carpool.batch`: many callers of one function share its calls, inside a program and without a process.

Over a `def`, callers are threads, and one of them runs the batch for the others. Over an `async def`, callers are
tasks, and a batch is a task. What the function takes and gives is a list; what callers see is one item.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import logging
import os
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from threading import get_ident
from typing import Any, Generic, Literal, Protocol, TypeVar, cast, overload

from carpool import merge as merging
from carpool.core.batcher import INFINITY, Batcher
from carpool.core.pipeline import Pipeline
from carpool.core.queue import Queue
from carpool.drive.aio import Driver
from carpool.drive.tasks import AwaitedRequest, TaskStage
from carpool.drive.threads import ExecutionLock, LeaderFollower, Outcome, Seat
from carpool.errors import DeadlineExceeded, Unavailable
from carpool.invoke import Invoker, is_async
from carpool.merge import Merge, Split
from carpool.model import AnyModel, Model, name_of, traits_of
from carpool.observe.stats import NoStats
from carpool.oom import OomErrors, names_of
from carpool.parts import Caller, Failed, Trouble, run_now
from carpool.policy import Policy
from carpool.request import Request
from carpool.settings import at_least, check_policy, not_negative, policy_for, positive
from carpool.weigh import units

logger = logging.getLogger("carpool")

A = TypeVar("A")
B = TypeVar("B")

_inside: contextvars.ContextVar[Any] = contextvars.ContextVar("carpool_inside", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `batch` was told; see there."""

    max_batch_size: int = 64
    size: Callable[[Any], int] | None = None
    merge: bool | Merge | None = None
    split: Split | None = None
    policy: Policy | str | None = None
    max_queue_delay_s: float | None = None
    max_queue_size: int = 1024
    max_in_flight_batches: int = 1
    timeout_s: float | None = None
    slo_s: float | None = None
    execution_lock: Any = None
    isolate_errors: bool = False
    oom_errors: OomErrors | None = ()

    def __post_init__(self) -> None:
        at_least("max_batch_size", self.max_batch_size, 1)
        at_least("max_queue_size", self.max_queue_size, 1)
        at_least("max_in_flight_batches", self.max_in_flight_batches, 1)
        positive("timeout_s", self.timeout_s)
        positive("slo_s", self.slo_s)
        not_negative("max_queue_delay_s", self.max_queue_delay_s)
        check_policy(self.policy)
        if self.oom_errors is not None:
            names_of(self.oom_errors)
        if callable(self.merge) != (self.split is not None):
            raise ValueError("a merge function needs a split function, and the other way round")

    def batcher(self, name: str) -> Batcher:
        """A queue and a policy for one line."""
        policy = policy_for(self.policy, self.max_batch_size, self.max_queue_delay_s, slo_s=self.slo_s)
        return Batcher(name, policy, Queue(self.max_queue_size))

    def function(self, function: Callable[..., Any], is_async: bool) -> Callable[..., Any]:
        """The function over a list of chunks that a function over one merged input makes; else itself."""
        if not self.merge:
            return function
        merge = self.merge if callable(self.merge) else merging.merge
        split = self.split or merging.split
        count = self.size or merging.rows

        def together(chunks: list[Any]) -> Any:
            return split(function(merge(chunks)), [count(chunk) for chunk in chunks])

        async def together_async(chunks: list[Any]) -> Any:
            return split(await function(merge(chunks)), [count(chunk) for chunk in chunks])

        return together_async if is_async else together

    def pieces(self, x: Any) -> list[Any]:
        """A chunk of more rows than a batch may have, cut up; only where we know how."""
        if self.merge is not True or merging.rows(x) <= self.max_batch_size:
            return [x]
        step = self.max_batch_size
        return [merging.cut(x, begin, begin + step) for begin in range(0, merging.rows(x), step)]

    def sizes(self, items: Sequence[Any]) -> list[int] | None:
        """How much of a batch each item takes up; None if all count for one.

        Raises:
            ModelError: the size function returned no whole number of at least 1.
            Exception: whatever it raises.
        """
        if self.size is None and not self.merge:
            return None
        return [self.weigh(item) for item in items]

    def weigh(self, item: Any) -> int:
        """How much of a batch an item takes up. Raises what `sizes` does."""
        count = self.size or merging.rows
        return units(count(item), "@carpool.batch")


class Ticket(Generic[B]):
    """What `submit` gives: a place in the line, to be traded for the result later.

    Nobody runs it until somebody waits, for this ticket or another call of the same function, or closes it.
    """

    def __init__(self, owner: ThreadBatch[Any, B], seats: Seat) -> None:
        self._owner = owner
        self._seat = seats

    def __repr__(self) -> str:
        return f"<Ticket of {self._owner.__name__}, {'done' if self.done() else 'waiting'}>"

    def done(self) -> bool:
        """Whether the result is there."""
        return not self._seat.pending

    def result(self, timeout_s: float | None = None) -> B:
        """Wait for the result; this thread may run the batch.

        Args:
            timeout_s: how long to wait; the ticket keeps its place.

        Raises:
            TimeoutError: the result was not there in time.
            DeadlineExceeded: the function's own `timeout_s` has passed since `submit`.
            Exception: what the function raised.
        """
        positive("timeout_s", timeout_s)
        if not self._owner._line.wait(self._seat, self._owner._run, timeout_s):
            raise DeadlineExceeded(f"no result of {self._owner.__name__} within {timeout_s} s")
        return self._owner._answer(self._seat)

    def cancel(self) -> bool:
        """Give up the place; the item is not run any more if it still waits. False if the result was there already."""
        return self._owner._line.leave(self._seat, Unavailable("the ticket was cancelled", code="cancelled"))


class _Bindable:
    """What both kinds have in common: a name, and one batcher per instance when used on a method."""

    __name__: str

    def __init__(self, function: Any, settings: Settings) -> None:
        functools.update_wrapper(cast(Any, self), function, updated=())  # a class's own attributes stay its own
        self.__name__ = name_of(function)
        self._function = function
        self._settings = settings
        self._bound: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def __repr__(self) -> str:
        return f"<carpool.batch of {self.__name__}>"

    def _closed(self) -> Unavailable:
        return Unavailable(f"{self.__name__} is closed", code="stopped")

    def _line_of(self, instance: Any, new: Callable[[], Any]) -> Any:
        """The line of one instance, which ends with it."""
        key = id(instance)
        found = self._bound.get(key)
        if found is not None and found[0]() is instance:
            return found[1]
        try:
            reference = weakref.ref(instance, lambda _: self._bound.pop(key, None))
        except TypeError:
            kind = type(instance).__name__
            raise TypeError(
                f"{kind} objects cannot be referred to weakly: add '__weakref__' to the __slots__ of {kind}"
            ) from None
        return self._bound.setdefault(key, (reference, new()))[1]


class ThreadBatch(_Bindable, Generic[A, B]):
    """A function whose callers, threads, share its calls. Made by `batch`."""

    def __init__(self, function: Any, settings: Settings, invoker: Invoker, line: LeaderFollower | None = None) -> None:
        super().__init__(function, settings)
        self._invoker = invoker
        self._made_here = isinstance(function, type)  # and set up
        self._line = line or self._new_line()
        if line is None:
            _alive.add(self)

    def __call__(self, x: A) -> B:
        """The function's result for one item.

        Raises:
            DeadlineExceeded: `timeout_s` has passed before the item's batch had begun to run in this thread, or was
                done in another.
            RuntimeError: this is a call from inside the function itself.
            Exception: what the function raised; each caller of a batch that raised gets it.
        """
        return self._answer(self._run_through(self._settings.pieces(x)))

    def many(self, xs: Iterable[A]) -> list[B]:
        """The results for several items of one caller, in their order. If one failed, its error is raised."""
        seat = self._run_through(list(xs))
        return [_result_of(request) for request in seat.requests]

    def submit(self, x: A) -> Ticket[B]:
        """Take a place in the line without waiting."""
        pieces = self._settings.pieces(x)
        return Ticket(self, self._line.join(pieces, self._settings.sizes(pieces), self._settings.timeout_s))

    def close(self) -> None:
        """Run what is in the line, tickets too, and refuse new callers; a model that was set up here is torn down."""
        self._line.drain(self._run, self._closed())
        if self._made_here:
            self._made_here = False
            run_now(self._invoker.tear_down())

    @overload
    def __get__(self, instance: None, owner: type) -> ThreadBatch[A, B]: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> ThreadBatch[A, B]: ...
    def __get__(self, instance: object | None, owner: type | None = None) -> ThreadBatch[A, B]:
        if instance is None:
            return self
        bound = functools.partial(self._function, instance)
        line = self._line_of(instance, self._new_line)
        invoker = _invoker(bound, self._settings, is_async=False, like=self._invoker)
        return ThreadBatch(self._function, self._settings, invoker, line)

    # -- inside

    def _new_line(self) -> LeaderFollower:
        settings = self._settings
        return LeaderFollower(
            self.__name__,
            settings.batcher(self.__name__),
            slots=settings.max_in_flight_batches,
            slo_s=settings.slo_s,
            execution_lock=cast("ExecutionLock | None", settings.execution_lock),
        )

    def _start_anew(self) -> None:
        """In a forked child: whoever was in the line stayed in the parent."""
        self._line = self._new_line()
        self._bound.clear()

    def _run_through(self, items: Sequence[Any]) -> Seat:
        line = self._line
        seat = line.join(items, self._settings.sizes(items), self._settings.timeout_s)
        line.wait(seat, self._run)
        return seat

    def _answer(self, seat: Seat) -> B:
        results = [_result_of(request) for request in seat.requests]
        return cast(B, results[0] if len(results) == 1 else merging.merge(results))

    def _run(self, items: list[Any]) -> Outcome:
        started = time.monotonic()
        trouble: list[Trouble] = []
        results, errors = _shared_out(run_now(self._invoker.run(items, trouble, sound=True)))
        return results, errors, time.monotonic() - started, trouble


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


class AsyncBatch(_Bindable, Generic[A, B]):
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
        self._timeout_s = settings.timeout_s
        if drivers is None:
            _alive.add(self)

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
        for driver in drivers.by_loop.values():
            driver.pipeline.close(drivers.closed)
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
        invoker = _invoker(bound, self._settings, is_async=True, like=self._invoker)
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

    def _start_anew(self) -> None:
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
        lock = self._settings.execution_lock
        if lock is None:
            return _shared_out(await self._invoker.run(items, trouble, sound=True))
        async with lock:
            return _shared_out(await self._invoker.run(items, trouble, sound=True))

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


class Decorator(Protocol):
    """`batch(...)` with settings: to be applied to a function."""

    @overload
    def __call__(self, function: Callable[[list[A]], Awaitable[Sequence[B]]], /) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: Callable[[list[A]], Sequence[B]], /) -> ThreadBatch[A, B]: ...
    @overload
    def __call__(self, function: Callable[[Any, list[A]], Awaitable[Sequence[B]]], /) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: Callable[[Any, list[A]], Sequence[B]], /) -> ThreadBatch[A, B]: ...


class MergeDecorator(Protocol):
    """`batch(merge=...)`: to be applied to a function over whole arrays. An awaitable fits both: it goes first."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[[A], Awaitable[B]], /
    ) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: Callable[[A], B], /) -> ThreadBatch[A, B]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[[Any, A], Awaitable[B]], /
    ) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: Callable[[Any, A], B], /) -> ThreadBatch[A, B]: ...


@overload
def batch(function: type[Model] | Model, /) -> ThreadBatch[Any, Any]: ...
@overload
def batch(function: Callable[[list[A]], Awaitable[Sequence[B]]], /) -> AsyncBatch[A, B]: ...
@overload
def batch(function: Callable[[Any, list[A]], Awaitable[Sequence[B]]], /) -> AsyncBatch[A, B]: ...
@overload
def batch(function: Callable[[list[A]], Sequence[B]], /) -> ThreadBatch[A, B]: ...
@overload
def batch(function: Callable[[Any, list[A]], Sequence[B]], /) -> ThreadBatch[A, B]: ...
@overload
def batch(
    function: None = None,
    /,
    *,
    merge: Literal[True] | Merge,
    split: Split | None = None,
    max_batch_size: int = 64,
    size: Callable[[Any], int] | None = None,
    policy: Policy | str | None = None,
    max_queue_delay_s: float | None = None,
    max_queue_size: int = 1024,
    max_in_flight_batches: int = 1,
    timeout_s: float | None = None,
    slo_s: float | None = None,
    execution_lock: Any = None,
    isolate_errors: bool = False,
    oom_errors: OomErrors | None = (),
) -> MergeDecorator: ...
@overload
def batch(
    function: None = None,
    /,
    *,
    max_batch_size: int = 64,
    size: Callable[[Any], int] | None = None,
    policy: Policy | str | None = None,
    max_queue_delay_s: float | None = None,
    max_queue_size: int = 1024,
    max_in_flight_batches: int = 1,
    timeout_s: float | None = None,
    slo_s: float | None = None,
    execution_lock: Any = None,
    isolate_errors: bool = False,
    oom_errors: OomErrors | None = (),
) -> Decorator: ...
def batch(function: Any = None, /, **settings: Any) -> Any:
    """Let the callers of a function share its calls: `@carpool.batch` or `@carpool.batch(max_batch_size=32)`.

    Args:
        function: takes a list of items and returns a sequence of as many results, `def` or `async def`; or a `Model`
            class or instance. A class is constructed and set up here (an async one before its first batch); an
            instance is taken as it is.
        max_batch_size: most items in one call; with `size` or `merge`, most of their sizes or rows.
        size: how much of a batch an item takes up (rows, tokens): a whole number of at least 1 (0 counts for 1).
        merge: True if the function takes one merged list, numpy array or dict of arrays and returns one with as many
            rows; callers then bring chunks of any number of rows. Or a function that merges a list of chunks.
        split: with a merge function, cuts its function's output into chunks of the given row counts.
        policy: when to go: a policy object or its name; defaults to "adaptive".
        max_queue_delay_s: longest time an item is held back only to fill a batch.
        max_queue_size: items that may wait; further callers wait for room.
        max_in_flight_batches: batches that may run at a time.
        timeout_s: longest time of a call; None for no limit.
        slo_s: the latency that calls should be answered within. A policy that plans (adaptive, deadline, cork) serves
            what can make it and refuses what cannot, with `Overloaded`; what was not refused and is late is answered.
        execution_lock: held while the function runs: a `carpool.Lock`, `threading.Lock` or `RLock` for a `def`, an
            `asyncio.Lock` for an `async def`. Share one between several functions, or with code of your own.
        isolate_errors: whether a batch that raises is run again in parts, so that only the guilty items fail.
        oom_errors: exception classes, or their full names, that mean "out of memory", besides MemoryError and torch's.
            A batch that raises one is run again in smaller calls, and later batches are smaller. None: it fails as with
            any other error.

    Raises:
        ValueError: a setting is out of range.
        TypeError: there is no such setting, or `function` is no function or model.
    """
    known = {field.name for field in fields(Settings)}
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise TypeError(f"batch has no setting {unknown[0]!r}; there are {', '.join(sorted(known))}")
    checked = Settings(**settings)
    if function is None:
        return lambda function: _batched(function, checked)
    return _batched(function, checked)


_alive: weakref.WeakSet[ThreadBatch[Any, Any] | AsyncBatch[Any, Any]] = weakref.WeakSet()


def _batched(function: Any, settings: Settings) -> Any:
    if isinstance(function, staticmethod | classmethod):
        raise TypeError(f"put @{type(function).__name__} above @carpool.batch, not below it")
    asynchronous = is_async(function)
    lock = settings.execution_lock
    if lock is not None and asynchronous != hasattr(lock, "__aenter__"):
        right = "an asyncio.Lock" if asynchronous else "a carpool.Lock, a threading.Lock or an RLock"
        raise TypeError(f"the execution_lock of {name_of(function)} must be {right}")
    invoker = _invoker(function, settings, asynchronous)
    if asynchronous:
        return AsyncBatch(function, settings, invoker, unset=isinstance(function, type))
    if isinstance(function, type):
        run_now(invoker.set_up())
    return ThreadBatch(function, settings, invoker)


def _invoker(function: AnyModel | Model, settings: Settings, is_async: bool, like: Invoker | None = None) -> Invoker:
    """What calls a function; `like` that of the same function of another instance, with which it shares a budget."""
    model = function
    if not isinstance(function, type | Model):
        function = settings.function(function, is_async)
    elif settings.merge:
        raise TypeError("merge is for functions; a Model's predict takes a list of items")
    if like is not None:
        return Invoker(function, {}, like.traits, like.caller, batched=True)
    caller = Caller(
        isolate_errors=settings.isolate_errors,
        oom_errors=None if settings.oom_errors is None else names_of(settings.oom_errors),
        through=(GeneratorExit, KeyboardInterrupt, asyncio.CancelledError),
        may_wait=is_async,
    )
    traits = traits_of(type(model) if isinstance(model, Model) else model, batched=True)
    return Invoker(function, {}, traits, caller, batched=True)


def _shared_out(results: list[Any]) -> tuple[list[Any], dict[int, Exception] | None]:
    """Errors apart from results. An error that several items share goes to the first as it is, to others as a copy."""
    if Failed not in set(map(type, results)):
        return results, None
    errors: dict[int, Exception] = {}
    given: set[int] = set()
    for i, value in enumerate(results):
        if isinstance(value, Failed):
            error = cast(Exception, value.error)
            errors[i] = _copy_of(error) if id(error) in given else error
            given.add(id(error))
    return results, errors


def _copy_of(error: Exception) -> Exception:
    try:
        twin = copy.copy(error)
    except Exception:
        return error
    if type(twin) is not type(error):
        return error
    twin.__cause__ = error
    return twin


def _result_of(request: Request) -> Any:
    if request.error is not None:
        raise request.error
    return request.result


def _forked() -> None:
    for batched in list(_alive):
        batched._start_anew()


os.register_at_fork(after_in_child=_forked)
