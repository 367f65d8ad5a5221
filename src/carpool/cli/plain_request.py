"""Sends one request of a command to a server, by a URL or the path of a Unix socket."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.parse
from typing import Any, NamedTuple

_UNIX = "unix:"


class NoAnswer(Exception):
    """No server answers there; the text says why."""


class PlainAnswer(NamedTuple):
    """What a server has answered.

    Attributes:
        status: Of the response.
        body: Of the response.
    """

    status: int
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON. Raises ValueError if it is none."""
        return json.loads(self.body)


def send(
    url: str, method: str, path: str, *, key: str = "", order: dict[str, Any] | None = None, timeout_s: float
) -> PlainAnswer:
    """Send a request, and return its answer.

    Args:
        url: Where the server is, such as `http://127.0.0.1:8000` or `unix:PATH`.
        method: Of the request.
        path: Below the URL.
        key: An API key; empty if the server needs none.
        order: What is sent as JSON; None for nothing.
        timeout_s: For how long the server may be silent.

    Raises:
        NoAnswer: The URL makes no sense, or no server answers there.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = None if order is None else json.dumps(order)
    if body is not None:
        headers["Content-Type"] = "application/json"
    connection, root = _connection(url, timeout_s)
    try:
        connection.request(method, root + path, body, headers)
        answer = connection.getresponse()
        return PlainAnswer(answer.status, answer.read())
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise NoAnswer(str(error) or type(error).__name__) from None
    finally:
        connection.close()


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a server that listens on a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket. Raises OSError."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _connection(url: str, timeout_s: float) -> tuple[http.client.HTTPConnection, str]:
    """Return a connection to a server, and what stands before the paths there. Raises NoAnswer."""
    if url.startswith(_UNIX):
        return _UnixConnection(url.removeprefix(_UNIX), timeout_s), ""
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        return kind(parts.hostname or "", parts.port, timeout=timeout_s), parts.path.rstrip("/")
    except ValueError as error:
        raise NoAnswer(f"that is no address of a server: {error}") from None
