"""Answers in parts over HTTP, read with nothing of carpool's."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from carpool import Service, Stage
from carpool.http.app import App
from tests.support.http.both_fronts import both_fronts
from tests.support.parts import Counting, Once, Resuming, up_to
from tests.support.waiting import PATIENCE_S

DOORS = ["our own", "uvicorn"]


class Reply:
    """A response as it comes, chunk by chunk, read with nothing of carpool's."""

    def __init__(self, sock: socket.socket, received: bytes = b"") -> None:
        self._sock = sock
        self._bytes = received
        head = self._until(b"\r\n\r\n").decode().split("\r\n")
        self.status = int(head[0].split()[1])
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        self.is_whole = False

    @property
    def rest(self) -> bytes:
        """What has come behind the body, once that has been read."""
        return self._bytes

    def pieces(self) -> Iterator[bytes]:
        """The body, in the pieces in which it comes; `is_whole` says whether it ended in good order."""
        if self.headers.get("transfer-encoding") == "chunked":
            while n := int(self._until(b"\r\n"), 16):
                yield self._exactly(n)
                assert self._exactly(2) == b"\r\n"
            assert self._exactly(2) == b"\r\n"
        elif "content-length" in self.headers:
            yield self._exactly(int(self.headers["content-length"]))
        else:
            while self._bytes or (self._receive()):
                piece, self._bytes = self._bytes, b""
                yield piece
        self.is_whole = True

    def body(self) -> bytes:
        return b"".join(self.pieces())

    def lines(self) -> Iterator[str]:
        """The lines of the body, as they come."""
        kept = b""
        for piece in self.pieces():
            *whole, kept = (kept + piece).split(b"\n")
            yield from [line.decode() for line in whole]
        assert not kept, "the last line does not end"

    def events(self) -> Iterator[tuple[str, Any]]:
        """Server-sent events as the HTML standard has them: type and data. A comment has no type."""
        kind, data = "message", []
        for line in self.lines():
            field, colon, value = line.partition(":")
            value = value.removeprefix(" ")
            if line == "":
                if data:
                    yield kind, json.loads("\n".join(data))
                kind, data = "message", []
            elif not field and colon:
                yield "", value
            elif field == "event":
                kind = value
            elif field == "data":
                data.append(value)
        assert not data, "the last event does not end"

    def _until(self, mark: bytes) -> bytes:
        while mark not in self._bytes:
            assert self._receive(), "the connection has ended"
        found, _, self._bytes = self._bytes.partition(mark)
        return found

    def _exactly(self, n: int) -> bytes:
        while len(self._bytes) < n:
            assert self._receive(), "the connection has ended"
        found, self._bytes = self._bytes[:n], self._bytes[n:]
        return found

    def _receive(self) -> bool:
        data = self._sock.recv(65536)
        self._bytes += data
        return bool(data)

    def follows_on(self) -> Reply:
        """The next response on the connection, of which some bytes may be here already."""
        other = Reply.__new__(Reply)
        other._sock, other._bytes = self._sock, self._bytes
        head = other._until(b"\r\n\r\n").decode().split("\r\n")
        other.status = int(head[0].split()[1])
        other.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        other.is_whole = False
        return other


def request(item: Any, accept: str = "text/event-stream", version: str = "1.1", **headers: str) -> bytes:
    body = json.dumps(item).encode()
    more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"POST /predict HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\nAccept: {accept}\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@contextmanager
def asked(port: int, data: bytes) -> Iterator[Reply]:
    """The response to a request, or to the first of several."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
        sock.sendall(data)
        yield Reply(sock)


def message(n: int) -> list[tuple[str, Any]]:
    """The events of a whole answer that counts."""
    return [*[("message", i) for i in up_to(n)], ("end", {"parts": n})]


@contextmanager
def counting(model: Any = Resuming, **settings: Any) -> Iterator[tuple[dict[str, int], list[Any]]]:
    """A service that counts, in threads, behind both doors; their ports, and the model's log."""
    log: list[Any] = []
    kwargs = {"kwargs": {"step_s": settings.pop("step_s", 0.0), "log": log}} if issubclass(model, Counting) else {}
    stage = {"run_in": "thread", "max_batch_size": settings.pop("max_batch_size", 4), **kwargs}
    if model is Once:
        del stage["max_batch_size"]
    with both_fronts(App(Service(Stage(model, **stage), **settings))) as (own, other):
        yield dict(zip(DOORS, (own.port, other.port), strict=True)), log
