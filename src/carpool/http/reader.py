"""Reads requests off one connection's bytes. Sans-IO; httptools (llhttp) parses and sets no limits, this file counts.

A body of known, large length is received straight into memory of its own and never passes the parser. A request that
is refused before its body was read ends the reading: what follows it on the connection cannot be told from the body.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import httptools

from carpool.errors import CarpoolError
from carpool.http.codec import Refusal, too_large
from carpool.http.exchange import WANTED_HEADERS, HttpResponse
from carpool.http.listener import HttpHead
from carpool.http_request import Field
from carpool.logger import logger

if TYPE_CHECKING:
    from carpool.http.listener import Listener


LARGE_BODY: Final = 64 * 1024
LARGEST_READ: Final = 256 * 1024
"""Most bytes that come in one piece."""
MOST_AT_ONCE: Final = 16
"""Requests of one connection that are read before others get their turn: an answer may take milliseconds."""

_FRAMING_HEADERS = frozenset({b"host", b"expect", b"transfer-encoding"})
_KEPT_HEADERS = WANTED_HEADERS | _FRAMING_HEADERS
_FORBIDDEN_TRAILERS = frozenset({b"content-length", b"host", b"transfer-encoding"})
_NEVER_KNOWN = frozenset({b"expect", b"transfer-encoding", b"x-request-id"})
_LONGEST_KNOWN_HEAD = 2048
_FIELD_OVERHEAD = 4  # ": " and CRLF
_SCHEMES = (b"http", b"https")
_BLANK_LINE = b"\r\n\r\n"


class Taker(Protocol):
    """Whom a reader tells what it has read."""

    deaf: bool

    @property
    def room(self) -> int:
        """How many more requests it can take for now."""

    def take(self, head: HttpHead, body: bytes | bytearray, refusal: HttpResponse | None) -> None:
        """A whole request, and what the app has said to its head."""

    def take_large(self, rest: memoryview) -> None:
        """What comes next belongs into `rest`; `RequestReader.received_large` is told of all of it."""

    def refuse(self, response: HttpResponse) -> None:
        """The present request is not read any further."""

    def encourage(self) -> None:
        """The client waits to be told that its body is welcome."""


class _Stop(Exception):
    """Raised inside the parser: the present request is not read any further."""

    def __init__(self, response: HttpResponse) -> None:
        super().__init__()
        self.response = response


class RequestReader:
    """The requests of one connection.

    Args:
        listener: its app, limits and counts.
        taker: told of every request.

    Attributes:
        fresh: whether the next byte is the first of a request, so that a known head may be looked up.
        in_headers: whether a request's headers are being received; head: the request whose body is.
        requests: how many were begun.
        held: bytes of the present request's body so far.
    """

    def __init__(self, listener: Listener, taker: Taker) -> None:
        self.fresh = True
        self.in_headers = False
        self.head: HttpHead | None = None
        self.requests = 0
        self.held = 0
        self._app = listener.app
        self._listener = listener
        self._limits = listener.limits
        self._taker = taker
        self._parser: Any = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._all: list[Field] = []  # headers, if a model of the app asks for all of them
        self._fields = 0
        self._header_bytes = 0
        self._unparsed_bytes = 0  # received since the parser last completed something
        self._raw_head = b""  # its bytes, if they are worth remembering
        self._refusal: HttpResponse | None = None  # what the app said to its head
        self._parts: list[bytes] = []
        self._chunks = 0
        self._own: memoryview | None = None  # a large body's own memory

    @property
    def idle(self) -> bool:
        """Whether no request is half received."""
        return self.head is None and not self.in_headers

    def feed(self, data: bytes, raw_head: bytes = b"") -> bytes:
        """More bytes, that may begin with a whole head, `raw_head`. Returns those that have to wait for their turn."""
        self.fresh = False
        self._raw_head = raw_head
        taker, most = self._taker, self.requests + MOST_AT_ONCE
        at = 0
        while at < len(data) and not taker.deaf:
            room = min(taker.room, most - self.requests)
            if self.fresh and room <= 0:
                break
            if self._own is not None:
                upto = at + len(self._own) - self.held
                self._fill(data[at:upto])
            else:
                upto = _end_of_heads(data, at, max(1, room))
                self._parse(data[at:upto])
            at = upto
        self._raw_head = b""
        if self._own is not None:
            taker.take_large(self._own[self.held :])
        return b"" if taker.deaf else data[at:]

    def received_large(self, nbytes: int) -> None:
        """So much more is in the memory that `Taker.take_large` was given."""
        assert self._own is not None
        try:
            self._listener.bodies.add(self, nbytes)
        except CarpoolError as error:
            self._taker.refuse(self._app.refuse(self.head, error))
            return
        if self.held == len(self._own):
            self._complete_large()

    def end(self) -> None:
        """The present body comes so slowly that its place is needed for others."""
        self._taker.refuse(self._app.refuse(self.head, Refusal(408, "request_timeout")))

    def forget(self) -> None:
        """Let go of a request that is half received."""
        self._take_body()
        self.head = None
        self.in_headers = False

    # -- the parser's calls

    def on_message_begin(self) -> None:
        self.requests += 1
        self.fresh = False
        self._target = b""
        self._headers = {}
        self._all = []
        self._fields = self._header_bytes = self._chunks = 0
        self._parts = []
        self.in_headers = True

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > self._limits.target_bytes:
            raise Refusal(414, "uri_too_long")

    def on_header(self, name: bytes, value: bytes) -> None:
        limits = self._limits
        self._fields += 1
        self._header_bytes += len(name) + len(value) + _FIELD_OVERHEAD
        if self._fields > limits.header_fields or self._header_bytes > limits.header_bytes:
            raise Refusal(431, "headers_too_large")
        name = name.lower()
        if not self.in_headers:  # a trailer
            if name in _FORBIDDEN_TRAILERS:
                raise Refusal(400, "bad_http")
            return
        if name in _KEPT_HEADERS:
            if name in _FRAMING_HEADERS and name in self._headers:
                raise Refusal(400, "bad_http")
            self._headers[name] = value.strip(b" \t")
        if self._app.wants_heads:
            self._all.append((name, value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self.in_headers = False
        raw, self._raw_head = self._raw_head, b""
        parser, headers = self._parser, self._headers
        version = parser.get_http_version()
        self._check_framing(version)
        query = self._target.partition(b"?")[2]
        self.head = head = HttpHead(parser.get_method(), self._path(), headers, version == "1.0", query, self._all)
        head.keep_alive = parser.should_keep_alive()
        head.is_plain = head.is_plain and head.keep_alive
        self._refusal = self._app.admit(head)
        has_body = head.length > 0 or b"transfer-encoding" in headers
        if self._refusal is None:
            if has_body:
                self._expect_body(head)
            if raw:
                self._remember(raw, head)
        elif has_body:
            raise _Stop(self._refusal)

    def on_body(self, body: bytes) -> None:
        if self._own is not None:
            self._own[self.held : self.held + len(body)] = body
        else:
            self._unparsed_bytes = 0
            self._parts.append(body)
            if self.held + len(body) > self._app.max_body_bytes:
                raise too_large(self._app.max_body_bytes)
        self._listener.bodies.add(self, len(body))

    def on_chunk_header(self) -> None:
        self._unparsed_bytes = 0
        self._chunks += 1
        if self._chunks > self._limits.chunks:
            raise Refusal(413, "too_large")

    def on_message_complete(self) -> None:
        head = self.head
        assert head is not None
        if self._own is not None and self.held < len(self._own):
            return  # the parser sees no body in an offer to upgrade
        body = self._take_body()
        self.head = None
        self._unparsed_bytes = 0
        self.fresh = True
        self._taker.take(head, body, self._refusal)

    # -- inside

    def _fill(self, data: bytes) -> None:
        """More of a body that is received into memory of its own."""
        assert self._own is not None
        try:
            self.on_body(data)
        except CarpoolError as error:
            self._taker.refuse(self._app.refuse(self.head, error))
            return
        if self.held == len(self._own):
            self._complete_large()

    def _complete_large(self) -> None:
        self._parser = httptools.HttpRequestParser(self)  # the old one still waits for the body
        self.on_message_complete()

    def _parse(self, data: bytes) -> None:
        """Have the parser read some bytes; whatever it says to them, nothing is raised."""
        self._unparsed_bytes += len(data)
        while data and not self._taker.deaf:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._decline_upgrade(data[upgrade.args[0] :])
                continue
            except httptools.HttpParserCallbackError as error:
                self._taker.refuse(self._response_to(error.__context__))
            except httptools.HttpParserError:
                if not self._taker.deaf:
                    self._taker.refuse(self._app.refuse(self.head, Refusal(400, "bad_http")))
            else:
                if self._unparsed_bytes > self._limits.header_bytes + LARGEST_READ and self._own is None:
                    # swallowed without a word: an endless header line or blank lines
                    self._taker.refuse(self._app.refuse(self.head, Refusal(431, "headers_too_large")))
            break

    def _decline_upgrade(self, data: bytes) -> bytes:
        """An offer to change protocols is ignored. The parser stopped behind its head; returns what it goes on with."""
        self._parser = httptools.HttpRequestParser(self)
        if self._own is None:
            return data
        n = len(self._own) - self.held
        self._fill(data[:n])
        return data[n:]

    def _remember(self, raw: bytes, head: HttpHead) -> None:
        """Keep the head that was just parsed, if its bytes are known and are all that it means."""
        headers = head.headers
        if (
            head.keep_alive
            and not head.old_version
            and head.length < LARGE_BODY
            and headers.keys().isdisjoint(_NEVER_KNOWN)
            and not self._parser.should_upgrade()
            and len(raw) <= _LONGEST_KNOWN_HEAD
            # the lines are those the parser has seen, and all end as they should
            and raw.count(b"\n") == raw.count(b"\r\n") == self._fields + 2
        ):
            self._listener.remember(raw, head)

    def _response_to(self, cause: BaseException | None) -> HttpResponse:
        """The answer to a request at which a call of the parser raised."""
        if isinstance(cause, _Stop):
            return cause.response
        if isinstance(cause, CarpoolError):
            return self._app.refuse(self.head, cause)
        logger.error("a request could not be handled", exc_info=cause)
        return self._app.refuse(self.head, CarpoolError("internal error"))

    def _check_framing(self, version: str) -> None:
        """What llhttp lets pass and we do not."""
        headers = self._headers
        if version not in ("1.1", "1.0"):
            raise Refusal(505, "version_not_supported")
        host = headers.get(b"host")
        if (host is None and version == "1.1") or (host is not None and not _is_host(host)):
            raise Refusal(400, "bad_http")
        coding = headers.get(b"transfer-encoding")
        if coding is not None:
            if version == "1.0":
                raise Refusal(400, "bad_http")
            if coding.lower() != b"chunked" or self._parser.should_upgrade():
                raise Refusal(501, "not_implemented")
        if version == "1.1" and headers.get(b"expect", b"100-continue").lower() != b"100-continue":
            raise Refusal(417, "expectation_failed")

    def _path(self) -> bytes:
        """The path of the address, which may come with a scheme and a host as for a proxy (RFC 9112, 3.2.2)."""
        path = self._target.partition(b"?")[0]
        if path.startswith(b"/"):
            return path
        scheme, _, rest = path.partition(b"://")
        host, slash, rest = rest.partition(b"/")
        if scheme.lower() not in _SCHEMES or not host or not _is_host(host):
            raise Refusal(400, "bad_http")
        return slash + rest or b"/"

    def _expect_body(self, head: HttpHead) -> None:
        """Make ready for the body of an admitted request."""
        if b"expect" in self._headers and not head.old_version:
            self._taker.encourage()
        if head.length >= LARGE_BODY or self._parser.should_upgrade():
            self._own = memoryview(self._listener.memory.buffer(head.length))

    def _take_body(self) -> bytes | bytearray:
        """The body that has been received, and its bytes off the account."""
        self._listener.bodies.remove(self)
        if self._own is not None:
            body = cast(bytearray, self._own.obj)
            self._own = None
            return body
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _end_of_heads(data: bytes, at: int, most: int) -> int:
    """How far to parse, from `at` on, so that no more heads are read than there is room for requests."""
    for _ in range(most):
        at = data.find(_BLANK_LINE, at) + len(_BLANK_LINE)
        if at < len(_BLANK_LINE):
            return len(data)
    return at


def _is_host(host: bytes) -> bool:
    return not any(c in host for c in b"/@ ,")
