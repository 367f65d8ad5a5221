"""TLS for the connections of workers that join over a network.

A `TlsSocket` behaves like a plain socket where frames are concerned: it can write several buffers
(`sendmsg`), it raises BlockingIOError where it would have to wait, and closing one side of it
leaves the other one readable.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

_RECORD_BYTES: Final = 16 * 1024  # more is not written at once: a write that waits must be repeated as it was


@dataclass(frozen=True, slots=True)
class Tls:
    """The files that one side of a connection needs.

    Attributes:
        certificate: Its own certificate, with those that lead to the authority.
        key: The key of that.
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
        """Write some of the first of several buffers, and return how much that was."""
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
