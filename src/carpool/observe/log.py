"""Log lines of `carpool serve`: for people, or one JSON object a line. Text from outside is escaped and cut."""

from __future__ import annotations

import json
import logging
import sys
import time

from carpool.observe.outlet import Outlet

_LONGEST_LINE = 16 * 1024


def set_up(format: str, level: int = logging.INFO) -> None:
    """Send the program's logs to stderr.

    Args:
        format: "text" or "json".
        level: the least important level that is shown.
    """
    handler = _ThroughOutlet()
    handler.setFormatter(JsonLines() if format == "json" else TextLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)


class _ThroughOutlet(logging.Handler):
    """To stderr, without ever waiting for who reads it."""

    def __init__(self) -> None:
        super().__init__()
        self._outlet = Outlet(lambda: sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        """One record; whatever is wrong with it is the logger's to tell."""
        try:
            self._outlet.write(self.format(record))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait a moment until all has been written."""
        self._outlet.flush()


class TextLines(logging.Formatter):
    """Time, level if it is not the usual one, message."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        worker = getattr(record, "worker", None)
        source = f"[{worker}] " if worker else ""
        # what follows the first line is set off, so that no text from outside looks like a line of its own
        message = printable(_message(record)).replace("\n", "\n    ")
        return f"{clock} {source}{level}{message}"


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the worker where it comes from one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": printable(_message(record)),
        }
        worker = getattr(record, "worker", None)
        if worker:
            line["worker"] = worker
        return json.dumps(line, ensure_ascii=False)


def worker_line(worker: str, is_error: bool, line: str) -> None:
    """A `LineSink` that logs what a worker prints."""
    logging.getLogger("carpool.worker").info("%s", line, extra={"worker": worker, "is_error": is_error})


def _message(record: logging.LogRecord) -> str:
    text = record.getMessage()
    if record.exc_info:
        text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
    return text[:_LONGEST_LINE]


def printable(text: str) -> str:
    """Control characters made visible, but for newlines and tabs, so that no request can write into the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
