"""Requests whose bodies are converted here and not in the worker: forms and .npy files.

A form (`multipart/form-data`) holds one file, or fields that fit the model's items. A body in the
.npy format of numpy is one array. Its header may only have plain dtypes, and a shape that fits the
body.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import struct
import typing
from math import prod
from typing import Any, Final, NamedTuple

import msgspec

from carpool.engine.allowance import Allowance
from carpool.engine.hints import schema
from carpool.engine.rows import as_array, is_array_type
from carpool.engine.wire.payload import ARRAYS, MSGPACK, OBJECT, RAW
from carpool.errors import InvalidRequest, ModelError, ValidationError, too_large
from carpool.http.codec import Formats
from carpool.http.exchange import HttpResponse
from carpool.http.protocols.base import ModelOfApp, Submission
from carpool.http.protocols.rows import fields_of
from carpool.http.protocols.wording import value_in


def is_converted(content_type: bytes | None, accept: bytes | None, formats: Formats) -> bool:
    """Report whether a request's body or answer is converted here."""
    sent, wanted = _kind(content_type), _kind(accept)
    is_read = sent == NPY_TYPE or (sent == FORM_TYPE and can_read_forms())
    return (is_read and not formats.owns_input) or (wanted == NPY_TYPE and not (formats.owns_output or formats.joins))


def submission_of(
    model: ModelOfApp, body: bytes | bytearray, content_type: bytes | None, accept: bytes | None
) -> Submission:
    """Return the submission of a request.

    Raises:
        CarpoolError: Its body is malformed or does not fit.
    """
    takes, formats = model.takes.input_type, model.formats
    sent, wanted = _kind(content_type), _kind(accept)
    item: Any
    if sent == NPY_TYPE:
        item, sent_as = _array(body, takes), OBJECT
    elif sent == FORM_TYPE:
        item, sent_as = _form(body, content_type or b"", takes)
    else:
        sent_as, _ = formats.choose(content_type, None)
        item = body
    if not (formats.owns_output or formats.joins) and (
        wanted == NPY_TYPE or (sent == NPY_TYPE and wanted in (b"", b"*/*"))
    ):
        return Submission(
            model, [item], lambda results: HttpResponse(200, as_npy(results[0]), NPY_TYPE), sent_as, ARRAYS
        )
    _, wanted_as = formats.choose(b"application/json", accept)
    kind = formats.types[wanted_as]
    return Submission(model, [item], lambda results: HttpResponse(200, results[0], kind), sent_as, wanted_as)


def _array(body: bytes | bytearray, takes: Any) -> Any:
    array = array_in(body)
    if takes is not Any and not is_array_type(takes):
        text = f"the model takes {schema.type_name(takes)}, not an array"
        raise InvalidRequest(text, status=415, code="unsupported_media_type")
    wanted = None if takes is Any else schema.dtype_of(takes)
    if wanted is not None and array.dtype != wanted:
        raise ValidationError(f"Expected an array of {wanted}, got one of {array.dtype}")
    return array


def _form(body: bytes | bytearray, content_type: bytes, takes: Any) -> tuple[Any, int]:
    item = item_of(parts_of(body, content_type), takes)
    if takes is bytes or (takes is str and isinstance(item, str)):
        return (item if isinstance(item, bytes) else item.encode()), RAW
    try:
        return schema.msgpack_bytes(item), MSGPACK
    except (TypeError, ValueError) as error:
        raise ValidationError(str(error)) from error


def _kind(header: bytes | None) -> bytes:
    return (header or b"").partition(b";")[0].partition(b",")[0].strip().lower()


FORM_TYPE: Final = b"multipart/form-data"
_LONGEST_BOUNDARY: Final = 70
_MOST_PARTS: Final = 128
_LONGEST_HEADERS: Final = 8 * 1024


class FormPart(NamedTuple):
    """One part of a form."""

    name: str
    is_file: bool
    content: bytes


@functools.cache
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
    """Takes the findings of the parser, within limits."""

    def __init__(self) -> None:
        self.parts: list[FormPart] = []
        self.has_ended = False
        self._header_bytes = 0
        self._field = self._line = self._disposition = b""
        self._content: list[bytes] = []

    def callbacks(self) -> dict[str, Any]:
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
    """Return the parameters of a header, behind its first semicolon, by name in lower case."""
    pairs = [part.partition(b"=") for part in header.split(b";")[1:]]
    return {name.strip().lower(): value.strip().strip(b'"').replace(b'\\"', b'"') for name, _, value in pairs}


def item_of(parts: list[FormPart], kind: Any) -> Any:
    """Return the item that a form is, in builtins.

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


NPY_TYPE: Final = b"application/x-npy"
_MAGIC: Final = b"\x93NUMPY"
_DESCR = re.compile(r"[<>=|]?[?bBiufc][0-9]{0,2}")
_MOST_AXES: Final = 32
_LONGEST_HEADER: Final = 4096


def array_in(body: bytes | bytearray) -> Any:
    """Return the array in a body, in memory of its own.

    Raises:
        InvalidRequest: The body is not a .npy file, or one with objects or other dtypes.
    """
    import numpy as np

    dtype, is_fortran, shape, at = _header_of(body)
    if dtype.hasobject or dtype.kind not in "biufc":
        raise InvalidRequest(f"the array is of dtype {str(dtype)!r}: only numbers and bools are read")
    count = prod(shape)
    if count * dtype.itemsize != len(body) - at:
        raise InvalidRequest(
            f"the array has {len(body) - at} bytes, but {dtype} of shape {list(shape)} takes {count * dtype.itemsize}"
        )
    Allowance(len(body)).take_array(shape or (1,), "the array")
    memory = bytearray(memoryview(body)[at:])
    array = np.frombuffer(memory, dtype) if count else np.empty(0, dtype)
    array = array.reshape(shape, order="F" if is_fortran else "C")
    return array.astype(dtype.newbyteorder("="), order="C", copy=False)


def _header_of(body: bytes | bytearray) -> tuple[Any, bool, tuple[int, ...], int]:
    if bytes(body[:6]) != _MAGIC or len(body) < 10 or body[6] not in (1, 2, 3):
        raise InvalidRequest("the body is not a .npy file")
    is_short = body[6] == 1
    at = 10 if is_short else 12
    if len(body) < at:
        raise InvalidRequest("the body is not a .npy file")
    (length,) = struct.unpack_from("<H" if is_short else "<I", body, 8)
    if length > min(_LONGEST_HEADER, len(body) - at):
        raise InvalidRequest("the header of the .npy file is too long")
    return *_read_header(bytes(body[at : at + length])), at + length


@functools.lru_cache(maxsize=128)  # clients send the same one again and again, and Python's parser takes 20 us
def _read_header(text: bytes) -> tuple[Any, bool, tuple[int, ...]]:
    import numpy as np

    try:
        header = ast.literal_eval(text.decode("ascii").strip())
        descr, is_fortran, shape = header["descr"], header["fortran_order"], header["shape"]
        is_fit = len(header) == 3 and isinstance(descr, str) and _DESCR.fullmatch(descr) and type(is_fortran) is bool
        is_fit = is_fit and type(shape) is tuple and len(shape) <= _MOST_AXES
        is_fit = is_fit and all(type(n) is int and n >= 0 for n in shape) and prod(filter(None, shape)) < 2**48
        dtype = np.dtype(descr) if is_fit else None
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError, UnicodeDecodeError):
        is_fit = False
    if not is_fit:
        raise InvalidRequest("the header of the .npy file is not one of an array of numbers or bools")
    return dtype, is_fortran, shape


def as_npy(value: Any) -> bytes:
    """Return a result as a .npy file.

    Raises:
        ModelError: It is not an array of numbers or bools.
    """
    import numpy as np

    try:
        array = as_array(value)
        array = np.ascontiguousarray(array) if array.ndim else array
    except ValueError as error:
        raise ModelError(f"the result is not an array: {error}", code="bad_result") from error
    if array.dtype.kind not in "biufc":
        raise ModelError(f"the result is an array of {array.dtype}, which .npy bodies do not hold", code="bad_result")
    header = f"{{'descr': {array.dtype.str!r}, 'fortran_order': False, 'shape': {array.shape!r}, }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    return b"".join([_MAGIC, b"\x01\x00", struct.pack("<H", len(header)), header.encode(), array.tobytes()])
