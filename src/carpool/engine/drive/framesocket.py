"""This side of a connection to a worker: frames go out and come in as the loop finds it ready.

Two state machines:

1. The frame that was sent last (`_LastFrame`): WHOLE or IN_PIECES; UNREAD once the socket turns out
   to be broken.
2. The sending side. Either the kernel has taken all frames (`_unsent` is empty), or the rest waits
   until the socket is writable (`_is_watching_writable`), and later frames wait behind it. A large
   frame may wait for the worker to begin to answer (`_behind_reply`), and later ones behind that.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import enum
import fcntl
import socket
import termios
from collections.abc import Callable

from carpool.engine.wire.frame import Frame, FrameError, FrameKind, FrameReader, encode
from carpool.engine.wire.payload import LARGE, Buffer

_IOV_MAX = 1024
_READS_IN_A_ROW = 16  # then other callbacks of the loop have their turn
BUFFER_BYTES = 512 * 1024
"""The size of a socket's buffers: large enough for few wake-ups, small enough to stay in the
processor's cache.
"""

OnEnd = Callable[[str, Exception | None], None]
"""Takes why a connection has ended, in words, and the exception; None if it ended in good order."""


class _LastFrame(enum.Enum):
    IN_PIECES = enum.auto()
    """Part of it went later, so whether the worker has begun to read it is not known."""

    WHOLE = enum.auto()
    """It went in one go: if anything lies unread in the socket, it is this frame."""

    UNREAD = enum.auto()
    """The worker was gone before it had read it."""


class FrameSocket:
    """One connection to a worker, which belongs to the running loop.

    Args:
        on_frame: Called with each frame that comes. It raises FrameError if the frame must not
            come.
        on_end: Called once, when the connection has ended by itself or by `close`.

    Attributes:
        is_open: Whether frames are sent and received.
    """

    def __init__(self, sock: socket.socket, on_frame: Callable[[Frame], None], on_end: OnEnd) -> None:
        self.sock = sock
        self.is_open = True
        self.on_frame = on_frame
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._is_local = sock.family == socket.AF_UNIX
        self._pending: Callable[[], int] | None = getattr(sock, "pending", None)  # bytes that TLS has decrypted

        # what is sent
        self._unsent: list[memoryview] = []
        self._behind_reply: list[Buffer] = []  # frames that go once the worker begins to answer
        self._is_watching_writable = False
        self._last_frame = _LastFrame.IN_PIECES
        self._broken: OSError | None = None  # what the first write that failed has raised

        # while the socket is lent: how to get it back; then what was read from it meanwhile
        self._recall: Callable[[], None] | None = None
        self._unread = b""

        self._reader = FrameReader()
        self._is_delivering = False  # `on_frame` is called, perhaps for the first of several frames
        self._loop.add_reader(sock.fileno(), self._readable)

    # -- sending

    def send(self, frame: Frame) -> None:
        """Write a frame, at once if the socket takes it, else as it becomes writable.

        The first branch is the fast path of `_writable`, for small frames while nothing waits: the
        same bytes, see tests/engine/drive/test_sending.py.
        """
        if not self.is_open:
            return
        buffers = encode(frame)
        if self._behind_reply:  # which is to come first
            self._behind_reply += buffers
            return
        if not self._unsent and sum(map(len, buffers)) < LARGE:
            message = b"".join(buffers)
            try:
                sent = self.sock.send(message)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                sent = 0  # it is dead; tried again below, where errors are dealt with
                self._broken = self._broken or error
                self._last_frame = _LastFrame.UNREAD
            if sent == len(message):
                self._last_frame = _LastFrame.WHOLE
                return
            buffers = [memoryview(message)[sent:]]
        self._write(buffers)

    def send_behind_reply(self, frame: Frame) -> None:
        """Write a large frame once a worker on a network, which is busy, begins to answer.

        Before that it would not be read, and a socket whose window stays closed looks as if the
        machine had fallen silent.
        """
        if self._is_local or self._reader.opening == FrameKind.REPLY:
            self.send(frame)
        elif self.is_open:
            self._behind_reply += encode(frame)

    def close_input(self) -> None:
        if self.is_open:
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_WR)

    @property
    def has_unread_frame(self) -> bool:
        """Whether the worker has not begun to read the frame that was sent last.

        While the connection is open, only a local socket shows it: on a network the kernel shows
        what the other machine has not acknowledged, and not what the process has not read.
        """
        if self.is_open:
            return self._is_local and self._last_frame is _LastFrame.WHOLE and _bytes_not_read(self.sock) > 0
        return self._last_frame is _LastFrame.UNREAD

    # -- lending

    def lend(self, recall: Callable[[], None]) -> socket.socket | None:
        """Lend the socket to another thread, and have the loop not watch it until `take_back`,
        which `recall` must call. The worker must have answered all it was sent.

        Returns:
            The socket; None if it cannot be lent.
        """
        if not self.is_open or self._last_frame is not _LastFrame.WHOLE:
            return None
        if self._unsent or not self._reader.idle:
            return None
        self._recall = recall
        self._loop.remove_reader(self.sock.fileno())
        return self.sock

    def recall_loan(self) -> None:
        if self._recall is not None:
            self._recall()

    def take_back(self, unread: bytes) -> None:
        """Take the lent socket back, and read from it again, behind what was read meanwhile."""
        self._recall = None
        if not self.is_open or self._loop.is_closed():
            return
        self._loop.add_reader(self.sock.fileno(), self._readable)
        if unread:
            self._unread = unread
            self._loop.call_soon(self._readable)

    # -- hearing

    def read(self) -> bool:
        if not self.is_open:
            return False
        try:
            n = self.sock.recv_into(self._reader.get_buffer()) if not self._unread else self._read_again()
            if n == 0:
                self.close("it closed its connection", self._broken)  # the first reader of the end gets the error
                return False
            self._is_delivering = True
            frames = self._reader.received(n)
            if self._behind_reply and self._has_begun_to_answer(frames):
                buffers, self._behind_reply = self._behind_reply, []
                self._write(buffers)
            for frame in frames:
                self.on_frame(frame)
        except BlockingIOError:
            return False
        except FrameError as error:
            self.close("it was killed", error)
            return False
        except OSError as error:
            if isinstance(error, ConnectionResetError) and self._last_frame is _LastFrame.WHOLE:
                self._last_frame = _LastFrame.UNREAD  # the kernel resets if anything was left to read in its socket
            self.close(f"its connection broke: {error}", error)
            return False
        finally:
            self._is_delivering = False
        return True

    def catch_up(self) -> bool:
        """Read what has come already, and report whether there was anything.

        While frames are being delivered it is True, and nothing is read.
        """
        return self._is_delivering or self.read()

    def close(self, why: str, error: Exception | None = None) -> None:
        """End the connection and call `on_end`, unless that has been done; without an error it has
        ended in good order.
        """
        if self.is_open:
            on_end = self._on_end
            self.abandon()
            on_end(why, error)

    def abandon(self) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self._on_end = _ignore_end  # which would keep this and the worker alive for each other
        if not self._loop.is_closed():
            self._loop.remove_reader(self.sock.fileno())
            self._loop.remove_writer(self.sock.fileno())
        self.sock.close()
        self._unsent.clear()
        self._behind_reply = []

    # -- inside

    def _has_begun_to_answer(self, frames: list[Frame]) -> bool:
        return self._reader.opening == FrameKind.REPLY or any(frame.kind == FrameKind.REPLY for frame in frames)

    def _write(self, buffers: list[Buffer]) -> None:
        if self._last_frame is not _LastFrame.UNREAD:
            self._last_frame = _LastFrame.IN_PIECES
        is_waiting = bool(self._unsent)
        self._unsent += [memoryview(part).cast("B") for part in buffers if len(part)]
        if not is_waiting:
            self._writable()

    def _writable(self) -> None:
        unsent = self._unsent
        try:
            while unsent:
                sent = self.sock.sendmsg(unsent[:_IOV_MAX])
                while sent:
                    if sent < len(unsent[0]):
                        unsent[0] = unsent[0][sent:]
                        break
                    sent -= len(unsent.pop(0))
        except BlockingIOError:
            if not self._is_watching_writable:
                self._is_watching_writable = True
                self._loop.add_writer(self.sock.fileno(), self._writable)
            return
        except OSError as error:  # the peer is gone; what it still sent is read first, then it is lost
            self._broken = self._broken or error
            unsent.clear()
        if self._is_watching_writable:
            self._is_watching_writable = False
            self._loop.remove_writer(self.sock.fileno())

    def _readable(self) -> None:
        for _ in range(_READS_IN_A_ROW):
            # unless half a frame is here there is nothing to wait for: the loop notices further
            # replies, but not what TLS has decrypted already
            if not self.read() or (self._reader.idle and not (self._pending and self._pending())):
                return
        if self._pending is not None and self.is_open and self._pending():
            self._loop.call_soon(self._readable)

    def _read_again(self) -> int:
        """Put what another thread has read into the reader's buffer; return how many bytes."""
        buffer = self._reader.get_buffer()
        n = min(len(buffer), len(self._unread))
        buffer[:n] = self._unread[:n]
        self._unread = self._unread[n:]
        return n


def _ignore_end(why: str, error: Exception | None) -> None:
    """Stand in for `on_end` once the connection has ended."""


def _bytes_not_read(sock: socket.socket) -> int:
    """Return how many sent bytes are still in the socket; 0 where the system does not show it."""
    count = array.array("i", [0])
    try:
        fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, count)
    except OSError:
        return 0
    return count[0]
