"""How callers' threads sleep in a line until they are woken, which thread wakes which, and how
tasks wait.

Each sleeping thread has a lock of its own, so exactly those that are meant are woken.

Threads whose answers have come are woken one after the other, the next leader first: the leader
wakes one, and each thread that wakes up wakes the next. If all woke at once, they would fight for
the interpreter, and the next leader with them.

A task that awaits a ticket must not hold its loop up. So threads of the loop's default executor
wait, and lead, for all tickets that tasks of the loop await: as many as batches may run at a time,
however many tickets there are. They end when nothing is awaited any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from carpool.engine.core.line import Waiter
from carpool.engine.foreign import as_model_error
from carpool.engine.request import Request

WakeupLocks = list[threading.Lock]
"""One for each thread that sleeps on the same waiter: held while it sleeps, released to wake it."""


class ThreadWaiter:
    """What one caller waits for, and the threads that sleep until it is there.

    Args:
        requests: All with the same deadline.
        deadline: Theirs.

    Attributes:
        pending: How many of the requests have no answer yet.
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
        """Take note that one of the requests has its answer."""
        self.pending -= 1


class Sleep(msgspec.Struct):
    """A thread's sleep, prepared while the line's lock is held.

    It is a struct because that is made as fast as a tuple, without a call of Python code.

    Attributes:
        lock: Wakes the thread once it is released.
        sleepers: The locks of the waiter that it sleeps on, this one among them.
        seconds: How long it sleeps at most; `inf` for any time.
    """

    lock: threading.Lock
    sleepers: WakeupLocks
    seconds: float


class WakeQueue:
    """Sleeping threads that are to be woken, the next leader first.

    As long as there is a group in it, some thread is awake or waking up that will wake the next.

    Attributes:
        groups: The locks of those threads, one list for each waiter.
    """

    __slots__ = ("groups",)

    def __init__(self) -> None:
        self.groups: deque[WakeupLocks] = deque()

    def add(self, waiters: list[Waiter]) -> int:
        """Queue the sleeping threads of some waiters, while the line's lock is held.

        Args:
            waiters: All of them are of threads. The list is emptied only once all is done, since
                this thread may be interrupted.

        Returns:
            How many of the waiters have threads that sleep.
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
        wake a thread twice does no harm. Only the thread that has woken a group counts it, so that
        no two count the same.
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
    """Release the locks that no other thread has released, and report whether there was any."""
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
    """A ticket's waiter and the future that its task awaits."""

    waiter: ThreadWaiter
    wait: Wait
    future: asyncio.Future[None]


class _OfLoop:
    """What the tasks of one loop await. Their threads and the loop's share it.

    Args:
        loop: The loop.
        most: How many threads may wait.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int) -> None:
        self._loop = weakref.ref(loop)
        self._most = most
        self._lock = threading.Lock()
        self._awaited: deque[_Awaited] = deque()
        self._n_threads = 0

    def add(self, loop: asyncio.AbstractEventLoop, awaited: _Awaited) -> None:
        """Have a thread wait for a ticket."""
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
        """Wait in a thread for one ticket after the other, until there is none."""
        while True:
            with self._lock:
                if not self._awaited:
                    self._n_threads -= 1
                    return
                mine = self._awaited.popleft()
            while not self._is_done(mine):
                self._complete_others()

    def _is_done(self, mine: _Awaited) -> bool:
        """Wait a moment for a ticket, and report whether it has ended."""
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
        """Tell the tasks whose tickets were served before the thread's own."""
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
    """What tasks, of any loops, await of one line.

    Args:
        most: How many threads of each loop may wait.
    """

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
