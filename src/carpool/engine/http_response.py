"""`Response` and `HTTPError`: what a model returns or raises for an item that needs a status or
headers of its own.

On the wire a response is an outcome of its own. One from a stage that is not the last, or for a
Python caller, breaks the protocol.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

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
    if not isinstance(kind, str):
        raise TypeError(f"content_type must be text, not {kind!r:.80}")
    if not _CONTENT_TYPE.fullmatch(kind):
        raise ValueError(f"content_type must be one like 'text/csv', not {kind!r:.80}")
