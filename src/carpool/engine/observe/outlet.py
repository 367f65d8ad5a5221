"""Lines of text for a stream that may block, since a pipe that nobody reads must not stop the loop.

A thread writes them. Lines for which there is no room are dropped and counted, and the count is
written as soon as there is room again.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable
from io import TextIOWrapper
from queue import SimpleQueue
from typing import TextIO

_MOST_LINES = 2000
_LAST_LINES_S = 1.0  # how long the end of the program waits for the last lines


class Outlet:
    """Writes lines to a stream, in a thread of its own that starts with the first line.

    Args:
        stream: Returns the stream. It is called for each line, since programs replace `sys.stdout`.
        as_line: Returns a text about dropped lines as a line like the others.

    Attributes:
        dropped: How many lines have been dropped since the last line about dropped ones.
    """

    def __init__(self, stream: Callable[[], TextIO], as_line: Callable[[str], str] = "({})".format) -> None:
        self._as_line = as_line
        self.dropped = 0
        self._stream = stream
        self._lines: SimpleQueue[str | threading.Event] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def write(self, line: str) -> None:
        """Have a line written, without ever blocking."""
        if self._lines.qsize() >= _MOST_LINES:
            self.dropped += 1
            return
        if self.dropped:
            self._lines.put(self._as_line(f"{self.dropped} lines were dropped here, since nobody was reading them"))
            self.dropped = 0
        self._lines.put(line)
        if self._thread is None or not self._thread.is_alive():  # a forked process has lost the thread
            if self._thread is None:
                atexit.register(self.flush)
            self._thread = threading.Thread(target=self._write, name="carpool-output", daemon=True)
            self._thread.start()

    def flush(self, timeout_s: float = _LAST_LINES_S) -> None:
        """Wait until all lines have been written, but at most for `timeout_s` seconds."""
        if self._thread is not None and self._thread.is_alive():
            written = threading.Event()
            self._lines.put(written)
            written.wait(timeout_s)

    def _write(self) -> None:
        """Write line after line, and set each event that stands between them."""
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            with contextlib.suppress(OSError, ValueError):  # closed or full: serving goes on
                _print(line, self._stream())


def _print(line: str, stream: TextIO) -> None:
    """Write a line, past the stream's buffer if the stream is a file.

    So a thread that blocks here holds no lock of the stream. Other streams may have a `fileno`,
    too: a notebook's is that of the terminal that it was started in, and not of the cell.
    """
    try:
        fd = stream.fileno() if isinstance(stream, TextIOWrapper) else None
    except (OSError, ValueError):  # the stream is over memory, as in a test
        fd = None
    if fd is None:
        print(line, file=stream, flush=True)
        return
    rest = f"{line}\n".encode(stream.encoding or "utf-8", "replace")
    while rest:
        rest = rest[os.write(fd, rest) :]
