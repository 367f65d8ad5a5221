"""What a program must not leave behind: threads, descriptors, children, and whatever Python complains of."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from tests.fuzz import telling
from tests.support.processes import children, command_of

_FOR_GOOD = "carpool-output"  # one thread of the process writes what all workers print
_LOOK_AGAIN_S = 0.01


class Before:
    """What there is before a program begins."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._descriptors = descriptors()
        self._children = children()

    def left(self, settle_s: float) -> list[str]:
        """What there is now and was not before, after some time to settle."""
        until = time.monotonic() + settle_s
        while True:
            found = self._found()
            if not found or time.monotonic() > until:
                return found
            time.sleep(_LOOK_AGAIN_S)

    def _found(self) -> list[str]:
        threads = [thread for thread in threading.enumerate() if thread not in self._threads]
        threads = [thread for thread in threads if thread.name != _FOR_GOOD]
        found = [f"thread {thread.name}" for thread in threads]
        now = descriptors()
        found += [f"descriptor of {what}" for fd, what in now.items() if self._descriptors.get(fd) != what]
        found += [f"child {command_of(pid)}" for pid in children() if pid not in self._children]
        return found


def warm_up() -> None:
    """Use what stays once it has been used: descriptors of libuv."""
    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.new_event_loop().close()


def descriptors() -> dict[int, str]:
    """The open descriptors and what they are of."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}").split(":")[0]
    return {fd: what for fd, what in found.items() if not what.startswith("/proc/")}


class Complaints(logging.Handler):
    """Collects what Python says where nobody listens: unraisable exceptions, dead threads, asyncio's log, warnings.

    Args:
        tell: Told of each one, with its origin.
    """

    def __init__(self, tell: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def __enter__(self) -> Complaints:
        logging.getLogger("asyncio").addHandler(self)
        logging.getLogger("carpool").addHandler(self)
        logging.getLogger("carpool").propagate = logging.getLogger("asyncio").propagate = False
        self._hooks = sys.unraisablehook, threading.excepthook
        sys.unraisablehook, threading.excepthook = self._unraisable, self._thread_died
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.simplefilter("always", ResourceWarning)
        warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = self._warned
        return self

    def __exit__(self, *exc: object) -> None:
        self._warnings.__exit__()
        sys.unraisablehook, threading.excepthook = self._hooks
        logging.getLogger("asyncio").removeHandler(self)
        logging.getLogger("carpool").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                text += "\n" + telling.told(record.exc_info[1])
        except BaseException as error:
            text = f"a record of the log that cannot be told: {record.msg!r}: {type(error).__name__}"
        self._tell(f"log {record.name} {record.levelname}", text)

    def _unraisable(self, what: Any) -> None:
        self._tell(
            "unraisable",
            f"{what.err_msg or 'Exception ignored in'} {what.object!r:.200}\n{_told_or_none(what.exc_value)}",
        )

    def _thread_died(self, what: Any) -> None:
        self._tell("thread died", f"{what.thread.name if what.thread else '?'}\n{_told_or_none(what.exc_value)}")

    def _warned(self, message: Any, category: Any, filename: str, lineno: int, *rest: object) -> None:
        self._tell("warning", f"{category.__name__}: {message} ({os.path.basename(filename)}:{lineno})")


def _told_or_none(error: BaseException | None) -> str:
    return "(no exception)" if error is None else telling.told(error)
