"""Bulk requests by hand: lines that go out while answers come in."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.http.streamed import Reply
from tests.support.waiting import PATIENCE_S

HEAD = (
    "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n{more}\r\n"
)


class Bulk:
    """A bulk request by hand."""

    def __init__(self, port: int, path: str = "/predict", more: str = "") -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
        self.sock.sendall(HEAD.format(path=path, more=more).encode())

    def send(self, data: bytes) -> None:
        self.sock.sendall(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        self.sock.sendall(b"0\r\n\r\n")

    def reply(self) -> Reply:
        return Reply(self.sock)


@contextmanager
def bulk(port: int, *args: str) -> Iterator[Bulk]:
    asking = Bulk(port, *args)
    with asking.sock:
        yield asking


def lines(*items: Any) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in items)
