"""State shared by all connections of one server: limits, known heads, headers of this second.

Known heads: clients repeat their headers byte for byte, and equal bytes after a message boundary
mean the same. So a head is parsed and judged once, and then looked up. Only heads whose every line
the parser has seen are kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from typing import TYPE_CHECKING, Final, Protocol

from carpool.engine.drive.failures import RefusalLog
from carpool.engine.http_request import Field
from carpool.engine.observe.refusals import Refusals
from carpool.engine.wire.payload import Memory
from carpool.http.codec import content_length, too_many_connections
from carpool.http.exchange import REQUEST_ID, Head
from carpool.http.shares import Bodies, Body, ConnectionShares

if TYPE_CHECKING:
    from carpool.http.app import AdminApp, App
    from carpool.http.exchange import Exchange, HttpResponse, ServedModel

_MOST_KNOWN_HEADS = 1024
FRAMING_HEADERS: Final = frozenset({b"host", b"expect", b"transfer-encoding"})
"""The headers that decide how a request is read; none of them may come twice."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one client may take up, and how long it may take.

    Attributes:
        connections: How many may be open at a time. One more is answered 503 and closed, unless it
            asks for `/livez`; from twice as many on the oldest of these are closed without an
            answer. Of several services none can have all (`shares.py`).
        body_bytes_in_flight: Size of all bodies that are being received, over all connections;
            twice the largest body if that is more.
        write_buffer_bytes: Size of the answers that may wait for a slow client before its
            connection is no longer read.
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
    """A head with the facts that our own HTTP/1.1 front needs.

    Attributes:
        length: Of the body in bytes, if the head says it; 0 otherwise.
        extra_ok_headers: Lines, made in advance, that a model's whole 200 has beside the usual
            headers; None if it is to take the long way, and not `AnswerWriter.answer_now`.
        brings_id: Whether the client has given its request an id that is fit.
        is_cut_short: Whether the request was refused before all of it was read.
    """

    __slots__ = ("brings_id", "extra_ok_headers", "is_cut_short", "is_http_1_0", "keep_alive", "length")

    def __init__(
        self,
        method: bytes,
        path: bytes,
        headers: Mapping[bytes, bytes],
        is_http_1_0: bool = False,
        query: bytes = b"",
        fields: Sequence[Field] = (),
    ) -> None:
        super().__init__(method, path, headers, query, fields)
        self.length = content_length(headers)
        self.keep_alive = True
        self.is_http_1_0 = is_http_1_0
        self.extra_ok_headers: bytes | None = None
        given = self.request_id if REQUEST_ID in headers else b""
        self.brings_id = given != b""
        if method != b"HEAD" and not is_http_1_0:
            self.extra_ok_headers = b"%b: %b\r\n" % (REQUEST_ID, given) if given else b""
        self.is_cut_short = False

    def add_to_ok_answers(self, headers: Sequence[Field]) -> None:
        """Have good answers to this head carry further headers."""
        if self.extra_ok_headers is not None:
            self.extra_ok_headers += b"".join([b"%b: %b\r\n" % header for header in headers])


class ClientConnection(Protocol):
    """A connection as its parts and its server see it; there is one kind, `Connection`, which
    explains these methods.

    Attributes:
        ignoring_input: Whether everything that still comes is thrown away.
        is_reading_paused: Whether the server, and not the client, holds the input up.
        counted_for: The model for which it counts as a connection; None if it may be another one,
            and that is to be found out again.
    """

    ignoring_input: bool
    is_reading_paused: bool
    counted_for: ServedModel | None

    @property
    def requests(self) -> int: ...

    @property
    def room(self) -> int: ...

    @property
    def is_quiet(self) -> bool: ...

    @property
    def unsent(self) -> int: ...

    # -- its reader calls these

    def has_room_at(self, model: ServedModel | None, owed: int = 0) -> bool: ...

    def request_received(self, head: HttpHead, body: bytes | bytearray, refusal: HttpResponse | None) -> None: ...

    def large_body_started(self, memory: memoryview) -> None: ...

    def refuse(self, response: HttpResponse) -> None: ...

    def bulk_started(self, head: HttpHead) -> None: ...

    def bulk_received(self, data: bytes) -> None: ...

    def bulk_ended(self) -> None: ...

    def send_continue(self) -> None: ...

    # -- its exchanges call these

    def flush(self) -> None: ...

    # -- its bulk requests call these

    def want_more(self) -> None: ...

    def hold(self, exchange: Body, nbytes: int) -> None: ...

    def break_off_as_slow(self, exchange: Exchange) -> None: ...

    def leave_body_unread(self) -> None: ...

    # -- its timers call these

    def received_too_slowly(self) -> None: ...

    def probe(self, is_first: bool) -> bool: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...

    # -- its server calls these

    def turn_has_come(self) -> None: ...

    def write_gathered(self) -> None: ...

    def drain(self) -> None: ...


class ServerState:
    """The state that all connections of one server share.

    Attributes:
        ending: Those of them that have had their last answer, and are open only so that it arrives.
        beyond: Those for which there is no room, and which have not been answered yet.
        kept_headers: The headers of a request that are not thrown away.
        heads: Recent heads by their exact bytes. Clients repeat their heads and equal bytes mean
            the same, so most requests need no parsing at all.
        ok_prefixes: By content type, a good answer up to the number in its id, for the present
            second.
        memory: Holds large bodies.
        livez: The addresses that are answered although there is no room.
        is_draining: Whether connections are to be closed after the answers that are owed.
        long_page_written: Whether a long page was written in this turn of the loop. That takes
            milliseconds, so there is one in a turn however many clients ask for one, and every
            request for a page of the app waits in line until the next turn.
    """

    def __init__(self, app: App | AdminApp, limits: Limits) -> None:
        self.app = app
        self.limits = limits
        self._loop = asyncio.get_running_loop()
        self.connections: set[ClientConnection] = set()
        self.ending: dict[ClientConnection, None] = {}
        self.beyond: dict[ClientConnection, None] = {}
        self._refusals = Refusals()
        self._refusal_log = RefusalLog(self._refusals, "the server", {}, self._loop.time, self._loop)
        self.livez = frozenset([b"/livez", app.root_path.encode() + b"/livez"])
        self.shares = ConnectionShares(limits.connections)
        self.kept_headers = {*FRAMING_HEADERS, *app.wanted_headers}
        self.heads: dict[bytes, HttpHead] = {}
        self.memory = Memory()
        largest = max(limits.body_bytes_in_flight, 2 * app.max_body_bytes)
        self.bodies = Bodies(largest, limits.connections, self._loop.time)
        self._divide()
        self.is_draining = self.long_page_written = False
        self._waiting_for_page: dict[ClientConnection, None] = {}
        self._gathering: list[ClientConnection] = []  # connections with parts to write at the end of this turn
        self._emptied: asyncio.Future[None] | None = None
        self.ok_prefixes: dict[bytes, bytes] = {}
        self.next_number = app.request_ids.next_number
        self._common_headers = b""

    def remember(self, raw: bytes, head: HttpHead) -> None:
        """Keep a parsed head for requests with the same bytes; `raw` ends with the blank line."""
        if len(self.heads) >= _MOST_KNOWN_HEADS:
            self.heads.clear()
        self.heads[raw.removesuffix(b"\r\n\r\n")] = head

    def routes_changed(self) -> None:
        """Judge all heads anew, keep the headers that new services read, and divide the limits
        anew."""
        self.heads.clear()
        self.kept_headers.update(self.app.wanted_headers)
        self._divide()
        for connection in self.connections:
            connection.counted_for = None  # there may be no room any more for its next request

    def _divide(self) -> None:
        self.shares.divide(self.app.shares)
        self.bodies.divide(self.app.shares)

    def forget_heads(self) -> None:
        """Forget all known heads: some that were let in may not be any more."""
        self.heads.clear()

    def may_ask_for_page(self, connection: ClientConnection) -> bool:
        """Report whether a connection may ask for a page now; if not, call it when it may."""
        if self.long_page_written:
            self._waiting_for_page[connection] = None
        return not self.long_page_written

    def note_long_page(self) -> None:
        """Note that a long page has been written: no other page is written in this turn."""
        self.long_page_written = True
        self._loop.call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self.long_page_written = False
        while self._waiting_for_page and not self.long_page_written:
            connection = next(iter(self._waiting_for_page))
            del self._waiting_for_page[connection]
            connection.turn_has_come()

    def write_soon(self, connection: ClientConnection) -> None:
        """Have a connection write its gathered parts, at the end of this turn of the loop."""
        if not self._gathering:
            self._loop.call_soon(self._write_gathered)
        self._gathering.append(connection)

    def _write_gathered(self) -> None:
        gathering, self._gathering = self._gathering, []
        for connection in gathering:
            connection.write_gathered()

    def announce_end(self) -> None:
        """Have each connection closed after its next answer, so that its client goes elsewhere."""
        self.is_draining = True

    def drain(self) -> None:
        """Close idle connections now, and the others after the answers that are owed."""
        self.announce_end()
        for connection in list(self.connections):
            connection.drain()

    def abort(self) -> None:
        """Close every connection, whatever it is doing."""
        for connection in list(self.connections):
            connection.abort()
        self._refusal_log.log_all()
        self._refusal_log.has_stopped = True

    async def empty(self) -> None:
        if self.connections:
            self._emptied = asyncio.get_running_loop().create_future()
            await self._emptied

    def add(self, connection: ClientConnection) -> bool:
        """Note a new connection, and report whether there is room for it.

        Those that are ending take no room, nor do those beyond the limit. If there are too many of
        both, the oldest one is cut off.
        """
        self.connections.add(connection)
        n_open, most = len(self.connections), self.limits.connections
        has_room = n_open - len(self.ending) - len(self.beyond) <= most
        if not has_room:
            self.beyond[connection] = None
        if n_open > 2 * most:
            oldest = next(iter(self.ending or self.beyond))
            if oldest in self.beyond:
                self.note_refused()
            self.remove(oldest)
            oldest.abort()
        return has_room

    def note_refused(self) -> None:
        """Count a connection that is refused since there is no room for it, and log it in time."""
        self.shares.refused += 1
        self._refusals.count(too_many_connections())
        if self._refusals.is_due:
            self._refusal_log.log_due()

    def note_ending(self, connection: ClientConnection) -> None:
        """Note that a connection has had its last answer."""
        self.beyond.pop(connection, None)
        self.ending[connection] = None
        self.shares.give_back(connection)

    def remove(self, connection: ClientConnection) -> None:
        self.connections.discard(connection)
        self.ending.pop(connection, None)
        self.beyond.pop(connection, None)
        self.shares.give_back(connection)
        if self._emptied is not None and not self._emptied.done() and not self.connections:
            self._emptied.set_result(None)

    def common_headers(self) -> bytes:
        """Return the headers of every answer, which hold for the present second."""
        if not self._common_headers:
            now = time.time()
            date = formatdate(now, usegmt=True).encode()
            self._common_headers = b"date: %b\r\nx-content-type-options: nosniff\r\n" % date
            self._loop.call_later(1.0 - now % 1.0, self._forget_second)
        return self._common_headers

    def ok_prefix(self, content_type: bytes) -> bytes:
        """Make the entry of `ok_prefixes` for a content type."""
        prefix = b"%b%b: %b" % (self.ok_start(content_type), REQUEST_ID, self.app.request_ids.start)
        self.ok_prefixes[content_type] = prefix
        return prefix

    def ok_start(self, content_type: bytes) -> bytes:
        """Return a good answer up to its content type."""
        return b"HTTP/1.1 200 OK\r\n%bcontent-type: %b\r\n" % (self.common_headers(), content_type)

    def _forget_second(self) -> None:
        self._common_headers = b""
        self.ok_prefixes.clear()
