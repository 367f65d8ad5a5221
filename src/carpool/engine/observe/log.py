"""Lines to stdout and stderr: the log of `carpool serve`, as text for people or as one JSON object
a line, and the lines that workers print.

Text from outside is escaped and cut. A program may be started without some of its standard
descriptors: then `fill_standard` opens them.

A pipe that nobody reads must not stop the loop. So a thread writes the lines (`Outlet`). Lines for
which there is no room are dropped and counted, and the count is written as soon as there is room
again.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from io import TextIOWrapper
from queue import SimpleQueue
from typing import Any, TextIO

from carpool.engine.foreign import traceback_of
from carpool.engine.logger import GuardedLogger, logger

LineSink = Callable[[str, bool, str], None]
"""Takes the worker's name, whether the line came from stderr, and the line."""

_LONGEST_LINE = 16 * 1024
_MOST_COMPLAINTS = 10
_LAST_STANDARD = 2
_FIELDS = (
    *("model", "stage", "worker", "node", "actor", "device"),
    *("request_id", "code", "requests", "address", "serves"),
    *("caller", "method", "path", "status", "bytes", "took_ms", "trace_id", "stages"),
)
_OURS, _WORKERS, _ACCESS = (logging.getLogger(f"carpool{name}") for name in ("", ".worker", ".access"))
_worker_logger = GuardedLogger(_WORKERS, {})  # of what workers print


def set_up(format: str, level: int = logging.INFO) -> None:
    """Send the program's logs to stderr, and our own whatever the program does to its logging.

    Args:
        level: The least important level that is shown; what workers print is always shown.
    """
    global _kept
    if _kept is not None:
        _OURS.removeHandler(_kept)
    _kept = handler = _ThroughOutlet()
    handler.setFormatter(JsonLines() if format == "json" else TextLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    _OURS.setLevel(level)
    _OURS.propagate = True
    _WORKERS.setLevel(logging.INFO)  # workers have chosen by their level what to print
    GuardedLogger.keep = lambda: _keep(handler, level)


def _keep(handler: logging.Handler, level: int) -> None:
    """Put back what a `dictConfig` of the program has taken from our loggers.

    What it says of them by name, with handlers, is left as it is.
    """
    for ours in (_OURS, _WORKERS, _ACCESS):
        ours.disabled = False
    root = logging.getLogger()
    if handler in root.handlers or _OURS.handlers:
        return
    _OURS.addHandler(handler)
    _OURS.setLevel(_OURS.level or level)
    _WORKERS.setLevel(logging.INFO)
    # or each line would be there twice
    _OURS.propagate = not any(type(each) is logging.StreamHandler for each in root.handlers)


def is_json() -> bool:
    return _kept is not None and isinstance(_kept.formatter, JsonLines)


def flush() -> None:
    if _kept is not None:
        _kept.flush()


def level_of(name: str) -> int:
    """Raises ValueError if there is no level of that name."""
    levels = ("debug", "info", "warning", "error")
    if name not in levels:
        raise ValueError(f"log_level must be one of {', '.join(levels)}, not {name!r}")
    return logging.getLevelNamesMapping()[name.upper()]


class _ThroughOutlet(logging.Handler):
    """A handler that writes to stderr, but never waits for its reader."""

    def __init__(self) -> None:
        super().__init__()
        self._outlet = Outlet(lambda: sys.stderr, self._as_line)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._outlet.write(self.format(record))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        self._outlet.flush()

    def _as_line(self, text: str) -> str:
        return self.format(logging.LogRecord("carpool", logging.WARNING, "", 0, text, None, None))


_kept: _ThroughOutlet | None = None  # the handler, once the log is set up


class TextLines(logging.Formatter):
    """Lines for people: time, worker if one has printed it, level unless it is info, message."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        worker = getattr(record, "worker", None) if record.name == _WORKERS.name else None
        source = f"[{worker}] " if worker else ""
        # further lines are indented, so that no text from outside looks like a line of its own
        message = printable(_message(record)).replace("\n", "\n    ")
        return f"{clock} {source}{level}{message}"


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and what the line is about.

    The last is given as `extra=` to the logger; see `_FIELDS`.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": printable(_message(record)),
        }
        for name in _FIELDS:
            value = getattr(record, name, None)
            if value is not None:
                line[name] = printable(value) if isinstance(value, str) else value
        return json.dumps(line, ensure_ascii=False, default=repr)


def worker_line(worker: str, is_error: bool, line: str) -> None:
    about = {"worker": worker, "stage": worker.rpartition("/")[0], "is_error": is_error}
    _worker_logger.info("%s", line, extra=about)


def _message(record: logging.LogRecord) -> str:
    text = record.getMessage()
    if record.exc_info:
        text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
    return text[:_LONGEST_LINE]


def printable(text: str) -> str:
    """Escape control characters other than newlines and tabs.

    So nothing that comes from outside can control the terminal.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


_MOST_LINES = 2000
_LAST_LINES_S = 1.0  # how long the end of the program waits for the last lines


class Outlet:
    """Writes lines to a stream, in a thread of its own that starts with the first line.

    Args:
        stream: Returns the stream. It is called for each line, since programs replace `sys.stdout`.
        as_line: Returns a text about dropped lines as a line like the others.
    """

    def __init__(self, stream: Callable[[], TextIO], as_line: Callable[[str], str] = "({})".format) -> None:
        self._as_line = as_line
        self.dropped = 0
        self._stream = stream
        self._lines: SimpleQueue[str | threading.Event] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def write(self, line: str) -> None:
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


# -- lines that workers print

_STDOUT = Outlet(lambda: sys.stdout)
_STDERR = Outlet(lambda: sys.stderr)


def print_line(worker: str, is_error: bool, line: str) -> None:
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


def fill_standard() -> None:
    """Open /dev/null in place of each of the descriptors 0, 1 and 2 that is closed.

    Otherwise a socket or a loop's own descriptor would get such a number. Code that prints or reads
    input would then use it, a worker would inherit it as its standard stream, and libuv aborts the
    program rather than close it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _LAST_STANDARD:
        os.set_inheritable(fd, True)
    os.close(fd)
