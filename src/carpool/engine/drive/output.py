"""Passes on the lines that workers print: each goes to the parent's output, with their name.

Of a line that is written over and over (a carriage return and no newline: a progress bar), the last
state is passed on, and one every ten seconds while it goes on.

A program may be started without some of its standard descriptors: then `fill_standard` opens them.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import IO

from carpool.engine.foreign import traceback_of
from carpool.engine.logger import logger
from carpool.engine.observe.log import Outlet

LineSink = Callable[[str, bool, str], None]
"""Takes the worker's name, whether the line came from stderr, and the line."""

_STDOUT = Outlet(lambda: sys.stdout)
_STDERR = Outlet(lambda: sys.stderr)
_READ_BYTES = 64 * 1024
_LONGEST_LINE = 16 * 1024  # a longer one is passed on in pieces
_MOST_COMPLAINTS = 10
_STATE_EVERY_S = 10.0  # of a line that is written over


def print_line(worker: str, is_error: bool, line: str) -> None:
    """Print a worker's line to this process's stdout or stderr, as the default sink."""
    (_STDERR if is_error else _STDOUT).write(f"[{worker}] {line}")


def guarded(sink: LineSink) -> LineSink:
    """Return a sink that drops lines with which `sink` raises, and logs each kind once."""
    logged: set[str] = set()

    def pass_on(worker: str, is_error: bool, line: str) -> None:
        try:
            sink(worker, is_error, line)
        except BaseException as error:
            kind = type(error).__name__
            if kind not in logged and len(logged) < _MOST_COMPLAINTS:
                logged.add(kind)
                text = "output= raised %s for a line of worker %s; such lines are dropped, and this is logged once\n%s"
                about = {"worker": worker, "stage": worker.rpartition("/")[0]}
                logger.error(text, kind, worker, traceback_of(error).rstrip(), extra=about)

    return pass_on


class OutputLines:
    """Reads one output stream of a worker without ever blocking.

    Args:
        stream: The worker's stdout or stderr.
        worker: Its name.
        is_error: Whether it is stderr.
        sink: Gets the lines.
    """

    def __init__(self, stream: IO[bytes], worker: str, is_error: bool, sink: LineSink) -> None:
        self._stream = stream
        self._worker = worker
        self._is_error = is_error
        self._sink = sink
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._state_at: float | None = None  # when a state of the present line may be passed on
        os.set_blocking(stream.fileno(), False)
        self._loop.add_reader(stream.fileno(), self._readable)

    def close(self) -> None:
        """Pass on what has been written so far and let go of the stream."""
        while self._readable():
            pass
        if not self._stream.closed:  # a child of the worker still holds it
            self._loop.remove_reader(self._stream.fileno())
            self._stream.close()
            if self._rest:
                self._pass_on(self._rest)

    def _readable(self) -> bool:
        """Read once, and report whether something came."""
        if self._stream.closed:
            return False
        try:
            data = os.read(self._stream.fileno(), _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove_reader(self._stream.fileno())
            self._stream.close()
            if self._rest:
                self._pass_on(self._rest)
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._pass_on(line)
            self._state_at = None
        if b"\r" in self._rest:
            self._overwrite()
        if len(self._rest) > _LONGEST_LINE:
            self._pass_on(self._rest)
            self._rest = b""
        return True

    def _overwrite(self) -> None:
        """Forget the states of the present line that have been written over."""
        *states, present = self._rest.split(b"\r")
        latest = next((state for state in reversed(states) if state), b"")
        self._rest = present or latest + b"\r"  # with nothing after it, it is what is seen
        now = self._loop.time()
        if self._state_at is None:
            self._state_at = now + _STATE_EVERY_S
        elif latest and now >= self._state_at:
            self._state_at = now + _STATE_EVERY_S
            self._pass_on(latest)

    def _pass_on(self, line: bytes) -> None:
        self._sink(self._worker, self._is_error, _last_state(line).decode("utf-8", "replace"))


def _last_state(line: bytes) -> bytes:
    """Return what is seen in the end of a line that is written over."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


_LAST_STANDARD = 2


def fill_standard() -> None:
    """Open /dev/null in place of each of the descriptors 0, 1 and 2 that is closed.

    Otherwise a socket or a loop's own descriptor would get such a number. Code that prints or reads
    input would then use it, a worker would inherit it as its standard stream, and libuv aborts the
    program rather than close it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _LAST_STANDARD:
        os.set_inheritable(fd, True)
    os.close(fd)
