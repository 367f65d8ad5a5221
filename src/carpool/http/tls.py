"""TLS of our own server: certificates that are read again when they have been renewed, and how
connections shake hands.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from carpool.engine.drive.gate import Strangers
from carpool.engine.logger import logger

_PROTOCOLS = ["http/1.1"]
_HANDSHAKE_S = 10.0
_SURE_S = 1.0  # what a handshake may take however many others come
_NO_ROOM_S = 1.0  # until connections are taken again after the system had no descriptor for one


class Certificates:
    """The certificate of a server, and whose clients' certificates it trusts.

    Args:
        cert: The file with the certificate and those that lead to its root, in PEM.
        key: The file with its private key; None if that is in `cert`.
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
        """Read the files again if one has changed; log those that are no good."""
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
        """Make a context of the files. Raises OSError."""
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
        """Return what changes when one of the files is written or replaced. Raises OSError."""
        states = [path.stat() for path in self._files]
        return [(state.st_mtime_ns, state.st_size, state.st_ino) for state in states]


class TlsServer:
    """Accepts connections, and has each shake hands before it becomes one of the server's.

    Those that have not done so are strangers: there may be only so many at a time, and the newest
    come in.

    Args:
        sock: Listens, and does not block.
        certificates: Of the server.
        make: Makes the protocol of a connection.
        most: How many may be shaking hands at a time.
    """

    def __init__(
        self, sock: socket.socket, certificates: Certificates, make: Callable[[], asyncio.Protocol], most: int
    ) -> None:
        self._sock = sock
        self._certificates = certificates
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._strangers: Strangers[asyncio.Task[None]] = Strangers(most, _SURE_S)
        self._has_room = asyncio.Event()
        self._accepting = self._loop.create_task(self._accept())
        self._shaking: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Accept no more, and let go of those that have not shaken hands."""
        for task in (self._accepting, *self._shaking):
            task.cancel()

    async def _accept(self) -> None:
        with self._sock:
            while True:
                await self._accept_one()

    async def _accept_one(self) -> None:
        while wait_s := self._strangers.wait_s(self._loop.time()):
            self._has_room.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._has_room.wait()
        try:
            sock, address = await self._loop.sock_accept(self._sock)
        except ConnectionAbortedError:
            return
        except OSError as error:
            logger.error("no connection is taken for %g s: %s", _NO_ROOM_S, error)
            await asyncio.sleep(_NO_ROOM_S)
            return
        task = self._loop.create_task(self._shake_hands(sock))
        self._shaking.add(task)
        task.add_done_callback(self._shaken)
        going = self._strangers.enter(task, str(address[0]) if address else "", self._loop.time())
        if going is not None:
            going.cancel()

    async def _shake_hands(self, sock: socket.socket) -> None:
        """Make a connection of a socket; who cannot shake hands is not worth a word."""
        context = self._certificates.context
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(self._make, sock, ssl=context, ssl_handshake_timeout=_HANDSHAKE_S)

    def _shaken(self, task: asyncio.Task[None]) -> None:
        self._shaking.discard(task)
        self._strangers.leave(task)
        self._has_room.set()
