"""An event loop in a thread of its own, for programs that have none.

Other threads post work to it and wait for results. Work that comes as the loop ends is not lost: it
is done in the loop's thread after the loop has stopped or, later still, in the thread that brings
it. It meets a stopped driver then, which answers at once.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from carpool.engine.clock import monotonic
from carpool.engine.core.life import Mailbox, Work
from carpool.engine.drive.output import fill_standard
from carpool.engine.logger import logger
from carpool.errors import Unavailable

T = TypeVar("T")

_TASKS_END_S = 5.0  # for tasks that a model has started and left, once they have been cancelled
_LOOK_UP_S = 0.5  # how often a waiting thread looks for signals that came just before it slept


class LoopThread:
    """A running loop.

    Args:
        name: That of its thread.
        loop: The loop, which does not run yet; None for a new one, the fastest there is.

    Attributes:
        loop: The loop.
        ident: The thread's number.
        is_parents: Whether this process is a child of the one whose loop it is.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = _new_loop() if loop is None else loop

        # the mailbox and its lock; that is taken twice by a thread which is interrupted while it
        # posts, by a signal handler or a collected generator, and posts there too
        self._lock = threading.RLock()
        self._mailbox = Mailbox()

        # the loop's life: stopping is written by its thread, the rest is read by others, too
        self._is_stopping = False
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

        Raises:
            TimeoutError: The loop has not called it within `most_s` seconds.
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

    @property
    def is_stopping(self) -> bool:
        """Whether the loop ends: a task that is made now may never begin."""
        return self._is_stopping

    def stop(self) -> None:
        """End the loop after this turn, from its own thread. Further calls do nothing."""
        if not self._is_stopping:
            self._is_stopping = True
            self.loop.stop()

    def wait_until_ended(self, silent_s: float) -> None:
        """Wait in another thread until the loop and all that was posted to it are done.

        Once the interpreter ends, it has ended the loop's thread, as all daemon threads: then
        nothing is waited for.

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
        """Have the loop do what has been posted."""
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
        """Cancel all tasks and wait for a limited time, whatever they do about it."""
        until = self.loop.time() + _TASKS_END_S
        while self.loop.time() < until:
            try:
                return self.loop.run_until_complete(_end_tasks(until))
            except (SystemExit, KeyboardInterrupt, RuntimeError):  # RuntimeError: a task has called `loop.stop()`
                # that task is done; others may be left
                logger.exception("a task that was cancelled tried to end the service's loop")

    def _live(self) -> None:
        while not self._is_stopping:
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
    """Return a loop of uvloop where it is installed, else of asyncio."""
    fill_standard()
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
