"""A line that threads share: its lock, how they sleep and wake, and what goes wrong with it.

The line (`core/line.py`) decides under one short lock which thread leads and which sleep. How
threads are woken is in `drive/wakeups.py`, and one thread's way through the line in
`drive/threads.py`.

Any thread may be interrupted at any point, by Ctrl-C or by an exception of a signal handler. So
whatever another thread counts on is one step, or is made up for where the exception is caught.
"""

from __future__ import annotations

import threading
from math import inf
from threading import get_ident
from typing import Any, ClassVar

from carpool.call.lock import ExecutionLock, can_be_tried
from carpool.clock import Clock, monotonic
from carpool.core.batcher import Batcher
from carpool.core.line import Line, LoneWaiter
from carpool.drive import reentry
from carpool.drive.awaiting import AwaitedTickets
from carpool.drive.reentry import Sleeper, would_deadlock
from carpool.drive.trouble import FAILED_FOR_S
from carpool.drive.wakeups import Sleep, ThreadWaiter, WakeQueue, WakeupLocks
from carpool.errors import CarpoolError, Unavailable
from carpool.foreign import text_of
from carpool.logger import logger
from carpool.observe.function_stats import CallCounts, FunctionSnapshot, snapshot
from carpool.observe.stage_stats import explained

# bound as names of this module, since a look-up in another one at each call takes time
_leading = reentry.leading
_sleeping = reentry.sleeping


class LoneCall(LoneWaiter):
    """The call of a thread that found the line empty and runs its one item itself.

    Attributes:
        sleepers: None, since its thread is inside the function.
        result: What the function returned for the item.
        error: Why it failed; None if it did not.
    """

    __slots__ = ("error", "result")

    sleepers: ClassVar[WakeupLocks] = []

    result: object
    error: Exception | None


class PolicyRaised(Exception):
    """The policy of a line has raised, and the line has failed for it."""


class SharedLine:
    """A line, and what its callers' threads do with it under its lock.

    `LineDriver` derives from it and adds the rest.

    Args:
        name: The function's, for error texts.
        batcher: Its queue and policy.
        slots: How many batches may run at a time.
        slo_s: How many seconds after its arrival a caller should have its answer, if there is a
            goal.
        execution_lock: Held while the function runs.
        clock: Monotonic seconds.

    Attributes:
        awaited: The tickets that tasks await.
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
        batcher.lobby.on_fault = self._policy_raised
        self._fault: BaseException | None = None  # what the policy has raised, until the line fails for it
        self._slots = slots
        self._slo_s = slo_s
        self._execution_lock = execution_lock
        self._may_try = can_be_tried(execution_lock)
        self._clock = clock
        self._leading_only_this = (self,)
        self.awaited = AwaitedTickets(slots)

        # shared by all threads that call the function: the line is read and changed with the lock
        # held, the queue of wake-ups filled with it and emptied without
        self._line = Line(batcher, slots, slo_s)
        self._counts = CallCounts()
        self._lock = threading.RLock()  # which knows its owner; it is never taken twice
        self._wake_queue = WakeQueue()

    # -- what it has done

    def snapshot(self) -> FunctionSnapshot:
        """Return what has been done so far. It takes no lock, so a call may be missing from it."""
        line = self._line
        return snapshot(self._name, line.pipeline, self._counts, int(line.lone is not None))

    def explain(self) -> dict[str, Any]:
        """Return why the policy decides as it does."""
        self._check_owner()
        with self._lock:
            return explained(self._batcher.lobby.policy, self._clock(), self._batcher)

    # -- forks

    def start_anew(self, batcher: Batcher) -> None:
        """Begin with an empty line in a forked child: its callers and leaders are in the parent."""
        closed = self._line.pipeline.flow.closed_because
        self._batcher = batcher
        batcher.lobby.on_fault = self._policy_raised
        self._fault = None
        self._line = Line(batcher, self._slots, self._slo_s)
        self._counts = CallCounts()
        if closed is not None:
            self._line.close(closed)
        self._lock = threading.RLock()
        self._wake_queue = WakeQueue()
        self.awaited = AwaitedTickets(self._slots)

    @property
    def generation(self) -> object:
        """An object that is not the same one in a forked child as in its parent."""
        return self._line

    @property
    def leading_threads(self) -> list[object] | None:
        """The threads that lead the line; None if one more could."""
        return self._line.leading_threads

    def forked(self) -> RuntimeError:
        """Return the error for a caller in a child that waits for requests in its parent's line."""
        return RuntimeError(
            f"the process was forked after this call of {self._name} had joined the line, which is the parent's:"
            " call it again in the child"
        )

    # -- sleep

    def _prepare_sleep(self, now: float, waiter: ThreadWaiter, until: float) -> Sleep:
        """Note, with the lock held, that this thread sleeps from now on; `_sleep` does it.

        Raises:
            RuntimeError: It would sleep for ever, as all threads that could wake it wait for it.
        """
        thread = get_ident()
        if thread in _leading and until == inf:
            _sleeping[thread] = Sleeper(self, waiter)  # before it looks at others, which do the same
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
        """Sleep; a thread that is woken wakes the next one that is to be woken."""
        timeout = -1 if sleep.seconds == inf else min(max(sleep.seconds, 0.0), threading.TIMEOUT_MAX)
        is_woken = sleep.lock.acquire(timeout=timeout)
        if _sleeping:
            _sleeping.pop(get_ident(), None)
        if not is_woken:
            try:
                sleep.sleepers.remove(sleep.lock)
                return
            except ValueError:  # it is being woken after all
                pass
        if self._wake_queue.groups:
            self._wake_queue.wake(1)

    # -- changes of the line

    def _give_up(self, slot: int) -> None:
        with self._lock:
            self._line.give_up(slot)
            woken = self._to_wake()
        self._wake_queue.wake(woken)

    def _stop_waiting(self, waiter: ThreadWaiter) -> None:
        with self._lock:
            self._line.stop_waiting(waiter)
            woken = self._to_wake()
        self._wake_queue.wake(woken)

    def _leave(self, waiter: ThreadWaiter | LoneCall, error: Exception, thread: int | None) -> bool:
        with self._lock:
            self._line.leave(self._clock(), waiter, thread)
            unanswered = [request for request in waiter.requests if request.caller is None]
            for request in unanswered:
                request.error = error
            waiter.pending = 0
            self._line.wake.append(waiter)  # other threads may wait for it too
            self._to_wake()
        self._wake_queue.wake_everybody()  # it might have been this thread's turn to wake the next one
        return bool(unanswered)

    def _close(self, error: CarpoolError, waiter: ThreadWaiter) -> None:
        with self._lock:
            self._line.close(error)
            self._line.wait_for_end(waiter)
            woken = self._to_wake()
        self._wake_queue.wake(woken)

    # -- what goes wrong

    def _policy_raised(self, stage: str, error: BaseException) -> None:
        """Take note of what the policy has raised, but for KeyboardInterrupt, which is Ctrl-C."""
        if isinstance(error, KeyboardInterrupt):
            raise error
        self._fault = error

    def _to_wake(self) -> int:
        """Take over whom the line wants to be woken, and return how many; its lock is held.

        Raises:
            PolicyRaised: The policy has raised meanwhile, and the line has failed for it.
        """
        error, self._fault = self._fault, None
        if error is None:
            return self._wake_queue.add(self._line.wake)
        what = f"{self._name} has failed: its policy raised {type(error).__name__}"
        logger.critical("%s: %s", what, text_of(error), exc_info=error)
        failure = Unavailable(what, code="stage_failed", retry_after_s=FAILED_FOR_S)
        self._line.fail(self._clock(), failure, get_ident())
        self._wake_queue.add(self._line.wake)
        raise PolicyRaised

    def _has_failed(self, error: BaseException) -> bool:
        """Report whether an error says that the line has failed; then all others are woken."""
        if not isinstance(error, PolicyRaised):
            return False
        self._wake_queue.wake_everybody()
        return True

    def _check_owner(self) -> None:
        """Raise RuntimeError if this thread holds the lock, and would wait for itself."""
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise self._called_in_between()

    def _called_in_between(self) -> RuntimeError:
        return RuntimeError(
            f"{self._name} was called by a signal handler or a __del__ in a thread that it has interrupted inside"
            " the line of the same function: let another thread make the call"
        )

    def _interrupted(self) -> Unavailable:
        return Unavailable(f"a thread that waited for {self._name} was interrupted", code="cancelled")
