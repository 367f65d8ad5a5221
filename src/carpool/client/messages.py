"""The messages of a client: items and results, and the errors in answers. Sans-IO."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final
from urllib.parse import quote

import msgspec

from carpool.engine.details import Detail
from carpool.engine.hints import schema
from carpool.engine.http_response import HTTPError
from carpool.engine.type_hints import meant
from carpool.errors import (
    CarpoolError,
    DeadlineExceeded,
    InvalidRequest,
    ModelError,
    Overloaded,
    Unavailable,
    ValidationError,
)
from carpool.http import entries

JSON_TYPE: Final = "application/json"
MSGPACK_TYPE: Final = "application/msgpack"
LINES_TYPE: Final = "application/x-ndjson"
EVENTS_TYPE: Final = "text/event-stream"
SERVER_READINESS: Final = "/readyz"


class _Sent(msgspec.Struct):
    code: str = ""
    message: str = ""
    request_id: str = ""
    status: int = 0
    reason: str = ""
    details: list[Detail] = []
    is_last: bool = False


class _Body(msgspec.Struct):
    error: _Sent


class _End(msgspec.Struct):
    parts: int | None = None


_read_end = msgspec.json.Decoder(_End).decode
_read_error = msgspec.json.Decoder(_Body).decode


def address_of(model: str | None) -> str:
    """Return the path at which a model is asked; None for the first one."""
    return "/predict" if model is None else f"/models/{quote(model, safe='')}/predict"


def readiness_address_of(model: str | None) -> str:
    """Return the path of a model's readiness; of that of any model for None."""
    return SERVER_READINESS if model is None else f"/models/{quote(model, safe='')}/ready"


def packed(item: Any) -> bytes:
    """Return an item as the body of a request. Raises TypeError or ValueError if that cannot be."""
    return schema.msgpack_bytes(item)


def line_of(item: Any) -> bytes:
    """Return an item as a line of a bulk request. Raises TypeError or ValueError.

    NaN and infinities are refused: JSON does not have them, and null would be another item.
    """
    line = schema.json_bytes(item)
    if not line or line.isspace():  # of a `msgspec.Raw`; the server would pass it over
        raise ValueError("an item is an empty line: write null, or leave it out")
    return line + b"\n"


@lru_cache(64)
def reader_of(kind: Any, *, is_json: bool = False) -> Callable[[bytes], Any]:
    """Return what reads results of a type."""
    kind = meant(kind)
    return schema.json_reader(kind) if is_json else schema.msgpack_reader(kind)


def result_in(body: bytes, content_type: str, kind: Any) -> Any:
    """Return the result in an answer.

    Args:
        body: Of the answer.
        content_type: Of the answer.
        kind: The type that the result is to be.

    Raises:
        ValidationError: It is not of this type.
    """
    media = content_type.partition(";")[0].strip().lower()
    if media in (MSGPACK_TYPE, JSON_TYPE):
        return read(body, kind, is_json=media == JSON_TYPE)
    return body.decode() if media == "text/plain" and meant(kind) is not bytes else body


def read(body: bytes, kind: Any, *, is_json: bool) -> Any:
    """Return a result of a type. Raises `ValidationError` if it is not of this type."""
    try:
        return reader_of(kind, is_json=is_json)(body)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise ValidationError(f"the answer is not {schema.type_name(kind)}: {error}") from error


def error_in(status: int, headers: Mapping[str, str], body: bytes) -> CarpoolError:
    """Return the error of an answer, in the class that a Python caller would get.

    Args:
        status: Of the answer.
        headers: Of the answer, by name in lower case.
        body: Of the answer.
    """
    sent = _sent_in(body)
    sent.message = sent.message or f"the server answered {status}"
    sent.status = status
    sent.request_id = sent.request_id or headers.get("x-request-id", "")
    retry = headers.get("retry-after", "")
    return error_of(sent, float(retry) if retry.isdigit() else None)


def entry_in(line: bytes, kind: Any) -> Any:
    """Return the result or the error of an item in a line of a bulk answer.

    Args:
        line: The line.
        kind: The type that a result is to be.

    Raises:
        CarpoolError: The line says why there are no more.
    """
    line = line.lstrip(b" ")  # by which a server says that it is alive
    if entries.is_error(line):
        sent = _sent_in(line)
        error = error_of(sent, None)
        if sent.is_last:
            raise error
        return error
    try:
        return read(entries.result_in(line), kind, is_json=True)
    except CarpoolError as unfit:
        return unfit


def _sent_in(body: bytes) -> _Sent:
    try:
        return _read_error(body).error
    except msgspec.MsgspecError:
        return _Sent(message=body[:200].decode("utf-8", "replace").strip())


def error_of(sent: _Sent, retry_after_s: float | None) -> CarpoolError:
    """Return the error of the class that fits its status."""
    text = sent.message + (f" (request {sent.request_id})" if sent.request_id else "")
    error = _error_for(sent, text, retry_after_s)
    error.request_id = sent.request_id
    return error


def _error_for(sent: _Sent, text: str, retry_after_s: float | None) -> CarpoolError:
    status, code = sent.status or 500, sent.code
    if status == 422:
        return ValidationError(text, details=sent.details)
    if status == 429:
        return Overloaded(text, retry_after_s=retry_after_s, reason=sent.reason)
    if status == 504 or code == "deadline_exceeded":
        return DeadlineExceeded(text)
    if status == 503:
        return Unavailable(text, code=code or "unavailable", retry_after_s=retry_after_s)
    if code in ("model_error", "bad_result", "request_crashed_worker"):
        return ModelError(text, code=code)
    if status in (400, 404, 405, 406, 408, 413, 415):
        return InvalidRequest(text, status=status, code=code or "invalid_request")
    if 400 <= status <= 599:
        return HTTPError(text, status=status, code=code if code.isidentifier() else "refused")
    return CarpoolError(text)


def broken(what: str) -> Unavailable:
    """Return the error of an answer that broke off."""
    return Unavailable(f"{what} broke off before its end", code="broken", retry_after_s=None)


class LineSplitter:
    """Takes lines from pieces of a body; a long line is joined once, when its end is there.

    Attributes:
        has_rest: Whether a line has begun that has not ended.
    """

    def __init__(self) -> None:
        self._begun: list[bytes] = []

    @property
    def has_rest(self) -> bool:
        return bool(self._begun)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete now, without their ends."""
        *lines, rest = data.split(b"\n")
        if lines and self._begun:
            lines[0] = b"".join([*self._begun, lines[0]])
            self._begun.clear()
        if rest:
            self._begun.append(rest)
        return lines


class EventReader:
    """Reads server-sent events from pieces of a body.

    Attributes:
        has_ended: Whether the event came that says that the answer is whole.
        failure: Why the answer has failed; None if it has not.
    """

    def __init__(self) -> None:
        self.has_ended = False
        self.failure: CarpoolError | None = None
        self._lines = LineSplitter()
        self._kind = b""
        self._data: list[bytes] = []
        self._n = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the parts that are complete now. What follows the end is not read."""
        parts: list[bytes] = []
        for line in self._lines.feed(data):
            name, _, value = line.rstrip(b"\r").partition(b":")
            if name == b"event":
                self._kind = value.strip()
            elif name == b"data":
                self._data.append(value.removeprefix(b" "))
            elif not name and not value:
                self._end_event(parts)
                if self.has_ended or self.failure is not None:
                    break
        return parts

    def _end_event(self, parts: list[bytes]) -> None:
        kind, part = self._kind, b"\n".join(self._data)
        self._kind, self._data = b"", []
        if kind == b"error":
            sent = _sent_in(part)
            self.failure = error_of(sent, None) if sent.status or sent.code else broken("the stream")
        elif kind == b"end":
            self.has_ended = True
            if _count_in(part) not in (None, self._n):
                self.failure = broken("the stream")
        elif part:
            self._n += 1
            parts.append(part)


def _count_in(data: bytes) -> int | None:
    try:
        return _read_end(data).parts
    except msgspec.MsgspecError:
        return None
