"""Tasks that await tickets of a line of threads.

A task must not hold its loop up, so threads of the loop's default executor wait, and lead, for all
tickets that tasks of the loop await: as many as batches may run at a time, however many tickets
there are. They end when nothing is awaited any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from carpool.engine.drive.wakeups import ThreadWaiter
from carpool.engine.foreign import as_model_error

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
                self._tell_others()

    def _is_done(self, mine: _Awaited) -> bool:
        """Wait a moment for a ticket, and report whether its task was told an end."""
        try:
            if not mine.wait(mine.waiter, _LOOK_S):
                return False
            self._tell(mine, None)
        except Exception as error:
            self._tell(mine, error)
        except BaseException as error:  # the function's own, as no signal comes to this thread
            self._tell(mine, as_model_error(error, "a batch function that a task awaits"))
        return True

    def _tell_others(self) -> None:
        """Tell the tasks whose tickets were served before the thread's own."""
        with self._lock:
            served = [each for each in self._awaited if not each.waiter.pending]
            for each in served:
                self._awaited.remove(each)
        for each in served:
            self._tell(each, None)

    def _tell(self, awaited: _Awaited, error: Exception | None) -> None:
        loop = self._loop()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_tell_task, awaited.future, error)


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


def _tell_task(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():  # its task was cancelled
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
