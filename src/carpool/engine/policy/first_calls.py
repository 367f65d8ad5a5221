"""What is learned from a worker's first call of a size: nothing, if it may be slow for that reason.

Such a call may take ten times as long as later ones of its size, while kernels are compiled for it,
and each worker has a first one of its own. If that were believed, the size would seem so dear that
it is not run any more, and nothing would show that it is not. So a first call counts only if it
took no longer than expected anyway, or while there has been no other. If a second call of its size
shows then that it was slow, all is forgotten, as the others may have been slow, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Final

_NO_LONGER: Final = 1.6  # times the expected seconds: noise alone is often more than 1.25


class FirstCalls(ABC):
    """Base of what learns from the times of calls, some of which are first ones."""

    __slots__ = ("_guesses", "_knows_others")

    def __init__(self) -> None:
        self._knows_others = False
        self._guesses: set[Hashable] = set()  # kinds of first calls that were believed, as there was no other

    @abstractmethod
    def forget(self) -> None:
        """Forget all that was learned."""

    def _teaches(self, kind: Hashable, seconds: float, expected: float, is_first: bool) -> bool:
        """Report whether a call is to be learned from.

        Args:
            kind: What calls of about its size have in common.
            seconds: What it took.
            expected: What it was expected to take.
            is_first: Whether it was the first one of its kind on its worker.
        """
        if is_first:
            if self._knows_others:
                return seconds <= _NO_LONGER * expected
            self._guesses.add(kind)
            return True
        self._knows_others = True
        if kind in self._guesses:
            self._guesses.remove(kind)
            if expected > _NO_LONGER * seconds:
                self._guesses.clear()
                self.forget()
        return True
