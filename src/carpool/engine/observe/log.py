"""The log lines of `carpool serve`, as text for people or as one JSON object a line.

Text from outside is escaped and cut.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from carpool.engine.logger import GuardedLogger
from carpool.engine.observe.outlet import Outlet

_LONGEST_LINE = 16 * 1024
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
        format: `text` or `json`.
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
    for logger in (_OURS, _WORKERS, _ACCESS):
        logger.disabled = False
    root = logging.getLogger()
    if handler in root.handlers or _OURS.handlers:
        return
    _OURS.addHandler(handler)
    _OURS.setLevel(_OURS.level or level)
    _WORKERS.setLevel(logging.INFO)
    # or each line would be there twice
    _OURS.propagate = not any(type(each) is logging.StreamHandler for each in root.handlers)


def is_json() -> bool:
    """Report whether the lines are JSON objects."""
    return _kept is not None and isinstance(_kept.formatter, JsonLines)


def flush() -> None:
    """Wait a moment for all lines to be written."""
    if _kept is not None:
        _kept.flush()


def level_of(name: str) -> int:
    """Return the number of a log level. Raises ValueError if there is none of that name."""
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
        """Write one record; errors in doing so are handled as `logging` handles them."""
        try:
            self._outlet.write(self.format(record))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait a moment for all lines to be written."""
        self._outlet.flush()

    def _as_line(self, text: str) -> str:
        """Return a text of ours as a line of the log."""
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
    """Log a line that a worker has printed; this is a `LineSink`."""
    about = {"worker": worker, "stage": worker.rpartition("/")[0], "is_error": is_error}
    _worker_logger.info("%s", line, extra=about)


def _message(record: logging.LogRecord) -> str:
    """Return the message, with its traceback if there is one, cut to a bearable length."""
    text = record.getMessage()
    if record.exc_info:
        text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
    return text[:_LONGEST_LINE]


def printable(text: str) -> str:
    """Escape control characters other than newlines and tabs.

    So nothing that comes from outside can control the terminal.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
