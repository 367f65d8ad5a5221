"""Workers inside this process, which are threads or tasks of the loop.

Threads are for models that release the GIL, tasks for `async def` models. They live the same life
as a worker process (`worker/serve.py`) and exchange the same frames, which are handed over as they
are; only what a model may go on changing is copied out of them, as a socket would do it. But they
cannot be killed: one that hangs is left to itself, and what it sends later is not read.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
import types
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from carpool.engine.call.results import run_now
from carpool.engine.clock import monotonic
from carpool.engine.drive.worker import Launch
from carpool.engine.foreign import text_of
from carpool.engine.observe.log import LineSink
from carpool.engine.wire.frame import Frame, FrameError
from carpool.engine.wire.payload import Memory, detached
from carpool.engine.worker.generators import Beside
from carpool.engine.worker.place import enter_context, pin
from carpool.engine.worker.program import Setup, process_name
from carpool.engine.worker.serve import serve

_LOOP_ENDS_S = 0.05  # a loop that cancels its tasks is about to end, and a successor would outlive it


class _LocalWorker:
    """A worker in a thread or a task; see `Worker`. The arguments are those of
    `WorkerProcess`; the sink gets its stack if it hangs.
    """

    pid: int | None = None
    where = ""
    broke_protocol = False
    fell_silent = False
    send_ahead = None
    hello = None
    has_unread_batch = False

    def __init__(
        self,
        launch: Launch,
        index: int,
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[str], None],
        sink: LineSink,
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._sink = sink
        self._model = (launch.model, launch.kwargs, launch.adapters, launch.spots)
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._setup: Setup = msgspec.structs.replace(launch.setup, place=index, cores=launch.cores_of(index))
        self._name = process_name(self._setup.stage, index)
        self._start()

    def _start(self) -> None:
        raise NotImplementedError

    def _stack(self) -> str:
        raise NotImplementedError

    async def ended(self) -> None:
        await asyncio.shield(self._gone)

    def catch_up(self) -> bool:
        return False

    def give_up(self, why: str, on_frame: Callable[[Frame], None]) -> None:
        self._on_frame = on_frame
        name = f"{self._setup.stage}/{self._setup.place}"
        for line in self._stack().splitlines():
            self._sink(name, True, line)
        self.kill(why)

    def abandon(self) -> None:
        """A task ends with the loop, a thread once its present call returns."""
        if not self._loop.is_closed() and not self._gone.done():
            self._gone.set_result(None)

    def kill(self, why: str = "") -> None:
        self._loop.call_soon(self._end, why or "it was given up")

    def _hand_over(self, frame: Frame) -> None:
        if self._gone.done() or self.broke_protocol:  # a stream would miss the part that was not read
            return
        try:
            self._on_frame(frame)
        except FrameError as error:
            self.broke_protocol = True
            self.kill(f"it is given up for what it sent: {error}")

    def _end(self, why: str) -> None:
        if not self._gone.done():
            self._gone.set_result(None)
            self._on_lost(why)


class ThreadWorker(_LocalWorker):
    def _start(self) -> None:
        self._inbox: SimpleQueue[Frame | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._live, name=self._name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has none to give, as it may have no process
            raise OSError(f"no thread can be started: {error}") from None

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        return f"Thread {self._name}:\n{''.join(traceback.format_stack(frame))}" if frame is not None else ""

    def send(self, frame: Frame) -> None:
        self._inbox.put(frame)

    def close_input(self) -> None:
        self._forget()

    def kill(self, why: str = "") -> None:
        super().kill(why)
        self._forget()

    def abandon(self) -> None:
        super().abandon()
        self._forget()

    def _forget(self) -> None:
        with suppress(Empty):
            while True:
                self._inbox.get_nowait()
        self._inbox.put(None)

    def _live(self) -> None:
        try:
            pin(self._setup.cores)
            enter_context(self._setup.place)
            link = _ThreadLink(self._loop, self._inbox, self._hand_over)
            run_now(serve(link, self._setup, lambda: self._model, same_process=True))
            why = "it ended"
        except BaseException as error:
            why = f"it ended with {type(error).__name__}: {text_of(error)}"
        _call_soon(self._loop, self._end, why)


class _ThreadLink:
    """A thread's end of the connection, which received its last frame at `came_at`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, inbox: SimpleQueue[Frame | None], hand_over: Callable[[Frame], None]
    ) -> None:
        self._loop = loop
        self._inbox = inbox
        self._hand_over = hand_over
        self._memory = Memory()
        self.came_at = 0.0

    async def receive(self) -> Frame | None:
        frame = self._inbox.get()
        self.came_at = monotonic()
        return frame

    async def has_news(self) -> bool:
        return not self._inbox.empty()

    def send(self, frame: Frame) -> None:
        frame.payloads = detached(frame.payloads, self._memory)
        _call_soon(self._loop, self._hand_over, frame)


class LoopWorker(_LocalWorker):
    def _start(self) -> None:
        self._inbox: deque[Frame | None] = deque()
        self._news = asyncio.Event()
        self._task = self._loop.create_task(self._live(), name=self._name)
        self._task.add_done_callback(self._done)  # which comes even if it is cancelled before its first step

    def _stack(self) -> str:
        frames = []
        awaiting: Any = self._task.get_coro()
        while isinstance(awaiting, types.CoroutineType):
            frame = awaiting.cr_frame
            if frame is not None:  # it has not ended
                frames.append((frame, frame.f_lineno))
            awaiting = awaiting.cr_await
        # frame by frame: the callers of a frame that runs at this moment are no part of the task
        return f"Task {self._name}:\n{''.join(traceback.StackSummary.extract(iter(frames)).format())}"

    def send(self, frame: Frame) -> None:
        self._put(frame)

    def close_input(self) -> None:
        self._put(None)

    def kill(self, why: str = "") -> None:
        super().kill(why)
        self._task.cancel()

    def _put(self, frame: Frame | None) -> None:
        self._inbox.append(frame)
        self._news.set()

    async def _live(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        enter_context(self._setup.place)

        def is_ending() -> bool:
            """Report whether the task is cancelled or closed; user code may raise the same."""
            try:
                return task.cancelling() > 0 or asyncio.current_task() is not task
            except RuntimeError:  # no loop is running
                return True

        link = _LoopLink(self._inbox, self._news, self._hand_over)
        fatal_errors = (GeneratorExit, asyncio.CancelledError)
        beside = Beside(link.news)
        try:
            await serve(
                link,
                self._setup,
                lambda: self._model,
                fatal_errors,
                is_ending=is_ending,
                beside=beside,
                same_process=True,
            )
            why = "it ended"
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # some kinds would end the loop, if they left the task
            why = f"it ended with {type(error).__name__}: {text_of(error)}"
        finally:
            beside.end()
        _call_soon(self._loop, self._end, why)

    def _done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # by `kill`, which has reported it already; or by the end of the loop
            self._loop.call_later(_LOOP_ENDS_S, self._end, "its task was cancelled")


class _LoopLink:
    """A task's end of the connection; see `_ThreadLink`."""

    def __init__(self, inbox: deque[Frame | None], news: asyncio.Event, hand_over: Callable[[Frame], None]) -> None:
        self._inbox = inbox
        self._news = news
        self._hand_over = hand_over
        self._memory = Memory()
        self.came_at = 0.0

    async def news(self) -> None:
        while not self._inbox:
            self._news.clear()
            await self._news.wait()

    async def receive(self) -> Frame | None:
        await self.news()
        self.came_at = monotonic()
        return self._inbox.popleft()

    async def has_news(self) -> bool:
        await asyncio.sleep(0)  # a model that never waits must not keep the loop for itself
        return bool(self._inbox)

    def send(self, frame: Frame) -> None:
        frame.payloads = detached(frame.payloads, self._memory)
        self._hand_over(frame)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[..., None], argument: object) -> None:
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        if not loop.is_closed():
            raise
