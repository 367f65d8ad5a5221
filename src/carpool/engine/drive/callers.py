"""Python callers: objects become requests, answers become objects, and tasks and threads wait for
them, as a whole or part by part.

A caller that reads more slowly than the model makes parts has its stream paused when `PAUSE_BYTES`
wait for it, and goes on when it has taken half of them. So memory is bounded, and the streams
beside it keep their pace.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, TypeVar

from carpool.engine.clock import Clock
from carpool.engine.drive.aio import Driver
from carpool.engine.drive.loop_thread import LoopThread
from carpool.engine.foreign import as_model_error, text_of
from carpool.engine.request import DONE, Request
from carpool.engine.wire.payload import (
    LARGE,
    SCALAR_BYTES,
    SCALARS,
    SHORT_SCALARS,
    Memory,
    Payload,
    detach,
    dump,
    load,
    size_of,
)
from carpool.errors import DeadlineExceeded, ModelError

GRACE_S = 1.0
"""How long after a deadline a thread waits for the loop to report it."""

NO_ANSWER = (
    "the service did not answer in time, and did not say so either: is its loop blocked, by an async model, a size="
    " function, a sink or a policy?"
)
"""The error of a thread that has waited even longer."""

Weigh = Callable[[Request, Any], None]
"""Writes on a request what its item counts for: its size, its length and its key."""


def request_for(x: Any, deadline: float, weigh: Weigh | None = None, memory: Memory | None = None) -> Request:
    """Return a caller's object as a request, which waits while the queue is full.

    Args:
        weigh: Writes on the request what the item counts for.
        memory: Where large buffers are copied to; None if the caller cannot change them, as its
            thread waits for the answer.

    Raises:
        Exception: What pickling or weighing the object raises.
        ModelError: Its own `__reduce__` raised no `Exception`, but SystemExit or the like.
    """
    try:
        item = dump(x)
    except Exception:
        raise
    except BaseException as error:
        raise as_model_error(error, "an item that is pickled") from error
    if type(item) is bytes:
        nbytes = len(item)
    else:
        nbytes = SCALAR_BYTES if type(item) in SHORT_SCALARS else size_of(item)
    if memory is not None and nbytes >= LARGE:
        item = detach(item, memory)
    request = Request(item, deadline, None, nbytes)
    if weigh is not None:
        weigh(request, x)
    request.patient = True
    return request


def result_of(request: Request) -> Any:
    if request.error is not None:
        raise error_of(request)
    return load_result(request.result)


def load_part(request: Request, payload: Payload) -> Any:
    """Return a part as an object, which shares no memory with what is kept of it: its model may go
    on from there elsewhere. Raises `ModelError` if it cannot be read.
    """
    is_kept = request.stream is not None and len(request.stream.kept) > 0
    return load_result(detach(payload, Memory()) if is_kept else payload)


def load_result(payload: object) -> Any:
    """Return a result, or a part of one, as an object; raise `ModelError` if it cannot be read."""
    if type(payload) in SCALARS:
        return payload  # as `load` does, without a call
    try:
        return load(payload)  # type: ignore[arg-type]
    except BaseException as error:  # its class may have a `__setstate__`, which is the user's
        text = f"the model's result cannot be read here: {text_of(error)}"
        raise ModelError(text, code="bad_result", type_name=type(error).__name__) from error


def error_of(request: Request) -> Exception:
    """Take out of a request why it has failed.

    Each error is handed out once: if a frame of the call led to the error, and the error to the
    frame, neither would be freed.
    """
    error, request.error = request.error, None
    assert error is not None
    return error


def with_cause(error: Exception) -> Exception:
    """Return the error with its cause loaded and noted, in a thread of the caller's own, since an
    interpreter that prints an uncaught exception would not load it.
    """
    if type(error) is ModelError:  # a subclass may be the user's
        error._open_cause()
    return error


class TaskCaller:
    """A task that awaits the answer, which is then the request's, or other news, by the future
    `done`, which is None while it does not wait.
    """

    __slots__ = ("done",)

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.done: Any = None if loop is None else loop.create_future()

    def set(self) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_result(None)

    def answered(self, request: Request) -> None:
        self.set()

    async def wait(self) -> None:
        self.done = asyncio.get_running_loop().create_future()
        try:
            await self.done
        finally:
            self.done = None


class LockCaller:
    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self, request: Request, clock: Clock) -> None:
        """Raises DeadlineExceeded if the loop should have reported that the deadline has passed,
        and has not.
        """
        most_s = max(0.0, request.deadline - clock()) + GRACE_S
        if self._lock.acquire(timeout=min(most_s, threading.TIMEOUT_MAX)):
            return
        if request.state != DONE or not self._lock.acquire(timeout=GRACE_S):
            raise DeadlineExceeded(NO_ANSWER)

    def answered(self, request: Request) -> None:
        self._lock.release()


T = TypeVar("T")

PAUSE_BYTES: Final = 2**20
"""How many bytes may wait for a caller before its stream is paused."""

ENTER_FIRST: Final = "use it as a block: `with s.predict_stream(x) as parts: for part in parts: ...`"
LEFT: Final = "this stream of parts was left before its end: read it inside of its block"
PARENTS: Final = "this stream of parts belongs to the process from which this one was forked: ask for it there"
TWO_READERS: Final = "another task waits for the next part of this stream: let one task read it"
_LEAST_BYTES: Final = 64  # what a part takes in memory at least, whatever its payload holds


class Unread:
    """How much waits for a caller, and when its stream pauses and goes on.

    Parts are added in the loop's thread, which writes `is_paused`, and taken in the caller's; no
    count has two writers.
    """

    __slots__ = ("_added", "_taken", "is_paused")

    def __init__(self) -> None:
        self._added = self._taken = 0
        self.is_paused = False

    def add(self, nbytes: int) -> bool:
        """Count a part that has come, and report whether the stream pauses now."""
        self._added += nbytes + _LEAST_BYTES
        if self.is_paused or self._added - self._taken <= PAUSE_BYTES:
            return False
        self.is_paused = True
        return True

    def take(self, nbytes: int) -> bool:
        """Count a part that was taken, and report whether a paused stream can go on."""
        self._taken += nbytes + _LEAST_BYTES
        return self.is_paused and self._is_half_read

    def take_all(self) -> None:
        self._taken = self._added

    def go_on(self) -> bool:
        if not self.is_paused or not self._is_half_read:
            return False
        self.is_paused = False
        return True

    @property
    def _is_half_read(self) -> bool:
        return self._added - self._taken <= PAUSE_BYTES // 2


class _PartsReader(Generic[T]):
    """The parts of one answer, which a driver takes, and `news`, which wakes who reads them. The
    handle of the service is kept until the block ends, as the service would end with it.
    """

    def __init__(self, driver: Driver, request: Request, handle: object, news: TaskCaller | threading.Event) -> None:
        self._wake = news.set
        self._driver = driver
        self._handle: object | None = handle
        self._request = request
        self._parts: deque[Payload] = deque()  # the loop appends, the caller takes
        self._unread = Unread()
        self._has_entered = False
        self._has_ended = False  # the loop writes it, after the last part
        self._is_cut = False  # the block was left before all parts were taken

    def whole(self, parts: list[Any]) -> Any:
        """Return the whole answer, once all `parts` have been taken."""
        stream = self._request.stream
        if stream is None or stream.is_collected:
            return parts[0]
        return result_of(self._request) if stream.is_told_both else parts

    # -- the caller's calls

    def _enter(self) -> None:
        if self._has_entered:
            raise RuntimeError("this stream of parts has been used: ask for a new one")
        self._has_entered = True
        self._request.caller = self
        self._post(partial(self._driver.submit, self._request))

    def _leave(self) -> None:
        self._is_cut = not self._has_ended or len(self._parts) > 0
        if not self._has_ended:
            self._post(partial(self._driver.cancel, self._request))
        self._parts.clear()
        self._wake()
        self._handle = None  # which a circle of this and its request would keep

    def _is_at_end(self, enter_first: str) -> bool:
        """Report whether no part comes any more. Raises RuntimeError outside the block."""
        if not self._has_entered:
            raise RuntimeError(enter_first)
        if self._is_cut:
            raise RuntimeError(LEFT)
        return self._has_ended and not self._parts  # the end is written after the last part

    def _take(self) -> Any:
        payload = self._parts.popleft()
        if self._unread.take(size_of(payload)):
            self._post(self._go_on)
        return load_part(self._request, payload)

    def _post(self, work: Callable[[], object]) -> None:
        raise NotImplementedError

    # -- in the loop's thread

    def take_part(self, request: Request, part: object) -> None:
        """Take the next part."""
        self._parts.append(part)  # type: ignore[arg-type]
        if self._unread.add(size_of(part)):  # type: ignore[arg-type]
            self._driver.pause(request, True)
            self._post(self._go_on)  # what was taken meanwhile did not see the pause
        self._wake()

    def answered(self, request: Request) -> None:
        """Take the end; an answer that was not made in parts is a single part."""
        if request.error is None and (request.stream is None or request.stream.is_collected):
            self._parts.append(request.result)  # type: ignore[arg-type]
        self._has_ended = True
        self._wake()

    def _go_on(self) -> None:
        if self._unread.go_on():
            self._driver.pause(self._request, False)


class AsyncParts(_PartsReader[T], AsyncIterator[T]):
    """The parts of one answer, for a task of the service's loop.

    Use it as `async with s.predict_stream(x) as parts: async for part in parts: ...`. Leaving the
    block before the answer is complete cancels the request.

    Args:
        driver: Takes the request.
        request: What is asked; its answer comes in parts if the model gives it so.
        handle: Of the service, which would end with it; kept until the block ends.
    """

    def __init__(self, driver: Driver, request: Request, handle: object) -> None:
        self._news = TaskCaller()
        super().__init__(driver, request, handle, self._news)

    async def __aenter__(self) -> AsyncParts[T]:
        self._enter()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    def __aiter__(self) -> AsyncParts[T]:
        return self

    async def __anext__(self) -> T:
        while not self._parts:
            if self._is_at_end(ENTER_FIRST.replace("with", "async with").replace("for", "async for")):
                if self._request.error is not None:
                    raise error_of(self._request)
                raise StopAsyncIteration
            if self._news.done is not None:
                raise RuntimeError(TWO_READERS)
            self._news.done = self._driver.loop.create_future()  # as `wait` does, without a coroutine more
            try:
                await self._news.done
            finally:
                self._news.done = None
        return self._take()  # type: ignore[no-any-return]

    def _post(self, work: Callable[[], object]) -> None:
        work()


class ThreadParts(_PartsReader[T], Iterator[T]):
    """The parts of one answer, for a thread that is not the loop's.

    Use it as `with s.predict_stream(x) as parts: for part in parts: ...`. Leaving the block before
    the answer is complete cancels the request.

    Args:
        thread: The loop's.
        driver: Takes the request.
        request: What is asked; its answer comes in parts if the model gives it so.
        silence_s: How long the model may be silent.
        handle: Of the service, which would end with it; kept until the block ends.
    """

    def __init__(self, thread: LoopThread, driver: Driver, request: Request, silence_s: float, handle: object) -> None:
        self._news = threading.Event()
        super().__init__(driver, request, handle, self._news)
        self._thread = thread
        self._silence_s = silence_s

    def __enter__(self) -> ThreadParts[T]:
        self._enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    def __iter__(self) -> ThreadParts[T]:
        return self

    def __next__(self) -> T:
        while not self._parts:
            if self._is_at_end(ENTER_FIRST):
                if self._request.error is not None:
                    raise with_cause(error_of(self._request))
                raise StopIteration
            self._news.clear()
            # checked after the clearing, so that no news is missed
            if not (self._parts or self._has_ended or self._is_cut):
                self._wait()
        return self._take()  # type: ignore[no-any-return]

    def _wait(self) -> None:
        """Wait until a part or the end is there.

        Raises:
            DeadlineExceeded: The loop should have reported that the time is up, and has not.
            RuntimeError: This is a forked child, in which the loop does not run.
        """
        if self._thread.is_parents:
            raise RuntimeError(PARENTS)
        most_s = min(self._silence_s + 2 * GRACE_S, threading.TIMEOUT_MAX)
        if not self._news.wait(most_s) and not (self._parts or self._has_ended or self._is_cut):
            raise DeadlineExceeded(NO_ANSWER)

    def _post(self, work: Callable[[], object]) -> None:
        self._thread.post(work)
