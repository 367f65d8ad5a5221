"""Callers' threads drive the line themselves: the first one leads, the others sleep. No thread of ours exists.

The line (`core/line.py`) decides under one short lock; everything slow, sleeping, the execution lock and the user's
function, happens outside it. Each sleeping thread has a bell of its own, so exactly those are woken who are meant.

Those whose answers have come are woken in a chain, the next leader first: the leader rings for one, and each thread
that wakes up rings for the next. All of them would only fight for the interpreter, and the next leader with them.

A function may call another one, whose leader is another thread, which calls the first one: each would wait for the
other. So a leader who goes to sleep in a line looks first whether all who could wake it sleep for what it leads.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import Context
from math import inf
from threading import get_ident
from typing import Any, ClassVar, Final, cast

from carpool.call.lock import ExecutionLock, can_be_tried, is_owned
from carpool.call.retry import Trouble
from carpool.clock import Clock, monotonic
from carpool.core import line as lines
from carpool.core.batch import Batch
from carpool.core.batcher import Batcher
from carpool.core.line import DONE, LEADS, SLEEP, Line
from carpool.drive.failures import for_all
from carpool.drive.trouble import FAILED_FOR_S, learn, stage_at_fault
from carpool.errors import CarpoolError, DeadlineExceeded, Unavailable
from carpool.foreign import text_of
from carpool.logger import logger
from carpool.request import Lane, Request

_LONGEST_LOCK_WAIT_S = 60.0  # for the execution lock, where no time-out bounds it

AT_ONCE: Final = -inf
"""Until when somebody waits who does not wait."""

Outcome = tuple[Sequence[object], dict[int, Exception] | None, Sequence[Trouble]]
"""The results of a batch, the errors that stand in for some, and what else there is to tell."""

Run = Callable[[list[Any]], Outcome]
Bells = list[threading.Lock]
"""Of the threads that sleep for one seat. Each is rung once; it is locked until then."""

Bed = tuple[threading.Lock, Bells, float]
"""The bell that wakes a thread, those it is one of, and how many seconds it sleeps at most."""


_leading: dict[int, tuple[LeaderFollower, ...]] = {}
"""By thread: the lines whose functions it is inside of."""

_sleeping: dict[int, tuple[LeaderFollower, Seat]] = {}
"""Threads that lead one line and sleep in another for as long as it takes, and their seats there."""


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


class LoneSeat(lines.Lone):
    """The seat of a caller who found nobody in the line, and runs its one item itself; no thread sleeps for it.

    Attributes:
        result, error: the answer.
    """

    __slots__ = ("error", "result")

    bells: ClassVar[Bells] = []

    result: object
    error: Exception | None


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
        self._slots = slots
        self._slo_s = slo_s
        self._line = Line(batcher, slots, slo_s)
        self._lock = threading.RLock()  # which knows its owner; it is never taken twice
        self._execution_lock = execution_lock
        self._may_try = can_be_tried(execution_lock)
        self._clock = clock
        self._only = (self,)
        self._chain: deque[Bells] = deque()  # still to be rung; while there are any, somebody wakes up

    def alone(self, item: object, timeout_s: float | None, run: Run) -> LoneSeat | None:
        """Run one item in this thread at once, if nobody is in the line and nothing speaks against it; which is so most
        of the time, and takes a third of what it takes to `join` and `wait`.

        Args:
            item: it counts for one, and may share a batch with any other.
            timeout_s: how long it may wait.
            run: the user's function.

        Returns:
            The answer; None if nothing has been done, and the item is to join the line.

        Raises:
            BaseException: this thread was interrupted.
        """
        me, lock = get_ident(), self._execution_lock
        leads = _leading.get(me)
        if (leads is not None and self in leads) or self._lock._is_owned():  # type: ignore[attr-defined]
            return None
        if lock is not None and (not self._may_try or is_owned(lock) or not lock.acquire(timeout=0)):
            return None
        line, now = self._line, self._clock()
        lone = LoneSeat(item, inf if timeout_s is None else now + timeout_s, me, now)
        try:
            try:
                with self._lock:
                    if not line.alone(lone):
                        return None
                outcome, busy_s = self._call([item], run)
            finally:
                if lock is not None:
                    lock.release()
            self._finish_alone(line, lone, outcome, busy_s)
        except BaseException as error:
            if line is self._line:
                if self._has_failed(error):
                    return _told(lone) if lone.requests else None
                if line.lone is lone or lone.requests:
                    self.leave(lone, self._gone(), me)
            raise
        return lone

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
        self.check_reentry()
        now = self._clock()
        deadline = inf if timeout_s is None else now + timeout_s
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
        except BaseException as error:
            if not self._has_failed(error):  # the thread was interrupted
                self._ring(len(self._chain))
                raise
        return seat

    def wait(self, seat: Seat, run: Run, timeout_s: float | None = None) -> bool:
        """In the thread of a caller, which has been checked: until its answers are there. It may lead meanwhile.

        Args:
            seat: the caller's.
            run: the user's function.
            timeout_s: look up after this time; the place in the line is kept.

        Returns:
            Whether the answers are there.

        Raises:
            DeadlineExceeded: the execution lock could not be had in time; the caller has left the line.
            RuntimeError: the function forked, and this is the child; or it waits for a function that waits for it.
        """
        return self._wait(seat, run, inf if timeout_s is None else self._clock() + timeout_s)

    def lead(self, seat: Seat, run: Run) -> None:
        """In the thread of a caller who has just joined: run what is in the line as far as its own, unless somebody
        else is at it or the policy holds it back; then this does not wait for it.

        Args:
            seat: the caller's.
            run: the user's function.

        Raises: what `wait` does.
        """
        self._wait(seat, run, AT_ONCE)

    def leave(self, seat: Seat | LoneSeat, error: Exception, thread: int | None = None) -> bool:
        """The caller goes without its answers.

        Args:
            seat: the caller's.
            error: what other threads that wait for the same answers get to hear.
            thread: the one that was interrupted, if that is the reason.

        Returns:
            Whether any answer was still due.
        """
        self._check_owner()
        try:
            return self._leave(seat, error, thread)
        except BaseException as fault:
            if not self._has_failed(fault):
                raise
            return True

    def _wait(self, seat: Seat, run: Run, until: float) -> bool:
        line = self._line
        while seat.pending or line.elect is seat:
            try:
                led = self._turn(seat, run, until)
                if line is not self._line and seat.pending:
                    raise self.forked()
                if until != inf and not (led and until == AT_ONCE) and self._clock() >= until:
                    self._look_away(seat)
                    break
            except BaseException as error:
                _sleeping.pop(get_ident(), None)
                if line is self._line:
                    if self._has_failed(error):
                        continue
                    told = error if isinstance(error, CarpoolError) else self._gone()
                    self.leave(seat, told, get_ident())
                raise
        return not seat.pending

    def _leave(self, seat: Seat | LoneSeat, error: Exception, thread: int | None) -> bool:
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
        """Refuse new callers with `error`, run what is in the line and wait for those who lead.

        Raises:
            RuntimeError: this thread is inside the function, or holds the execution lock: it would wait for itself.
        """
        self.check_reentry()
        seat = Seat((), inf)
        seat.pending = 1
        try:
            self._close(error, seat)
        except BaseException as fault:
            if not self._has_failed(fault):
                raise
            self._close(error, seat)  # the policy is asked nothing any more
        self.wait(seat, run)

    def _close(self, error: CarpoolError, seat: Seat) -> None:
        with self._lock:
            self._line.close(error)
            self._line.drain(seat)
            woken = self._line_up()
        self._ring(woken)

    def check_reentry(self) -> None:
        """Raise RuntimeError if this thread would wait for itself."""
        leads = _leading.get(get_ident())
        if leads is not None and self in leads:
            raise RuntimeError(
                f"{self._name} was called from inside itself: the call would wait for the batch that makes it."
                " Call the plain function instead"
            )
        self._check_owner()
        if is_owned(self._execution_lock):
            raise RuntimeError(
                f"this thread already holds the execution lock of {self._name}: release it before the call"
            )

    def start_anew(self, batcher: Batcher) -> None:
        """In a forked child: whoever was in the line, led it or held its lock is in the parent."""
        closed = self._line.pipeline.closed
        self._batcher = batcher
        self._line = Line(batcher, self._slots, self._slo_s)
        if closed is not None:
            self._line.close(closed)
        self._lock = threading.RLock()
        self._chain = deque()

    @property
    def generation(self) -> object:
        """Another one in a forked child than in its parent."""
        return self._line

    def forked(self) -> RuntimeError:
        """What a child is told that waits for what is in its parent's line."""
        return RuntimeError(
            f"the process was forked after this call of {self._name} had joined the line, which is the parent's:"
            " call it again in the child"
        )

    # -- inside

    def _check_owner(self) -> None:
        """Raise RuntimeError where waiting for the lock would be waiting for oneself."""
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise self._interrupted()

    def _interrupted(self) -> RuntimeError:
        return RuntimeError(
            f"{self._name} was called by a signal handler or a __del__ in a thread that it has interrupted inside"
            " the line of the same function: let another thread make the call"
        )

    def _gone(self) -> Unavailable:
        return Unavailable(f"a thread that waited for {self._name} was interrupted", code="cancelled")

    def _has_failed(self, error: BaseException) -> bool:
        """Whether it is the policy that raised `error`; then the line has failed, and all who are in it know."""
        if isinstance(error, KeyboardInterrupt) or stage_at_fault(error) is None:
            return False
        what = f"{self._name} has failed: its policy raised {type(error).__name__}"
        logger.critical("%s: %s", what, text_of(error), exc_info=error)
        with self._lock:
            failure = Unavailable(what, code="stage_failed", retry_after_s=FAILED_FOR_S)
            self._line.fail(self._clock(), failure, get_ident())
            self._line_up()
        self._ring(len(self._chain))
        return True

    def _turn(self, seat: Seat, run: Run, until: float) -> bool:
        """Look at the line once, and do what is to be done: run a batch, which it tells if so, or sleep."""
        bed = None
        with self._lock:
            now = self._clock()
            slot = self._line.step(now, seat, get_ident())
            if slot == SLEEP:
                bed = self._make_bed(now, seat, until)
            elif slot == LEADS:
                raise self._interrupted()
            woken = self._line_up()
        self._ring(woken)
        if bed is not None:
            self._sleep(seat, bed)
        elif slot != DONE:
            return self._lead(seat, slot, run, until)
        return False

    def _lead(self, seat: Seat, slot: int, run: Run, until: float) -> bool:
        """Run a batch with a slot that was claimed. Whether there was one."""
        lock, line = self._execution_lock, self._line
        if lock is not None and not self._acquire(lock, seat, until):
            with self._lock:
                self._line.give_up(slot)
                woken = self._line_up()
            self._ring(woken)
            return False
        outcome = bed = batch = None
        busy_s = 0.0
        try:
            with self._lock:
                now = self._clock()
                batch = line.lead(now, slot)
                if batch is None:
                    bed = self._make_bed(now, seat, until)
                woken = self._line_up()
            self._ring(woken)
            if batch is not None:
                outcome, busy_s = self._call([request.item for request in batch.requests], run)
        finally:
            try:
                if lock is not None:
                    lock.release()
            finally:  # also where it could not be released
                if batch is not None and outcome is not None:
                    self._finish(line, batch, outcome, busy_s)
        if bed is not None:
            self._sleep(seat, bed)
        return batch is not None

    def _finish_alone(self, line: Line, lone: LoneSeat, outcome: Outcome, busy_s: float) -> None:
        """An item that was run alone is done; unless somebody else has come, nobody is to know."""
        results, errors, _ = outcome
        lone.result, lone.error = results[0], None if errors is None else errors[0]
        if line is not self._line:  # the function forked, and this is the child
            return
        with self._lock:
            if line.lone is lone:
                line.went_alone(self._clock(), busy_s, errors is None)
                return
        if lone.batch is not None:
            self._finish(line, lone.batch, outcome, busy_s)
            _told(lone)
        else:  # who came was interrupted before it had caught up
            self.leave(lone, self._gone(), get_ident())

    def _finish(self, line: Line, batch: Batch, outcome: Outcome, busy_s: float) -> None:
        """A batch has run: its callers, and the next leader, are to know."""
        if line is not self._line:  # the function forked, and this is the child
            _answer_here(batch, outcome)
            return
        results, errors, trouble = outcome
        with self._lock:
            if trouble:
                learn(self._name, self._batcher, batch.place, batch.id, trouble)
            line.finished(self._clock(), batch, results, errors, busy_s)
            woken = self._line_up()
        self._ring(min(woken, 1))

    def _make_bed(self, now: float, seat: Seat, until: float) -> Bed:
        """For the seat's thread, which sleeps from now on."""
        me = get_ident()
        if me in _leading and until == inf:
            _sleeping[me] = self, seat  # before it looks at others, who do the same
            if self._waits_for(me):
                raise RuntimeError(
                    f"{self._name} was called by a function that it waits for: each would wait for the other."
                    " Call the plain function instead"
                )
        bell = threading.Lock()
        bell.acquire()
        seat.bells.append(bell)
        return bell, seat.bells, min(until, self._line.sleep(seat)) - now

    def _waits_for(self, thread: int) -> bool:
        """Whether nothing moves in this line before the thread is done with what it leads."""
        lines: list[LeaderFollower] = [self]
        for line in lines:  # which grows
            leaders = line._line.leaders
            if leaders is None:
                return False
            for leader in leaders:
                if leader == thread:
                    continue
                sleeps = _sleeping.get(leader)  # type: ignore[call-overload]
                if sleeps is None or not sleeps[1].pending:
                    return False
                if sleeps[0] not in lines:
                    lines.append(sleeps[0])
        return True

    def _sleep(self, seat: Seat, bed: Bed) -> None:
        bell, bells, seconds = bed
        timeout = -1 if seconds == inf else min(max(seconds, 0.0), threading.TIMEOUT_MAX)
        rung = bell.acquire(timeout=timeout)
        if _sleeping:
            _sleeping.pop(get_ident(), None)
        if not rung:
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

    def _call(self, items: list[Any], run: Run) -> tuple[Outcome, float]:
        """Run a batch in a context that is no caller's, and answer its callers whatever the function raises.

        Returns:
            The answers, and how many seconds it took.
        """
        me = get_ident()
        outer = _leading.get(me)
        _leading[me] = self._only if outer is None else (*outer, self)
        began = self._clock()
        try:
            outcome = Context().run(run, items)
            return outcome, self._clock() - began
        except KeyboardInterrupt:  # of this thread: the next leader runs the batch
            raise
        except BaseException as error:
            return (*for_all(error, len(items)), ()), 0.0
        finally:
            if outer:
                _leading[me] = outer
            else:
                _leading.pop(me, None)

    def _acquire(self, lock: ExecutionLock, seat: Seat, until: float) -> bool:
        """Take the execution lock; False if it was not free until the caller looks up."""
        now = self._clock()
        if until == AT_ONCE:  # who leads at once waits for the lock like any other leader
            until = inf
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


def _told(lone: LoneSeat) -> LoneSeat:
    """Who has come to be a leader like any other, with the answer that the line has for it."""
    (request,) = lone.requests
    lone.result, lone.error = request.result, request.error
    return lone


def _answer_here(batch: Batch, outcome: Outcome) -> None:
    """What this thread has run in a forked child, for its own caller; nobody else is here."""
    results, errors, _ = outcome
    for i, request in enumerate(batch.requests):
        if request.caller is not None:
            request.result, request.error = results[i], None if errors is None else errors.get(i)
            request.caller.answered(request)


def _forked() -> None:
    _leading.clear()
    _sleeping.clear()


os.register_at_fork(after_in_child=_forked)


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
