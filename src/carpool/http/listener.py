"""Where a server listens: a host and port, a Unix socket, or a socket that was handed to it.

With TLS it shakes hands before a connection is served, and reads certificates again when they have
been renewed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from carpool.engine.drive.gate import Strangers
from carpool.engine.logger import logger
from carpool.engine.worker.address import bare_host, listen_at
from carpool.http.access import is_loopback

BACKLOG = 2048
_LARGEST_PORT = 65535
_UNIX = "unix:"


class Listener(Protocol):
    """Where a server listens."""

    def bind(self) -> socket.socket:
        """Bind the address. Raises OSError if it is not free."""

    def release(self) -> None:
        """Leave nothing behind, once nothing listens any more."""

    @property
    def address(self) -> str:
        """The address for people, such as `127.0.0.1:8000`; a free port is known once it is
        bound."""

    @property
    def is_private(self) -> bool:
        """Whether only programs of this machine reach it."""


class PortListener:
    """A TCP port.

    Args:
        host: The address to bind, with or without brackets; `::` is for IPv4 as well.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = bare_host(host)
        self.port = port

    def bind(self) -> socket.socket:
        sock = listen_at(self.host, self.port, BACKLOG)
        self.port = sock.getsockname()[1]
        return sock

    def release(self) -> None:
        """Leave nothing behind."""

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_private(self) -> bool:
        """Whether the host is a loopback address."""
        return is_loopback(self.host)


class UnixListener:
    """A Unix socket in the file system.

    Args:
        path: Where it is made. One that a server has left behind is replaced.
        mode: Who may connect, as the permissions of a file: 0o600 is this user only.
    """

    def __init__(self, path: Path, mode: int = 0o600) -> None:
        self.path = path
        self.mode = mode

    def bind(self) -> socket.socket:
        """Make the socket. Raises OSError if there is another file, or a server listens there."""
        self._remove_abandoned()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        umask = os.umask(0o777 & ~self.mode)  # there is no moment in which others could connect
        try:
            sock.bind(os.fspath(self.path))
            sock.listen(BACKLOG)
        except OSError:
            sock.close()
            raise
        finally:
            os.umask(umask)
        return sock

    def release(self) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()

    @property
    def address(self) -> str:
        return f"{_UNIX}{self.path}"

    @property
    def is_private(self) -> bool:
        """It is: only programs of this machine reach it, and not all of them."""
        return True

    def _remove_abandoned(self) -> None:
        try:
            is_socket = stat.S_ISSOCK(self.path.stat().st_mode)
        except FileNotFoundError:
            return
        if not is_socket:
            raise OSError(errno.EADDRINUSE, f"{self.path} is a file: choose another path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            try:
                client.connect(os.fspath(self.path))
            except ConnectionRefusedError:
                self.path.unlink()
                return
        raise OSError(errno.EADDRINUSE, f"a server listens at {self.path}: stop it, or choose another path")


class InheritedListener:
    """A socket that listens already, which the parent process has handed over.

    Args:
        number: Its file descriptor; systemd's first one is 3.

    Raises:
        OSError: The descriptor is no socket that listens.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        with socket.socket(fileno=os.dup(number)) as sock:
            if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                raise OSError(errno.EINVAL, f"descriptor {number} is a socket that does not listen")
            self._name: object = sock.getsockname()

    def bind(self) -> socket.socket:
        """Take the socket."""
        return socket.socket(fileno=self.number)

    def release(self) -> None:
        """Leave nothing behind: the parent has made the socket."""

    @property
    def address(self) -> str:
        """The address to which the parent has bound it."""
        if isinstance(self._name, tuple):
            host, port = self._name[:2]
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return f"{_UNIX}{self._name}" if self._name else f"descriptor {self.number}"

    @property
    def is_private(self) -> bool:
        """Whether it is a Unix socket, or bound to a loopback address."""
        return not isinstance(self._name, tuple) or is_loopback(self._name[0])


def listener_at(text: str) -> Listener:
    """Return the listener that a setting describes: `HOST:PORT`, `PORT`, or the path of a socket.

    Raises:
        ValueError: It is none of these.
    """
    if text.startswith((_UNIX, "/", "./")):
        return UnixListener(Path(text.removeprefix(_UNIX)))
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > _LARGEST_PORT:
        raise ValueError(f"{text!r} is no address: write HOST:PORT, such as 127.0.0.1:9000, or unix:PATH")
    return PortListener(host or "127.0.0.1", int(port))


_PROTOCOLS = ["http/1.1"]
_HANDSHAKE_S = 10.0
_SURE_S = 1.0  # what a handshake may take however many others come
_IN_A_TURN = 256  # connections at most are accepted: each takes some 50 us, and the others wait meanwhile
_NO_ROOM_S = 1.0  # until connections are taken again after the system had no descriptor for one


class Certificates:
    """The certificate of a server, and whose clients' certificates it trusts.

    Args:
        cert: The file with the certificate and those that lead to its root, in PEM.
        client_ca: The file with the roots that clients' certificates must lead to; None if clients
            need none.

    Attributes:
        context: For the next handshake: what was read last. With another one begin other sessions,
            so no client resumes one for which it could not begin any more.

    Raises:
        OSError: A file cannot be read, or has no certificate or key that fits.
    """

    def __init__(self, cert: Path, key: Path | None = None, client_ca: Path | None = None) -> None:
        self._cert = cert
        self._key = key
        self._client_ca = client_ca
        self._seen = self._states()
        self.context = self._read()

    def refresh(self) -> None:
        """Read the files again if one has changed; log bad ones."""
        try:
            states = self._states()
            if states == self._seen:
                return
            self._seen = states
            self.context = self._read()
        except OSError as error:
            logger.error("the certificate stays as it is: %s", error)
        else:
            logger.info("the certificate in %s is in force", self._cert)

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(_PROTOCOLS)
        try:
            context.load_cert_chain(self._cert, self._key)
            if self._client_ca is not None:
                context.load_verify_locations(self._client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except ssl.SSLError as error:
            files = " and ".join(str(path) for path in self._files)
            raise OSError(f"{files} have no certificate with its key: {error.reason or error}") from None
        return context

    @property
    def _files(self) -> list[Path]:
        return [path for path in (self._cert, self._key, self._client_ca) if path is not None]

    def _states(self) -> list[tuple[int, int, int]]:
        """Return a mark that changes when one of the files is written or replaced. Raises
        OSError."""
        states = [path.stat() for path in self._files]
        return [(state.st_mtime_ns, state.st_size, state.st_ino) for state in states]


class Acceptor:
    """Accepts connections; with TLS each shakes hands before it becomes one of the server's.

    It takes many in one turn of the loop. The server of uvloop takes one: where a turn lasts 10 ms,
    as under load, of a thousand clients that connect at once the last would wait for ten seconds.

    Those that have not shaken hands are strangers: there may be only so many at a time, and the
    newest come in.
    """

    def __init__(
        self,
        sock: socket.socket,
        make: Callable[[], asyncio.Protocol],
        certificates: Certificates | None,
        most_strangers: int,
    ) -> None:
        self._sock = sock
        self._make = make
        self._certificates = certificates
        self._loop = asyncio.get_running_loop()
        self._strangers: Strangers[asyncio.Task[None]] = Strangers(most_strangers, _SURE_S)
        self._connecting: set[asyncio.Task[None]] = set()
        self._resting: asyncio.TimerHandle | None = None
        self._loop.add_reader(sock, self._accept)

    def close(self) -> None:
        """Accept no more, and let go of those that have not shaken hands."""
        self._rest(None)
        self._sock.close()
        if self._certificates is not None:
            for task in self._connecting:
                task.cancel()

    async def connected(self) -> None:
        """Wait until all that were accepted are connections, or have failed."""
        await asyncio.gather(*self._connecting, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(_IN_A_TURN):
            now = self._loop.time()
            if self._certificates is not None and (wait_s := self._strangers.wait_s(now)):
                self._rest(wait_s)
                return
            try:
                sock, address = self._sock.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                logger.error("no connection is taken for %g s: %s", _NO_ROOM_S, error)
                self._rest(_NO_ROOM_S)
                return
            sock.setblocking(False)
            task = self._loop.create_task(self.connect(sock))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)
            if self._certificates is not None:
                task.add_done_callback(self._shaken)
                going = self._strangers.enter(task, str(address[0]) if address else "", now)
                if going is not None:
                    going.cancel()

    async def connect(self, sock: socket.socket, handshake_s: float = _HANDSHAKE_S) -> None:
        """Make a connection of a socket that was accepted; a handshake that fails is not logged."""
        shaking: dict[str, Any] = {}
        if self._certificates is not None:
            shaking = {"ssl": self._certificates.context, "ssl_handshake_timeout": handshake_s}
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(self._make, sock, **shaking)

    def _shaken(self, task: asyncio.Task[None]) -> None:
        self._strangers.leave(task)
        if self._resting is not None and self._sock.fileno() >= 0:
            self._resume()

    def _rest(self, seconds: float | None) -> None:
        """Accept nobody for so long, or until a stranger has left; None is for good."""
        self._loop.remove_reader(self._sock)
        if self._resting is not None:
            self._resting.cancel()
        self._resting = self._loop.call_later(seconds, self._resume) if seconds is not None else None

    def _resume(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        self._loop.add_reader(self._sock, self._accept)
