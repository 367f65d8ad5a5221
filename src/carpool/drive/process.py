"""A worker process: started as a fresh interpreter, talked to over a socketpair, ended and reaped.

It lives in a process group of its own; the socket is the only thing it shares with this process, so a worker killed at
any moment leaves nothing locked.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import os
import pickle
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping

import msgspec

from carpool.drive.descriptors import fill_standard
from carpool.drive.launch import Launch
from carpool.drive.output import LineSink, OutputLines
from carpool.errors import StartupError
from carpool.wire.frame import MAX_FRAME_BYTES, Frame, FrameError, FrameKind, FrameReader, encode
from carpool.wire.payload import LARGE
from carpool.worker.setup import DUMP_SIGNAL, process_name

_IOV_MAX = 1024
_READS_IN_A_ROW = 16  # then others get their turn
_REAP_EVERY_S = 0.002
_SOCKET_BUFFER = 512 * 1024  # large enough for few wake-ups, small enough to stay in the processor's cache
_LONGEST_NAME = 200
_LONGEST_END_S = 1.0  # of one that is killed
_LAST_WORDS_S = 1.0  # for one that hangs, to write down where


WORKER_MODULE = "carpool.worker.main"
"""What a worker process runs; `carpool.testing` puts its stub here."""


class WorkerProcess:
    """One process and this side's end of its socket.

    Args:
        launch: how to start it.
        worker: its place in the stage.
        heard: called with each frame it sends.
        lost: called once, when it is dead or has broken the protocol.
        sink: where its output goes.

    Raises:
        StartupError: its kwargs are too large.
        OSError: the system has no process, memory or descriptors to give.
    """

    def __init__(
        self,
        launch: Launch,
        place: int,
        heard: Callable[[Frame], None],
        lost: Callable[[str], None],
        sink: LineSink,
    ) -> None:
        self._heard = heard
        self._lost = lost
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._reader = FrameReader()
        self._unsent: list[memoryview] = []
        self._watching_writable = False
        self._killed_because = ""
        self.broke_protocol = False
        self._in_one_go = False  # how the last frame was sent
        self._unread = False
        self._gone = False
        self._reaped = False
        self._pidfd: int | None = None
        self._killing: asyncio.TimerHandle | None = None
        self._guard = launch.guard
        first = _setup_frame(launch, place)
        fill_standard()
        self._sock, theirs = _socketpair()
        with theirs:
            try:
                self._process = self._spawn(theirs, process_name(launch.setup.stage, place), launch.env[place])
            except BaseException:
                self._sock.close()
                raise
        if self._guard is not None:
            self._guard.add(self._process.pid)
        name = f"{launch.setup.stage}/{place}"
        self._outputs = [
            OutputLines(stream, name, error, sink)
            for stream, error in ((self._process.stdout, False), (self._process.stderr, True))
            if stream is not None
        ]
        self._loop.add_reader(self._sock.fileno(), self._readable)
        with contextlib.suppress(AttributeError, OSError):  # not on this system, or already dead
            self._pidfd = os.pidfd_open(self._process.pid)
            self._loop.add_reader(self._pidfd, self._exited)
        self.send(first)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, frame: Frame) -> None:
        """Write a frame, now if the socket takes it, else as it becomes writable."""
        if self._gone:
            return
        buffers = encode(frame)
        if not self._unsent and sum(map(len, buffers)) < LARGE:
            message = b"".join(buffers)
            try:
                sent = self._sock.send(message)
            except BlockingIOError:
                sent = 0
            except OSError:
                sent = 0  # it is dead; tried again below, where errors are dealt with
                self._unread = True
            if sent == len(message):
                self._in_one_go = True
                return
            buffers = [memoryview(message)[sent:]]
        self._in_one_go = False
        waiting = bool(self._unsent)
        self._unsent += [memoryview(part).cast("B") for part in buffers if len(part)]
        if not waiting:
            self._writable()

    def close_input(self) -> None:
        """Tell it that nothing more will come: it finishes, tears down and ends."""
        if not self._gone:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    @property
    def untouched(self) -> bool:
        """Whether the model cannot have seen the batch that was sent last, since the worker has not read it.

        One that dies like that has been killed for other reasons; several that are killed together show why this
        matters: a batch is handed on to one of which it is not known yet that it is dead, too.
        """
        if self._gone:
            return self._unread
        return self._in_one_go and _bytes_not_read(self._sock) > 0

    def catch_up(self) -> bool:
        """Read what it has sent already; whether there was anything."""
        return self._read()

    def give_up(self, why: str, heard: Callable[[Frame], None]) -> None:
        """It hangs: it has a second to write down where it stands, then it is killed.

        Args:
            why: for the log.
            heard: called with what it still sends.
        """
        self._heard = heard
        self._killed_because = self._killed_because or why
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self._process.send_signal(DUMP_SIGNAL)  # if it is stopped, this waits, and shows where it was stopped
            os.killpg(self._process.pid, signal.SIGCONT)
        self._killing = self._loop.call_later(_LAST_WORDS_S, self.kill)

    def kill(self, why: str = "") -> None:
        """End it, and whatever it has started, at once."""
        if self._reaped:
            return  # its number, and that of its group, may be another's by now
        self._killed_because = self._killed_because or why
        for end in (os.killpg, os.kill):  # it may have left its group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(self._process.pid, signal.SIGKILL)

    def abandon(self) -> None:
        """The loop has gone or is about to go: end the process, and let go of everything without the loop's help."""
        self.kill()
        if self._reaped:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel's hands: nobody can end it now
            self._process.wait(_LONGEST_END_S)
        self._gone = self._reaped = True
        if not self._loop.is_closed():
            self._unwatch()
            self._close_outputs()
            if not self._ended.done():
                self._ended.set_result(None)
        self._sock.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    async def ended(self) -> None:
        """Wait until the process is gone and reaped."""
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

    def _writable(self) -> None:
        """Send what is waiting, as far as the socket takes it."""
        unsent = self._unsent
        try:
            while unsent:
                sent = self._sock.sendmsg(unsent[:_IOV_MAX])
                while sent:
                    if sent < len(unsent[0]):
                        unsent[0] = unsent[0][sent:]
                        break
                    sent -= len(unsent.pop(0))
        except BlockingIOError:
            if not self._watching_writable:
                self._watching_writable = True
                self._loop.add_writer(self._sock.fileno(), self._writable)
            return
        except OSError:  # the peer is gone; what it still sent is read first, then it is lost
            unsent.clear()
        if self._watching_writable:
            self._watching_writable = False
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        for _ in range(_READS_IN_A_ROW):
            # without a half frame there is nothing to wait for; the loop tells if another reply is there already
            if not self._read() or self._reader.idle:
                return

    def _read(self) -> bool:
        """Read once; whether something came."""
        if self._gone:
            return False
        try:
            n = self._sock.recv_into(self._reader.get_buffer())
            if n == 0:
                self._end("it closed its connection")
                return False
            for frame in self._reader.received(n):
                self._heard(frame)
        except BlockingIOError:
            return False
        except FrameError as error:
            self.broke_protocol = True
            self.kill(f"it was killed for what it sent: {error}")
            self._end("it was killed")
            return False
        except OSError as error:
            if isinstance(error, ConnectionResetError) and self._in_one_go:
                self._unread = True  # that is what the kernel says if anything was left to read in its socket
            self._end(f"its connection broke: {error}")
            return False
        return True

    def _exited(self) -> None:
        """The process has ended; what it wrote before is still read."""
        while self._read():
            pass
        self._end("it ended")

    def _end(self, why: str) -> None:
        """The worker is of no use any more: make sure that it is dead, then say so."""
        if self._gone:
            return
        self._gone = True
        self._unwatch()
        self._sock.close()
        self._unsent.clear()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        self._reap(why, 0)

    def _unwatch(self) -> None:
        """Nothing of it is waited for any more."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)

    def _reap(self, why: str, tries: int) -> None:
        """Wait a moment for its end, so that the log can tell how it died; then use force."""
        if self._reaped:
            return  # it was abandoned
        over = self._is_over()
        if not over and tries < 500:
            if tries == 25:
                self.kill()
            self._loop.call_later(_REAP_EVERY_S, self._reap, why, tries + 1)
            return
        if self._killing is not None:
            self._killing.cancel()
        if over:
            self.kill()  # its children, if it had any; as long as it is not reaped, its number is nobody else's
            if self._guard is not None:
                self._guard.remove(self._process.pid)
            self._reaped = True
        code = self._process.poll()
        self._close_outputs()
        self._ended.set_result(None)
        self._lost(self._killed_because or _cause(code, why))

    def _is_over(self) -> bool:
        """Whether the process has ended; it is not reaped by this where that can be told without."""
        if not hasattr(os, "waitid"):  # macOS
            return self._process.poll() is not None
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # somebody has reaped it: a program that waits for all its children
            return True

    def _close_outputs(self) -> None:
        for output in self._outputs:
            output.close()


def _setup_frame(launch: Launch, place: int) -> Frame:
    """What tells the worker who it is.

    Raises:
        StartupError: it is too large; that is because of the kwargs, as nothing else in it is large.
    """
    setup = msgspec.structs.replace(launch.setup, place=place, cores=launch.cores[place])
    packed = pickle.dumps(setup, 5)
    if len(packed) > MAX_FRAME_BYTES:
        raise StartupError(
            f"the kwargs of stage {setup.stage} are too large to be sent to its workers: {len(packed):,} bytes where"
            f" {MAX_FRAME_BYTES:,} are possible. Give the model a path, and load what is there in setup"
        )
    return Frame(FrameKind.SETUP, ids=[0], formats=b"\0", payloads=[packed])


def _socketpair() -> tuple[socket.socket, socket.socket]:
    """Our end, which does not block, and the worker's."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)
    ours.setblocking(False)
    return ours, theirs


def _shown(name: str) -> bytes:
    """A name as an argument that `ps` can show, whatever is in it and whatever the locale is."""
    return "".join(c if c.isprintable() else "?" for c in name[:_LONGEST_NAME]).encode()


def _bytes_not_read(sock: socket.socket) -> int:
    """How much of what was sent is still in the socket; 0 where the system cannot tell."""
    count = array.array("i", [0])
    try:
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, count)
    except OSError:
        return 0
    return count[0]


def _cause(code: int | None, why: str) -> str:
    """How a process died, for a person."""
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
