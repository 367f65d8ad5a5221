"""A service's guard: a small process that ends the workers' process groups if this process dies.

It gets the number of a group when its worker has been started, and drops it before the worker is
reaped: so no number that it has can have become another group's. If it dies itself, the workers
go on, and another one is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path

from carpool.engine.logger import logger
from carpool.engine.observe.log import fill_standard
from carpool.engine.worker import guard

_PROGRAM = str(Path(guard.__file__).resolve())
_AGAIN_S = 1.0
_END_S = 1.0
_LOOK_EVERY_S = 0.002


class Guard:
    """This process's side of the guard; it belongs to the running loop."""

    def __init__(self, model: str = "") -> None:
        self._about = {"model": model} if model else {}
        self._loop = asyncio.get_running_loop()
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._pidfd = -1
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process and send it all groups; try again later if the system has no room."""
        self._timer = None
        try:
            fill_standard()
            self._process, self._pipe = _spawn()
        except OSError as error:
            logger.warning(
                "no guard could be started; it is tried again in %g s: %s", _AGAIN_S, error, extra=self._about
            )
            self._start_later()
            return
        with contextlib.suppress(AttributeError, OSError):  # without it, its death is noticed at the next write
            self._pidfd = os.pidfd_open(self._process.pid)
            self._loop.add_reader(self._pidfd, self._died)
        for group in self._groups:
            self._send(b"+%d\n" % group)

    def add(self, group: int) -> None:
        self._groups.add(group)
        self._send(b"+%d\n" % group)

    def remove(self, group: int) -> None:
        self._groups.discard(group)
        self._send(b"-%d\n" % group)

    async def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        process = self._process
        if process is None:
            return
        self._send(b"quit\n")
        self._let_go()
        try:
            for _ in range(int(_END_S / _LOOK_EVERY_S)):
                if process.poll() is not None:
                    return
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            if process.poll() is None:  # it takes too long, or we are cancelled
                process.kill()
                process.wait()

    def abandon(self) -> None:
        process, self._closed = self._process, True
        if process is None:
            return
        with contextlib.suppress(OSError):
            os.write(self._pipe, b"quit\n")
        self._let_go()
        if self._timer is not None:
            self._timer.cancel()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    # -- inside

    def _start_later(self) -> None:
        if not self._closed and self._timer is None:
            self._timer = self._loop.call_later(_AGAIN_S, self.start)

    def _send(self, line: bytes) -> None:
        if self._process is None:
            return  # the next one gets all groups
        try:
            os.write(self._pipe, line)
        except OSError:  # it is dead, or has not read for thousands of lines
            self._died()

    def _died(self) -> None:
        process = self._process
        if process is None:
            return
        self._let_go()
        process.kill()
        process.wait()
        if not self._closed:
            text = "the guard of the workers (pid %d) has died; another one is started"
            logger.warning(text, process.pid, extra=self._about)
        self._start_later()

    def _let_go(self) -> None:
        self._process = None
        os.close(self._pipe)
        if self._pidfd >= 0:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


def _spawn() -> tuple[subprocess.Popen[bytes], int]:
    """Start a process; return it and our end of its input, which never blocks."""
    theirs, ours = os.pipe()
    try:
        for end in (theirs, ours):
            os.set_blocking(end, False)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", _PROGRAM, str(os.getpid())],
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    return process, ours
