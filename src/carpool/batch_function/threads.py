"""Batch functions over a `def`: callers are threads, one of which runs the batch for the others."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Generator, Iterable, Sequence
from itertools import chain
from math import inf
from typing import Any, Generic, Self, TypeVar, cast, overload

from carpool.batch_function.base import Bindable, LoopCheck, Settings, ThisProcess, invoker_of, live_functions
from carpool.engine.call import merge as merging
from carpool.engine.call.invoke import Invoker
from carpool.engine.call.lock import execution_lock
from carpool.engine.call.results import Trouble, run_now
from carpool.engine.drive.failures import BatchOutcome, as_outcome
from carpool.engine.drive.threads import LineDriver, ThreadWaiter
from carpool.engine.observe.function_stats import FunctionSnapshot
from carpool.engine.request import Request
from carpool.errors import DeadlineExceeded, Unavailable
from carpool.service.checks import flag, optional_seconds

A = TypeVar("A")
B = TypeVar("B")


class Ticket(Generic[B]):
    """An item that was put into the line by a function's `submit`, to get its result later.

    The item is run when any caller waits for the function (for this ticket, or in a call), or when
    the function is closed. With `submit(x, lead=True)` it may be run at once. A task awaits the
    ticket: `await f.submit(x)` shares batches with the callers in threads.
    """

    def __init__(self, owner: ThreadBatch[Any, B], waiter: ThreadWaiter) -> None:
        self._owner = owner
        self._waiter = waiter
        self._generation = owner._driver.generation

    def __repr__(self) -> str:
        return f"<Ticket of {self._owner.__name__}, {'done' if self.done() else 'waiting'}>"

    def done(self) -> bool:
        """Report whether the result is there."""
        return not self._waiter.pending

    def result(self, timeout_s: float | None = None) -> B:
        """Wait for the result and return it. This thread may run the batch.

        Args:
            timeout_s: How many seconds to wait; None for no limit. Afterwards the item is still in
                the line, and `result` may be called again.

        Raises:
            TimeoutError: The result was not there in time.
            DeadlineExceeded: The function's own `timeout_s` has passed since `submit`.
            RuntimeError: This thread is inside the function, or the process was forked since
                `submit`.
            Exception: The function raised it.
        """
        optional_seconds("timeout_s", timeout_s)
        driver = self._owner._driver
        if self._waiter.pending:
            driver.check_reentry()
            if self._generation is not driver.generation:
                raise driver.forked()
        if not driver.wait(self._waiter, self._owner._run, timeout_s):
            raise DeadlineExceeded(f"no result of {self._owner.__name__} within {timeout_s} s")
        return self._owner._answer(self._waiter)

    def __await__(self) -> Generator[Any, None, B]:
        """Await the result in a task; threads of its loop's default executor wait and lead.

        A task that is cancelled takes the item out of the line.

        Raises: what `result` does.
        """
        return self._awaited().__await__()

    def cancel(self) -> bool:
        """Take the item out of the line, so that it is not run if it still waits.

        Returns:
            Whether it was cancelled; False if the result was there already.

        Raises:
            RuntimeError: The process was forked since `submit`.
        """
        if self._generation is not self._owner._driver.generation:
            raise self._owner._driver.forked()
        return self._owner._driver.leave(self._waiter, Unavailable("the ticket was cancelled", code="cancelled"))

    async def _awaited(self) -> B:
        driver = self._owner._driver
        if self._waiter.pending:
            if self._generation is not driver.generation:
                raise driver.forked()
            run = self._owner._run
            try:
                await driver.awaited.wait(self._waiter, lambda waiter, most_s: driver.wait(waiter, run, most_s))
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self._owner._answer(self._waiter)


class ThreadBatch(Bindable, Generic[A, B]):
    """A function whose callers, threads, share its calls; made by `carpool.batch`."""

    def __init__(
        self,
        function: Any,
        settings: Settings,
        invoker: Invoker,
        driver: LineDriver | None = None,
        loop_check: LoopCheck | None = None,
    ) -> None:
        super().__init__(function, settings)
        self._loop_check = loop_check or LoopCheck(self.__name__)
        self._invoker = invoker
        self._made_here = isinstance(function, type)  # the model was made and set up here, and is to be torn down
        self._closing = threading.RLock()
        self._each_counts_as_one = settings.each_counts_as_one
        self._timeout_s = settings.timeout_s
        self._driver = driver or self._new_driver()
        if driver is None:
            live_functions.add(self)

    def __call__(self, x: A, *, priority: int = 0) -> B:
        """Return the function's result for one item.

        Args:
            x: The item, or a chunk of rows with `merge`.
            priority: From -100 to 100. Larger goes first; an item that is passed over rises by a
                level a second.

        Raises:
            DeadlineExceeded: `timeout_s` passed before the item's batch began to run in this
                thread, or was done in another one.
            Unavailable: The function is closed.
            Overloaded: The item could not be answered within `slo_s`, and the policy refuses such
                items.
            RuntimeError: This is a call from inside the function itself.
            Exception: The function raised it. Each caller of a batch that raised gets it.
        """
        if self._each_counts_as_one and not priority:
            lone = self._driver.call_alone(x, self._timeout_s, self._run)
            if lone is not None:
                if lone.began >= self._loop_check.due:
                    self._loop_check.check(lone.began)
                if lone.error is not None:
                    raise lone.error
                return lone.result  # type: ignore[return-value]
        waiter = self._run_through(self._settings.pieces(x), priority)
        request = waiter.requests[0]
        if request.admitted >= self._loop_check.due:
            self._loop_check.check(request.admitted)
        if len(waiter.requests) > 1:
            return self._answer(waiter)
        if request.error is not None:
            raise request.error
        return request.result  # type: ignore[return-value]

    def many(self, xs: Iterable[A], *, priority: int = 0) -> list[B]:
        """Return the results for several items of one caller, in the order of the items.

        Args:
            xs: The items, or chunks of rows with `merge`.
            priority: That of all of them, as in a call.

        Raises:
            Exception: The error of the first item that failed; otherwise as in a call.
        """
        if not self._settings.merge:
            pieces: list[list[Any]] | None = None
            waiter = self._run_through(list(xs), priority)
        else:
            pieces = [self._settings.pieces(x) for x in xs]
            waiter = self._run_through(list(chain.from_iterable(pieces)), priority)
        joined = waiter.requests[0].admitted if waiter.requests else -inf  # of no items: nobody has waited
        if joined >= self._loop_check.due:
            self._loop_check.check(joined)
        if pieces is None:
            return [_result_of(request) for request in waiter.requests]
        return merging.joined_by_caller([_result_of(request) for request in waiter.requests], pieces)

    def submit(self, x: A, *, lead: bool = False, priority: int = 0) -> Ticket[B]:
        """Put an item into the line without waiting for its result, and return its ticket.

        Args:
            x: The item, or a chunk of rows with `merge`.
            lead: Whether this thread runs the batch at once, for itself and for all who wait, if no
                other thread runs one. Then the ticket is done, and its `result` raises what the
                function raised. If another thread does, or the policy holds the batch back for more
                items, the ticket is like any other.
            priority: As in a call.

        Raises:
            DeadlineExceeded: With `lead`, the execution lock could not be had within `timeout_s`.
            Unavailable: The function is closed.
            RuntimeError: This is a call from inside the function itself.
            TypeError: `lead` is not True or False.
        """
        flag("lead", lead)
        driver = self._driver
        pieces = self._settings.pieces(x)
        sizes, lengths, lanes = self._settings.shares(pieces, priority)
        waiter = driver.join(pieces, sizes, self._timeout_s, lanes, lengths)
        if lead:
            driver.run_at_once(waiter, self._run)
        return Ticket(self, waiter)

    def stats(self) -> FunctionSnapshot:
        """Return the figures so far; of a method, for its instance."""
        return self._driver.snapshot()

    def explain(self) -> dict[str, Any]:
        """Return why the policy decides as it does.

        Raises:
            RuntimeError: A signal handler or a `__del__` called this in a thread that was inside
                the line.
        """
        return self._driver.explain()

    def close(self) -> None:
        """Refuse new callers, run the items in the line (those of tickets, too), and wait for them.

        A model that was set up by `carpool.batch` is then torn down. It may be called several
        times, and by several threads at once.

        Raises:
            RuntimeError: This is a call from inside the function itself.
            Exception: The model's `teardown` raised it.
        """
        self._driver.drain(self._run, self._closed_error())
        with self._closing:
            if self._made_here:
                self._made_here = False
                run_now(self._invoker.tear_down())

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: object, owner: type | None = None) -> Self: ...
    def __get__(self, instance: object | None, owner: type | None = None) -> Self:
        if instance is None:
            return self
        bound = self._over_items(functools.partial(self._function, instance))
        driver = self._of_instance(instance, self._new_driver)
        invoker = invoker_of(bound, self._settings, is_async=False, sibling=self._invoker)
        method = type(self)(self._function, self._settings, invoker, driver, self._loop_check)
        self._bind(method, instance)
        return method

    # -- inside

    def _new_driver(self) -> LineDriver:
        settings, name = self._settings, self.__name__
        return LineDriver(
            name,
            settings.new_batcher(name),
            slots=settings.max_in_flight_batches,
            slo_s=settings.slo_s,
            execution_lock=None if settings.execution_lock is None else execution_lock(settings.execution_lock, name),
        )

    def start_anew(self) -> None:
        self._closing = threading.RLock()
        of_methods = [driver for _, driver in list(self._bound.values())]  # the program may hold bound methods
        for driver in (self._driver, *of_methods):
            driver.start_anew(self._settings.new_batcher(self.__name__))

    def _run_through(self, items: Sequence[Any], priority: int) -> ThreadWaiter:
        driver = self._driver
        sizes, lengths, lanes = self._settings.shares(items, priority)
        waiter = driver.join(items, sizes, self._timeout_s, lanes, lengths)
        driver.wait(waiter, self._run)
        return waiter

    def _answer(self, waiter: ThreadWaiter) -> B:
        """Return the result of an item, joined if it was cut up. Raises its error."""
        results = [_result_of(request) for request in waiter.requests]
        return cast(B, results[0] if len(results) == 1 else merging.joined(results))

    def _run(self, items: list[Any]) -> BatchOutcome:
        if self._ran_in[0] is not ThisProcess.mark:
            self._note_process()
        trouble: list[Trouble] = []
        return as_outcome(self._invoker.run_now(items, trouble), trouble)


def _result_of(request: Request) -> Any:
    if request.error is not None:
        raise request.error
    return request.result
