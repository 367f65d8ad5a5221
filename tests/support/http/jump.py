"""An event loop whose time jumps to the next timer when nothing else is left to do.

Time-outs of half a minute are tested to the second and take no time. A test that waits for what cannot happen any more
fails at once, because then no timer is left to jump to.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class NothingWillHappen(Exception):
    """Everybody waits and no timer runs: a hang."""


class _JumpingSelector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingWillHappen
        self.now += timeout
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """Has no place for real sockets: nobody would wait for them."""

    def __init__(self) -> None:
        self._clock = _JumpingSelector()
        self.faults: list[dict[str, Any]] = []
        super().__init__(self._clock)
        self.set_exception_handler(lambda _, context: self.faults.append(context))

    def time(self) -> float:
        return self._clock.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end; what a callback raised fails the test."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, JumpingLoop)
        result = runner.run(main)
        assert loop.faults == []
        return result


def on_a_jumping_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Runs an `async def` test on a `JumpingLoop`."""

    @functools.wraps(test)
    def runs(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return runs


async def turns(n: int = 5) -> None:
    """Let the loop turn a few times; no time passes."""
    for _ in range(n):
        await asyncio.sleep(0)
