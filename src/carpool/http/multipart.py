"""Bodies of HTML forms (`multipart/form-data`): one file, or fields that fit the model's items."""

from __future__ import annotations

import importlib.util
import typing
from functools import cache
from typing import Any, Final, NamedTuple

import msgspec

from carpool.errors import InvalidRequest, ValidationError, too_large
from carpool.http.protocols.rows import fields_of
from carpool.http.protocols.wording import value_in

FORM_TYPE: Final = b"multipart/form-data"
_LONGEST_BOUNDARY: Final = 70
_MOST_PARTS: Final = 128
_LONGEST_HEADERS: Final = 8 * 1024


class FormPart(NamedTuple):
    """One part of a form.

    Attributes:
        name: Of the field.
        is_file: Whether it is a file.
        content: Its bytes.
    """

    name: str
    is_file: bool
    content: bytes


@cache
def can_read_forms() -> bool:
    """Report whether the package that reads forms is installed: `carpool[forms]`."""
    return importlib.util.find_spec("python_multipart") is not None


def parts_of(body: bytes | bytearray, content_type: bytes) -> list[FormPart]:
    """Return the parts of a form.

    Raises:
        InvalidRequest: The body is malformed, or has too many parts.
    """
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser

    boundary = _parameters(content_type).get(b"boundary", b"")
    if not 0 < len(boundary) <= _LONGEST_BOUNDARY:
        raise InvalidRequest("the Content-Type of a form must name its boundary")
    reader = _Reader()
    try:
        parser = MultipartParser(boundary, reader.callbacks())  # type: ignore[arg-type]
        parser.write(bytes(body))
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequest(f"the form is malformed: {error}") from None
    if not reader.has_ended:
        raise InvalidRequest("the form ends before its last boundary")
    return reader.parts


class _Reader:
    """Takes what the parser finds, within limits."""

    def __init__(self) -> None:
        self.parts: list[FormPart] = []
        self.has_ended = False
        self._header_bytes = 0
        self._field = self._line = self._disposition = b""
        self._content: list[bytes] = []

    def callbacks(self) -> dict[str, Any]:
        """Return what the parser calls."""
        return {
            "on_part_begin": self._begin,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_header_field": self._header,
            "on_header_value": self._value,
            "on_header_end": self._header_end,
            "on_end": self._all,
        }

    def _begin(self) -> None:
        if len(self.parts) >= _MOST_PARTS:
            raise too_large(f"the form has more than {_MOST_PARTS} parts")
        self._content, self._header_bytes = [], 0
        self._field = self._line = self._disposition = b""

    def _data(self, data: bytes, start: int, end: int) -> None:
        self._content.append(data[start:end])

    def _header(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._field += data[start:end]

    def _value(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._line += data[start:end]

    def _count(self, n: int) -> None:
        self._header_bytes += n
        if self._header_bytes > _LONGEST_HEADERS:
            raise InvalidRequest("a part of the form has too long headers")

    def _header_end(self) -> None:
        if self._field.lower() == b"content-disposition":
            self._disposition = self._line
        self._field = self._line = b""

    def _end(self) -> None:
        named = _parameters(self._disposition)
        if b"name" not in named:
            raise InvalidRequest("a part of the form has no name")
        name = named[b"name"].decode("utf-8", "replace")
        self.parts.append(FormPart(name, b"filename" in named, b"".join(self._content)))

    def _all(self) -> None:
        self.has_ended = True


def _parameters(header: bytes) -> dict[bytes, bytes]:
    """Return what follows the first semicolon of a header, by name in lower case."""
    pairs = [part.partition(b"=") for part in header.split(b";")[1:]]
    return {name.strip().lower(): value.strip().strip(b'"').replace(b'\\"', b'"') for name, _, value in pairs}


def item_of(parts: list[FormPart], kind: Any) -> Any:
    """Return the item that a form is, in builtins.

    Args:
        parts: Of the form.
        kind: The type of the model's items.

    Raises:
        ValidationError: They do not fit.
    """
    fields = fields_of(kind)
    if fields is None:
        # browsers send buttons and tokens beside the file
        files = [part for part in parts if part.is_file] if len(parts) > 1 else parts
        if len(files) != 1:
            text = f"the form has {len(parts)} parts, {len(files)} of them files, and the model takes one item"
            raise ValidationError(f"{text}: send one part, or one file with other fields beside it")
        return _value(files[0], kind)
    item: dict[str, Any] = {}
    for part in parts:
        if part.name not in fields:
            raise ValidationError(f"the form has a field {part.name[:80]!r}, which the model's items do not have")
        hint = fields[part.name][0]
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin is list and args:
            item.setdefault(part.name, []).append(_value(part, args[0]))
        elif part.name in item:
            raise ValidationError(f"the form has the field {part.name!r} twice")
        else:
            item[part.name] = _value(part, hint)
    return item


def _value(part: FormPart, kind: Any) -> Any:
    """Return the content of a part as what its type wants. Raises `ValidationError`."""
    if kind is bytes or (kind is Any and part.is_file):
        return part.content
    try:
        text = part.content.decode()
    except UnicodeDecodeError:
        raise ValidationError(f"the field {part.name!r} is not UTF-8") from None
    if kind is str:
        return text
    try:
        return msgspec.to_builtins(msgspec.convert(text, kind, strict=False), builtin_types=(bytes,))
    except (msgspec.MsgspecError, TypeError, NotImplementedError):
        pass
    try:
        return value_in(part.content)  # a list, an object
    except InvalidRequest:
        return text
