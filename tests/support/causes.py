"""Models that fail in all ways, and what they raise. Worker processes import nothing else for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from carpool.engine.wire.outcome import LONGEST_CAUSE


class Plain(Exception):
    """What pickle reads again, with an attribute."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.also = [1, 2]


class TwoArguments(Exception):
    """Cannot be read again: pickle gives it its text only."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class NotItself(Exception):
    """An exception that is read as something else."""

    def __reduce__(self) -> Any:
        return str, ("no exception",)


class Quits(Exception):
    """An exception that ends the program which reads it."""

    def __init__(self, text: str = "") -> None:
        super().__init__(text)

    def __setstate__(self, state: Any) -> None:
        raise SystemExit(3)

    def __reduce__(self) -> Any:
        return Quits, ("",), {"some": "state"}


class NoNotes(Exception):
    """An exception that takes no note."""

    __notes__ = property(lambda self: 1 / 0)


SHARED = KeyError("shared")


def local_class() -> type[Exception]:
    class Local(Exception):
        pass

    return Local


def with_an_array() -> ValueError:
    import numpy as np

    return ValueError(np.arange(3))


def far_too_large() -> ValueError:
    import numpy as np

    return ValueError(["x" * 1000] * 100, np.zeros(10**6))


RAISED: dict[str, Callable[[], BaseException]] = {
    "KeyError": lambda: KeyError("x"),
    "a class of one's own": lambda: Plain("text"),
    "with an array": with_an_array,
    "a group": lambda: ExceptionGroup("several", [KeyError(1), Plain("two")]),
    "StopIteration": lambda: StopIteration(3),
    "GeneratorExit": GeneratorExit,
    "CancelledError": asyncio.CancelledError,
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": lambda: SystemExit(2),
    "just below the limit": lambda: ValueError("x" * (LONGEST_CAUSE - 200)),
    "no notes": lambda: NoNotes("x"),
    "two arguments": lambda: TwoArguments(1, 2),
    "not itself": lambda: NotItself("x"),
    "quits when it is read": lambda: Quits("x"),
    "local": lambda: local_class()("x"),
    "unpicklable": lambda: ValueError(lambda: 1),
    "too large": lambda: ValueError("x" * LONGEST_CAUSE),
    "far too large": far_too_large,
}
TEXT_ONLY = {
    *("two arguments", "not itself", "quits when it is read", "local", "unpicklable", "too large", "far too large"),
}


def fails(name: str) -> str:
    if name in RAISED:
        raise RAISED[name]()
    return name


async def fails_later(name: str) -> str:
    return fails(name)


def fails_together(names: list[str]) -> list[str]:
    if "shared" in names:
        raise SHARED
    return names


def lambda_of(x: Any) -> Any:
    return lambda: x


def echo(x: Any) -> Any:
    return x


def refuse(item: Any) -> Any:
    raise ValueError("never")


async def refuse_later(item: Any) -> Any:
    raise ValueError("never")


def fails_at_large(xs: list[int]) -> list[int]:
    raise ValueError("x" * (LONGEST_CAUSE - 1000))
