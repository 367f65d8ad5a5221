"""The loop's thread, for programs that have none, and how long it works.

Work that comes as the loop ends is done in its thread after it has stopped or, later still, in the
thread that brings it. It meets a stopped driver then, which answers at once.

The work of the thread that drives a core is measured ten times a second, for the views of policies.
That is the time for which it is on a core and, where Linux says so, waits for one: where cores are
shared, a batch takes as much longer to be written. Whatever else runs on the thread counts as well,
so time in which little has come teaches nothing.

The core counts requests and batches. From several sums of both follow the two numbers, work for a
request and for a batch besides, by the least squares of relative errors. Where batches have about
one size, sums say nothing of how the work divides, so it is taken to divide as for a service of a
trivial model. No request and no batch reads a clock for it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from math import inf
from threading import get_ident
from time import thread_time
from typing import TYPE_CHECKING, Any, Final, TypeVar

from carpool.engine.clock import monotonic
from carpool.engine.core.life import Mailbox, Work
from carpool.engine.logger import logger
from carpool.engine.observe.log import fill_standard
from carpool.errors import Unavailable

if TYPE_CHECKING:
    from carpool.engine.core.core import Core

T = TypeVar("T")

_TASKS_END_S = 5.0  # for tasks that a model has started and left, once they have been cancelled
_LOOK_UP_S = 0.5  # how often a waiting thread looks for signals that came just before it slept


class LoopThread:
    """A running loop.

    Args:
        loop: The loop, which does not run yet; None for a new one, the fastest there is.

    Attributes:
        ident: The thread's number.
        is_stopping: Whether the loop ends: a task that is made now may never begin.
        is_parents: Whether this process is a child of the one whose loop it is.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = _new_loop() if loop is None else loop

        # the mailbox and its lock; that is taken twice by a thread which is interrupted while it
        # posts, by a signal handler or a collected generator, and posts there too
        self._lock = threading.RLock()
        self._mailbox = Mailbox()

        # the loop's life: stopping is written by its thread, the rest is read by others, too
        self.is_stopping = False
        self._ended = threading.Event()
        self._afterwards = threading.RLock()  # what is done once the loop has ended is done by one thread at a time
        self._last_beat = monotonic()
        self.is_parents = False
        _all.add(self)
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self.loop.close()
            raise
        self.ident = self._thread.ident

    def post(self, work: Work) -> None:
        """Have something done in the loop's thread, soon; or here at once, if the loop has ended.

        In a forked child nothing is done: the loop is the parent's, and its locks may be held for
        ever.
        """
        if self.is_parents:
            return
        try:
            with self._lock:
                must_wake = self._mailbox.post(work)
        except ValueError:
            with self._afterwards:
                work()
            return
        if must_wake:
            self._wake()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result; an interruption cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            while not wait([future], timeout=_LOOK_UP_S).done:
                if self._ended.is_set() or sys.is_finalizing():
                    raise Unavailable("the service has stopped", code="stopped")
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def ask(self, question: Callable[[], T], most_s: float) -> T:
        """Return what a function returns in the loop's thread, or here if the loop has ended.
        Raises TimeoutError after `most_s` seconds.
        """
        if threading.get_ident() == self.ident:
            return question()
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(question())
            except BaseException as error:
                future.set_exception(error)

        until = monotonic() + most_s
        self.post(answer)
        while not wait([future], timeout=_LOOK_UP_S).done:
            if monotonic() >= until:
                raise TimeoutError
        return future.result()

    def stop(self) -> None:
        """End the loop after this turn, from its own thread. Further calls do nothing."""
        if not self.is_stopping:
            self.is_stopping = True
            self.loop.stop()

    def wait_until_ended(self, silent_s: float) -> None:
        """Wait in another thread until the loop and all that was posted to it are done.

        Nothing is waited for once the interpreter ends, as it has ended the thread.

        Raises:
            TimeoutError: Something blocks the loop, which has done nothing for `silent_s` seconds.
        """
        self._last_beat = monotonic()
        while not sys.is_finalizing() and not self._ended.wait(_LOOK_UP_S):
            self.post(self._beat)
            if monotonic() - self._last_beat > silent_s:
                raise TimeoutError

    def _beat(self) -> None:
        self._last_beat = monotonic()

    # -- inside

    def _wake(self) -> None:
        try:
            self.loop.call_soon_threadsafe(self._do_posted)
        except RuntimeError:  # it has just ended, and has done what was posted
            if not self._mailbox.is_over:
                raise

    def _do_posted(self) -> None:
        with self._lock:
            posted = self._mailbox.take()
        _do(posted)

    def _end_tasks(self) -> None:
        until = self.loop.time() + _TASKS_END_S
        while self.loop.time() < until:
            try:
                return self.loop.run_until_complete(_end_tasks(until))
            except (SystemExit, KeyboardInterrupt, RuntimeError):  # RuntimeError: a task has called `loop.stop()`
                # that task is done; others may be left
                logger.exception("a task that was cancelled tried to end the service's loop")

    def _live(self) -> None:
        while not self.is_stopping:
            try:
                self.loop.run_forever()
            except BaseException:  # SystemExit or KeyboardInterrupt, which asyncio lets through from any callback
                logger.exception("a callback tried to end the service's loop, which goes on")
        try:
            self._end_tasks()
        finally:
            with self._afterwards:
                with self._lock:
                    left = self._mailbox.end()
                _do(left)
                self.loop.close()
            self._ended.set()


_all: weakref.WeakSet[LoopThread] = weakref.WeakSet()
"""The loop threads of this process, which a fork leaves to the parent."""


def _forked() -> None:
    for thread in list(_all):
        thread.is_parents = True


os.register_at_fork(after_in_child=_forked)


async def _end_tasks(until: float) -> None:
    """Cancel what is left on the loop, as `asyncio.run` does: nothing may wait in vain."""
    loop = asyncio.get_running_loop()
    left: set[asyncio.Task[Any]] = set()
    while loop.time() < until:
        await asyncio.sleep(0)  # what other threads have asked for meanwhile may be a task, too
        new = {task for task in asyncio.all_tasks() - left if task is not asyncio.current_task()}
        if not new:
            break
        for task in new:
            task.cancel()
        left |= new
        await asyncio.wait([asyncio.gather(*new, return_exceptions=True)], timeout=max(0.0, until - loop.time()))
    await asyncio.wait([loop.create_task(loop.shutdown_asyncgens())], timeout=max(0.0, until - loop.time()))
    stubborn = [task for task in left if not task.done()]
    if stubborn:
        logger.error("tasks that a model has started were cancelled but do not end; they are left alone: %s", stubborn)


def _do(posted: Sequence[Work]) -> None:
    for work in posted:
        try:
            work()
        except BaseException:
            logger.exception("work that was posted to the service's loop has raised")


def _new_loop() -> asyncio.AbstractEventLoop:
    fill_standard()
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


_EVERY_S: Final = 0.1  # a thread's time is no more than some milliseconds out; policies learn in seconds
_LONGEST_S: Final = 1.0  # in which `_LEAST` must have come
_LEAST: Final = 64  # requests and batches, some milliseconds of work
_QUEUE: Final = "/proc/thread-self/schedstat"  # its second number is in nanoseconds
_KEEP: Final = 0.95  # of the weight of former sums, at each new one
_USUAL: Final = 5.0  # requests that are as much work as a batch besides: 63 and 12 µs were measured
_PULL: Final = 0.02  # weight of that ratio beside the sums; noise of a tenth moves the numbers by as much


class OwnWork:
    """Learned seconds of the coordinator's work for each request, and for each batch besides; 0
    while they are not known.
    """

    __slots__ = ("_b", "_bb", "_n", "_nb", "_nn", "batch_s", "request_s")

    def __init__(self) -> None:
        self.request_s = self.batch_s = 0.0
        self._n = self._b = self._nn = self._nb = self._bb = 0.0

    def learn(self, worked_s: float, requests: int, batches: int) -> None:
        """Learn from a sum of seconds for some requests and batches, of which there was one at
        least.
        """
        if worked_s <= 0.0:
            return
        n, b = requests / worked_s, batches / worked_s
        self._n, self._b = _KEEP * self._n + n, _KEEP * self._b + b
        self._nn, self._nb, self._bb = _KEEP * self._nn + n * n, _KEEP * self._nb + n * b, _KEEP * self._bb + b * b
        pull = _PULL * self._bb  # times (batch_s - _USUAL * request_s)², beside the squares of the sums
        nn, nb, bb = self._nn + pull * _USUAL**2, self._nb - pull * _USUAL, self._bb + pull
        determinant = nn * bb - nb * nb
        request_s = (bb * self._n - nb * self._b) / determinant
        batch_s = (nn * self._b - nb * self._n) / determinant
        if request_s < 0.0:
            request_s, batch_s = 0.0, self._b / self._bb
        elif batch_s < 0.0:
            request_s, batch_s = self._n / self._nn, 0.0
        self.request_s, self.batch_s = request_s, batch_s


class WorkMeter:
    """Measures the thread that drives a core, unless that counts no batches.

    Attributes:
        next_at: When `measure` is to be called next; infinity for never.
    """

    def __init__(self, core: Core) -> None:
        self.next_at = -inf if core.requests_and_batches is not None else inf
        self._core = core
        self._work = OwnWork()
        self._thread = 0
        self._since = -inf
        self._worked_s = 0.0
        self._requests = self._batches = 0

    def measure(self, now: float) -> None:
        self.next_at = now + _EVERY_S
        counted = self._core.requests_and_batches
        assert counted is not None  # else this is not called
        requests, batches = counted
        came, went = requests - self._requests, batches - self._batches
        is_new = now - self._since > _LONGEST_S or get_ident() != self._thread
        if not is_new and (came + went < _LEAST or not went):
            return
        try:
            before_s, self._worked_s = self._worked_s, worked_s()
        except OSError:  # say, no file can be opened now
            self._since = -inf
            return
        if not is_new:
            work = self._work
            work.learn(self._worked_s - before_s, came, went)
            self._core.note_work(work.request_s, work.batch_s)
        self._thread, self._since, self._requests, self._batches = get_ident(), now, requests, batches


def worked_s() -> float:
    """Return for how many seconds this thread has been on a core, or has waited for one; raises
    OSError where the system does not say it.
    """
    try:
        file = os.open(_QUEUE, os.O_RDONLY)
    except (FileNotFoundError, PermissionError):  # no such system
        return thread_time()
    try:
        return thread_time() + int(os.read(file, 64).split()[1]) * 1e-9
    finally:
        os.close(file)
