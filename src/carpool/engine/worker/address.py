"""Where workers that come by themselves connect, a path or a host and a port, and TLS for these
connections.

A `TlsSocket` behaves like a plain socket where frames are concerned: it can write several buffers
(`sendmsg`), it raises BlockingIOError where it would have to wait, and closing one side of it
leaves the other one readable.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

_LARGEST_PORT: Final = 65535
_BUFFER_BYTES: Final = 512 * 1024
_TCP_BUFFER_BYTES: Final = 4 * 2**20  # 6 MB there and back take a quarter less processor time than with 512 KiB
_PROBE_EVERY_S: Final = 1

# Of Linux, as Python's socket module does not have them: the option that says which of a socket's
# two buffers keep the size that they were given, and its bits.
_SO_BUF_LOCK: Final = 72
_LOCKS: Final = {socket.SO_SNDBUF: 1, socket.SO_RCVBUF: 2}


class JoinAddress(NamedTuple):
    """An address of a service.

    Attributes:
        path: Of a Unix socket; empty for an address on a network.
        host: The name or number of the machine.
        port: The port; 0 lets a service take a free one.
    """

    path: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.path:
            return self.path
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def parse_address(text: str) -> JoinAddress:
    """Return the address that a user has written.

    Raises:
        ValueError: It is none; the text says how to write one.
    """
    if "/" in text:
        return JoinAddress(path=text)
    host, colon, port = text.rpartition(":")
    host = bare_host(host)
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > _LARGEST_PORT:
        raise ValueError(
            f"{text!r} is not an address: write HOST:PORT, such as 127.0.0.1:7000, or the path of a Unix socket with a"
            " slash in it, such as /run/carpool.sock or ./carpool.sock"
        )
    return JoinAddress(host=host, port=int(port))


def listen_at(host: str, port: int, backlog: int) -> socket.socket:
    """Return a socket that listens on a network; at `::` for IPv4 as well as IPv6.

    Of a name the IPv4 address is taken if it has several.

    Raises:
        OSError: It is in use, or no address of this machine.
    """
    found = socket.getaddrinfo(bare_host(host) or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    is_for_both = address[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address, family=family, backlog=backlog, dualstack_ipv6=is_for_both)


def bare_host(host: str) -> str:
    """Return a host without the brackets that an IPv6 address may have."""
    return host.removeprefix("[").removesuffix("]")


def tune(sock: socket.socket, silence_s: float) -> None:
    """Set up a connection for frames.

    The kernel then ends it with ETIMEDOUT when the other machine has acknowledged nothing for about
    `silence_s`. It is kernels that acknowledge: a process that is busy, or stopped, is not silent.
    But what the process does not read must fit into its buffer, since a window that stays closed
    counts as silence, too (`JoinedWorker.send_ahead`).

    Args:
        silence_s: From two seconds on; whole seconds count.
    """
    is_local = sock.family == socket.AF_UNIX
    # A larger one than the system allows is cut to what it does.
    for option in _LOCKS:
        sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES if is_local else _TCP_BUFFER_BYTES)
    if is_local:
        return
    _let_grow(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = max(1, int(silence_s / _PROBE_EVERY_S) - 1)
    settings = {
        "TCP_KEEPIDLE" if sys.platform == "linux" else "TCP_KEEPALIVE": _PROBE_EVERY_S,
        "TCP_KEEPINTVL": _PROBE_EVERY_S,
        "TCP_KEEPCNT": probes,
        "TCP_USER_TIMEOUT": int(silence_s * 1000),  # the same while something is on its way
    }
    for name, value in settings.items():
        with contextlib.suppress(AttributeError, OSError):  # not on this system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _let_grow(sock: socket.socket) -> None:
    """Have the kernel enlarge the buffers that it has cut, as it does with those nobody has set.

    Where nobody has changed that it goes further than what may be asked for: 416 KiB then become 4
    MiB and more while a large frame is on its way. A size that was set is fixed otherwise.
    """
    if sys.platform != "linux":
        return
    locks = 0
    for option, lock in _LOCKS.items():
        if sock.getsockopt(socket.SOL_SOCKET, option) >= _TCP_BUFFER_BYTES:
            locks |= lock
    with contextlib.suppress(OSError):  # a kernel before 5.14
        sock.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, locks)


_RECORD_BYTES: Final = 16 * 1024  # more is not written at once: a write that waits must be repeated as it was


@dataclass(frozen=True, slots=True)
class Tls:
    """The files that one side of a connection needs.

    Attributes:
        certificate: Its own certificate, with those that lead to the authority.
        authority: Certificates of those whom it trusts to vouch for the other side. A service that
            has one demands a certificate of each worker.
        checks_name: Whether a worker checks that the service's certificate is for the name that it
            connects to.
    """

    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    authority: str | os.PathLike[str] | None = None
    checks_name: bool = True

    def for_service(self) -> ssl.SSLContext:
        """Return the context of a service. Raises OSError (ssl.SSLError) for a bad file."""
        context = _context(ssl.PROTOCOL_TLS_SERVER)
        assert self.certificate is not None
        context.load_cert_chain(self.certificate, self.key)
        context.num_tickets = 0  # no session is ever resumed
        if self.authority is not None:
            context.load_verify_locations(self.authority)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def for_worker(self) -> ssl.SSLContext:
        """Return the context of a worker. Raises OSError (ssl.SSLError) for a bad file."""
        context = _context(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = self.checks_name
        if self.authority is None:
            context.load_default_certs()
        else:
            context.load_verify_locations(self.authority)
        if self.certificate is not None:
            context.load_cert_chain(self.certificate, self.key)
        return context


def _context(side: Any) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.sslsocket_class = TlsSocket
    return context


class TlsSocket(ssl.SSLSocket):
    """A TLS connection on which frames can be sent and received like on a plain one."""

    def send(self, data: Any, flags: int = 0) -> int:
        """Write at most one record, and return how much that was. Raises BlockingIOError."""
        try:
            return super().send(memoryview(data)[:_RECORD_BYTES], flags)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            raise BlockingIOError from None

    def sendmsg(self, buffers: Sequence[Any], *more: Any) -> int:  # type: ignore[override]
        return self.send(buffers[0])

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Read what has come. Raises BlockingIOError if that is nothing, and it must not wait."""
        timeout_s = self.gettimeout()
        must_not_wait = bool(flags & socket.MSG_DONTWAIT) and timeout_s != 0.0
        if must_not_wait:
            self.setblocking(False)
        try:
            return super().recv_into(buffer, nbytes or len(buffer))
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        finally:
            if must_not_wait:
                self.settimeout(timeout_s)

    def shutdown(self, how: int) -> None:
        """Close one side; the other one goes on, which it would not by `SSLSocket.shutdown`."""
        socket.socket.shutdown(self, how)
