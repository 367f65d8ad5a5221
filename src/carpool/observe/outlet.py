"""Text on its way to a stream that may block: a pipe that nobody reads must not hold up the loop.

A thread does the writing. What it cannot get rid of is dropped and counted, and the count is told when it flows again.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TextIO

_MOST_LINES = 2000
_LAST_LINES_S = 1.0  # at the end of the program


class Outlet:
    """Writes lines to a stream, from a thread of its own that starts with the first one.

    Args:
        stream: gives the stream, for each line anew: programs replace `sys.stdout`.

    Attributes:
        dropped: lines that have not been told of yet.
    """

    def __init__(self, stream: Callable[[], TextIO]) -> None:
        self.dropped = 0
        self._stream = stream
        self._lines: SimpleQueue[str | threading.Event] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def write(self, line: str) -> None:
        """Have a line written; never blocks."""
        if self._lines.qsize() >= _MOST_LINES:
            self.dropped += 1
            return
        if self.dropped:
            self._lines.put(f"({self.dropped} lines were dropped here, since nobody read them)")
            self.dropped = 0
        self._lines.put(line)
        if self._thread is None or not self._thread.is_alive():  # a fork has none
            if self._thread is None:
                atexit.register(self.flush)
            self._thread = threading.Thread(target=self._write, name="carpool-output", daemon=True)
            self._thread.start()

    def flush(self, timeout_s: float = _LAST_LINES_S) -> None:
        """Wait until all has been written, or no longer."""
        if self._thread is not None and self._thread.is_alive():
            written = threading.Event()
            self._lines.put(written)
            written.wait(timeout_s)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            with contextlib.suppress(OSError, ValueError):  # closed or full: serving goes on
                _print(line, self._stream())


def _print(line: str, stream: TextIO) -> None:
    """Past the stream's buffer where it is a file, so that a thread that blocks holds no lock of the stream."""
    try:
        fd = stream.fileno()
    except (OSError, ValueError):  # no file: a notebook's, a test's
        print(line, file=stream, flush=True)
        return
    rest = f"{line}\n".encode(stream.encoding or "utf-8", "replace")
    while rest:
        rest = rest[os.write(fd, rest) :]
