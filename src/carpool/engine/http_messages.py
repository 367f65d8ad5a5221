"""`HTTPRequest`, `Response` and `HTTPError`: a whole request for a model's own `decode`, and
answers with a status or headers of their own.

On the wire a response is an outcome of its own. One from a stage that is not the last, or for a
Python caller, breaks the protocol.

A request travels to a worker in the place of its body.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final
from urllib.parse import parse_qs

import msgspec

from carpool.errors import CarpoolError

BODILESS: Final = frozenset({204, 205, 304})
"""Statuses of responses that have no body."""

_LONGEST_FIELDS = 16 * 1024
_CONTENT_TYPE = re.compile(r"[!-.0-~]+/[!-.0-~][ -~]*")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CODE = re.compile(r"[A-Za-z0-9_]{1,64}")
_VALUE = re.compile(r"[\t -~]*")
_OURS = frozenset(
    {
        "connection",
        "content-length",
        "content-type",
        "date",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-content-type-options",
    }
)
"""Headers that the server writes, or that belong to the connection and not to a response."""


@final
@dataclass(frozen=True, slots=True, init=False)
class Response:
    """The response for one item, returned by a model in the place of a result that is only a value.

    Args:
        value: Bytes are sent as they are; anything else is checked and written like any result.
        status: 200 to 599; with 204, 205 and 304 there is no body, so `value` must be None.
        headers: By name, or as pairs if a name occurs several times. The server itself writes the
            length, the date and the like.
        content_type: Of a value that is bytes; "application/octet-stream" if it is not given.

    Raises:
        ValueError: A status, header or content type is not allowed in HTTP, or is written by the
            server itself.
        TypeError: A status, header or content type has the wrong type.
    """

    value: Any
    status: int
    headers: tuple[tuple[str, str], ...]
    content_type: str | None

    def __init__(
        self,
        value: Any = None,
        *,
        status: int = 200,
        headers: Mapping[str, str] | Iterable[tuple[str, str]] = (),
        content_type: str | None = None,
    ) -> None:
        pairs = tuple(headers.items() if isinstance(headers, Mapping) else headers)
        is_body = isinstance(value, bytes | bytearray | memoryview)
        check_status(status)
        check_headers(pairs)
        if status in BODILESS and not (value is None and content_type is None):
            raise ValueError(f"a response with status {status} has no body: leave out value and content_type")
        if content_type is not None:
            check_content_type(content_type)
            if not is_body:
                raise TypeError(
                    f"content_type describes bytes, but value is {type(value).__name__}, which is written as the client"
                    " accepts it: give bytes, or leave content_type out"
                )
        elif is_body:
            content_type = "application/octet-stream"
        object.__setattr__(self, "value", value)
        object.__setattr__(self, "status", int(status))
        object.__setattr__(self, "headers", pairs)
        object.__setattr__(self, "content_type", content_type)

    @property
    def is_body(self) -> bool:
        """Whether the value is sent as it is, without being written in a format."""
        return self.content_type is not None or self.status in BODILESS


class HTTPError(CarpoolError):
    """The model refuses an item with a status of its own, for that item alone.

    Raised or returned in the place of an item or a result, in any stage and hook; raised in a
    batch, it fails the item for which the model raises it alone as well. Python callers get it,
    too.

    Args:
        message: The text for the client and the log.
        status: 400 to 599.
        code: The error code in the response, for programs: letters, digits and `_`.
        headers: By name, or as pairs if a name occurs several times; `Retry-After`, for example.

    Raises:
        ValueError: A status, code or header is not allowed, or is written by the server itself.
        TypeError: One of these has the wrong type.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str = "refused",
        headers: Mapping[str, str] | Iterable[tuple[str, str]] = (),
    ) -> None:
        super().__init__(message)
        pairs = tuple(headers.items() if isinstance(headers, Mapping) else headers)
        check_refusal(status, code, pairs)
        self.status = int(status)
        self.code = code
        self.headers = pairs

    def __reduce__(self) -> tuple[Any, ...]:
        return _refusal, (type(self), str(self), self.status, self.code, self.headers), self.__dict__


def _refusal(kind: type[HTTPError], message: str, status: int, code: str, headers: Any) -> HTTPError:
    return kind(message, status=status, code=code, headers=headers)


def check_refusal(status: Any, code: Any, pairs: tuple[Any, ...]) -> None:
    """Raise ValueError or TypeError unless an error can be answered like this."""
    check_status(status)
    check_headers(pairs)
    if status < 400:
        raise ValueError(f"the status of an error must be from 400 to 599, not {status}: return a Response instead")
    if not isinstance(code, str):
        raise TypeError(f"code must be text, not {code!r:.80}")
    if not _CODE.fullmatch(code):
        raise ValueError(f"code must be up to 64 letters, digits and underscores, not {code!r:.80}")
    if any(name.lower() == "x-request-id" for name, _ in pairs):
        raise ValueError("the header 'X-Request-Id' is written by the server itself in errors: leave it out")


def check_status(status: Any) -> None:
    """Raise ValueError or TypeError unless this is the status of a final response."""
    if not isinstance(status, int) or isinstance(status, bool):
        raise TypeError(f"status must be a whole number, not {status!r}")
    if not 200 <= status <= 599:
        raise ValueError(f"status must be from 200 to 599, not {status}")


def check_headers(pairs: tuple[Any, ...]) -> None:
    """Raise ValueError or TypeError unless these can be sent as headers of a response."""
    length = 0
    for pair in pairs:
        if type(pair) is not tuple or [type(part) for part in pair] != [str, str]:
            raise TypeError(f"headers must be a mapping of str to str, or pairs of str, not {pair!r:.80}")
        name, value = pair
        length += len(name) + len(value)
        if not _NAME.fullmatch(name):
            raise ValueError(f"a header cannot be called {name!r:.80}: use letters, digits and hyphens")
        if name.lower() in _OURS:
            instead = "; use content_type=" if name.lower() == "content-type" else ""
            raise ValueError(f"the header {name!r} is written by the server itself: leave it out{instead}")
        if not _VALUE.fullmatch(value) or value != value.strip():
            raise ValueError(
                f"the header {name!r} cannot be {value!r:.80}: it must be one line of ASCII, without spaces around it"
            )
    if length > _LONGEST_FIELDS:
        raise ValueError(f"headers of {length} characters are over the limit of {_LONGEST_FIELDS}")


def check_content_type(kind: Any) -> None:
    """Raise ValueError or TypeError unless this is a content type."""
    if not isinstance(kind, str):
        raise TypeError(f"content_type must be text, not {kind!r:.80}")
    if not _CONTENT_TYPE.fullmatch(kind):
        raise ValueError(f"content_type must be one like 'text/csv', not {kind!r:.80}")


Field = tuple[bytes, bytes]
"""A header: its name in lower case, and its value as it was received."""


class Headers(Mapping[str, str]):
    """Headers by name, in any case. Repeated ones are joined with commas (RFC 9110, 5.3).

    Args:
        fields: The names and values.
    """

    __slots__ = ("_values",)

    def __init__(self, fields: Mapping[str, str] | Iterable[tuple[str, str]] = ()) -> None:
        self._values: dict[str, str] = {}
        for name, value in fields.items() if isinstance(fields, Mapping) else fields:
            name = name.lower()
            before = self._values.get(name)
            between = "; " if name == "cookie" else ", "
            self._values[name] = value if before is None else before + between + value

    def __getitem__(self, name: str) -> str:
        return self._values[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Headers({self._values!r})"


_NONE: Final = Headers()
_OF_THE_BODY: Final = frozenset(
    name.encode()
    for name in ("content-type", "content-length", "content-encoding", "transfer-encoding", "content-digest", "digest")
)
"""The headers that say something of a body, which is not that of an item in it."""


@final
class HTTPRequest:
    """One HTTP request, body and head. A model's `decode` gets a batch of them if it asks for it:

        def decode(self, requests: list[carpool.HTTPRequest]) -> ...

    Args:
        body: The body as it was sent.
        headers: All headers that the client sent.
        path: The path as the client wrote it, below the point where the app is mounted.
        query: What follows the `?` of the address, not decoded.
    """

    __slots__ = ("_query", "body", "headers", "path", "query_string")

    def __init__(
        self,
        body: bytes,
        *,
        headers: Mapping[str, str] | Iterable[tuple[str, str]] = _NONE,
        path: str = "/predict",
        query: str = "",
    ) -> None:
        self.body = body
        self.headers = headers if type(headers) is Headers else Headers(headers)
        self.path = path
        self.query_string = query
        self._query: dict[str, list[str]] | None = None

    @property
    def content_type(self) -> str:
        """The header of that name with its parameters; empty if there is none."""
        return self.headers.get("content-type", "")

    @property
    def query(self) -> dict[str, list[str]]:
        """The parameters of the address, decoded; each may have several values."""
        if self._query is None:
            self._query = parse_qs(self.query_string, keep_blank_values=True)
        return self._query

    def __repr__(self) -> str:
        return f"<HTTPRequest {self.path} {self.content_type or 'without content type'}, {len(self.body)} bytes>"


class _RequestHead(msgspec.Struct, array_like=True):
    path: bytes
    query: bytes
    fields: list[Field]


def pack_head(path: bytes, query: bytes, fields: Sequence[Field], content_type: bytes | None = None) -> bytes:
    """Pack all of a request but its body, for a worker.

    Args:
        path: Of the request.
        query: Of the request.
        fields: Its headers.
        content_type: That of one item in the body, which gets the headers of the request but for
            those that say something of the body as a whole; None where the body is the item.
    """
    if content_type is not None:
        fields = [(b"content-type", content_type), *[field for field in fields if field[0] not in _OF_THE_BODY]]
    return _encoder.encode(_RequestHead(path, query, list(fields)))


class RequestMaker:
    """Makes the requests of one batch; of equal heads, which are common, only the first is read."""

    def __init__(self) -> None:
        self._heads: dict[bytes, tuple[Headers, str, str]] = {}

    def make(self, packed: bytes, body: bytes) -> HTTPRequest:
        """Make a request from what `pack_head` returned, and its body."""
        known = self._heads.get(packed)
        if known is None:
            head = _decoder.decode(packed)
            headers = Headers([(name.decode("latin-1"), value.decode("latin-1")) for name, value in head.fields])
            known = self._heads[packed] = headers, head.path.decode("latin-1"), head.query.decode("latin-1")
        headers, path, query = known
        return HTTPRequest(body, headers=headers, path=path, query=query)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_RequestHead)
