"""Python callers: their objects as requests, their answers as objects, and two ways to wait for one answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from carpool.errors import ModelError
from carpool.request import Request
from carpool.wire.payload import dump, load, size_of

Weigh = Callable[[Any], int]
"""How much of a batch an item takes up."""


def request_for(x: Any, deadline: float, weigh: Weigh | None = None) -> Request:
    """A caller's object as a request, which waits while the queue is full. Raises what pickling or weighing it does."""
    item = dump(x)
    request = Request(item, deadline, None, len(item) if type(item) is bytes else size_of(item))
    if weigh is not None:
        request.size = weigh(x)
    request.patient = True
    return request


def result_of(request: Request) -> Any:
    """The answer of a request that is done: its result as an object, or its error raised."""
    if request.error is not None:
        raise request.error
    try:
        return load(request.result)  # type: ignore[arg-type]
    except Exception as error:
        text = f"the model's result cannot be read here: {error}"
        raise ModelError(text, code="bad_result", type_name=type(error).__name__) from error


class FutureCaller:
    """A task that awaits the answer."""

    __slots__ = ("future",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.future: asyncio.Future[Any] = loop.create_future()

    def answered(self, request: Request) -> None:
        """Complete the future, unless its task has been cancelled."""
        if self.future.done():
            return
        try:
            self.future.set_result(result_of(request))
        except Exception as error:
            self.future.set_exception(error)


class LockCaller:
    """A thread that blocks until the answer is there."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self) -> None:
        """In the caller's thread: until `answered`."""
        self._lock.acquire()

    def answered(self, request: Request) -> None:
        """Wake the thread."""
        self._lock.release()
