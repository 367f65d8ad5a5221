"""TLS of our own server: certificates that are read again when they have been renewed."""

from __future__ import annotations

import ssl
from pathlib import Path

from carpool.logger import logger

_PROTOCOLS = ["http/1.1"]


class Certificates:
    """The certificate of a server, and whose clients' certificates it trusts.

    Args:
        cert: The file with the certificate and those that lead to its root, in PEM.
        key: The file with its private key; None if that is in `cert`.
        client_ca: The file with the roots that clients' certificates must lead to; None if clients
            need none.

    Attributes:
        context: For the server's sockets. Each handshake takes what was read last.

    Raises:
        OSError: A file cannot be read, or has no certificate or key that fits.
    """

    def __init__(self, cert: Path, key: Path | None = None, client_ca: Path | None = None) -> None:
        self._cert = cert
        self._key = key
        self._client_ca = client_ca
        self._seen = self._states()
        self._current = self._read()
        self.context = self._read()
        self.context.sni_callback = self._choose

    def refresh(self) -> None:
        """Read the files again if one has changed; log those that are no good."""
        try:
            states = self._states()
            if states == self._seen:
                return
            self._seen = states
            self._current = self._read()
        except OSError as error:
            logger.error("the certificate stays as it is: %s", error)
        else:
            logger.info("the certificate in %s is in force", self._cert)

    def _choose(self, handshake: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Have a handshake use what was read last."""
        handshake.context = self._current

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
