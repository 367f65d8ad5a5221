"""`HTTPRequest`, a whole request for a model's own `decode`, and how it travels to a worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, final
from urllib.parse import parse_qs

import msgspec

Field = tuple[bytes, bytes]
"""A header: its name in lower case, and its value as it was received."""


class Headers(Mapping[str, str]):
    """Headers by name, in any case. Repeated ones are joined with commas (RFC 9110, 5.3)."""

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
        headers: Mapping[str, str] | Iterable[tuple[str, str]] = (),
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
        known = self._heads.get(packed)
        if known is None:
            head = _decoder.decode(packed)
            headers = Headers([(name.decode("latin-1"), value.decode("latin-1")) for name, value in head.fields])
            known = self._heads[packed] = headers, head.path.decode("latin-1"), head.query.decode("latin-1")
        headers, path, query = known
        return HTTPRequest(body, headers=headers, path=path, query=query)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_RequestHead)
