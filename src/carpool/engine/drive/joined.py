"""A worker that has come by itself (`gate.py`): a connection to it, and no process of ours.

It is lost when its connection ends, however that happens:

    end of file            its process has ended, or has left in good order
    reset                  the same, with something unread in its socket: if the frame that was sent
                           last went in one go, the model has not seen it
    nothing acknowledged   its machine is silent, or the way there is (`fell_silent`)
    closed by us           it hangs, has broken the protocol, or the service ends

A worker that is given up ends by itself: it watches its end of the connection (`worker/remote.py`).

Three things differ on a network. A machine may fall silent, which the kernel reports
(`TCP_USER_TIMEOUT`, keepalive): its requests wait again as if untaken, and only a second silence
with the same request counts against it (`WorkerPool._is_first_silence`). A reset may come from a
machine that was started again, so where a request must not run twice, its frame counts as read. A
window that stays closed is a silence for the kernel, so a large batch goes ahead only when the
worker begins to answer the one before it (`FrameSocket.send_behind_reply`). Deadlines are by the
coordinator's monotonic clock: each batch carries its time, and the worker keeps the least
difference to its own clock.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

from carpool.engine.drive.framesocket import FrameSocket
from carpool.engine.wire.frame import Frame, FrameError
from carpool.engine.wire.handshake import Hello

_LAST_WORDS_S = 1.0  # for a worker that hangs, before its connection is closed altogether
_SILENCE = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN}) | {
    errno.EINVAL,  # what the kernel says where a route here swallows what is sent, once time is up
    errno.EACCES,  # the same where a route forbids it
}


class JoinedWorker:
    """The connection to a worker that has come by itself; see `Worker` in worker.py.

    Args:
        sock: The connection, which has been admitted.
        hello: What the worker has said of itself.
        on_frame: Called with each frame that it sends.
        on_lost: Called once, with the cause, when its connection has ended.
        trusts_resets: Whether a reset means that the worker had not read the last frame. On a
            network it may also come from a machine that has been started again, so that a batch
            which must not run twice is better counted as run.

    Attributes:
        broke_protocol: Whether it has sent what it must not send.
        fell_silent: Whether it was lost since nothing was heard of its machine.
        send: Sends it a frame.
        send_ahead: Sends it a large frame while it is busy, once it begins to answer; None if
            `send` may do that at once. On a network what it does not read must fit into its socket:
            a window that stays closed looks like silence.
        hello: What the worker has said of itself.
        where: Where it runs, in words.
    """

    pid: int | None = None

    def __init__(
        self,
        sock: socket.socket,
        hello: Hello,
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[str], None],
        *,
        trusts_resets: bool,
    ) -> None:
        self.broke_protocol = False
        self.fell_silent = False
        self.hello = hello
        self.where = hello.whereabouts
        self._trusts_resets = trusts_resets or sock.family == socket.AF_UNIX
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._ended_because = ""
        self._end_timer: asyncio.TimerHandle | None = None
        self._connection = FrameSocket(sock, on_frame, self._disconnected)
        self.send: Callable[[Frame], None] = self._connection.send
        has_window = sock.family != socket.AF_UNIX
        self.send_ahead = self._connection.send_behind_reply if has_window else None

    @property
    def has_unread_batch(self) -> bool:
        """Whether the model cannot have seen the batch sent last, as the worker has not read it."""
        return self._trusts_resets and self._connection.has_unread_frame

    def close_input(self) -> None:
        """Close the sending side: the worker finishes, tears down and ends."""
        self._connection.close_input()

    def catch_up(self) -> bool:
        """Read what it has sent already, and report whether there was anything."""
        return self._connection.catch_up()

    def listen_to(self, on_frame: Callable[[Frame], None]) -> None:
        """Call another function with what it sends from now on."""
        self._connection.on_frame = on_frame

    def give_up(self, why: str, on_frame: Callable[[Frame], None]) -> None:
        """Close the sending side of a worker that hangs, and the connection a second later.

        Args:
            why: For the log.
            on_frame: Called with what it still sends.
        """
        self._ended_because = self._ended_because or why
        self.listen_to(on_frame)
        self._connection.close_input()
        self._end_timer = self._loop.call_later(_LAST_WORDS_S, self.kill)

    def kill(self, why: str = "") -> None:
        """Close the connection, which ends the worker.

        Args:
            why: For the log.
        """
        self._ended_because = self._ended_because or why
        # not at once: whoever asks for it may be going through all workers
        self._loop.call_soon(self._connection.close, "its connection was closed by the service")

    def abandon(self) -> None:
        """Close the connection without the loop, which ends or has ended."""
        self._connection.abandon()
        if not self._loop.is_closed() and not self._ended.done():
            self._ended.set_result(None)

    async def ended(self) -> None:
        """Wait until its connection has ended."""
        await asyncio.shield(self._ended)

    def _disconnected(self, why: str, error: Exception | None) -> None:
        """Report that the worker is lost."""
        if isinstance(error, FrameError):
            self.broke_protocol = True
            why = f"it is given up for what it sent: {error}"
        elif isinstance(error, OSError) and error.errno in _SILENCE:
            self.fell_silent = True
            why = f"nothing has been heard of its machine: {error.strerror}"
        if self._end_timer is not None:
            self._end_timer.cancel()
        if not self._ended.done():
            self._ended.set_result(None)
        self._on_lost(self._ended_because or why)
