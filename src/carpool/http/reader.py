"""Reads requests off one connection's bytes. Sans-IO: httptools parses, this file sets the limits.

A body of known, large length is received straight into memory of its own:

1. The reader has seen the head and calls `Connection.large_body_started` with the memory to be
   filled.
2. The connection receives into that memory and calls `RequestReader.large_body_received` each time.
3. When the memory is full, the reader calls `Connection.request_received`, as for any request.

A request that is refused before its body was read ends the reading, since what follows it on the
connection cannot be distinguished from its body.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import httptools

from carpool.engine.fast_paths import fast_path
from carpool.engine.http_request import Field
from carpool.engine.logger import logger
from carpool.errors import CarpoolError
from carpool.http.access import SINGLE
from carpool.http.codec import Refusal, too_large, too_many_connections
from carpool.http.exchange import HttpResponse, ServedModel
from carpool.http.server_state import FRAMING_HEADERS, HttpHead

if TYPE_CHECKING:
    from carpool.http.server_state import ClientConnection, ServerState

LARGE_BODY: Final = 64 * 1024
LARGEST_READ: Final = 256 * 1024
"""The most bytes that come in one piece."""
MOST_AT_ONCE: Final = 16
"""How many requests of one connection are read before other connections get their turn."""

_SINGLE_HEADERS = FRAMING_HEADERS | SINGLE
_FORBIDDEN_TRAILERS = frozenset({b"content-length", b"host", b"transfer-encoding"})
_NEVER_KNOWN = frozenset({b"expect", b"transfer-encoding", b"x-request-id", b"traceparent"})
_LONGEST_KNOWN_HEAD = 2048
_LONG_PIECE = 16 * 1024
_FIELD_OVERHEAD = 4  # ": " and CRLF
_SCHEMES = (b"http", b"https")
_BLANK_LINE = b"\r\n\r\n"


class _Stop(Exception):
    """Raised inside the parser's calls to stop reading at the present request.

    Args:
        response: The answer to it.
    """

    def __init__(self, response: HttpResponse) -> None:
        super().__init__()
        self.response = response


class _Ignored(Exception):
    """Raised inside the parser's calls to stop reading, as nothing more is wanted."""


class RequestReader:
    """Reads the requests of one connection.

    Attributes:
        at_request_start: Whether the next byte is the first of a request, so that a known head may
            be looked up.
    """

    def __init__(self, state: ServerState, receiver: ClientConnection) -> None:
        self.at_request_start = True
        self.in_headers = False
        self.head: HttpHead | None = None
        self.requests = 0
        self.held = 0
        self._app = state.app
        self._state = state
        self._limits = state.limits
        self._receiver = receiver
        self._kept_headers = state.kept_headers
        self._parser: Any = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: dict[bytes, bytes] = {}
        self._all_headers: list[Field] = []  # all headers, if a model of the app asks for them
        self._fields = 0
        self._header_bytes = 0
        self._unparsed_bytes = 0  # received since the parser last completed something
        self._raw_head = b""  # the bytes of the present head, if they are worth remembering
        self._refusal: HttpResponse | None = None  # the answer of the app to the present head
        self._parts: list[bytes] = []
        self._chunks = 0
        self._large_body: memoryview | None = None  # the memory of a large body
        self._is_bulk = False  # the present body is handed on as it comes
        self._skips_body = False  # the parser does, which takes it for another protocol
        self._is_resumed = False  # another parser gets a head that was read already

    @property
    def service(self) -> ServedModel | None:
        """The service that the present body is for; None where the head does not say."""
        return None if self.head is None else self.head.model

    @property
    def is_idle(self) -> bool:
        """Whether no request is half received."""
        return self.head is None and not self.in_headers

    def feed(self, data: bytes, raw_head: bytes = b"") -> bytes:
        """Read bytes, and return those that have to wait for their turn.

        Args:
            raw_head: The head with which `data` begins, blank line and all, if that is known.
        """
        self.at_request_start = False
        self._raw_head = raw_head
        receiver, most = self._receiver, self.requests + MOST_AT_ONCE
        at = 0
        while at < len(data) and not receiver.ignoring_input:
            room = min(receiver.room, most - self.requests)
            if self.at_request_start and room <= 0:
                break
            if self._large_body is not None:
                upto = at + len(self._large_body) - self.held
                self._fill(memoryview(data)[at:upto])
            else:
                # behind the first head of a long piece lies its body, in which no other is sought
                upto = _end_of_heads(data, at, max(1, room) if len(data) - at < _LONG_PIECE else 1)
                self._parse(data[at:upto])
            at = upto
        self._raw_head = b""
        if self._large_body is not None:
            receiver.large_body_started(self._large_body[self.held :])
        return b"" if receiver.ignoring_input else data[at:]

    def large_body_received(self, nbytes: int) -> None:
        """Note that more bytes are in the memory that `Connection.large_body_started` was given."""
        assert self._large_body is not None
        try:
            self._state.bodies.add(self, nbytes)
        except CarpoolError as error:
            self._receiver.refuse(self._app.refuse(self.head, error))
            return
        if self.held == len(self._large_body):
            self._large_body_completed()

    def refuse_as_slow(self) -> None:
        """Refuse the present request: its body comes so slowly that others need its memory."""
        self._receiver.refuse(self._app.refuse(self.head, Refusal(408, "request_timeout")))

    def forget(self) -> None:
        """Let go of a request that is half received."""
        self._take_body()
        self.head = None
        self.in_headers = self._is_bulk = self._skips_body = False

    # -- the parser's calls

    def on_message_begin(self) -> None:
        if self._receiver.ignoring_input:  # a request before it in the same piece has ended the reading
            raise _Ignored
        if self._is_resumed:
            return
        self.requests += 1
        self.at_request_start = False
        self._target = b""
        self._headers = {}
        self._all_headers = []
        self._fields = self._header_bytes = self._chunks = 0
        self._parts = []
        self.in_headers = True

    def on_url(self, url: bytes) -> None:
        if self._is_resumed:
            return
        self._target += url
        if len(self._target) > self._limits.target_bytes:
            raise Refusal(414, "uri_too_long")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_resumed:
            return
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
        if name in self._kept_headers:
            if name in _SINGLE_HEADERS and name in self._headers:
                raise Refusal(400, "bad_http")
            self._headers[name] = value.strip(b" \t")
        if self._app.wants_heads:
            self._all_headers.append((name, value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        if self._is_resumed:
            self._is_resumed = False
            return
        self.in_headers = False
        raw, self._raw_head = self._raw_head, b""
        parser, headers = self._parser, self._headers
        version = parser.get_http_version()
        self._check_framing(version)
        query = self._target.partition(b"?")[2]
        self.head = head = HttpHead(
            parser.get_method(), self._path(), headers, version == "1.0", query, self._all_headers
        )
        head.keep_alive = parser.should_keep_alive()
        if not head.keep_alive:
            head.extra_ok_headers = None
        self._refusal = self._app.admit(head)
        if self._refusal is None and head.model is not self._receiver.counted_for:
            self._check_room(head)
        ask = head.ask
        if ask is None or ask.framing is not None or self._app.observer is not None:
            head.extra_ok_headers = None  # its answers take the long way
        elif head.extra:
            head.add_to_ok_answers(head.extra)
        has_body = head.length > 0 or b"transfer-encoding" in headers
        if self._refusal is None:
            self._is_bulk = ask is not None and ask.is_bulk
            if has_body:
                self._expect_body(head)
            if self._is_bulk:
                self._receiver.bulk_started(head)
            elif raw:
                self._remember(raw, head)
        elif has_body:
            raise _Stop(self._refusal)

    def _check_room(self, head: HttpHead) -> None:
        if not self._receiver.has_room_at(head.model):
            head.keep_alive = False
            self._refusal = self._app.refuse(head, too_many_connections())

    def on_body(self, body: bytes) -> None:
        if self._is_bulk:
            self._unparsed_bytes = 0
            self._receiver.bulk_received(body)
            return
        if self._large_body is not None:
            self._large_body[self.held : self.held + len(body)] = body
        else:
            self._unparsed_bytes = 0
            self._parts.append(body)
            if self.held + len(body) > self._app.max_body_bytes:
                raise too_large(self._app.max_body_bytes)
        self._state.bodies.add(self, len(body))

    def on_chunk_header(self) -> None:
        self._unparsed_bytes = 0
        self._chunks += 1
        if self._chunks > self._limits.chunks and not self._is_bulk:
            raise Refusal(413, "too_large")

    def on_message_complete(self) -> None:
        head = self.head
        assert head is not None
        if self._skips_body:
            return
        body = self._take_body()
        self.head = None
        self._unparsed_bytes = 0
        self.at_request_start = True
        if self._is_bulk:
            self._is_bulk = False
            self._receiver.bulk_ended()
        else:
            self._receiver.request_received(head, body, self._refusal)

    # -- bodies and parsing

    def _fill(self, data: bytes | memoryview) -> None:
        assert self._large_body is not None
        self._large_body[self.held : self.held + len(data)] = data
        self.large_body_received(len(data))

    def _large_body_completed(self) -> None:
        self._parser = httptools.HttpRequestParser(self)  # the old one still waits for the body
        self.on_message_complete()

    def _parse(self, data: bytes) -> None:
        """Have the parser read some bytes; bytes that it rejects are refused, and nothing is
        raised."""
        self._unparsed_bytes += len(data)
        while data and not self._receiver.ignoring_input:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._decline_upgrade(data[upgrade.args[0] :])
                continue
            except httptools.HttpParserCallbackError as error:
                if not isinstance(error.__context__, _Ignored):
                    self._receiver.refuse(self._response_to(error.__context__))
            except httptools.HttpParserError:
                if not self._receiver.ignoring_input:
                    self._receiver.refuse(self._app.refuse(self.head, Refusal(400, "bad_http")))
            else:
                if self._unparsed_bytes > self._limits.header_bytes + LARGEST_READ and self._large_body is None:
                    # the parser takes endless header lines and blank lines without a word
                    self._receiver.refuse(self._app.refuse(self.head, Refusal(431, "headers_too_large")))
            break

    def _decline_upgrade(self, data: bytes) -> bytes:
        """Ignore an offer to change protocols, after which the parser stops; return the rest.

        The parser sees no body behind such an offer. So another one reads the body, of which the
        head says nothing but how the body is sent.
        """
        self._parser = httptools.HttpRequestParser(self)
        if not self._skips_body or self._receiver.ignoring_input:
            return data
        self._skips_body = False
        if self._large_body is not None:
            n = len(self._large_body) - self.held
            self._fill(data[:n])
            return data[n:]
        assert self.head is not None
        is_chunked = b"transfer-encoding" in self._headers
        framing = b"transfer-encoding: chunked" if is_chunked else b"content-length: %d" % self.head.length
        self._is_resumed = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n" % framing)
        return data

    @fast_path("known_heads", declined=False)
    def _remember(self, raw: bytes, head: HttpHead) -> bool:
        """Keep the head that was just parsed if its meaning depends on nothing but its bytes;
        report whether it does.

        Fast path of reading it again: see `Connection._look_up`.
        """
        headers = head.headers
        is_known = (
            head.keep_alive
            and not head.is_http_1_0
            and head.length < LARGE_BODY
            and headers.keys().isdisjoint(_NEVER_KNOWN)
            and not self._parser.should_upgrade()
            and len(raw) <= _LONGEST_KNOWN_HEAD
            # the parser has seen each of these lines, and all end as they should
            and raw.count(b"\n") == raw.count(b"\r\n") == self._fields + 2
        )
        if is_known:
            self._state.remember(raw, head)
        return is_known

    def _response_to(self, cause: BaseException | None) -> HttpResponse:
        if isinstance(cause, _Stop):
            return cause.response
        if isinstance(cause, CarpoolError):
            return self._app.refuse(self.head, cause)
        logger.error("a request could not be read", exc_info=cause)
        return self._app.refuse(self.head, CarpoolError("internal error"))

    def _check_framing(self, version: str) -> None:
        """Refuse heads that llhttp lets pass and we do not."""
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
            if coding.lower() != b"chunked":
                raise Refusal(501, "not_implemented")
        if version == "1.1" and headers.get(b"expect", b"100-continue").lower() != b"100-continue":
            raise Refusal(417, "expectation_failed")

    def _path(self) -> bytes:
        path = self._target.partition(b"?")[0]
        if path.startswith(b"/") or (self._target == b"*" and self._parser.get_method() == b"OPTIONS"):
            return path
        scheme, _, rest = path.partition(b"://")
        host, slash, rest = rest.partition(b"/")
        if scheme.lower() not in _SCHEMES or not host or not _is_host(host):
            raise Refusal(400, "bad_http")
        return slash + rest or b"/"

    def _expect_body(self, head: HttpHead) -> None:
        if b"expect" in self._headers and not head.is_http_1_0:
            self._receiver.send_continue()
        self._skips_body = self._parser.should_upgrade()
        if head.length >= LARGE_BODY and not self._is_bulk:
            self._large_body = memoryview(self._state.memory.buffer(head.length))

    def _take_body(self) -> bytes | bytearray:
        """Take the received part of the body, and its bytes off the account."""
        self._state.bodies.remove(self)
        if self._large_body is not None:
            body = cast(bytearray, self._large_body.obj)
            self._large_body = None
            return body
        parts, self._parts = self._parts, []
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _end_of_heads(data: bytes, at: int, most: int) -> int:
    """Return how far to parse from `at` on so that no more than `most` heads are read."""
    for _ in range(most):
        at = data.find(_BLANK_LINE, at) + len(_BLANK_LINE)
        if at < len(_BLANK_LINE):
            return len(data)
    return at


def _is_host(host: bytes) -> bool:
    return not any(c in host for c in b"/@ ,")
