"""Promises of carpool, broken on purpose in this process, to see that the machine finds each.

python -m tests.fuzz --mutant swap
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from carpool.client import sync
from carpool.client.aio import AsyncClient
from carpool.client.waits import Waits
from carpool.engine.core.core import Core
from carpool.engine.drive import streams
from carpool.engine.drive.aio import Driver
from carpool.engine.drive.callers import AsyncParts, ThreadParts
from carpool.errors import Unavailable
from carpool.service.handle import AsyncHandle
from carpool.service.thread_handle import Handle

_AWAY_S = 60.0
_NOW_AND_THEN = 40


def swap() -> None:
    """Two answers of a batch change places."""

    def swapped(completed: Any, self: Any, now: float, reply: Any) -> Any:
        if len(reply.results) > 1 and not reply.errors:
            reply.results = [reply.results[1], reply.results[0], *reply.results[2:]]
        return completed(self, now, reply)

    _wrap(Core, "completed", swapped)


def forget() -> None:
    """Now and then nobody is told of an answer."""
    answers = count(1)

    def forgetful(perform: Any, self: Any, todo: Any) -> Any:
        todo.answer = [request for request in todo.answer if next(answers) % _NOW_AND_THEN]
        return perform(self, todo)

    _wrap(Driver, "_perform", forgetful)


def skip() -> None:
    """Now and then a stream leaves out an answer."""
    answers = count(1)

    def skipping(harvest: Any, self: Any) -> Any:
        if self._requests and self._requests[0].state == streams.DONE and next(answers) % _NOW_AND_THEN == 0:
            self._requests.popleft()
        return harvest(self)

    _wrap(streams.ThreadStream, "_harvest", skipping)


def skip_part() -> None:
    """Now and then an answer in parts leaves out a part."""
    parts = count(1)

    def skipping(take_part: Any, self: Any, request: Any, part: Any) -> None:
        if next(parts) % _NOW_AND_THEN:
            take_part(self, request, part)

    _wrap(ThreadParts, "take_part", skipping)
    _wrap(AsyncParts, "take_part", skipping)


def hang() -> None:
    """`close` waits for something that never comes."""

    async def hanging(close: Any, self: Any, drain: bool = True) -> None:
        await close(self, drain)
        await asyncio.sleep(_AWAY_S)

    _wrap(AsyncHandle, "close", hanging)


def leak_thread() -> None:
    """A service leaves a thread."""
    _after_start(lambda: threading.Thread(target=time.sleep, args=(_AWAY_S,), daemon=True).start())


def leak_descriptor() -> None:
    """A service leaves a descriptor."""
    _after_start(lambda: os.open("/dev/null", os.O_RDONLY))


def leak_child() -> None:
    """A service leaves a process."""
    _after_start(lambda: subprocess.Popen(["sleep", str(_AWAY_S)]))


def leak_task() -> None:
    """A service leaves a task on the loop of its caller."""

    async def leaking(start: Any, self: Any) -> None:
        await start(self)
        self.left_behind = asyncio.ensure_future(asyncio.sleep(_AWAY_S))

    _wrap(AsyncHandle, "start", leaking)


def bare_error() -> None:
    """A service that is closed raises what happens to come."""

    def bare(new_request: Any, self: Any, *arguments: Any) -> Any:
        if self.driver is not None and self.driver.core.flow.closed_because is not None:
            raise AttributeError("no driver")
        return new_request(self, *arguments)

    _wrap(AsyncHandle, "new_request", bare)


def complain() -> None:
    """A coroutine is never awaited."""

    def complaining(stats: Any, self: Any) -> Any:
        asyncio.sleep(0)
        return stats(self)

    _wrap(Handle, "stats", complaining)


def wait_for_ever() -> None:
    """A client waits for a silent server for as long as that is silent."""
    _wrap(Waits, "at_most", lambda at_most, self, limit_s: at_most(self, None))


def swallow_end() -> None:
    """A client takes an answer that breaks off for a whole one."""

    async def swallowing(bunches: Any, self: Any, *arguments: Any) -> Any:
        try:
            async for bunch in bunches(self, *arguments):
                yield bunch
        except Unavailable:
            return

    _wrap(AsyncClient, "bunches", swallowing)


def leak_client() -> None:
    """A client that is dropped leaves its thread."""
    sync._drop = lambda *left: None


MUTANTS: dict[str, Callable[[], None]] = {
    mutant.__name__.replace("_", "-"): mutant
    for mutant in (
        swap,
        forget,
        skip,
        skip_part,
        hang,
        leak_thread,
        leak_descriptor,
        leak_child,
        leak_task,
        bare_error,
        complain,
        wait_for_ever,
        swallow_end,
        leak_client,
    )
}


def apply(name: str) -> None:
    """Break one promise in this process; "" for none."""
    if name:
        MUTANTS[name]()


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Have `wrapper` called instead of a method, which it gets as its first argument."""
    original = getattr(owner, name)
    setattr(owner, name, lambda self, *arguments, **named: wrapper(original, self, *arguments, **named))


def _after_start(leak: Callable[[], object]) -> None:
    def leaking(start: Any, self: Any) -> Any:
        leak()
        return start(self)

    _wrap(Handle, "start", leaking)
