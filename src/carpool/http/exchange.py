"""One HTTP request and the answer that is owed to it: the noun that the app and its doors share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from carpool.http_request import Field
from carpool.request import DEFAULT_LANE, Lane, Request
from carpool.wire.response import CheckedResponse

if TYPE_CHECKING:
    from carpool.http.app import App, Endpoint

JSON_TYPE = b"application/json"
_SILENT = frozenset({204, 304})

WANTED_HEADERS = frozenset(
    {
        b"accept",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"x-request-id",
        b"x-request-priority",
        b"x-request-timeout-ms",
    }
)
"""The headers that the app looks at; a door need not bring others, unless the app `wants_heads`."""


class HttpResponse(NamedTuple):
    """An answer, whichever door it goes out of."""

    status: int
    body: bytes | bytearray | memoryview
    content_type: bytes = JSON_TYPE
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def says_its_body(self) -> bool:
        """Whether it has headers about its body: none is allowed in some answers that have no body (RFC 9110, 8.6)."""
        return self.status not in _SILENT


class Head:
    """A request's head and what the app makes of it. Equal heads mean the same, so a door may keep and reuse them.

    Attributes:
        method, path, headers: as received; header names in lower case, the path without its query.
        query, fields: what follows the path, and all headers; kept only by an app that `wants_heads`.
        packed: all of these, for a worker; empty where the model does not ask for them.
        app, route: who answers, set by `App.admit`, and with them for a model's address
        endpoint: the model asked; format, accept, timeout_s, lane: what the headers say about the item;
        content_type: of a good answer.
    """

    __slots__ = (
        "accept",
        "app",
        "content_type",
        "endpoint",
        "fields",
        "format",
        "headers",
        "lane",
        "method",
        "packed",
        "path",
        "query",
        "route",
        "timeout_s",
    )

    app: App
    route: Callable[[Exchange], None]

    def __init__(
        self,
        method: bytes,
        path: bytes,
        headers: Mapping[bytes, bytes],
        query: bytes = b"",
        fields: Sequence[Field] = (),
    ) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.query = query
        self.fields = fields
        self.packed = b""
        self.endpoint: Endpoint | None = None
        self.format = self.accept = 0
        self.timeout_s = 0.0
        self.lane: Lane = DEFAULT_LANE
        self.content_type = JSON_TYPE


class Exchange(Request):
    """A request that came over HTTP; it is its own caller, and each door has its own way to `respond`.

    Attributes:
        head: the request's head; the body is the item.
    """

    __slots__ = ("head",)

    def __init__(self, head: Head, body: bytes | bytearray = b"") -> None:
        Request.__init__(self, body, inf, None, len(body))
        self.head = head
        self.format = head.format
        self.accept = head.accept
        self.lane = head.lane

    @property
    def body(self) -> bytes | bytearray:
        """The body, as long as no stage has worked on it."""
        return self.item  # type: ignore[return-value]

    def respond(self, response: HttpResponse) -> None:
        """Send an answer."""
        raise NotImplementedError

    def tell(self) -> None:
        """The driver has the answer."""
        result = self.result
        if self.error is None and type(result) is CheckedResponse:
            self.respond(
                HttpResponse(result.status, result.body, result.content_type or self.head.content_type, result.headers)
            )
        elif self.error is None:
            self.respond(HttpResponse(200, result, self.head.content_type))  # type: ignore[arg-type]
        else:
            self.respond(self.head.app.error(self.head, self.error))
