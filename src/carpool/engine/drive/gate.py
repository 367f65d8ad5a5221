"""Workers that come by themselves: the gate, which is the address at which they connect, and the
connections of those that were admitted.

A connection is a stranger until it has shown that it knows the token (`wire/handshake.py`). Each
has a few seconds, and only so many are let in at a time (`Strangers`), so strangers can hold a
worker up, but not keep it out.

A worker that was admitted is lost when its connection ends:

    end of file            its process has ended, or has left in good order
    reset                  the same, with something unread in its socket: if the frame that was sent
                           last went in one go, the model has not seen it
    nothing acknowledged   its machine is silent, or the way there is (`fell_silent`)
    closed by us           it hangs, has broken the protocol, or the service ends

A worker that is given up ends by itself (`worker/remote.py`).

Three things differ on a network. A machine may fall silent, which the kernel reports
(`TCP_USER_TIMEOUT`, keepalive): its requests wait again as if untaken, and only a second silence
with the same request counts against it. A reset may come from a machine that was started again, so
where a request must not run twice, its frame counts as read. A window that stays closed is a
silence for the kernel, so a large batch goes ahead only when the worker begins to answer the one
before it (`FrameSocket.send_behind_reply`). Deadlines are by the coordinator's monotonic clock:
each batch carries its time, and the worker keeps the least difference to its own clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import secrets
import socket
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from carpool.engine.drive.framesocket import FrameSocket
from carpool.engine.logger import logger
from carpool.engine.wire import handshake
from carpool.engine.wire.frame import Frame, FrameError
from carpool.engine.wire.handshake import Claim, HandshakeError, Hello
from carpool.engine.worker.address import JoinAddress, Tls, listen_at, tune

T = TypeVar("T")


class Strangers(Generic[T]):
    """Connections that may be proving themselves, to join or to speak TLS: `most` at a time.

    Each has `sure_s` for sure. After that it makes room for one that comes later, if there are as
    many as there may be. The one that goes is the oldest of the source that has most, so a source
    pushes out its own.
    """

    def __init__(self, most: int, sure_s: float) -> None:
        self._most = most
        self._sure_s = sure_s
        self._came: dict[T, tuple[str, float]] = {}
        self._of_source: dict[str, dict[T, None]] = {}

    def __len__(self) -> int:
        return len(self._came)

    def wait_s(self, now: float) -> float:
        """Return after how many seconds one more may come, unless one leaves before; 0 for now."""
        if len(self._came) < self._most:
            return 0.0
        return max(0.0, self._came[self._next_to_go()][1] + self._sure_s - now)

    def enter(self, stranger: T, source: str, now: float) -> T | None:
        going = self._next_to_go() if len(self._came) >= self._most else None
        if going is not None:
            self.leave(going)
        self._came[stranger] = source, now
        self._of_source.setdefault(source, {})[stranger] = None
        return going

    def leave(self, stranger: T) -> None:
        source, _ = self._came.pop(stranger, ("", 0.0))
        others = self._of_source.get(source, {})
        others.pop(stranger, None)
        if not others:
            self._of_source.pop(source, None)

    def _next_to_go(self) -> T:
        source = max(self._of_source, key=lambda each: len(self._of_source[each]))
        return next(iter(self._of_source[source]))


STRANGER_S: Final = 5.0
"""How long a connection may take to prove itself."""

MOST_STRANGERS: Final = 1024
"""How many connections may be proving themselves at a time; at most a quarter of the descriptors
that the process may have.
"""

MOST_PER_S: Final = 1000
"""How many may be let in in a second while others have to go for them."""

_BACKLOG: Final = 4096  # first come, first served; the kernel takes less where it is set to
_NO_ROOM_S: Final = 1.0  # until connections are taken again after the system had no descriptor for one
_LOG_EVERY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Invitation:
    """The places of workers that prove their knowledge of a token: `refusal` returns why it cannot
    be admitted, empty if it can, and `admit` gets the connection and what it has said.
    """

    token: bytes
    refusal: Callable[[Hello], str]
    admit: Callable[[socket.socket, Hello], None]


class Gate:
    """Listens for workers, on the running loop.

    Args:
        tls: The files for TLS; None for plain connections.
        silence_s: For how long a worker's machine may be silent.

    Attributes:
        invitations: By ticket, what becomes of a worker that comes with it.
        strangers: How many connections have been closed that did not prove themselves.
    """

    def __init__(self, tls: Tls | None, silence_s: float, model: str) -> None:
        self.invitations: dict[str, Invitation] = {}
        self.strangers = 0
        self._tls = None if tls is None else tls.for_service()
        self._silence_s = silence_s
        self._about = {"model": model}
        self._loop = asyncio.get_running_loop()
        self._listening: list[socket.socket] = []
        self._paths: list[tuple[str, int]] = []  # of our Unix sockets, and their inodes
        self._greeting: set[asyncio.Task[None]] = set()
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MOST_STRANGERS if descriptors == resource.RLIM_INFINITY else min(MOST_STRANGERS, descriptors // 4)
        self._proving: Strangers[asyncio.Task[None]] = Strangers(most, most / MOST_PER_S)
        self._is_full = False
        self._logged_at = 0.0

    def listen(self, address: JoinAddress) -> JoinAddress:
        """Listen at an address, and return it with the port that was taken. Raises OSError."""
        sock = _bound(address)
        self._listening.append(sock)
        if address.path:
            self._paths.append((address.path, os.stat(address.path).st_ino))
        if not self._is_full:
            self._loop.add_reader(sock.fileno(), self._knocked, sock)
        return address if address.path else address._replace(port=sock.getsockname()[1])

    def close(self) -> None:
        for task in self._greeting:
            task.cancel()
        self.abandon()

    def abandon(self) -> None:
        for sock in self._listening:
            if not self._loop.is_closed():
                self._loop.remove_reader(sock.fileno())
            sock.close()
        self._listening.clear()
        for path, inode in self._paths:
            with contextlib.suppress(OSError):
                if os.stat(path).st_ino == inode:  # else it is another service's by now
                    os.unlink(path)
        self._paths.clear()

    # -- inside

    def _knocked(self, listening: socket.socket) -> None:
        while (wait_s := self._proving.wait_s(self._loop.time())) == 0.0:
            try:
                sock, address = listening.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._wait_for_descriptors(error)
                return
            sock.setblocking(False)
            task = self._loop.create_task(self._greet(sock))
            self._greeting.add(task)
            task.add_done_callback(self._greeted)
            going = self._proving.enter(task, str(address[0]) if address else "", self._loop.time())
            if going is not None:
                going.cancel()
        self._pause()
        self._loop.call_later(wait_s, self._go_on)

    def _wait_for_descriptors(self, error: OSError) -> None:
        logger.error("no worker can join for %g s: %s", _NO_ROOM_S, error, extra=self._about)
        self._pause()
        self._loop.call_later(_NO_ROOM_S, self._go_on)

    def _pause(self) -> None:
        self._is_full = True
        for sock in self._listening:
            self._loop.remove_reader(sock.fileno())

    def _go_on(self) -> None:
        if self._is_full:
            self._is_full = False
            for sock in self._listening:
                self._loop.add_reader(sock.fileno(), self._knocked, sock)

    def _greeted(self, task: asyncio.Task[None]) -> None:
        self._greeting.discard(task)
        self._proving.leave(task)
        self._go_on()

    async def _greet(self, sock: socket.socket) -> None:
        peer = _peer_of(sock)
        conversation = _Conversation(sock)
        try:
            async with asyncio.timeout(STRANGER_S):
                if self._tls is not None and sock.family != socket.AF_UNIX:
                    await conversation.encrypt(self._tls)
                why = await self._talk(conversation, peer)
        except (OSError, HandshakeError, TimeoutError) as error:
            why = "it did not introduce itself in time" if isinstance(error, TimeoutError) else str(error)
        except BaseException:
            conversation.sock.close()
            if self._listening:
                self._turned_away(peer, "others came, and it had not introduced itself")
            raise
        if why:
            conversation.sock.close()
            self._turned_away(peer, why)

    async def _talk(self, conversation: _Conversation, peer: str) -> str:
        """Have a connection prove itself; return why it was not admitted, or nothing if it was."""
        nonce = secrets.token_bytes(handshake.NONCE_BYTES)
        await conversation.send(handshake.greeting(nonce))
        head = await conversation.receive(handshake.HELLO_HEAD_BYTES)
        claim = handshake.read_hello(head, await conversation.receive(handshake.hello_rest(head)))
        invitation = self.invitations.get(claim.hello.ticket)
        if invitation is None or not handshake.is_proven(claim, invitation.token, nonce):
            return "it does not know the token"
        refusal = invitation.refusal(claim.hello)
        await conversation.send(handshake.verdict(claim, invitation.token, nonce, refusal))
        if refusal:
            self._refused(claim, peer, refusal)
            conversation.sock.close()
            return ""
        if not self._listening:
            return "the service is closing"
        tune(conversation.sock, self._silence_s)
        invitation.admit(conversation.sock, claim.hello)
        return ""

    def _refused(self, claim: Claim, peer: str, refusal: str) -> None:
        hello = claim.hello
        text = "a worker (%s) at %s is not admitted to stage %s: %s"
        logger.warning(text, hello.whereabouts, peer, hello.stage, refusal, extra=self._about)

    def _turned_away(self, peer: str, why: str) -> None:
        self.strangers += 1
        now = self._loop.time()
        if self.strangers == 1 or now - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            text = "a connection from %s to the gate for workers was closed: %s (%d so far)"
            logger.warning(text, peer, why, self.strangers, extra=self._about)


class _Conversation:
    """Reads and writes a few bytes on a socket that does not block, TLS or not."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._loop = asyncio.get_running_loop()

    async def encrypt(self, context: ssl.SSLContext) -> None:
        self.sock = sock = context.wrap_socket(self.sock, server_side=True, do_handshake_on_connect=False)
        while True:
            try:
                sock.do_handshake()
            except ssl.SSLWantReadError:
                await self._ready(self._loop.add_reader, self._loop.remove_reader)
            except ssl.SSLWantWriteError:
                await self._ready(self._loop.add_writer, self._loop.remove_writer)
            else:
                return

    async def receive(self, n: int) -> bytes:
        """Return exactly so many bytes. Raises HandshakeError if the connection ends before."""
        data = bytearray()
        while len(data) < n:
            buffer = bytearray(n - len(data))
            try:
                got = self.sock.recv_into(buffer)
            except BlockingIOError:
                await self._ready(self._loop.add_reader, self._loop.remove_reader)
                continue
            if not got:
                raise HandshakeError("it closed the connection without introducing itself")
            data += buffer[:got]
        return bytes(data)

    async def send(self, data: bytes) -> None:
        while data:
            try:
                data = data[self.sock.send(data) :]
            except BlockingIOError:
                await self._ready(self._loop.add_writer, self._loop.remove_writer)

    async def _ready(self, watch: Callable[..., object], unwatch: Callable[[int], object]) -> None:
        ready: asyncio.Future[None] = self._loop.create_future()
        fd = self.sock.fileno()
        watch(fd, _resolve, ready)
        try:
            await ready
        finally:
            unwatch(fd)


def _resolve(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _bound(address: JoinAddress) -> socket.socket:
    if not address.path:
        sock = listen_at(address.host, address.port, _BACKLOG)
        sock.setblocking(False)
        return sock
    _remove_leftover(address.path)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(address.path)
        os.chmod(address.path, stat.S_IRUSR | stat.S_IWUSR)  # before anyone can connect
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def _remove_leftover(path: str) -> None:
    """Remove the socket of a service that has been killed, at which nothing listens any more."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX) as probe:
                try:
                    probe.connect(path)
                except ConnectionRefusedError:
                    os.unlink(path)


def _peer_of(sock: socket.socket) -> str:
    if sock.family == socket.AF_UNIX:
        return "this machine"
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return "an unknown address"


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
        on_lost: Called once, with the cause, when its connection has ended.
        trusts_resets: Whether a reset means that the worker had not read the last frame.

    Attributes:
        send_ahead: Sends it a large frame while it is busy, once it begins to answer; None if
            `send` may do that at once.
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
        return self._trusts_resets and self._connection.has_unread_frame

    def close_input(self) -> None:
        self._connection.close_input()

    def catch_up(self) -> bool:
        return self._connection.catch_up()

    def listen_to(self, on_frame: Callable[[Frame], None]) -> None:
        self._connection.on_frame = on_frame

    def give_up(self, why: str, on_frame: Callable[[Frame], None]) -> None:
        self._ended_because = self._ended_because or why
        self.listen_to(on_frame)
        self._connection.close_input()
        self._end_timer = self._loop.call_later(_LAST_WORDS_S, self.kill)

    def kill(self, why: str = "") -> None:
        self._ended_because = self._ended_because or why
        # not at once: whoever asks for it may be going through all workers
        self._loop.call_soon(self._connection.close, "its connection was closed by the service")

    def abandon(self) -> None:
        self._connection.abandon()
        if not self._loop.is_closed() and not self._ended.done():
            self._ended.set_result(None)

    async def ended(self) -> None:
        await asyncio.shield(self._ended)

    def _disconnected(self, why: str, error: Exception | None) -> None:
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
