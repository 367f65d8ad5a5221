"""A worker process: started as a fresh interpreter, talked to over a socketpair (`framesocket.py`),
ended and reaped.

It lives in a process group of its own. The socket is the only thing that it shares with this
process, so a worker that is killed at any moment leaves nothing locked.

The life of the process (`_Life`) goes from CONNECTED to DISCONNECTED when the process ends, closes
its socket or breaks the protocol, and to REAPED once it is dead; `abandon` goes to REAPED at once.

One that loads while others serve has a lower priority, so that it takes no core from them. To raise
it again needs a permission: a nice limit (`LimitNICE=+0` of systemd, `ulimit -e 20`) or
CAP_SYS_NICE. Where there is none, nothing is lowered, since a worker would stay slow once it
serves. Rejected: SCHED_IDLE (the same permission), SCHED_BATCH (leaves a process that computes its
whole share), and the loading thread alone (its priority would stay that of all threads which
libraries start meanwhile).

The lines that it prints are passed on, each with its name. Of a line that is written over and over
(a carriage return and no newline: a progress bar), the last state is passed on, and one every ten
seconds while it goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import IO

import msgspec

from carpool.engine.drive.framesocket import BUFFER_BYTES, FrameSocket
from carpool.engine.drive.worker import Launch
from carpool.engine.observe.log import LineSink, fill_standard
from carpool.engine.wire.frame import MAX_FRAME_BYTES, Frame, FrameError, FrameKind
from carpool.engine.worker.program import DUMP_SIGNAL, process_name
from carpool.errors import StartupError

_STEPS = 5  # one that loads gets a quarter of a core that another one wants, too
_LOWEST = 19


class LowPriority:
    """The lower priority of the process group that `pid` leads, from now until `end`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = self._lowered = os.getpriority(os.PRIO_PROCESS, 0)
        if may_lower():
            self._lowered = min(self._before + _STEPS, _LOWEST)
            self._set(self._lowered)

    def end(self) -> None:
        """Give all threads and processes of the group the priority that they began with.

        One that has chosen its own priority keeps that.
        """
        with contextlib.suppress(OSError):  # it has ended
            if os.getpriority(os.PRIO_PROCESS, self._pid) == self._lowered:
                self._set(self._before)

    def _set(self, nice: int) -> None:
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PGRP, self._pid, nice)


@cache
def may_lower() -> bool:
    """Report whether this process may lower a priority and raise it again; a thread tries it on
    itself, as on Linux each has its own.
    """
    may = []

    def try_it() -> None:
        before = os.getpriority(os.PRIO_PROCESS, 0)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, min(before + 1, _LOWEST))
            os.setpriority(os.PRIO_PROCESS, 0, before)
            may.append(True)

    if sys.platform == "linux":
        thread = threading.Thread(target=try_it, name="carpool-priority", daemon=True)
        with contextlib.suppress(RuntimeError):  # the system has no thread to give
            thread.start()
            thread.join()
    return bool(may)


_REAP_EVERY_S = 0.002
_TRIES_BEFORE_KILL = 25  # looks for its end, before it is killed
_MOST_TRIES = 500  # looks for its end, before it counts as one that cannot be ended
_LONGEST_NAME = 200
_LONGEST_END_S = 1.0  # between the signal that kills a process and its end
_LAST_WORDS_S = 1.0  # for a process that hangs, to write down where

WORKER_MODULE = "carpool.engine.worker.main"
"""What a worker process runs; `carpool.testing` puts its stub here."""


class _Life(enum.Enum):
    CONNECTED = enum.auto()
    """Its socket is open: frames are sent and received."""

    DISCONNECTED = enum.auto()
    """Nothing is sent or received any more; it is dead, or will be soon."""

    REAPED = enum.auto()
    """It is dead, and its process id may be another's by now."""


class WorkerProcess:
    """One process and this side's end of its socket.

    Args:
        on_frame: Called with each frame that it sends.
        on_lost: Called once, with the cause, when it is dead or has broken the protocol.
        sink: Where its output goes.

    Attributes:
        send: Sends it a frame; the connection's own function, since it is called for each batch.

    Raises:
        StartupError: Its kwargs are too large.
        OSError: The system has no process, memory or descriptors to give.
    """

    fell_silent = False
    send_ahead = None
    hello = None

    def __init__(
        self,
        launch: Launch,
        index: int,
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[str], None],
        sink: LineSink,
    ) -> None:
        self._on_lost = on_lost
        self._guard = launch.guard
        self._loop = asyncio.get_running_loop()

        # its life, and how it is ended
        self._life = _Life.CONNECTED
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._killed_because = ""
        self._kill_timer: asyncio.TimerHandle | None = None  # runs while a hanging process writes its last words
        self.broke_protocol = False

        self._pidfd: int | None = None
        first = _setup_frame(launch, index)
        fill_standard()
        ours, theirs = _socketpair()
        with theirs:
            try:
                self._process = self._spawn(theirs, process_name(launch.setup.stage, index), launch.env_of(index))
            except BaseException:
                ours.close()
                raise
        if self._guard is not None:
            self._guard.add(self._process.pid)
        name = f"{launch.setup.stage}/{index}"
        self._outputs = [
            OutputLines(stream, name, is_error, sink)
            for stream, is_error in ((self._process.stdout, False), (self._process.stderr, True))
            if stream is not None
        ]
        self._connection = FrameSocket(ours, on_frame, self._disconnected)
        self.send: Callable[[Frame], None] = self._connection.send
        self._watch_end()
        self.send(first)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def where(self) -> str:
        return f"pid {self._process.pid}"

    def lend(self, recall: Callable[[], None]) -> socket.socket | None:
        """Lend its socket to another thread, see `FrameSocket.lend`. Its end is noticed all the
        same.
        """
        return None if self._pidfd is None else self._connection.lend(recall)

    def take_back(self, unread: bytes) -> None:
        self._connection.take_back(unread)

    def close_input(self) -> None:
        self._connection.close_input()

    @property
    def has_unread_batch(self) -> bool:
        """Whether the worker has not read the batch sent last, which then is not to blame for its
        death.

        That matters where several workers are killed together: a batch of the first one is handed
        on to the second before it is known that this is dead, too.
        """
        return self._connection.has_unread_frame

    def catch_up(self) -> bool:
        return self._connection.catch_up()

    def give_up(self, why: str, on_frame: Callable[[Frame], None]) -> None:
        """Let a process that hangs write down where it stands, for a second, then kill it."""
        self._connection.on_frame = on_frame
        self._killed_because = self._killed_because or why
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self._process.send_signal(DUMP_SIGNAL)  # if it is stopped, this waits, and shows where it was stopped
            os.killpg(self._process.pid, signal.SIGCONT)
        self._kill_timer = self._loop.call_later(_LAST_WORDS_S, self.kill)

    def kill(self, why: str = "") -> None:
        if self._life is _Life.REAPED:
            return  # its id, and that of its group, may be another's by now
        self._killed_because = self._killed_because or why
        for end in (os.killpg, os.kill):  # it may have left its group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(self._process.pid, signal.SIGKILL)

    def abandon(self) -> None:
        self.kill()
        if self._life is _Life.REAPED:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel's hands: nothing can end it now
            self._process.wait(_LONGEST_END_S)
        self._life = _Life.REAPED
        self._connection.abandon()
        self._unwatch_end()
        if not self._loop.is_closed():
            self._close_outputs()
            if not self._ended.done():
                self._ended.set_result(None)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    async def ended(self) -> None:
        await asyncio.shield(self._ended)

    # -- inside

    def _spawn(self, theirs: socket.socket, name: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", WORKER_MODULE, str(theirs.fileno()), str(os.getpid()), _shown(name)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
            env={**os.environ, **env},
            process_group=0,
        )

    def _watch_end(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # not on this system, or already dead
            self._pidfd = os.pidfd_open(self._process.pid)
            self._loop.add_reader(self._pidfd, self._exited)

    def _unwatch_end(self) -> None:
        if self._pidfd is not None:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None

    def _exited(self) -> None:
        self._connection.recall_loan()
        while self._connection.read():
            pass
        self._connection.close("it ended")

    def _disconnected(self, why: str, error: Exception | None) -> None:
        if isinstance(error, FrameError):
            self.broke_protocol = True
            self.kill(f"it was killed for what it sent: {error}")
        self._life = _Life.DISCONNECTED
        self._unwatch_end()
        self._reap(why, 0)

    def _reap(self, why: str, tries: int) -> None:
        """Wait a moment for its end, so that the log can show how it died; then use force."""
        if self._life is _Life.REAPED:
            return  # it was abandoned
        is_over = self._is_over()
        if not is_over and tries < _MOST_TRIES:
            if tries == _TRIES_BEFORE_KILL:
                self.kill()
            self._loop.call_later(_REAP_EVERY_S, self._reap, why, tries + 1)
            return
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        if is_over:
            self.kill()  # its children, if it had any; as long as it is not reaped, its id is no other's
            if self._guard is not None:
                self._guard.remove(self._process.pid)
            self._life = _Life.REAPED
        code = self._process.poll()
        self._close_outputs()
        self._ended.set_result(None)
        self._on_lost(self._killed_because or _cause(code, why))

    def _is_over(self) -> bool:
        """Report whether the process has ended, without reaping it where the system can do that."""
        if not hasattr(os, "waitid"):  # macOS
            return self._process.poll() is not None
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # the program has reaped it, as it waits for all its children
            return True

    def _close_outputs(self) -> None:
        for output in self._outputs:
            output.close()


def _setup_frame(launch: Launch, index: int) -> Frame:
    """Return the frame that says what a worker is to load. Raises StartupError if the model's
    kwargs make it too large.
    """
    setup = msgspec.structs.replace(launch.setup, place=index, cores=launch.cores_of(index))
    packed = pickle.dumps(setup, 5)
    if len(packed) > MAX_FRAME_BYTES:
        raise StartupError(
            f"the kwargs of stage {setup.stage} are too large to be sent to its workers: {len(packed):,} bytes, and"
            f" {MAX_FRAME_BYTES:,} are possible. Give the model a path instead, and load what is there in setup"
        )
    return Frame(FrameKind.SETUP, ids=[0], formats=b"\0", payloads=[packed])


def _socketpair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    ours.setblocking(False)
    return ours, theirs


def _shown(name: str) -> bytes:
    """Return a name as an argument that `ps` can show, whatever is in it and in any locale."""
    return "".join(c if c.isprintable() else "?" for c in name[:_LONGEST_NAME]).encode()


def _cause(code: int | None, why: str) -> str:
    if code is None:
        return f"{why}, and it could not be ended"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = "; was it out of memory?" if name == "SIGKILL" else ""
        return f"killed by {name}{hint}"
    return f"exited with code {code}" if code else why


_READ_BYTES = 64 * 1024
_LONGEST_LINE = 16 * 1024  # a longer one is passed on in pieces
_STATE_EVERY_S = 10.0  # of a line that is written over


class OutputLines:
    """Reads one output stream of a worker without ever blocking, and gives its lines to a sink."""

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
        while self._readable():
            pass
        if not self._stream.closed:  # a child of the worker still holds it
            self._loop.remove_reader(self._stream.fileno())
            self._stream.close()
            if self._rest:
                self._pass_on(self._rest)

    def _readable(self) -> bool:
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
        state = line.rstrip(b"\r").rpartition(b"\r")[2]  # what is seen in the end of a line that is written over
        self._sink(self._worker, self._is_error, state.decode("utf-8", "replace"))
