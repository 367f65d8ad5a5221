"""What a model prints while it is warmed up. No caller asked for that, so it goes to the log."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from carpool.logger import logger


@contextlib.contextmanager
def hold_back_prints(stage: str) -> Iterator[None]:
    """Hold back what is printed in this process while the block runs: it goes to the log, at DEBUG.
    If the block raises, it is printed after all, since it may tell why.

    Standard error is left alone, and so is what is not printed by way of `sys.stdout`.

    Args:
        stage: The name of the stage, for the log.
    """
    real = sys.stdout
    held = _HeldBack(real)
    with contextlib.redirect_stdout(held):
        try:
            yield
        except BaseException:
            real.write(held.release())
            raise
    for line in held.release().splitlines():
        logger.debug("stage %s printed in its warm-up: %s", stage, line)


class _HeldBack:
    """A stand-in for `sys.stdout`. A model may keep it (a handler of the log does), so once it is
    released it passes on what is written.
    """

    def __init__(self, real: TextIO) -> None:
        self._real = real
        self._held: list[str] | None = []

    def write(self, text: str) -> int:
        """Keep a text, or pass it on."""
        if self._held is None:
            return self._real.write(text)
        self._held.append(text)
        return len(text)

    def release(self) -> str:
        """Pass on whatever comes from now on, and return what was held back."""
        held, self._held = self._held or [], None
        return "".join(held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
