"""Where a server listens: a host and port, a Unix socket, or a socket that was handed to it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path
from typing import Protocol

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
        """What people are told, such as `127.0.0.1:8000`; a free port is known once it is bound."""

    @property
    def is_private(self) -> bool:
        """Whether only programs of this machine reach it."""


class PortListener:
    """A TCP port.

    Args:
        host: The address to bind, with or without brackets; `::` is for IPv4 as well.
        port: The port to bind; 0 takes a free one.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host = bare_host(host)
        self.port = port

    def bind(self) -> socket.socket:
        """Take the port. Raises OSError if it is not free."""
        sock = listen_at(self.host, self.port, BACKLOG)
        self.port = sock.getsockname()[1]
        return sock

    def release(self) -> None:
        """Leave nothing behind."""

    @property
    def address(self) -> str:
        """Host and port."""
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
        """Remove the socket."""
        with contextlib.suppress(OSError):
            self.path.unlink()

    @property
    def address(self) -> str:
        """The path."""
        return f"{_UNIX}{self.path}"

    @property
    def is_private(self) -> bool:
        """It is: only programs of this machine reach it, and not all of them."""
        return True

    def _remove_abandoned(self) -> None:
        """Remove a socket at which no server listens. Raises OSError if one does."""
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
