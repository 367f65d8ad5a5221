"""Memory for large buffers, used again once nobody holds it.

A fresh buffer of some megabytes costs about as much as filling it: the system maps and clears its pages one by one.
So the last few are remembered, and one that nobody refers to any more is handed out again. That cannot be observed:
whoever keeps an array keeps, through it, its buffer.

It costs that when it is filled and not before: a fresh buffer is not cleared, so its pages take no memory until
something is written there. Whoever promises sixteen megabytes and sends none takes none.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final

_MOST_KEPT_BYTES: Final = 64 * 2**20
_MOST_KEPT: Final = 16
# only where each thread sees every reference at once can a count of references prove anything
_COUNTS_ARE_EXACT: Final = sys.version_info < (3, 13) or sys._is_gil_enabled()

_uncleared = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyByteArray_FromStringAndSize", ctypes.pythonapi)
)


class Memory:
    """Hands out buffers; one belongs to one reader, or to the connections of one loop."""

    def __init__(self) -> None:
        self._kept: list[bytearray] = []  # the one handed out last comes last
        self._kept_bytes = 0

    def buffer(self, nbytes: int) -> bytearray:
        """A buffer of exactly `nbytes`, with whatever is in it."""
        kept = self._kept
        for i in range(len(kept)):
            if len(kept[i]) == nbytes and _COUNTS_ARE_EXACT and _references(kept, i) == _OURS:
                kept.append(kept.pop(i))
                return kept[-1]
        fresh: bytearray = _uncleared(None, nbytes)
        if nbytes <= _MOST_KEPT_BYTES:
            self._keep(fresh)
        return fresh

    def _keep(self, fresh: bytearray) -> None:
        self._kept.append(fresh)
        self._kept_bytes += len(fresh)
        while self._kept_bytes > _MOST_KEPT_BYTES or len(self._kept) > _MOST_KEPT:
            self._kept_bytes -= len(self._kept.pop(0))


def _references(kept: list[bytearray], i: int) -> int:
    return sys.getrefcount(kept[i])


# The references that are ours: the list's and those that counting takes. Measured in the place where it counts, as the
# interpreter's own differ from version to version.
_OURS: Final = _references([bytearray(1)], 0)
