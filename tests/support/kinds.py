"""What code that is not ours may raise: ten kinds, each with a way of its own past a guard that is not whole."""

from __future__ import annotations

import asyncio
from typing import NoReturn


class MuteError(Exception):
    """Has no text: asking for it raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


KINDS: dict[str, type[BaseException]] = {
    "Exception": ValueError,
    "StopIteration": StopIteration,
    "StopAsyncIteration": StopAsyncIteration,
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": SystemExit,
    "MemoryError": MemoryError,
    "RecursionError": RecursionError,
    "one whose str raises": MuteError,
}

UNUSUAL = [kind for kind in KINDS.values() if kind is not ValueError]
"""Those that code rarely raises, and that a guard against `Exception` or `ValueError` may not know."""


def fail(kind: str) -> NoReturn:
    """Raise what the kind is called after."""
    raise KINDS[kind]("planned")


def is_of(error: object, kind: str) -> bool:
    """Whether an exception is of a kind; Python itself makes RuntimeErrors of some that leave a generator."""
    if isinstance(error, RuntimeError) and kind in ("StopIteration", "StopAsyncIteration"):
        error = error.__cause__
    return isinstance(error, KINDS[kind])
