"""Translates between HTTP and carpool: content types and item formats, errors and their bodies.

The tables here are part of the public contract. Nothing in this file reads a body.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from math import ceil
from typing import Final, Self
from urllib.parse import quote, unquote_to_bytes

import msgspec

from carpool.engine.details import Detail, sanitized
from carpool.engine.foreign import text_of
from carpool.engine.http_request import pack_head
from carpool.engine.http_response import HTTPError
from carpool.engine.observe.refusals import MODEL_MESSAGES, reason_of, text_for_clients
from carpool.engine.wire.payload import CUSTOM, JSON, MSGPACK, RAW
from carpool.errors import (
    CarpoolError,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Unavailable,
    ValidationError,
)
from carpool.http.exchange import REQUEST_ID, Head, HttpResponse
from carpool.http.streaming import BY_TYPE, PLAIN, Framing
from carpool.model import Traits
from carpool.version import page

_JSON = b"application/json"
_MSGPACK = b"application/msgpack"
_JSON_TYPES = frozenset({b"application/json", b"text/json"})
_MSGPACK_TYPES = frozenset({b"application/msgpack", b"application/x-msgpack", b"application/vnd.msgpack"})
_RAW_TYPES = re.compile(rb"application/octet-stream|(image|audio|text)/.+")
_TEXT_TYPES = re.compile(rb"text/.+")
_OCTETS = b"application/octet-stream"
_TEXT = b"text/plain"
_MADE_HERE = frozenset({b"multipart/form-data", b"application/x-npy"})  # see `converted.py`
_CURLS_OWN = b"application/x-www-form-urlencoded"
_MOST_LENGTH_DIGITS = 20  # enough for any body that there could be
_UNWANTED = re.compile(rb";\s*q\s*=\s*0(\.0*)?\s*(;|$)")
_MOST_CACHED = 256
_MOST_NAMED = 8  # addresses in the text of a 404
_encoder = msgspec.json.Encoder()

TYPES_OF_ENTRIES: Final = {JSON: _JSON, MSGPACK: _MSGPACK}
"""The content type of a list, and so of each of its entries, by format."""

MESSAGES = {
    "invalid_request": "The request could not be read.",
    "unsupported_media_type": "The model does not read this content type.",
    "not_acceptable": "The model does not write this content type.",
    "too_large": "The request body is too large.",
    "invalid_item": "The item does not fit the model's input.",
    "overloaded": "The service is overloaded; try again later.",
    "deadline_exceeded": "The deadline passed before the answer was ready.",
    "starting": "The service is starting.",
    "draining": "The service is shutting down.",
    "stopped": "The service has stopped.",
    "worker_lost": "The worker that had this request died.",
    "stage_failed": "The service has failed.",
    "not_ready": "The service is not ready.",
    "unavailable": "The service cannot take the request now.",
    "request_crashed_worker": "The request crashed two workers and is not tried again.",
    **MODEL_MESSAGES,
    "unauthorized": "A key is needed: send Authorization: Bearer KEY, or X-API-Key: KEY.",
    "wrong_host": "The server does not answer to this name.",
    "cross_site": "Pages of this site may not ask.",
    "not_found": "There is nothing at this address.",
    "not_local": "This address answers clients on its own machine only.",
    "method_not_allowed": "This address does not support the method.",
    "bad_http": "The request is not valid HTTP.",
    "headers_too_large": "The request's headers are too large.",
    "uri_too_long": "The request's address is too long.",
    "request_timeout": "The request did not arrive in time.",
    "expectation_failed": "The only supported expectation is `Expect: 100-continue`.",
    "not_implemented": "The only supported transfer coding is chunked.",
    "version_not_supported": "The only supported versions are HTTP/1.0 and HTTP/1.1.",
    "too_many_connections": "The server has too many open connections.",
    "internal_error": "Something went wrong in the server; it has been logged.",
    "metrics_unavailable": "Metrics need the package prometheus-client: pip install 'carpool[serve]'.",
}
"""The texts for clients, by error code. User exceptions are shown only in debug mode."""


_OVERLOADED = {
    "queue_full": "The queue is full; try again later.",
    "slo": "The answer would come later than the service promises; try again later.",
    "deadline": "The answer would come after the request's time-out; try again later, or with a longer one.",
    "priority": "The queue is full, and requests of a higher priority go first; try again later.",
    "uploads": "Too many bytes of requests are being received; try again later.",
}
"""The texts for clients of an overload, by its reason; others have that of `MESSAGES`."""


class Refusal(CarpoolError):
    """The HTTP layer itself refuses a request: its address, its method or how it was sent.

    Args:
        text: For the client, in the place of the text that `MESSAGES` has for the code.
    """

    def __init__(
        self, status: int, code: str, *, headers: tuple[tuple[bytes, bytes], ...] = (), text: str | None = None
    ) -> None:
        super().__init__(text or MESSAGES[code])
        self.status = status
        self.code = code
        self.headers = headers


class NotReady(Unavailable):
    """Models of the server do not answer now; the text names them to who may see the names."""

    def __init__(self, code: str, models: Mapping[str, str] | None = None) -> None:
        self.models = dict(models or {})
        super().__init__("; ".join(self.models.values()) or MESSAGES[code], code=code)

    def __reduce__(self) -> tuple[type[Self], tuple[str, Mapping[str, str]]]:
        return type(self), (self.code, self.models)  # for copies, of which each is raised once


class _Error(msgspec.Struct):
    code: str
    message: str
    request_id: str
    reason: str | msgspec.UnsetType = msgspec.UNSET  # why a request was refused with 429
    details: list[Detail] | msgspec.UnsetType = msgspec.UNSET  # what is wrong with an invalid item
    models: dict[str, str] | msgspec.UnsetType = msgspec.UNSET  # what keeps each one from answering
    help: str | msgspec.UnsetType = msgspec.UNSET  # the code's place in the documentation, once it has an address


class _ErrorBody(msgspec.Struct):
    error: _Error


def error_response(
    error: Exception, request_id: str, *, timeout_status: int = 504, debug: bool = False
) -> HttpResponse:
    """Return the response to a request that ended with `error`.

    Raises:
        Exception: Of any kind, if the error is of a user's class with attributes that make no
            sense.
    """
    code = error.code if isinstance(error, CarpoolError) else "internal_error"
    status = error.status if isinstance(error, CarpoolError) else 500
    if not isinstance(error, HTTPError):  # its status is checked where it is made
        status = HTTPStatus(status).value
    message = MESSAGES.get(code, MESSAGES["unavailable"])
    reason: str | msgspec.UnsetType = msgspec.UNSET
    if isinstance(error, Overloaded):
        reason = reason_of(error)
        message = _OVERLOADED.get(reason, message)
    if isinstance(error, DeadlineExceeded):
        status = timeout_status
    ours = text_for_clients(error, debug=debug)
    message = message if ours is None else ours
    headers: list[tuple[bytes, bytes]] = [(REQUEST_ID, request_id.encode())]
    if isinstance(error, Refusal):
        message = text_of(error)
        headers += error.headers
    if isinstance(error, NotReady) and error.models:
        message = f"{MESSAGES[code].removesuffix('.')}: {text_of(error)}"
    if isinstance(error, HTTPError):
        headers += [(name.lower().encode(), value.encode()) for name, value in error.headers]
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, ceil(retry_after_s))).encode()))
    details: list[Detail] | msgspec.UnsetType = msgspec.UNSET
    if isinstance(error, ValidationError):
        details = sanitized(error.details) or [{"loc": [], "msg": message, "type": "value_error"}]
    models = error.models if isinstance(error, NotReady) and error.models else msgspec.UNSET
    help_at = msgspec.UNSET if isinstance(error, HTTPError) else page(f"errors.html#{code}") or msgspec.UNSET
    body = _encoder.encode(_ErrorBody(_Error(code, message, request_id, reason, details, models, help_at)))
    return HttpResponse(status, body, headers=tuple(headers))


class Formats:
    """The formats that a service reads and writes: the one table that every way in and out asks.

    A model whose own `decode` reads a format that carpool reads, too, has replaced carpool's
    reading: `decode` gets all that is sent, and what it cannot get is refused. So it is with
    `encode` and what is written. A format of the model's own comes beside JSON and msgpack.

    Args:
        others_read: The content types that the address reads by itself, for the text of a 415.
        of_entries: Whether it is about the entries of a list, and about lines. These are JSON or
            msgpack, or what the model's own `decode` and `encode` make of that.

    Attributes:
        types: Content type of an answer, by format.
        wants_heads: Whether the model's `decode` asks for whole requests and not only for bodies.
        owns_input: Whether only the model's own `decode` reads what is sent.
        owns_output: Whether only the model's own `encode` writes the answers.
        joins: Whether an answer is put together of several, in JSON or msgpack.
    """

    def __init__(
        self, first: Traits, last: Traits, others_read: Sequence[str] = (), *, of_entries: bool = False
    ) -> None:
        self._others_read = others_read
        self._accepts = frozenset(_kind(kind.encode()) for kind in first.accepts)
        self._produces = {CUSTOM + i: kind.encode() for i, kind in enumerate(last.produces)}
        self.wants_heads = first.decodes_requests
        self._raw_in = first.input_type is bytes
        self._raw_out = last.output_type is bytes
        self._text_in = first.input_type is str
        self._text_out = last.output_type is str
        self.joins = last.is_joined
        self._parts_are_raw = last.in_parts and last.part_type is bytes
        self.owns_input = any(map(_is_known_here, self._accepts))
        self.owns_output = any(_is_known_here(_kind(kind)) for kind in self._produces.values())
        if of_entries:
            self._raw_in = self._raw_out = self._text_in = self._text_out = False
            entries = frozenset(TYPES_OF_ENTRIES.values())
            self._accepts &= entries
            self._produces = {i: kind for i, kind in self._produces.items() if _kind(kind) in entries}
        self._produced = {_kind(name): format for format, name in reversed(self._produces.items())}
        self._cached: dict[tuple[bytes | None, bytes | None], tuple[int, int]] = {}
        self.types = {JSON: _JSON, MSGPACK: _MSGPACK, RAW: b"application/octet-stream"}
        if self._text_out:
            self.types[RAW] = b"text/plain; charset=utf-8"
        self.types.update(self._produces)

    def choose(self, content_type: bytes | None, accept: bytes | None) -> tuple[int, int]:
        """Return the format in which to read a body, and the one in which to write the answer.

        Raises:
            InvalidRequest: The model does not read this content type (415), or its `encode` writes
                none of those that are accepted (406).
        """
        found = self._cached.get((content_type, accept))
        if found is None:
            read = self._reads(content_type)
            found = read, self._writes(accept, read, _kind(content_type or _JSON))
            if len(self._cached) < _MOST_CACHED:
                self._cached[content_type, accept] = found
        return found

    def usual(self, read: int) -> int:
        """Return the format of an answer for a client without a preference."""
        return self._writes(None, read, self.types.get(read, _JSON))

    def of_made(self, sent_as: int, wanted_as: int) -> tuple[int, int]:
        """Return in which formats an item goes to the model that a protocol has made of a body, and
        in which its result comes back.

        What is JSON or msgpack goes through the model's own `decode` and `encode` for that format,
        where it has them. CUSTOM stands for a format that `choose` has returned.

        Args:
            sent_as: In which form the protocol has the item, as `wire/payload.py` numbers formats.
            wanted_as: In which form it wants the result.

        Raises:
            InvalidRequest: The model's own `decode` (415) or `encode` (406) would be gone past.
        """
        if self.owns_input and sent_as < CUSTOM:
            if TYPES_OF_ENTRIES.get(sent_as) not in self._accepts:
                raise self._unread()
            sent_as = CUSTOM
        if self.owns_output and wanted_as < CUSTOM:
            wanted = self._produced.get(TYPES_OF_ENTRIES.get(wanted_as, b""))
            if wanted is None:
                raise self._unwritten()
            wanted_as = wanted
        return sent_as, wanted_as

    def holds(self, sent_as: int, wanted_as: int) -> bool:
        """Report whether `of_made` finds formats, so that an address which needs them is listed."""
        try:
            self.of_made(sent_as, wanted_as)
        except InvalidRequest:
            return False
        return True

    def framing(self, accept: bytes | None) -> Framing | None:
        """Return how the answer is written in parts, if the client asks for parts first of all.

        Parts are not written by the model's own `encode`, so where that owns the answers there are
        none, and `choose` refuses who accepts nothing else.
        """
        if self.owns_output:
            return None
        for wish in wishes(accept):
            if wish in self._produced or wish in _JSON_TYPES or wish in _MSGPACK_TYPES or wish == b"*/*":
                return None
            if wish in BY_TYPE:
                return BY_TYPE[wish]
            if wish == PLAIN.content_type and self._parts_are_raw:
                return PLAIN
        return None

    def packed(self, head: Head, entry: bytes | None = None) -> bytes:
        """Return the head of a request for the model's own `decode`.

        It gets no content type that the model does not name: other names of JSON and msgpack are
        replaced by the usual one.

        Args:
            entry: The content type of each item in the body; None where the body is the item.
        """
        sent = head.headers.get(b"content-type")
        if entry is None and sent is not None and not self.reads_itself(sent):
            entry = _usual_name(_kind(sent))
        return pack_head(head.path, head.query, head.fields, entry)

    def reads_itself(self, content_type: bytes) -> bool:
        """Report whether the model names a content type that its own `decode` reads."""
        return _kind(content_type) in self._accepts

    @property
    def readable(self) -> list[str]:
        """The content types that the model reads, by their usual names."""
        custom = [kind.decode() for kind in sorted(self._accepts)]
        if self.owns_input:
            return custom
        raw = ["application/octet-stream"] if self._raw_in else ["text/plain"] if self._text_in else []
        return list(dict.fromkeys([*custom, "application/json", "application/msgpack", *raw]))

    @property
    def writable(self) -> list[str]:
        """The content types that the model writes, for OpenAPI."""
        custom = [name.decode() for name in self._produces.values()]
        if self.owns_output:
            return custom
        raw = ["application/octet-stream"] if self._raw_out else ["text/plain"] if self._text_out else []
        return list(dict.fromkeys([*custom, "application/json", "application/msgpack", *raw]))

    @property
    def is_open(self) -> bool:
        """Whether anything can be sent and answered, so that the address is listed."""
        return bool(self.readable and self.writable)

    def _reads(self, content_type: bytes | None) -> int:
        content_type = content_type or _JSON
        kind, _, parameters = content_type.partition(b";")
        kind = kind.strip().lower()
        if kind in self._accepts or (_usual_name(kind) in self._accepts and _is_utf8(parameters)):
            return CUSTOM
        if not self.owns_input:
            if _is_json(kind):
                if _is_utf8(parameters):
                    return JSON
            elif kind in _MSGPACK_TYPES:
                return MSGPACK
            elif self._reads_as_it_is(kind, parameters):
                return RAW
        raise self._unread(kind)

    def _reads_as_it_is(self, kind: bytes, parameters: bytes) -> bool:
        if self._raw_in:
            return _RAW_TYPES.fullmatch(kind) is not None
        return self._text_in and _TEXT_TYPES.fullmatch(kind) is not None and _is_utf8(parameters)

    def _could_be_written(self, wish: bytes) -> bool:
        """Report whether carpool would write answers of a type, if the model did not write them."""
        if wish in _JSON_TYPES or wish in _MSGPACK_TYPES or wish in _MADE_HERE or wish in BY_TYPE:
            return True
        return (wish == _OCTETS and (self._raw_out or self._parts_are_raw)) or (wish == _TEXT and self._text_out)

    def _unread(self, kind: bytes = b"") -> InvalidRequest:
        text = f"the model does not read this content type; it reads {self._all_read}"
        if self.owns_input:
            text = f"the model reads what it is sent by a decode of its own, of {self._all_read}, and in no other way"
        if kind == _CURLS_OWN:
            usual = self.readable[-1] if self._raw_in or self._text_in else "application/json"
            wanted = "TYPE" if self._accepts else usual
            text = (
                f"curl sends {kind.decode()} by itself, which the model does not read:"
                f" add -H 'Content-Type: {wanted}'; it reads {self._all_read}"
            )
        elif kind == b"multipart/form-data" and not self.owns_input:  # else it would have been converted
            text += "; a server with carpool[forms] reads forms"
        return InvalidRequest(text, status=415, code="unsupported_media_type")

    def _unwritten(self) -> InvalidRequest:
        written = ", ".join(self.writable) or "nothing that fits here"
        text = f"the model writes its answers by an encode of its own, as {written}, and in no other way"
        return InvalidRequest(text, status=406, code="not_acceptable")

    @property
    def _all_read(self) -> str:
        if self.owns_input:
            return ", ".join([*self.readable, *self._others_read]) or "nothing that fits here"
        families = ["image/*", "audio/*", "text/*"] if self._raw_in else ["text/*"] if self._text_in else []
        others = [kind.decode() for kind in (*sorted(_JSON_TYPES), b"application/*+json", *sorted(_MSGPACK_TYPES))]
        return ", ".join(dict.fromkeys([*self.readable, *families, *self._others_read, *others]))

    def _writes(self, accept: bytes | None, read: int, sent: bytes) -> int:
        """Return the first format of `Accept` that the model writes, or else a suitable one."""
        is_refused = self.owns_output and not self._produces
        for wish in wishes(accept):
            if wish in self._produced:
                return self._produced[wish]
            if self.owns_output and _usual_name(wish) in self._produced:
                return self._produced[_usual_name(wish)]
            if self.owns_output:
                is_refused = is_refused or self._could_be_written(wish)
            elif wish in _JSON_TYPES:
                return JSON
            elif wish in _MSGPACK_TYPES:
                return MSGPACK
            elif (wish == _OCTETS and self._raw_out) or (wish == _TEXT and self._text_out):
                return RAW
            elif self.joins and self._could_be_written(wish):
                text = "an answer of several branches is written as application/json or application/msgpack only"
                raise InvalidRequest(text, status=415, code="unsupported_media_type")
            if wish == b"*/*":
                is_refused = self.owns_output and not self._produces
                break
        if is_refused:
            raise self._unwritten()
        if self._produces:
            return self._produced.get(sent, self._produced.get(_usual_name(sent), min(self._produces)))
        if read == RAW and (self._raw_out or (self._text_in and self._text_out)):
            return RAW
        return MSGPACK if read == MSGPACK else JSON


def format_of_entries(content_type: bytes | None) -> int:
    """Return the format of each entry of a list, or each line, of a body: JSON or MSGPACK."""
    return MSGPACK if _kind(content_type or b"") in _MSGPACK_TYPES else JSON


def _usual_name(kind: bytes) -> bytes:
    """Return by which name the content type of JSON, or of msgpack, is known; others have one."""
    return _JSON if _is_json(kind) else _MSGPACK if kind in _MSGPACK_TYPES else kind


def _is_known_here(kind: bytes) -> bool:
    """Report whether carpool itself can read, or write, values of any kind as a content type."""
    return _is_json(kind) or kind in _MSGPACK_TYPES or kind in _MADE_HERE


def _is_json(kind: bytes) -> bool:
    return kind in _JSON_TYPES or (kind.startswith(b"application/") and kind.endswith(b"+json"))


def _is_utf8(parameters: bytes) -> bool:
    """Report whether a content type's parameters say, or leave open, that a text is UTF-8."""
    charset = re.search(rb"charset\s*=\s*\"?([^\s;\"]+)", parameters.lower())
    return charset is None or charset[1] in (b"utf-8", b"utf8", b"us-ascii")


def wishes(accept: bytes | None) -> list[bytes]:
    """Return the content types that an `Accept` header names, without those of quality 0.

    Other qualities do not count: clients name first what they want most.
    """
    parts = (accept or b"").split(b",")
    return [_kind(part) for part in parts if b"q" not in part.lower() or not _UNWANTED.search(part.lower())]


def _kind(content_type: bytes) -> bytes:
    return content_type.partition(b";")[0].strip().lower()


def as_routes_are(path: bytes) -> bytes:
    """Quote each part of a path as `predict_path` quotes a name, however it was quoted before."""
    return b"/".join([quote(unquote_to_bytes(part), safe="").encode() for part in path.split(b"/")])


def content_length(headers: Mapping[bytes, bytes]) -> int:
    """Return the length of the body as the header gives it, 0 if there is no such header.

    Raises:
        Refusal: The header is not a length.
    """
    text = headers.get(b"content-length", b"0")
    if not text.isdigit() or len(text) > _MOST_LENGTH_DIGITS:
        raise Refusal(400, "bad_http")
    return int(text)


def too_many_connections() -> Refusal:
    """Return why a connection is closed for which there is no room."""
    refusal = Refusal(503, "too_many_connections")
    refusal.retry_after_s = 1.0
    return refusal


def too_large(limit: int) -> InvalidRequest:
    """Return the refusal of a body of more than `limit` bytes."""
    return InvalidRequest(f"the body is larger than {limit} bytes", status=413, code="too_large")


def as_json(value: object) -> bytes:
    return _encoder.encode(value)


def allow(methods: Iterable[str]) -> tuple[tuple[bytes, bytes], ...]:
    return ((b"allow", ", ".join(methods).encode()),)


def not_allowed(methods: Sequence[str]) -> Refusal:
    text = f"This address does not support the method; it supports {', '.join(methods)}."
    return Refusal(405, "method_not_allowed", headers=allow(methods), text=text)


def nothing_here(owner: str, paths: Sequence[str], more: str = "") -> Refusal:
    """Return the refusal of an address at which there is nothing."""
    *first, last = [*paths[:_MOST_NAMED], "others"] if len(paths) > _MOST_NAMED else paths or [""]
    named = f"{', '.join(first)} and {last}" if first else last
    listed = f" {owner} {named}{more}." if paths else ""
    return Refusal(404, "not_found", text=MESSAGES["not_found"] + listed)
