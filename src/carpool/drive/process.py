"""A worker process: started as a fresh interpreter, talked to over a socketpair, ended and reaped.

It lives in a process group of its own. The socket is the only thing that it shares with this
process, so a worker that is killed at any moment leaves nothing locked.

There are three state machines here:

1. The life of the process (`_Life`). It goes from CONNECTED to DISCONNECTED when the process ends,
   closes its socket or breaks the protocol, and to REAPED once it is dead; `abandon` goes to REAPED
   at once. `on_lost` is called when it is dead, or cannot be ended.
2. What is known of the frame that was sent last (`_LastFrame`). Each `send` decides between WHOLE
   and IN_PIECES; a socket that turns out to be broken makes it UNREAD.
3. The sending side. Either the kernel has taken all frames (`_unsent` is empty), or the rest waits
   until the socket is writable (`_is_watching_writable`), and later frames wait behind it.

How it came to be killed is no state but a note for the log (`_killed_because`, the first one
counts).
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import enum
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
_READS_IN_A_ROW = 16  # then other callbacks of the loop have their turn
_REAP_EVERY_S = 0.002
_TRIES_BEFORE_KILL = 25  # looks for its end, before it is killed
_MOST_TRIES = 500  # looks for its end, before it counts as one that cannot be ended
_SOCKET_BUFFER = 512 * 1024  # large enough for few wake-ups, small enough to stay in the processor's cache
_LONGEST_NAME = 200
_LONGEST_END_S = 1.0  # between the signal that kills a process and its end
_LAST_WORDS_S = 1.0  # for a process that hangs, to write down where

WORKER_MODULE = "carpool.worker.main"
"""What a worker process runs; `carpool.testing` puts its stub here."""


class _Life(enum.Enum):
    """Where a worker process is in its life."""

    CONNECTED = enum.auto()
    """Its socket is open: frames are sent and heard."""

    DISCONNECTED = enum.auto()
    """Nothing is sent or heard any more; it is dead, or will be soon."""

    REAPED = enum.auto()
    """It is dead, and its process id may be another's by now."""


class _LastFrame(enum.Enum):
    """What is known of the frame that was sent last."""

    IN_PIECES = enum.auto()
    """Part of it went later, so whether the worker has begun to read it is not known."""

    WHOLE = enum.auto()
    """It went in one go: if anything lies unread in the socket, it is this frame."""

    UNREAD = enum.auto()
    """The worker was gone before it had read it."""


class WorkerProcess:
    """One process and this side's end of its socket.

    Args:
        launch: how to start it.
        index: which worker of the stage it is for the user.
        on_frame: called with each frame that it sends.
        on_lost: called once, with the cause, when it is dead or has broken the protocol.
        sink: where its output goes.

    Attributes:
        broke_protocol: whether it has sent what it must not send.

    Raises:
        StartupError: its kwargs are too large.
        OSError: the system has no process, memory or descriptors to give.
    """

    def __init__(
        self,
        launch: Launch,
        index: int,
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[str], None],
        sink: LineSink,
    ) -> None:
        # what it reports to
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._guard = launch.guard
        self._loop = asyncio.get_running_loop()

        # its life, and how it is ended
        self._life = _Life.CONNECTED
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._killed_because = ""
        self._kill_timer: asyncio.TimerHandle | None = None  # runs while a hanging process writes its last words
        self.broke_protocol = False

        # what is sent to it
        self._unsent: list[memoryview] = []
        self._is_watching_writable = False
        self._last_frame = _LastFrame.IN_PIECES

        # while its socket is lent: how to get it back; then what was read from it meanwhile
        self._recall: Callable[[], None] | None = None
        self._unread = b""

        # what comes from it, and the process itself
        self._reader = FrameReader()
        self._pidfd: int | None = None
        first = _setup_frame(launch, index)
        fill_standard()
        self._sock, theirs = _socketpair()
        with theirs:
            try:
                self._process = self._spawn(theirs, process_name(launch.setup.stage, index), launch.env_of(index))
            except BaseException:
                self._sock.close()
                raise
        if self._guard is not None:
            self._guard.add(self._process.pid)
        name = f"{launch.setup.stage}/{index}"
        self._outputs = [
            OutputLines(stream, name, is_error, sink)
            for stream, is_error in ((self._process.stdout, False), (self._process.stderr, True))
            if stream is not None
        ]
        self._watch()
        self.send(first)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, frame: Frame) -> None:
        """Write a frame, at once if the socket takes it, else as it becomes writable.

        The first branch is the fast path of `_writable`, for small frames while nothing waits: the
        same bytes, see tests/drive/test_sending.py.
        """
        if self._life is not _Life.CONNECTED:
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
                self._last_frame = _LastFrame.UNREAD
            if sent == len(message):
                self._last_frame = _LastFrame.WHOLE
                return
            buffers = [memoryview(message)[sent:]]
        if self._last_frame is not _LastFrame.UNREAD:
            self._last_frame = _LastFrame.IN_PIECES
        is_waiting = bool(self._unsent)
        self._unsent += [memoryview(part).cast("B") for part in buffers if len(part)]
        if not is_waiting:
            self._writable()

    def lend(self, recall: Callable[[], None]) -> socket.socket | None:
        """Lend its socket to another thread, and have the loop not watch it until `take_back`.

        The worker must have answered all it was sent. Its end is noticed all the same.

        Args:
            recall: called before anything is read again because the process has ended; it must call
                `take_back`.

        Returns:
            The socket; None if it cannot be lent.
        """
        if self._life is not _Life.CONNECTED or self._last_frame is not _LastFrame.WHOLE or self._pidfd is None:
            return None
        if self._unsent or not self._reader.idle:
            return None
        self._recall = recall
        self._loop.remove_reader(self._sock.fileno())
        return self._sock

    def take_back(self, unread: bytes) -> None:
        """Read from the socket again, which was lent.

        Args:
            unread: what was read from it meanwhile, and is still to be heard.
        """
        self._recall = None
        if self._life is not _Life.CONNECTED or self._loop.is_closed():
            return
        self._loop.add_reader(self._sock.fileno(), self._readable)
        if unread:
            self._unread = unread
            self._loop.call_soon(self._readable)

    def close_input(self) -> None:
        """Close the sending side: the worker finishes, tears down and ends."""
        if self._life is _Life.CONNECTED:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    @property
    def has_unread_batch(self) -> bool:
        """Whether the model cannot have seen the batch sent last, since the worker has not read it.

        The batch is not to blame then for the death of the worker. That matters where several
        workers are killed together: a batch of the first one is handed on to the second before it
        is known that this is dead, too.
        """
        if self._life is _Life.CONNECTED:
            return self._last_frame is _LastFrame.WHOLE and _bytes_not_read(self._sock) > 0
        return self._last_frame is _LastFrame.UNREAD

    def catch_up(self) -> bool:
        """Read what it has sent already, and report whether there was anything."""
        return self._read()

    def give_up(self, why: str, on_frame: Callable[[Frame], None]) -> None:
        """Let a process that hangs write down where it stands, for a second, then kill it.

        Args:
            why: for the log.
            on_frame: called with what it still sends.
        """
        self._on_frame = on_frame
        self._killed_because = self._killed_because or why
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self._process.send_signal(DUMP_SIGNAL)  # if it is stopped, this waits, and shows where it was stopped
            os.killpg(self._process.pid, signal.SIGCONT)
        self._kill_timer = self._loop.call_later(_LAST_WORDS_S, self.kill)

    def kill(self, why: str = "") -> None:
        """Kill it and whatever it has started.

        Args:
            why: for the log.
        """
        if self._life is _Life.REAPED:
            return  # its number, and that of its group, may be another's by now
        self._killed_because = self._killed_because or why
        for end in (os.killpg, os.kill):  # it may have left its group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(self._process.pid, signal.SIGKILL)

    def abandon(self) -> None:
        """End the process and let go of everything without the loop, which ends or has ended."""
        self.kill()
        if self._life is _Life.REAPED:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel's hands: nothing can end it now
            self._process.wait(_LONGEST_END_S)
        self._life = _Life.REAPED
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

    def _watch(self) -> None:
        """Have the loop read what the process sends, and notice its end."""
        self._loop.add_reader(self._sock.fileno(), self._readable)
        with contextlib.suppress(AttributeError, OSError):  # not on this system, or already dead
            self._pidfd = os.pidfd_open(self._process.pid)
            self._loop.add_reader(self._pidfd, self._exited)

    def _writable(self) -> None:
        """Send what waits, as far as the socket takes it."""
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
            if not self._is_watching_writable:
                self._is_watching_writable = True
                self._loop.add_writer(self._sock.fileno(), self._writable)
            return
        except OSError:  # the peer is gone; what it still sent is read first, then it is lost
            unsent.clear()
        if self._is_watching_writable:
            self._is_watching_writable = False
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        for _ in range(_READS_IN_A_ROW):
            # unless half a frame is here there is nothing to wait for: the loop notices further
            # replies
            if not self._read() or self._reader.idle:
                return

    def _read(self) -> bool:
        """Read once, and report whether something came."""
        if self._life is not _Life.CONNECTED:
            return False
        try:
            n = self._sock.recv_into(self._reader.get_buffer()) if not self._unread else self._read_again()
            if n == 0:
                self._end("it closed its connection")
                return False
            for frame in self._reader.received(n):
                self._on_frame(frame)
        except BlockingIOError:
            return False
        except FrameError as error:
            self.broke_protocol = True
            self.kill(f"it was killed for what it sent: {error}")
            self._end("it was killed")
            return False
        except OSError as error:
            if isinstance(error, ConnectionResetError) and self._last_frame is _LastFrame.WHOLE:
                self._last_frame = _LastFrame.UNREAD  # the kernel resets if anything was left to read in its socket
            self._end(f"its connection broke: {error}")
            return False
        return True

    def _read_again(self) -> int:
        """Put what another thread has read into the reader's buffer, and return how much it is."""
        buffer = self._reader.get_buffer()
        n = min(len(buffer), len(self._unread))
        buffer[:n] = self._unread[:n]
        self._unread = self._unread[n:]
        return n

    def _exited(self) -> None:
        """Read what the process wrote before it ended; then it is lost."""
        if self._recall is not None:
            self._recall()
        while self._read():
            pass
        self._end("it ended")

    def _end(self, why: str) -> None:
        """Disconnect a worker that is of no use any more, and see that it is dead."""
        if self._life is not _Life.CONNECTED:
            return
        self._life = _Life.DISCONNECTED
        self._unwatch()
        self._sock.close()
        self._unsent.clear()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        self._reap(why, 0)

    def _unwatch(self) -> None:
        """Have the loop wait for nothing of it any more."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)

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
            self.kill()  # its children, if it had any; as long as it is not reaped, its number is no other's
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
    """Return the frame that tells a worker what to load and which worker it is.

    Raises:
        StartupError: it is too large, which only the model's kwargs can be the reason for.
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
    """Return our end of a new connection, which does not block, and the worker's."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)
    ours.setblocking(False)
    return ours, theirs


def _shown(name: str) -> bytes:
    """Return a name as an argument that `ps` can show, whatever is in it and in any locale."""
    return "".join(c if c.isprintable() else "?" for c in name[:_LONGEST_NAME]).encode()


def _bytes_not_read(sock: socket.socket) -> int:
    """Return how many sent bytes are still in the socket; 0 where the system does not show it."""
    count = array.array("i", [0])
    try:
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, count)
    except OSError:
        return 0
    return count[0]


def _cause(code: int | None, why: str) -> str:
    """Describe how a process died, for the log."""
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
