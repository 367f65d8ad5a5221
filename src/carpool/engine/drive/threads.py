"""The driver of a batch function whose callers are threads: one of them runs the batch for all.

No thread belongs to it. The line (`core/line.py`) decides under one short lock which thread leads
and which sleep; all that takes time, sleeping, the execution lock and the user's function, happens
outside that lock.

Each sleeping thread has a lock of its own. Threads whose answers have come are woken one after the
other, the next leader first: each thread that wakes up wakes the next. If all woke at once, they
would fight for the interpreter, and the next leader with them.

A task that awaits a ticket must not hold its loop up. So threads of the loop's default executor
wait, and lead, for all tickets that tasks of the loop await: as many as batches may run at a time.

A function may call another one, whose leader is another thread, which calls the first one: each
would wait for the other. So a thread that is inside a function, and is about to sleep in a line,
asks first whether all threads that could wake it sleep, directly or not, for what it leads.

Any thread may be interrupted at any point, by Ctrl-C or by an exception of a signal handler. So
whatever another thread counts on is one step, or is made up for where the exception is caught; else
a slot could stay claimed or a sleeper unwoken, and all other callers would wait for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from math import inf
from threading import get_ident
from typing import Any, Final, NamedTuple, NoReturn

import msgspec

from carpool.engine.call.lock import ExecutionLock, can_be_tried, is_owned
from carpool.engine.clock import Clock, monotonic
from carpool.engine.core.batch import Batch
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.line import LEADS, SLEEP, Line, LoneCall, Waiter
from carpool.engine.drive.failures import FAILED_FOR_S, BatchOutcome, for_all, learn
from carpool.engine.fast_paths import fast_path
from carpool.engine.foreign import as_model_error, text_of
from carpool.engine.logger import logger
from carpool.engine.observe.function_stats import CallCounts, FunctionSnapshot, snapshot
from carpool.engine.observe.stats import explained
from carpool.engine.request import Lane, Request
from carpool.errors import CarpoolError, DeadlineExceeded, Unavailable

_LONGEST_LOCK_WAIT_S = 60.0  # for the execution lock, where no time-out bounds it

AT_ONCE: Final = -inf
"""Deadline meaning: do not wait."""

Run = Callable[[list[Any]], BatchOutcome]
"""Calls the user's function for the items of a batch."""


# -- how threads sleep, and are woken

WakeupLocks = list[threading.Lock]
"""One for each thread that sleeps on the same waiter: held while it sleeps, released to wake it."""


class ThreadWaiter:
    """The answers that one caller waits for, and the threads that sleep until they are there.

    Attributes:
        pending: How many of the requests, which have one deadline, have no answer yet.
        sleepers: The locks that wake its sleeping threads. Whoever is going to wake them takes the
            list away and leaves an empty one.
    """

    __slots__ = ("deadline", "pending", "requests", "sleepers")

    def __init__(self, requests: Sequence[Request], deadline: float) -> None:
        self.requests = requests
        self.pending = len(requests)
        self.deadline = deadline
        self.sleepers: WakeupLocks = []
        for request in requests:
            request.caller = self

    def answered(self, request: Request) -> None:
        self.pending -= 1


class Sleep(msgspec.Struct):
    """A thread's sleep of some seconds, prepared while the line's lock is held; `lock` wakes it. A
    struct is made as fast as a tuple.
    """

    lock: threading.Lock
    sleepers: WakeupLocks
    seconds: float


class WakeQueue:
    """Sleeping threads that are to be woken, the next leader first; `groups` has their locks, one
    list for each waiter.

    As long as there is a group in it, some thread is awake or waking up that will wake the next.
    """

    __slots__ = ("groups",)

    def __init__(self) -> None:
        self.groups: deque[WakeupLocks] = deque()

    def add(self, waiters: list[Waiter]) -> int:
        """Queue the sleeping threads of some waiters, while the line's lock is held; return how
        many of the waiters have any. A list is emptied last, since this thread may be interrupted.
        """
        n = 0
        waiter: ThreadWaiter
        for waiter in waiters:  # type: ignore[assignment]
            sleepers = waiter.sleepers
            if sleepers:
                if waiter.pending:  # the next leader
                    self.groups.appendleft(sleepers)
                else:
                    self.groups.append(sleepers)
                waiter.sleepers = []
                n += 1
        waiters.clear()
        return n

    def wake(self, n: int) -> None:
        """Wake the first `n` groups, while the line's lock is not held.

        A group leaves the queue only once it is woken, since this thread may be interrupted; to
        wake a thread twice does no harm. Only the thread that has woken a group counts it.
        """
        groups = self.groups
        while n > 0 and groups:
            try:
                sleepers = groups[0]
                has_woken = _wake_all(sleepers)
                groups.remove(sleepers)
            except (IndexError, ValueError):  # another thread was faster
                continue
            n -= has_woken

    def wake_everybody(self) -> None:
        """Wake all groups: this thread may be interrupted, and would wake none later."""
        self.wake(len(self.groups))


def _wake_all(sleepers: WakeupLocks) -> bool:
    has_woken = False
    while sleepers:
        try:
            lock = sleepers[-1]
            if lock.locked():
                lock.release()
            sleepers.remove(lock)
        except (IndexError, ValueError, RuntimeError):  # another thread was faster
            continue
        has_woken = True
    return has_woken


# -- tasks that wait

_LOOK_S: Final = 0.01  # how often a thread looks whether other tickets than its own have their answers

Wait = Callable[[ThreadWaiter, float], bool]
"""Waits for the answers of a waiter for some seconds; the thread may lead meanwhile."""


class _Awaited(NamedTuple):
    waiter: ThreadWaiter
    wait: Wait
    future: asyncio.Future[None]


class _OfLoop:
    """The wake-ups of the tasks of one loop, shared by their `most` threads and the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int) -> None:
        self._loop = weakref.ref(loop)
        self._most = most
        self._lock = threading.Lock()
        self._awaited: deque[_Awaited] = deque()
        self._n_threads = 0

    def add(self, loop: asyncio.AbstractEventLoop, awaited: _Awaited) -> None:
        with self._lock:
            self._awaited.append(awaited)
            if self._n_threads == self._most:
                return
            self._n_threads += 1
        try:
            loop.run_in_executor(None, self._live)
        except BaseException:  # the executor has been shut down
            with self._lock:
                self._n_threads -= 1
            raise

    def _live(self) -> None:
        while True:
            with self._lock:
                if not self._awaited:
                    self._n_threads -= 1
                    return
                mine = self._awaited.popleft()
            while not self._is_done(mine):
                self._complete_others()

    def _is_done(self, mine: _Awaited) -> bool:
        try:
            if not mine.wait(mine.waiter, _LOOK_S):
                return False
            self._complete(mine, None)
        except Exception as error:
            self._complete(mine, error)
        except BaseException as error:  # the function's own, as no signal comes to this thread
            self._complete(mine, as_model_error(error, "a batch function that a task awaits"))
        return True

    def _complete_others(self) -> None:
        with self._lock:
            served = [each for each in self._awaited if not each.waiter.pending]
            for each in served:
                self._awaited.remove(each)
        for each in served:
            self._complete(each, None)

    def _complete(self, awaited: _Awaited, error: Exception | None) -> None:
        loop = self._loop()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_complete_future, awaited.future, error)


class AwaitedTickets:
    """The wake-ups of tasks that wait for one line; `most` limits the threads of each loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _OfLoop] = weakref.WeakKeyDictionary()

    async def wait(self, waiter: ThreadWaiter, wait: Wait) -> None:
        """Wait in a task until a waiter has its answers. Raises what `wait` raises."""
        loop = asyncio.get_running_loop()
        of_loop = self._of_loops.get(loop)
        if of_loop is None:
            of_loop = self._of_loops.setdefault(loop, _OfLoop(loop, self._most))
        future: asyncio.Future[None] = loop.create_future()
        of_loop.add(loop, _Awaited(waiter, wait, future))
        await future


def _complete_future(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():  # its task was cancelled
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


# -- the driver


class PolicyRaised(Exception):
    """The policy of a line has raised, and the line has failed for it, so all in it have answers.

    Raised by `_queue_wakeups_or_fail` for the methods around it; no caller gets it.
    """


class LineDriver:
    """Runs a line with the threads of its callers.

    Args:
        name: The function's, for error texts.
        batcher: Its queue and policy.
        slots: How many batches may run at a time.
        slo_s: How soon after its arrival a caller should have its answer, if there is a goal.
        execution_lock: Held while the function runs.
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
        self._slots = slots
        self._slo_s = slo_s
        self._execution_lock = execution_lock
        self._may_try = can_be_tried(execution_lock)
        self._clock = clock
        self._leading_only_this = (self,)
        self._begin(batcher)

    def _begin(self, batcher: Batcher) -> None:
        self._batcher = batcher
        batcher.lobby.on_fault = self._policy_raised
        self._fault: BaseException | None = None  # what the policy has raised, until the line fails for it
        self.awaited = AwaitedTickets(self._slots)

        # shared by all threads that call the function: the line is read and changed with the lock
        # held, the queue of wake-ups filled with it and emptied without
        self._line = Line(batcher, self._slots, self._slo_s)
        self._counts = CallCounts()
        self._lock = threading.RLock()  # for its `_is_owned`, as `threading.Condition`; it is never taken twice
        self._wake_queue = WakeQueue()

    # -- what it has done

    def snapshot(self) -> FunctionSnapshot:
        """Return what has been done so far. It takes no lock, so a call may be missing from it."""
        line = self._line
        return snapshot(self._name, line.core, self._counts, int(line.lone is not None))

    def explain(self) -> dict[str, Any]:
        self._check_owner()
        with self._lock:
            return explained(self._batcher.lobby.policy, self._clock(), self._batcher)

    # -- forks

    def start_anew(self, batcher: Batcher) -> None:
        """Begin with an empty line in a forked child: its callers and leaders are in the parent."""
        closed = self._line.core.flow.closed_because
        self._begin(batcher)
        if closed is not None:
            self._line.close(closed)

    @property
    def generation(self) -> object:
        """An object that differs between a forked child and its parent."""
        return self._line

    @property
    def leading_threads(self) -> list[object] | None:
        return self._line.leading_threads

    def forked(self) -> RuntimeError:
        return RuntimeError(
            f"the process was forked after this call of {self._name} had joined the line, which is the parent's:"
            " call it again in the child"
        )

    # -- callers

    def join(
        self,
        items: Sequence[Any],
        sizes: Sequence[int] | None,
        timeout_s: float | None,
        lanes: Sequence[Lane] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> ThreadWaiter:
        """Join the line with some items, and return what their caller waits for. Where sizes, lanes
        or lengths are not given, all count for one, may share a batch, and are alike.

        Raises:
            RuntimeError: This thread is inside the function, or holds the execution lock: it would
                wait for itself.
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
        if lengths is not None:
            for request, length in zip(requests, lengths, strict=True):
                request.length = length
        waiter = ThreadWaiter(requests, deadline)
        wake_queue = self._wake_queue
        try:
            with self._lock:
                self._line.join(now, requests)
                woken = self._queue_wakeups_or_fail()
            wake_queue.wake(woken)
        except PolicyRaised:
            wake_queue.wake_everybody()
        except BaseException:  # the thread was interrupted
            wake_queue.wake_everybody()
            raise
        return waiter

    def wait(self, waiter: ThreadWaiter, run: Run, timeout_s: float | None = None) -> bool:
        """Wait in the caller's thread, which may lead meanwhile, until its answers are there, or
        for some seconds; the requests stay in the line after these. Return whether the answers are
        there.

        Raises:
            DeadlineExceeded: The execution lock could not be had in time; the caller has left.
            RuntimeError: The function forked, and this is the child; or it waits for a function
                that waits for it.
        """
        return self._wait(waiter, run, inf if timeout_s is None else self._clock() + timeout_s)

    @fast_path("lone_call")
    def call_alone(self, item: object, timeout_s: float | None, run: Run) -> LoneCall | None:
        """Run one item, which counts for one, in this thread at once, if the line is empty and
        nothing speaks against it.

        Fast path of `join` and `wait`: the same outcome, see tests/batch_function/test_alone.py.

        Returns:
            The call with its answer; None if nothing has been done, and the item is to join.

        Raises:
            BaseException: This thread was interrupted.
        """
        thread, lock = get_ident(), self._execution_lock
        leads = leading.get(thread)
        if (leads is not None and self in leads) or self._lock._is_owned():  # type: ignore[attr-defined]
            return None
        if lock is not None and (not self._may_try or is_owned(lock) or not lock.acquire(timeout=0)):
            return None
        line, now = self._line, self._clock()
        lone = LoneCall(item, inf if timeout_s is None else now + timeout_s, thread, now)
        try:
            try:
                with self._lock:
                    if not line.start_alone(lone):
                        return None
                outcome = self._call([item], run)
            finally:
                if lock is not None:
                    lock.release()
            self._finish_alone(line, lone, outcome)
        except BaseException as error:
            if line is self._line:
                if self._has_failed(error):  # after the call
                    return _with_answer(lone) if lone.requests else lone
                if line.lone is lone or lone.requests:
                    self.leave(lone, self._interrupted(), thread)
            raise
        return lone

    def run_at_once(self, waiter: ThreadWaiter, run: Run) -> None:
        """Run what is in the line, up to the caller's own requests, without waiting for others;
        raise what `wait` raises. Nothing is run while another thread leads, or while the policy
        holds the batch back.
        """
        self._wait(waiter, run, AT_ONCE)

    def leave(self, waiter: ThreadWaiter | LoneCall, error: Exception, thread: int | None = None) -> bool:
        """Let a caller go without its answers, whose thread is given if it was interrupted; return
        whether any was still missing. Other threads that wait for the same answers get the error.
        """
        self._check_owner()
        try:
            return self._leave(waiter, error, thread)
        except PolicyRaised:
            self._wake_queue.wake_everybody()
            return True

    def drain(self, run: Run, error: CarpoolError) -> None:
        """Refuse new callers with `error`, run what is in the line and wait for its leaders.

        Raises:
            RuntimeError: As in `join`.
        """
        self.check_reentry()
        waiter = ThreadWaiter((), inf)
        waiter.pending = 1
        try:
            self._close(error, waiter)
        except PolicyRaised:
            self._wake_queue.wake_everybody()
            self._close(error, waiter)  # from now on the policy is not asked
        self.wait(waiter, run)

    def check_reentry(self) -> None:
        leads = leading.get(get_ident())
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

    # -- one thread's way through the line

    def _wait(self, waiter: ThreadWaiter, run: Run, until: float) -> bool:
        """Take steps until the answers are there, or until a time; with `AT_ONCE` as long as each
        runs a batch.
        """
        line = self._line
        while waiter.pending or line.next_leader is waiter:  # its next step passes the duty on
            try:
                has_led = self._step(waiter, run, until)
                if line is not self._line and waiter.pending:
                    raise self.forked()
                if not has_led if until == AT_ONCE else until != inf and self._clock() >= until:
                    self._change(line.stop_waiting, waiter)
                    break
            except BaseException as error:
                sleeping.pop(get_ident(), None)
                if line is self._line:
                    if self._has_failed(error):
                        continue
                    shown = error if isinstance(error, CarpoolError) else self._interrupted()
                    self.leave(waiter, shown, get_ident())
                raise
        return not waiter.pending

    def _step(self, waiter: ThreadWaiter, run: Run, until: float) -> bool:
        """Ask the line once what to do, and do it: run a batch, sleep, or nothing. Return whether a
        batch was run.
        """
        sleep = None
        with self._lock:
            now = self._clock()
            slot = self._line.step(now, waiter, get_ident())  # or, below 0, what else to do
            if slot == SLEEP:
                sleep = self._prepare_sleep(now, waiter, until)
            elif slot == LEADS:
                raise self._called_in_between()
            woken = self._queue_wakeups_or_fail()
        self._wake_queue.wake(woken)
        if sleep is not None:
            self._sleep(sleep)
        elif slot >= 0:
            return self._run_batch(waiter, slot, run, until)
        return False

    def _run_batch(self, waiter: ThreadWaiter, slot: int, run: Run, until: float) -> bool:
        lock, line = self._execution_lock, self._line
        if lock is not None and not self._acquire(lock, waiter, until):
            self._change(line.give_up, slot)
            return False
        outcome = sleep = batch = None
        try:
            with self._lock:
                now = self._clock()
                batch = line.take_batch(now, slot)
                if batch is None:
                    sleep = self._prepare_sleep(now, waiter, until)
                woken = self._queue_wakeups_or_fail()
            self._wake_queue.wake(woken)
            if batch is not None:
                outcome = self._call([request.item for request in batch.requests], run)
        finally:
            try:
                if lock is not None:
                    lock.release()
            finally:  # also where it could not be released
                if batch is not None and outcome is not None:
                    self._finish(line, batch, outcome)
        if sleep is not None:
            self._sleep(sleep)
        return batch is not None

    def _acquire(self, lock: ExecutionLock, waiter: ThreadWaiter, until: float) -> bool:
        now = self._clock()
        if until == AT_ONCE:  # a thread that leads at once waits for the lock like any other leader
            until = inf
        most_s = min(waiter.deadline - now, _LONGEST_LOCK_WAIT_S)
        if lock.acquire(timeout=max(min(most_s, until - now), 0.0)):
            return True
        if until - now < most_s:
            return False
        raise DeadlineExceeded(
            f"{self._name}: the execution lock was not free within {most_s:.3g} s;"
            " does this thread hold it already? That would be a re-entry"
        )

    def _call(self, items: list[Any], run: Run) -> BatchOutcome:
        """Run a batch in a fresh context.

        Whatever the function raises becomes the outcome, but for KeyboardInterrupt: that is for
        this thread, and the next leader runs the batch.
        """
        thread = get_ident()
        outer = leading.get(thread)
        leading[thread] = self._leading_only_this if outer is None else (*outer, self)
        began = self._clock()
        try:
            outcome = Context().run(run, items)
            outcome.busy_s = self._clock() - began
            return outcome
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return for_all(error, len(items))
        finally:
            if outer:
                leading[thread] = outer
            else:
                leading.pop(thread, None)

    def _finish(self, line: Line, batch: Batch, outcome: BatchOutcome) -> None:
        if line is not self._line:  # the function forked, and this is the child
            _answer_in_child(batch, outcome)
            return
        with self._lock:
            if outcome.trouble:
                learn(self._name, self._batcher, batch.place, batch.id, outcome.trouble)
            now, requests = self._clock(), [request for request in batch.requests if request.caller is not None]
            counts = self._counts
            counts.ran(batch)
            counts.compute_s += outcome.busy_s
            line.finished(now, batch, outcome.results, outcome.errors, outcome.busy_s)
            counts.answered(requests, now)
            woken = self._queue_wakeups_or_fail()
        self._wake_queue.wake(min(woken, 1))

    def _finish_alone(self, line: Line, lone: LoneCall, outcome: BatchOutcome) -> None:
        """Pass on the answer of a lone item: to its caller only, unless another caller has come.

        A part of the fast path `lone_call`, as of `_finish`.
        """
        errors = outcome.errors
        lone.result, lone.error = outcome.results[0], None if errors is None else errors[0]
        if line is not self._line:  # the function forked, and this is the child
            return
        with self._lock:
            if line.lone is lone:
                now = self._clock()
                line.finish_alone(now, outcome.busy_s, errors is None)
                self._counts.alone_s += now - lone.began
                if errors is not None:
                    self._counts.alone_failed_s += now - lone.began
                if self._fault is not None:
                    self._fail_line(self._fault)
                return
        if lone.batch is not None:  # another caller came, and `Line._catch_up` made it
            self._finish(line, lone.batch, outcome)
            _with_answer(lone)
        else:  # the other caller was interrupted before the line had caught up
            self.leave(lone, self._interrupted(), get_ident())

    # -- sleep

    def _prepare_sleep(self, now: float, waiter: ThreadWaiter, until: float) -> Sleep:
        """Note, with the lock held, that this thread sleeps from now on.

        Raises:
            RuntimeError: It would sleep for ever, as all threads that could wake it wait for it.
        """
        thread = get_ident()
        if thread in leading and until == inf:
            sleeping[thread] = Sleeper(self, waiter)  # before it looks at others, which do the same
            if would_deadlock(self, thread):
                raise RuntimeError(
                    f"{self._name} was called by a function that it waits for: each would wait for the other."
                    " Call the plain function instead"
                )
        lock = threading.Lock()
        lock.acquire()
        waiter.sleepers.append(lock)
        return Sleep(lock, waiter.sleepers, min(until, self._line.asleep_until(waiter)) - now)

    def _sleep(self, sleep: Sleep) -> None:
        timeout = -1 if sleep.seconds == inf else min(max(sleep.seconds, 0.0), threading.TIMEOUT_MAX)
        is_woken = sleep.lock.acquire(timeout=timeout)
        if sleeping:
            sleeping.pop(get_ident(), None)
        if not is_woken:
            try:
                sleep.sleepers.remove(sleep.lock)
                return
            except ValueError:  # it is being woken after all
                pass
        if self._wake_queue.groups:
            self._wake_queue.wake(1)

    # -- changes of the line

    def _change(self, change: Callable[..., object], *arguments: object) -> None:
        with self._lock:
            change(*arguments)
            woken = self._queue_wakeups_or_fail()
        self._wake_queue.wake(woken)

    def _leave(self, waiter: ThreadWaiter | LoneCall, error: Exception, thread: int | None) -> bool:
        with self._lock:
            self._line.leave(self._clock(), waiter, thread)
            unanswered = [request for request in waiter.requests if request.caller is None]
            for request in unanswered:
                request.error = error
            waiter.pending = 0
            self._line.wake.append(waiter)  # other threads may wait for it too
            self._queue_wakeups_or_fail()
        self._wake_queue.wake_everybody()  # it might have been this thread's turn to wake the next one
        return bool(unanswered)

    def _close(self, error: CarpoolError, waiter: ThreadWaiter) -> None:
        with self._lock:
            self._line.close(error)
            self._line.wait_for_end(waiter)
            woken = self._queue_wakeups_or_fail()
        self._wake_queue.wake(woken)

    # -- what goes wrong

    def _policy_raised(self, stage: str, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            raise error
        self._fault = error

    def _queue_wakeups_or_fail(self) -> int:
        """Queue the waiters that the line wakes, and return how many: the end of each change of the
        line, whose lock is held.

        Raises:
            PolicyRaised: The policy has raised in this change, and the line has failed for it.
        """
        if self._fault is not None:
            self._fail_line(self._fault)
        return self._wake_queue.add(self._line.wake)

    def _fail_line(self, error: BaseException) -> NoReturn:
        self._fault = None
        what = f"{self._name} has failed: its policy raised {type(error).__name__}"
        logger.critical("%s: %s", what, text_of(error), exc_info=error)
        failure = Unavailable(what, code="stage_failed", retry_after_s=FAILED_FOR_S)
        self._line.fail(self._clock(), failure, get_ident())
        self._wake_queue.add(self._line.wake)
        raise PolicyRaised

    def _has_failed(self, error: BaseException) -> bool:
        if not isinstance(error, PolicyRaised):
            return False
        self._wake_queue.wake_everybody()
        return True

    def _check_owner(self) -> None:
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise self._called_in_between()

    def _called_in_between(self) -> RuntimeError:
        return RuntimeError(
            f"{self._name} was called by a signal handler or a __del__ in a thread that it has interrupted inside"
            " the line of the same function: let another thread make the call"
        )

    def _interrupted(self) -> Unavailable:
        return Unavailable(f"a thread that waited for {self._name} was interrupted", code="cancelled")


def _with_answer(lone: LoneCall) -> LoneCall:
    (request,) = lone.requests
    lone.result, lone.error = request.result, request.error
    return lone


def _answer_in_child(batch: Batch, outcome: BatchOutcome) -> None:
    """Answer the requests of this thread's caller; those of others are the parent's."""
    errors = outcome.errors
    for i, request in enumerate(batch.requests):
        if request.caller is not None:
            request.result, request.error = outcome.results[i], None if errors is None else errors.get(i)
            request.caller.answered(request)


# -- threads inside of functions


class Sleeper(NamedTuple):
    """The line in which a thread sleeps while it is inside a function, and the waiter there."""

    line: LineDriver
    waiter: ThreadWaiter


leading: dict[int, tuple[LineDriver, ...]] = {}
"""The lines of this process whose functions each thread is inside of. `LineDriver._call` writes the
entry of its own thread only.
"""

sleeping: dict[object, Sleeper] = {}
"""Where threads that are inside a function sleep, by thread. Each writes its own entry, as it is
about to sleep, and takes it out when it is awake.
"""


def would_deadlock(line: LineDriver, thread: int) -> bool:
    """Report whether nothing moves in a line before the thread is done with what it leads."""
    lines = [line]
    for each in lines:  # which grows
        leaders = each.leading_threads
        if leaders is None:
            return False
        for leader in leaders:
            if leader == thread:
                continue
            sleeper = sleeping.get(leader)
            if sleeper is None or not sleeper.waiter.pending:
                return False
            if sleeper.line not in lines:
                lines.append(sleeper.line)
    return True


def _forked() -> None:
    leading.clear()
    sleeping.clear()


os.register_at_fork(after_in_child=_forked)
