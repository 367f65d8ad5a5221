"""What all connections of one server share: limits, heads seen before, the headers of the present second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from typing import TYPE_CHECKING, Protocol

from carpool.http.bodies import Bodies
from carpool.http.codec import content_length
from carpool.http.exchange import Head
from carpool.http_request import Field
from carpool.wire.memory import Memory

if TYPE_CHECKING:
    from carpool.http.app import App

_MOST_KNOWN_HEADS = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may take up.

    Attributes:
        connections: open at a time; one more is answered 503 and closed, without an answer from twice as many on.
        header_bytes: all header lines of a request; header_fields: how many; target_bytes: its address.
        chunks: parts of a chunked body.
        pipelined: requests of one connection in the app at a time.
        body_bytes_in_flight: bodies being received, over all connections; twice the largest body if that is more.
        write_buffer_bytes: answers that wait for a slow reader before its connection is no longer read.
        header_s, body_s: time for the headers and for the body to arrive.
        idle_s: time between requests; write_s: time for which a reader may take nothing of its answers.
    """

    connections: int = 1024
    header_bytes: int = 32 * 1024
    header_fields: int = 64
    target_bytes: int = 8 * 1024
    chunks: int = 65_536
    pipelined: int = 16
    body_bytes_in_flight: int = 256 * 2**20
    write_buffer_bytes: int = 256 * 1024
    header_s: float = 10.0
    body_s: float = 30.0
    idle_s: float = 75.0
    write_s: float = 30.0


class HttpHead(Head):
    """A head as this door sees it.

    Attributes:
        length: of the body, where the head says it.
        keep_alive: whether the connection goes on after the answer; old_version: whether it is HTTP/1.0.
        is_plain: whether a good answer needs nothing but the usual headers and its body.
        unread: whether the request was refused before all of it was read.
    """

    __slots__ = ("is_plain", "keep_alive", "length", "old_version", "unread")

    def __init__(
        self,
        method: bytes,
        path: bytes,
        headers: Mapping[bytes, bytes],
        old_version: bool = False,
        query: bytes = b"",
        fields: Sequence[Field] = (),
    ) -> None:
        super().__init__(method, path, headers, query, fields)
        self.length = content_length(headers)
        self.keep_alive = True
        self.old_version = old_version
        self.is_plain = method != b"HEAD" and not old_version
        self.unread = False


class Client(Protocol):
    """A connection as the listener sees it."""

    def hand_on(self) -> None:
        """Its turn has come, for which it has waited."""

    def drain(self) -> None:
        """Close as soon as nothing is owed."""

    def abort(self) -> None:
        """Close now."""


class Listener:
    """What all connections of one server share.

    Attributes:
        connections: the open ones.
        heads: recent heads by their exact bytes. Clients repeat theirs, and equal bytes mean the same, so most
            requests need no parsing at all.
        good: by content type, a good answer as far as its length, for the present second.
        memory: for large bodies; bodies: the account of those that are being received.
        draining: whether connections are to be closed after the answers that are owed.
        turn_over: whether a long page was written in this turn of the loop. That takes milliseconds, so there is one in
            a turn, however many clients ask for one, and who asks for any of the app's pages waits in line.
    """

    def __init__(self, app: App, limits: Limits) -> None:
        self.app = app
        self.limits = limits
        self._loop = asyncio.get_running_loop()
        self.connections: set[Client] = set()
        self.heads: dict[bytes, HttpHead] = {}
        self.memory = Memory()
        largest = max(limits.body_bytes_in_flight, 2 * app.max_body_bytes)
        self.bodies = Bodies(largest, largest // limits.connections, self._loop.time)
        self.draining = self.turn_over = False
        self._in_line: dict[Client, None] = {}
        self._emptied: asyncio.Future[None] | None = None
        self.good: dict[bytes, bytes] = {}
        self._common = b""

    def remember(self, raw: bytes, head: HttpHead) -> None:
        """Keep a parsed head, by its bytes without the blank line, for the next request that has the same."""
        if len(self.heads) >= _MOST_KNOWN_HEADS:
            self.heads.clear()
        self.heads[raw.removesuffix(b"\r\n\r\n")] = head

    def has_turn(self, connection: Client) -> bool:
        """Whether it may ask for a page in this turn; if not, it is told when it may."""
        if self.turn_over:
            self._in_line[connection] = None
        return not self.turn_over

    def end_turn(self) -> None:
        """A long page has been written."""
        self.turn_over = True
        self._loop.call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self.turn_over = False
        while self._in_line and not self.turn_over:
            connection = next(iter(self._in_line))
            del self._in_line[connection]
            connection.hand_on()

    def drain(self) -> None:
        """Close idle connections now, the others after the answers that are owed."""
        self.draining = True
        for connection in list(self.connections):
            connection.drain()

    def abort(self) -> None:
        """Close every connection, whatever it is doing."""
        for connection in list(self.connections):
            connection.abort()

    async def empty(self) -> None:
        """Wait until the last connection is closed."""
        if self.connections:
            self._emptied = asyncio.get_running_loop().create_future()
            await self._emptied

    def remove(self, connection: Client) -> None:
        """A connection is closed."""
        self.connections.discard(connection)
        if self._emptied is not None and not self._emptied.done() and not self.connections:
            self._emptied.set_result(None)

    def common_headers(self) -> bytes:
        """Headers of every answer. They hold for the present second, since one of them is the date."""
        if not self._common:
            now = time.time()
            date = formatdate(now, usegmt=True).encode()
            self._common = b"date: %b\r\nx-content-type-options: nosniff\r\n" % date
            self._loop.call_later(1.0 - now % 1.0, self._forget_common)
        return self._common

    def start_of_good(self, content_type: bytes) -> bytes:
        """A good answer as far as its length."""
        start = b"HTTP/1.1 200 OK\r\n%bcontent-type: %b\r\ncontent-length: " % (self.common_headers(), content_type)
        self.good[content_type] = start
        return start

    def _forget_common(self) -> None:
        self._common = b""
        self.good.clear()
