"""`@carpool.batch` over a `def`: callers are threads, and one of them runs the batch for the others."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Generic, TypeVar, cast, overload

from carpool.batch_function.batched import Bindable, Settings, alive, invoker_of
from carpool.call import merge as merging
from carpool.call.invoke import Invoker
from carpool.call.lock import execution_lock
from carpool.call.retry import Trouble, run_now
from carpool.drive.failures import shared_out
from carpool.drive.threads import LeaderFollower, Outcome, Seat
from carpool.errors import DeadlineExceeded, Unavailable
from carpool.request import Request
from carpool.service.settings import flag, optional_seconds

A = TypeVar("A")
B = TypeVar("B")


class Ticket(Generic[B]):
    """What `submit` gives: a place in the line, to be traded for the result later.

    Nobody runs it until somebody waits, for this ticket or another call of the same function, or closes it; unless it
    was submitted with `lead=True`.
    """

    def __init__(self, owner: ThreadBatch[Any, B], seats: Seat) -> None:
        self._owner = owner
        self._seat = seats
        self._generation = owner._line.generation

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
            RuntimeError: this thread is inside the function; or the process was forked since `submit`.
            Exception: what the function raised.
        """
        optional_seconds("timeout_s", timeout_s)
        line = self._owner._line
        if self._seat.pending:
            line.check_reentry()
            if self._generation is not line.generation:
                raise line.forked()
        if not line.wait(self._seat, self._owner._run, timeout_s):
            raise DeadlineExceeded(f"no result of {self._owner.__name__} within {timeout_s} s")
        return self._owner._answer(self._seat)

    def cancel(self) -> bool:
        """Give up the place; the item is not run any more if it still waits. False if the result was there already."""
        if self._generation is not self._owner._line.generation:
            raise self._owner._line.forked()
        return self._owner._line.leave(self._seat, Unavailable("the ticket was cancelled", code="cancelled"))


class ThreadBatch(Bindable, Generic[A, B]):
    """A function whose callers, threads, share its calls. Made by `batch`."""

    def __init__(self, function: Any, settings: Settings, invoker: Invoker, line: LeaderFollower | None = None) -> None:
        super().__init__(function, settings)
        self._invoker = invoker
        self._made_here = isinstance(function, type)  # and set up
        self._closing = threading.RLock()
        self._weightless = settings.size is None and not settings.merge
        self._timeout_s = settings.timeout_s
        self._line = line or self._new_line()
        if line is None:
            alive.add(self)

    def __call__(self, x: A) -> B:
        """The function's result for one item.

        Raises:
            DeadlineExceeded: `timeout_s` has passed before the item's batch had begun to run in this thread, or was
                done in another.
            RuntimeError: this is a call from inside the function itself.
            Exception: what the function raised; each caller of a batch that raised gets it.
        """
        if self._weightless:
            lone = self._line.alone(x, self._timeout_s, self._run)
            if lone is not None:
                if lone.error is not None:
                    raise lone.error
                return cast(B, lone.result)
        return self._answer(self._run_through(self._settings.pieces(x)))

    def many(self, xs: Iterable[A]) -> list[B]:
        """The results for several items of one caller, in their order. If one failed, its error is raised."""
        if not self._settings.merge:
            seat = self._run_through(list(xs))
            return [_result_of(request) for request in seat.requests]
        pieces = [self._settings.pieces(x) for x in xs]
        seat = self._run_through(list(chain.from_iterable(pieces)))
        return merging.joined_by_caller([_result_of(request) for request in seat.requests], pieces)

    def submit(self, x: A, *, lead: bool = False) -> Ticket[B]:
        """Take a place in the line without waiting for the others in it.

        Args:
            x: the item.
            lead: whether this thread runs the batch there and then, for itself and for those who wait, if nobody else
                runs one: then the ticket is done, and what the function raised is raised by its `result`. If somebody
                does, or the policy holds the batch back for more company, it is a ticket like any other.

        Raises:
            DeadlineExceeded: the execution lock, which one who leads waits for, could not be had in time.
            RuntimeError: this is a call from inside the function itself.
        """
        flag("lead", lead)
        line = self._line
        pieces = self._settings.pieces(x)
        sizes, lanes = self._settings.places(pieces)
        seat = line.join(pieces, sizes, self._timeout_s, lanes)
        if lead:
            line.lead(seat, self._run)
        return Ticket(self, seat)

    def close(self) -> None:
        """Run what is in the line, tickets too, and refuse new callers; a model that was set up here is torn down.

        It waits for the batches that run, in whatever thread. It may be called several times, also at once.

        Raises:
            RuntimeError: this is a call from inside the function itself.
        """
        self._line.drain(self._run, self._closed())
        with self._closing:
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
        invoker = invoker_of(bound, self._settings, is_async=False, like=self._invoker)
        one: ThreadBatch[A, B] = ThreadBatch(self._function, self._settings, invoker, line)
        self._bind(one, instance)
        return one

    # -- inside

    def _new_line(self) -> LeaderFollower:
        settings, name = self._settings, self.__name__
        return LeaderFollower(
            name,
            settings.batcher(name),
            slots=settings.max_in_flight_batches,
            slo_s=settings.slo_s,
            execution_lock=None if settings.execution_lock is None else execution_lock(settings.execution_lock, name),
        )

    def start_anew(self) -> None:
        """In a forked child: whoever was in the line stayed in the parent."""
        self._closing = threading.RLock()
        for line in (self._line, *[line for _, line in list(self._bound.values())]):  # bound methods may have been kept
            line.start_anew(self._settings.batcher(self.__name__))

    def _run_through(self, items: Sequence[Any]) -> Seat:
        line = self._line
        sizes, lanes = self._settings.places(items)
        seat = line.join(items, sizes, self._settings.timeout_s, lanes)
        line.wait(seat, self._run)
        return seat

    def _answer(self, seat: Seat) -> B:
        results = [_result_of(request) for request in seat.requests]
        return cast(B, results[0] if len(results) == 1 else merging.joined(results))

    def _run(self, items: list[Any]) -> Outcome:
        trouble: list[Trouble] = []
        results, errors = shared_out(self._invoker.run_now(items, trouble))
        return results, errors, trouble


def _result_of(request: Request) -> Any:
    if request.error is not None:
        raise request.error
    return request.result
