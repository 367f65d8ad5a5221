"""Tests that are `async def`."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

P = ParamSpec("P")

_TURNS = 1000  # of the loop, until a task has come


def on_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Runs an `async def` test on an event loop of asyncio's own, with real time and real sockets."""

    @functools.wraps(test)
    def runs(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return runs


async def cancel_unbegun(name: str) -> None:
    """Cancel the tasks of the coroutine function `name` before their first steps.

    It waits until there is one. It must run before them: they are looked for in each turn.
    """
    known = asyncio.all_tasks()
    begun: list[asyncio.Task[Any]] = []
    for _ in range(_TURNS):
        begun = [task for task in asyncio.all_tasks() - known if getattr(task.get_coro(), "__qualname__", "") == name]
        if begun:
            break
        await asyncio.sleep(0)
    assert begun, f"no task of {name} has come"
    for task in begun:
        task.cancel()
