"""Warn callers of a batch function over a `def` whose thread runs an event loop.

Such a call holds up the loop, so none of its other tasks can join the batch: the function works,
and batches nothing.
"""

from __future__ import annotations

import asyncio
import sys
import warnings
from math import inf
from typing import Final

_EVERY_S: Final = 0.05  # seconds; a check makes a system call, which would slow down each lone call

_TEXT: Final = (
    "{name} was called on a thread whose event loop runs: the loop stands still until the call returns, so no other"
    ' task can share its batch. Batch it with run_in="thread" and await {name}(x), or leave it as it is and await'
    " `asyncio.to_thread({name}, x)`"
)


class LoopCheck:
    """Checks, now and then, whether a function's callers are on a thread whose event loop runs.

    Args:
        name: The function's, for the warning.
        depth: How many functions of ours lie between the caller and the method that checks.

    Attributes:
        due: When the next check is due, by the driver's clock; infinity once the warning was given.
    """

    __slots__ = ("_depth", "_name", "due")

    def __init__(self, name: str, depth: int = 0) -> None:
        self._name = name
        self._depth = depth
        self.due = 0.0

    def check(self, now: float) -> None:
        """Warn the caller of the method that calls this, once, if its thread's event loop runs.

        Code at the top of a module or of a notebook's cell is left alone: it runs on the notebook's
        own loop, on which no other call could join.

        Args:
            now: The time by the driver's clock.
        """
        self.due = now + _EVERY_S
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        if sys._getframe(2 + self._depth).f_code.co_name == "<module>":
            return
        self.due = inf  # before the warning, which may be raised as an error
        warnings.warn(_TEXT.format(name=self._name), RuntimeWarning, stacklevel=3 + self._depth)
