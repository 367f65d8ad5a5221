"""Python callers: objects become requests, answers become objects, and two ways to wait for one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from carpool.engine.clock import Clock
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
        x: The object.
        deadline: The time after which nobody waits for the answer.
        weigh: Writes on the request what the item counts for.
        memory: Where large buffers are copied to, so that the caller may change them; None if the
            caller cannot, as its thread waits for the answer.

    Raises:
        Exception: What pickling or weighing the object raises.
        ModelError: Its own `__reduce__` raised something that is not an `Exception`, such as
            SystemExit.
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
    """Return the result of a request that is done, as an object, or raise its error."""
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
    """Return the error with its cause loaded and noted, in a thread of the caller's own.

    An interpreter that prints an uncaught exception would not load it.
    """
    if type(error) is ModelError:  # a subclass may be the user's
        error._open_cause()
    return error


class TaskCaller:
    """A task that awaits the answer, which is then the request's.

    Attributes:
        done: Is completed once the answer is there.
    """

    __slots__ = ("done",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.done: asyncio.Future[None] = loop.create_future()

    def answered(self, request: Request) -> None:
        """Wake the task, unless it has been cancelled."""
        if not self.done.done():
            self.done.set_result(None)


class LockCaller:
    """A thread that blocks until the answer is there."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self, request: Request, clock: Clock) -> None:
        """Wait in the caller's thread until the answer is there.

        Raises:
            DeadlineExceeded: The loop should have reported that the deadline has passed, and has
                not.
        """
        most_s = max(0.0, request.deadline - clock()) + GRACE_S
        if self._lock.acquire(timeout=min(most_s, threading.TIMEOUT_MAX)):
            return
        if request.state != DONE or not self._lock.acquire(timeout=GRACE_S):
            raise DeadlineExceeded(NO_ANSWER)

    def answered(self, request: Request) -> None:
        """Wake the thread."""
        self._lock.release()
