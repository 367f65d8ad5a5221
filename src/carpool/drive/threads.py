"""Callers' threads drive the line themselves: the first one leads, the others sleep. No thread of ours exists.

The line (`core/line.py`) decides under one short lock; everything slow, sleeping, the execution lock and the user's
function, happens outside it. Each sleeping thread has a bell of its own, so exactly those are woken who are meant.

Those whose answers have come are woken in a chain: the leader rings for the next leader and one more, and each thread
that wakes up rings for the next. All of them would only fight for the interpreter, and the next leader with them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from carpool.clock import Clock, monotonic
from carpool.core.batcher import INFINITY, Batch, Batcher
from carpool.core.line import DONE, SLEEP, Line
from carpool.drive.trouble import learn
from carpool.errors import CarpoolError, DeadlineExceeded
from carpool.parts import Trouble
from carpool.request import Request

_LONGEST_LOCK_WAIT_S = 60.0  # for the execution lock, where no time-out bounds it

_RUNG_AT_ONCE = 2  # the next leader, and the first of the chain

Outcome = tuple[Sequence[object], dict[int, Exception] | None, float, Sequence[Trouble]]
"""The results of a batch, the errors that stand in for some, the seconds it took, and what else there is to tell."""


class ExecutionLock(Protocol):
    """`threading.Lock`, `threading.RLock`, `carpool.Lock` and their like."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...

    def release(self) -> None: ...


class Seat:
    """One caller's place in the line: what it waits for, and the bells of the threads that sleep for it.

    Args:
        requests: all with the same deadline.
        deadline: theirs.
    """

    __slots__ = ("asleep", "bells", "deadline", "pending", "requests")

    def __init__(self, requests: Sequence[Request], deadline: float) -> None:
        self.requests = requests
        self.pending = len(requests)
        self.deadline = deadline
        self.asleep = False
        self.bells: list[threading.Lock] = []
        for request in requests:
            request.caller = self

    def answered(self, request: Request) -> None:
        """One of the requests has its answer."""
        self.pending -= 1


class LeaderFollower:
    """Runs a line with its callers' threads.

    Args:
        name: of the function, for error texts.
        batcher: its queue and policy.
        slots: how many batches may run at a time.
        slo_s: how soon after their arrival callers should have their answers, if there is a goal.
        execution_lock: held while the function runs.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        batcher: Batcher,
        *,
        slots: int = 1,
        slo_s: float | None = None,
        execution_lock: ExecutionLock | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._name = name
        self._batcher = batcher
        self._line = Line(batcher, slots, slo_s)
        self._lock = threading.Lock()
        self._execution_lock = execution_lock
        self._clock = clock
        self._leaders: set[int] = set()  # threads that are inside the function
        self._chain: deque[threading.Lock] = deque()  # bells still to be rung; while there are any, somebody wakes up

    def join(self, items: Sequence[Any], sizes: Sequence[int] | None, timeout_s: float | None) -> Seat:
        """A place in the line for some items.

        Raises:
            RuntimeError: this thread is inside the function, or holds the execution lock: it would wait for itself.
        """
        self._check_reentry()
        now = self._clock()
        deadline = INFINITY if timeout_s is None else now + timeout_s
        requests = [Request(item, deadline) for item in items]
        for request in requests:
            request.patient = True
        if sizes is not None:
            for request, size in zip(requests, sizes, strict=True):
                request.size = size
        seat = Seat(requests, deadline)
        with self._lock:
            self._line.join(now, requests)
        return seat

    def wait(self, seat: Seat, run: Callable[[list[Any]], Outcome], timeout_s: float | None = None) -> bool:
        """In the thread of a caller: until its answers are there. It may lead meanwhile.

        Args:
            seat: the caller's.
            run: the user's function.
            timeout_s: look up after this time; the place in the line is kept.

        Returns:
            Whether the answers are there.

        Raises:
            DeadlineExceeded: the execution lock could not be had in time; the caller has left the line.
        """
        if seat.pending:
            self._check_reentry()
        until = INFINITY if timeout_s is None else self._clock() + timeout_s
        try:
            while (step := self._step(seat, until)) != DONE:
                if step != SLEEP:
                    self._lead(seat, step, run, until)
                if until != INFINITY and self._clock() >= until:
                    return not seat.pending
        except BaseException:  # the thread was interrupted
            self.leave(seat, None, threading.get_ident())
            raise
        return True

    def leave(self, seat: Seat, error: Exception | None, thread: int | None = None) -> bool:
        """The caller goes without its answers.

        Args:
            seat: the caller's.
            error: what other threads that wait for the same answers get to hear.
            thread: the one that was interrupted, if that is the reason.

        Returns:
            Whether any answer was still due.
        """
        with self._lock:
            self._line.leave(self._clock(), seat, thread)
            due = [request for request in seat.requests if request.caller is None]
            for request in due:
                request.error = error
            seat.pending = 0
            bells = self._bells() + seat.bells + list(self._chain)  # this thread might have been a link of the chain
            seat.bells.clear()
            self._chain.clear()
        _ring(bells)
        return bool(due)

    def drain(self, run: Callable[[list[Any]], Outcome], error: CarpoolError) -> None:
        """Refuse new callers with `error` and run what is in the line."""
        self._line.close(error)
        while True:
            with self._lock:
                waiting = [*self._line.pipeline.stages[0].queue, *self._line.pipeline.door]
            if not waiting:
                return
            seat: Any = waiting[0].caller
            self.wait(seat, run)

    # -- inside

    def _check_reentry(self) -> None:
        if threading.get_ident() in self._leaders:
            raise RuntimeError(
                f"{self._name} was called from inside itself: the call would wait for the batch that makes it."
                " Call the plain function instead"
            )
        owned = getattr(self._execution_lock, "_is_owned", None)
        if owned is not None and owned():
            raise RuntimeError(
                f"this thread already holds the execution lock of {self._name}: release it before the call"
            )

    def _step(self, seat: Seat, until: float = INFINITY) -> int:
        """Ask the line what to do, and if it is to sleep, sleep."""
        with self._lock:
            now = self._clock()
            step = self._line.step(now, seat, threading.get_ident())
            if step == SLEEP:
                bell, until = self._make_bed(seat, until)
            bells = self._bells()
        _ring(bells)
        if step == SLEEP:
            self._sleep(seat, bell, until - now)
        return step

    def _make_bed(self, seat: Seat, until: float) -> tuple[threading.Lock, float]:
        """The bell that will wake the seat's thread, and until when it may sleep."""
        bell = threading.Lock()
        bell.acquire()
        seat.bells.append(bell)
        return bell, min(until, self._line.sleep(seat))

    def _sleep(self, seat: Seat, bell: threading.Lock, seconds: float) -> None:
        timeout = -1 if seconds == INFINITY else min(max(seconds, 0.0), threading.TIMEOUT_MAX)
        if not bell.acquire(timeout=timeout):
            with self._lock:  # nobody needs to ring it any more
                if bell in seat.bells:
                    seat.bells.remove(bell)
                    return
                with suppress(ValueError):  # it is no link of the chain
                    self._chain.remove(bell)
                    return
        if self._chain:  # the bell was rung, or is just being rung
            with suppress(IndexError):  # another thread was faster
                self._chain.popleft().release()

    def _lead(self, seat: Seat, slot: int, run: Callable[[list[Any]], Outcome], until: float) -> None:
        """Run a batch with a slot that was claimed."""
        lock = self._execution_lock
        if lock is not None and not self._acquire(lock, seat, until):
            with self._lock:
                self._line.give_up(slot)
                bells = self._bells()
            _ring(bells)
            return
        try:
            with self._lock:
                now = self._clock()
                batch = self._line.lead(now, slot)
                if batch is None:
                    bell, until = self._make_bed(seat, until)
                bells = self._bells()
            _ring(bells)
            if batch is not None:
                results, errors, busy_s, trouble = self._run(batch, run)
        finally:
            if lock is not None:
                lock.release()
        if batch is None:
            self._sleep(seat, bell, until - now)
            return
        with self._lock:
            if trouble:
                learn(self._name, self._batcher, batch.worker, batch.id, trouble)
            self._line.finished(self._clock(), batch, results, errors, busy_s)
            bells = self._bells()
            self._chain += bells[_RUNG_AT_ONCE:]
        _ring(bells[:_RUNG_AT_ONCE])

    def _run(self, batch: Batch, run: Callable[[list[Any]], Outcome]) -> Outcome:
        me = threading.get_ident()
        self._leaders.add(me)
        try:
            return run([request.item for request in batch.requests])
        finally:
            self._leaders.discard(me)

    def _acquire(self, lock: ExecutionLock, seat: Seat, until: float) -> bool:
        """Take the execution lock; False if it was not free until the caller looks up."""
        now = self._clock()
        most_s = min(seat.deadline - now, _LONGEST_LOCK_WAIT_S)
        if lock.acquire(timeout=max(min(most_s, until - now), 0.0)):
            return True
        if until - now < most_s:
            return False
        raise DeadlineExceeded(
            f"{self._name}: the execution lock was not free within {most_s:.3g} s;"
            " does this thread hold it already? That would be a re-entry"
        )

    def _bells(self) -> list[threading.Lock]:
        """The bells of those whom the line wants to wake; to be rung outside the lock."""
        bells: list[threading.Lock] = []
        for seat in self._line.wake:
            assert isinstance(seat, Seat)
            bells += seat.bells
            seat.bells.clear()
        self._line.wake.clear()
        return bells


def _ring(bells: list[threading.Lock]) -> None:
    for bell in bells:
        bell.release()
