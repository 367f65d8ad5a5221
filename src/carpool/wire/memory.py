"""Memory for large buffers, used again once nothing refers to it.

A fresh buffer of some megabytes costs about as much as filling it: the system maps and clears its
pages one by one. So the last few buffers are remembered, and one that nothing refers to any more is
handed out again. Users cannot observe that: an array that is kept also keeps its buffer.

The cost comes when a buffer is filled, and not before: a fresh buffer is not cleared, so its pages
take no memory until something is written to them. A client that announces sixteen megabytes and
sends none takes none.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final

_MOST_KEPT_BYTES: Final = 128 * 2**20  # 16 callers with arrays of 6 MB each have them all at once
_MOST_KEPT: Final = 32
# a count of references proves something only where every thread sees all references at once
_COUNTS_ARE_EXACT: Final = sys.version_info < (3, 13) or sys._is_gil_enabled()

uncleared = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyByteArray_FromStringAndSize", ctypes.pythonapi)
)
"""Returns a bytearray with arbitrary content, given None and its length."""


class Memory:
    """Hands out buffers to one reader, or to the connections of one loop."""

    def __init__(self) -> None:
        self._kept: list[bytearray] = []  # the one handed out last comes last
        self._kept_bytes = 0

    def buffer(self, nbytes: int) -> bytearray:
        """Return a buffer of exactly `nbytes` bytes, with arbitrary content."""
        kept = self._kept
        for i in range(len(kept)):
            if len(kept[i]) == nbytes and _COUNTS_ARE_EXACT and _references(kept, i) == _OURS:
                kept.append(kept.pop(i))
                return kept[-1]
        fresh: bytearray = uncleared(None, nbytes)
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


# How many references are our own: that of the list and those that counting adds. It is measured
# here, because the number differs between versions of the interpreter.
_OURS: Final = _references([bytearray(1)], 0)
