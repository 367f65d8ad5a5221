"""Callers' threads drive the line themselves: the first one leads, the others sleep. No thread of ours exists.

The line (`core/line.py`) decides under one short lock; everything slow, sleeping, the execution lock and the user's
function, happens outside it. Each sleeping thread has a bell of its own, so exactly those are woken who are meant.

Those whose answers have come are woken in a chain, the next leader first: the leader rings for one, and each thread
that wakes up rings for the next. All of them would only fight for the interpreter, and the next leader with them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, cast

from carpool.clock import Clock, monotonic
from carpool.core.batcher import INFINITY, Batch, Batcher
from carpool.core.line import DONE, SLEEP, Line
from carpool.drive.trouble import learn
from carpool.errors import CarpoolError, DeadlineExceeded, Unavailable
from carpool.parts import Trouble
from carpool.request import Lane, Request

_LONGEST_LOCK_WAIT_S = 60.0  # for the execution lock, where no time-out bounds it

Outcome = tuple[Sequence[object], dict[int, Exception] | None, float, Sequence[Trouble]]
"""The results of a batch, the errors that stand in for some, the seconds it took, and what else there is to tell."""

Run = Callable[[list[Any]], Outcome]
Bells = list[threading.Lock]
"""Of the threads that sleep for one seat. Each is rung once; it is locked until then."""

Bed = tuple[threading.Lock, Bells, float]
"""The bell that wakes a thread, those it is one of, and how many seconds it sleeps at most."""


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

    __slots__ = ("bells", "deadline", "pending", "requests")

    def __init__(self, requests: Sequence[Request], deadline: float) -> None:
        self.requests = requests
        self.pending = len(requests)
        self.deadline = deadline
        self.bells: Bells = []
        for request in requests:
            request.caller = self

    @property
    def asleep(self) -> bool:
        """Whether threads sleep for it that nobody is about to wake."""
        return bool(self.bells)

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
        self._chain: deque[Bells] = deque()  # still to be rung; while there are any, somebody wakes up

    def join(
        self,
        items: Sequence[Any],
        sizes: Sequence[int] | None,
        timeout_s: float | None,
        lanes: Sequence[Lane] | None = None,
    ) -> Seat:
        """A place in the line for some items.

        Args:
            items: they.
            sizes: how much of a batch each takes up; None if all count for one.
            timeout_s: how long they may wait.
            lanes: where each waits, if not all may share a batch.

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
        if lanes is not None:
            for request, lane in zip(requests, lanes, strict=True):
                request.lane = lane
        seat = Seat(requests, deadline)
        try:
            with self._lock:
                self._line.join(now, requests)
                woken = self._line_up()
            self._ring(woken)
        except BaseException:  # the thread was interrupted
            self._ring(len(self._chain))
            raise
        return seat

    def wait(self, seat: Seat, run: Run, timeout_s: float | None = None) -> bool:
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
            while seat.pending or self._line.elect is seat:
                self._turn(seat, run, until)
                if until != INFINITY and self._clock() >= until:
                    self._look_away(seat)
                    break
        except BaseException as error:
            interrupted = Unavailable(f"a thread that waited for {self._name} was interrupted", code="cancelled")
            self.leave(seat, error if isinstance(error, CarpoolError) else interrupted, threading.get_ident())
            raise
        return not seat.pending

    def leave(self, seat: Seat, error: Exception, thread: int | None = None) -> bool:
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
            self._line.wake.append(seat)  # other threads may wait for it too
            self._line_up()
        self._ring(len(self._chain))  # all of them: this thread might have been a link of the chain
        return bool(due)

    def drain(self, run: Run, error: CarpoolError) -> None:
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

    def _turn(self, seat: Seat, run: Run, until: float) -> None:
        """Look at the line once, and do what is to be done: run a batch, or sleep."""
        bed = None
        with self._lock:
            now = self._clock()
            slot = self._line.step(now, seat, threading.get_ident())
            if slot == SLEEP:
                bed = self._make_bed(now, seat, until)
            woken = self._line_up()
        self._ring(woken)
        if bed is not None:
            self._sleep(seat, bed)
        elif slot != DONE:
            self._lead(seat, slot, run, until)

    def _lead(self, seat: Seat, slot: int, run: Run, until: float) -> None:
        """Run a batch with a slot that was claimed."""
        lock = self._execution_lock
        if lock is not None and not self._acquire(lock, seat, until):
            with self._lock:
                self._line.give_up(slot)
                woken = self._line_up()
            self._ring(woken)
            return
        outcome = bed = None
        try:
            with self._lock:
                now = self._clock()
                batch = self._line.lead(now, slot)
                if batch is None:
                    bed = self._make_bed(now, seat, until)
                woken = self._line_up()
            self._ring(woken)
            if batch is not None:
                outcome = self._call(batch, run)
        finally:
            if lock is not None:
                lock.release()
        if bed is not None:
            self._sleep(seat, bed)
        elif batch is not None and outcome is not None:
            self._finish(batch, outcome)

    def _finish(self, batch: Batch, outcome: Outcome) -> None:
        """A batch has run: its callers, and the next leader, are to know."""
        results, errors, busy_s, trouble = outcome
        with self._lock:
            if trouble:
                learn(self._name, self._batcher, batch.worker, batch.id, trouble)
            self._line.finished(self._clock(), batch, results, errors, busy_s)
            woken = self._line_up()
        self._ring(min(woken, 1))

    def _make_bed(self, now: float, seat: Seat, until: float) -> Bed:
        """For the seat's thread, which sleeps from now on."""
        bell = threading.Lock()
        bell.acquire()
        seat.bells.append(bell)
        return bell, seat.bells, min(until, self._line.sleep(seat)) - now

    def _sleep(self, seat: Seat, bed: Bed) -> None:
        bell, bells, seconds = bed
        timeout = -1 if seconds == INFINITY else min(max(seconds, 0.0), threading.TIMEOUT_MAX)
        if not bell.acquire(timeout=timeout):
            with suppress(ValueError):  # it was rung after all
                bells.remove(bell)
                return
        if self._chain:  # the bell was rung, or is just being rung: the chain goes on
            self._ring(1)

    def _look_away(self, seat: Seat) -> None:
        with self._lock:
            self._line.look_away(seat)
            woken = self._line_up()
        self._ring(woken)

    def _call(self, batch: Batch, run: Run) -> Outcome:
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

    def _line_up(self) -> int:
        """With the lock held: put those into the chain whom the line wants to wake. Returns how many they are."""
        chain, woken = self._chain, cast("list[Seat]", self._line.wake)
        n = 0
        for seat in woken:
            bells = seat.bells
            if bells:  # else it is awake
                if seat.pending:  # the next leader
                    chain.appendleft(bells)
                else:
                    chain.append(bells)
                seat.bells = []
                n += 1
        woken.clear()  # not earlier: this thread may be interrupted
        return n

    def _ring(self, n: int) -> None:
        """Outside the lock: wake the first `n` of the chain.

        They leave it last, since this thread may be interrupted; what is rung twice does no harm. A ring counts only
        for the thread that has made them leave, so that no two count the same.
        """
        chain = self._chain
        while n > 0 and chain:
            try:
                bells = chain[0]
                rung = _ring_all(bells)
                chain.remove(bells)
            except (IndexError, ValueError):  # another thread was faster
                continue
            n -= rung


def _ring_all(bells: Bells) -> bool:
    """Ring what has not been rung. Whether there was any."""
    rung = False
    while bells:
        try:
            bell = bells[-1]
            if bell.locked():
                bell.release()
            bells.remove(bell)
        except (IndexError, ValueError, RuntimeError):  # another thread was faster
            continue
        rung = True
    return rung
