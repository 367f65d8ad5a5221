"""Readers of items, writers of results, and JSON Schemas, all made from type hints with msgspec.

Besides the types of msgspec an item may be a numpy array (nested lists on the wire) or a pydantic
model. Both are recognised without importing their libraries.

A response is checked by reading it back (`_writer`): the reader is compiled once, so this is
cheaper and stricter than inspecting the object. Readers and writers are made when the first item of
their format comes (`MadeWhenNeeded`), so a hint that JSON cannot express harms no caller without
JSON; `App` makes them beforehand, to refuse it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import sys
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec.inspect import AnyType, CustomType, NoneType, RawType

from carpool.engine.details import Detail, sanitized
from carpool.engine.foreign import text_of
from carpool.engine.hints import misfits, nesting, plain
from carpool.engine.hints.plain import to_builtins
from carpool.engine.rows import as_array, is_array_type
from carpool.errors import InvalidRequest, ModelError, ValidationError

T = TypeVar("T")

_DOES_NOT_FIT = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError, NotImplementedError)

_LARGEST_TO_TAKE_APART = 64 * 1024
"""The most bytes of an item whose faults are all reported; in a larger one that takes too long."""

_NULL = b"null"
_TAKE_NULL = (AnyType, CustomType, NoneType, RawType)
_HALF_A_CHARACTER = re.compile(rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\)")
_TRUNCATED = "Input data was truncated"
_MAYBE_NAN = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
"""The first bytes of NaN and infinities in msgpack; other values may hold these bytes, too."""


_json_encoder = msgspec.json.Encoder(enc_hook=to_builtins)
_msgpack_encoder = msgspec.msgpack.Encoder(enc_hook=to_builtins)


def json_bytes(value: Any) -> bytes:
    """Return a value as JSON in one line; arrays are nested lists. Raises TypeError, ValueError or
    the like, also if it holds NaN or an infinity.
    """
    body = _json_encoder.encode(value)
    if body.partition(_NULL)[1]:
        _refuse_nan(value)
    return _without_line_ends(body)


def msgpack_bytes(value: Any) -> bytes:
    return _msgpack_encoder.encode(value)


def json_reader(kind: Any) -> Callable[[bytes], Any]:
    """Make a function that reads one JSON item of type `kind`.

    `as_our_error` translates the exceptions that the function raises.

    Raises:
        TypeError: msgspec cannot read the type: a union of two dataclasses, for example.
    """
    return nesting.bounded(_json_decoder(kind), nesting.is_deep_json)


def msgpack_reader(kind: Any) -> Callable[[bytes], Any]:
    return nesting.bounded(_msgpack_decoder(kind), nesting.is_deep_msgpack)


def _json_decoder(kind: Any) -> Callable[[bytes], Any]:
    if _is_pydantic(kind):
        return _pydantic_reader(kind)
    return msgspec.json.Decoder(kind, dec_hook=_from_json).decode


def _msgpack_decoder(kind: Any) -> Callable[[bytes], Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_from_builtins).decode


def raw_reader(kind: Any) -> Callable[[Any], Any]:
    """Make a function that reads a body as the item that it is: a text, or else bytes."""
    return _text if kind is str else bytes


def _text(body: Any) -> str:
    return bytes(body).decode()


class MadeWhenNeeded(dict[int, Callable[[Any], T]]):
    """Readers or writers by format: those that are `ready`, and those that `makers` make when the
    first item in the format comes.

    Python callers need none, so a type that cannot be read from JSON does not stand in their way.
    """

    def __init__(
        self, ready: Mapping[int, Callable[[Any], T]], makers: Mapping[int, Callable[[], Callable[[Any], T]]]
    ) -> None:
        super().__init__(ready)
        self._makers = makers

    def __missing__(self, format: int) -> Callable[[Any], T]:
        made = self[format] = self._makers[format]()
        return made


def why_unreadable(kind: Any) -> str | None:
    """Return why no item of type `kind` can be read from JSON or msgpack; None if some can."""
    try:
        json_reader(kind)
    except Exception as error:
        return text_of(error)
    if not isinstance(kind, type) or is_array_type(kind) or _is_pydantic(kind):
        return None
    if not isinstance(msgspec.inspect.type_info(kind), CustomType):
        return None
    if any(issubclass(builtin, kind) for builtin in (dict, list, str, int, float, bool, type(None))):
        return None
    return f"no JSON value can be read as {type_name(kind)}"


def why_unwritable(kind: Any) -> str | None:
    """Return why no result of type `kind` can be written as JSON or msgpack; None if some can."""
    try:
        json_reader(kind)
    except Exception as error:
        return text_of(error)
    return None


def why_misfit(value: Any, kind: Any, what: str) -> str | None:
    """Return why a value cannot travel as an item or result of type `kind`; None if it can, or may.

    It can if either JSON or msgpack expresses it. Where they cannot express the type, only Python
    callers send and get such values, and those must be of the class that the hint names; anything
    else is not checked.
    """
    if kind is Any:
        return None
    if not can_travel(kind):
        return _why_not_instance(value, kind, what)
    if kind is bytes and not isinstance(value, bytes | bytearray | memoryview):
        # a text may pass for the base64 that bytes are in JSON
        return f"{what} does not fit bytes: it is of type {type(value).__name__}"
    problems: list[str] = []
    for make in (json_writer, msgpack_writer):
        try:
            make(kind, what)(value)
            return None
        except BaseException as error:  # types may have writers and validators, which are user code
            problems.append(text_of(error))
    return problems[0]


def can_travel(kind: Any) -> bool:
    """Report whether JSON and msgpack can express all parts of a type."""
    try:
        if why_unreadable(kind) is not None:
            return False
        parts = _parts_of(kind)
    except Exception:  # a protocol, for example
        return False
    classes = [part.cls for part in parts if isinstance(part, CustomType)]
    return all(is_array_type(each) or _is_pydantic(each) for each in classes)


def _why_not_instance(value: Any, kind: Any, what: str) -> str | None:
    try:
        if not isinstance(kind, type) or isinstance(value, kind):
            return None
    except TypeError:  # a protocol, which has no fields at run time
        return None
    return f"{what} does not fit {type_name(kind)}: it is of type {type(value).__name__}"


def as_our_error(error: BaseException, what: str, kind: Any = Any, body: Any = b"") -> BaseException:
    """Translate a reader's exception: the item does not fit its type, or the body is malformed.

    Args:
        body: What the reader was given.

    Returns:
        A `ValidationError` or an `InvalidRequest`; any other exception as it is.
    """
    if isinstance(error, msgspec.ValidationError):  # a subclass of DecodeError: first
        return ValidationError(text_of(error), details=_details(error, what, kind, body))
    if isinstance(error, msgspec.DecodeError):
        text = str(error).partition("malformed: ")[2] or str(error)
        half = _HALF_A_CHARACTER.search(body) if what == "JSON" and text == _TRUNCATED and body else None
        if half is not None:  # msgspec looks for the other half behind the end
            text = f"a text has half of a character, {half[1].decode()}"
        return InvalidRequest(f"the body is not valid {what}: {text}")
    if isinstance(error, UnicodeDecodeError):
        return InvalidRequest(f"the body is not valid {what}: byte {error.start} is not UTF-8")
    if isinstance(error, RecursionError):
        return InvalidRequest(f"the {what} is nested too deeply")
    if isinstance(error, NotImplementedError | TypeError):
        return ValidationError(text_of(error))
    return error


def _details(error: msgspec.ValidationError, what: str, kind: Any, body: Any) -> list[Detail]:
    found: list[Detail] = []
    with contextlib.suppress(BaseException):  # converting runs code of the types
        if len(body) <= _LARGEST_TO_TAKE_APART:
            convert = _convert_msgpack if what == "msgpack" else _convert_json
            read = msgspec.msgpack.decode if what == "msgpack" else msgspec.json.decode
            found = misfits.all_of(read(body), kind, convert)
    with contextlib.suppress(BaseException):
        found = found or misfits.first_of(error, [])
    return sanitized(found)


def _convert_json(value: Any, kind: Any) -> Any:
    return msgspec.convert(value, kind, str_keys=True, dec_hook=_from_json)


def _convert_msgpack(value: Any, kind: Any) -> Any:
    return msgspec.convert(value, kind, builtin_types=(bytes, datetime.datetime), dec_hook=_from_builtins)


def json_writer(kind: Any, what: str = "the result") -> Callable[[Any], bytes]:
    """Make a function that writes one result as JSON, and raises `ModelError` if it does not fit.

    NaN and infinities never fit, since JSON cannot express them.

    Raises:
        TypeError: See `json_reader`.
    """
    return _writer(_json_encoder.encode, _json_decoder(kind), kind, what, writes_nan_as_null=True)


def msgpack_writer(kind: Any, what: str = "the result") -> Callable[[Any], bytes]:
    """Make a function that writes one result as msgpack; NaN and infinities are allowed."""
    return _writer(_msgpack_encoder.encode, _msgpack_decoder(kind), kind, what, writes_nan_as_null=False)


def json_schema(types: list[Any], ref_template: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the JSON Schemas (2020-12) of types, and the components that they refer to.

    A type that JSON cannot express, and None, has an empty schema. `ref_template` is a reference
    with `{name}` for a component's name.
    """
    schemas, components = msgspec.json.schema_components(
        [Any if t is None or why_unwritable(t) is not None else t for t in types],
        schema_hook=_schema_hook,
        ref_template=ref_template,
    )
    return list(schemas), components


def result_schema(kind: Any, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of results of a type; with pydantic it can differ from that of items."""
    if not _is_pydantic(kind):
        return schema
    written: dict[str, Any] = kind.model_json_schema(mode="serialization")
    return written


def as_example(value: Any) -> Any:
    return msgspec.to_builtins(value, enc_hook=to_builtins)


def type_name(kind: Any) -> str:
    """Return a type as a person would write it. A dict with known keys whose class nobody can name,
    such as that of a join, is written as its keys and their types.
    """
    if typing.is_typeddict(kind) and not hasattr(sys.modules.get(kind.__module__), kind.__name__):
        return "{" + ", ".join(f"{key!r}: {type_name(each)}" for key, each in kind.__annotations__.items()) + "}"
    name = None if typing.get_args(kind) and not is_array_type(kind) else getattr(kind, "__name__", None)
    return name or str(kind).replace("typing.", "")


def _writer(
    encode: Callable[[Any], bytes], read: Callable[[bytes], Any], kind: Any, what: str, *, writes_nan_as_null: bool
) -> Callable[[Any], bytes]:
    """Make a function that writes a result and checks that what is written reads as `kind`.

    That takes numpy scalars for numbers as the wire does. Objects that msgspec cannot read
    (pydantic models, arrays) fit, too, if they are of the type that the hint names: their library
    has checked them, and may not read what it writes.
    """
    write_anything = _unchecked_writer(encode, writes_nan_as_null=writes_nan_as_null)
    if kind is Any:
        return write_anything
    dtype = dtype_of(kind) if is_array_type(kind) else None
    kinds = _kinds_in(kind)
    fits = _object_check(kind) if CustomType in kinds else None
    # where null does not fit the type, reading refuses NaN without our help
    may_hide_nan = writes_nan_as_null and not kinds.isdisjoint(_TAKE_NULL)
    may_hold_raw = writes_nan_as_null and not kinds.isdisjoint((AnyType, RawType))

    def write(value: Any) -> bytes:
        try:
            body = encode(value)
            if may_hide_nan and body.partition(_NULL)[1]:
                _refuse_nan(value)
            if fits is None or not fits(value):
                read(body)
            if may_hold_raw:
                body = _without_line_ends(body)
        except _DOES_NOT_FIT as error:
            text = f"{what} does not fit {type_name(kind)}"
            raise _bad_result(text, error, value, encode, writes_nan_as_null=writes_nan_as_null) from error
        return body

    def write_array(value: Any) -> bytes:
        return write_anything(value) if getattr(value, "dtype", None) == dtype else write(value)

    return write if dtype is None else write_array


def _unchecked_writer(encode: Callable[[Any], bytes], *, writes_nan_as_null: bool) -> Callable[[Any], bytes]:
    def write(value: Any) -> bytes:
        try:
            body = encode(value)
            if writes_nan_as_null:
                if body.partition(_NULL)[1]:  # the fastest way to ask; `in` is the slowest
                    _refuse_nan(value)
                body = msgspec.json.format(body, indent=-1) if type(value) is msgspec.Raw else _without_line_ends(body)
        except _DOES_NOT_FIT as error:
            text = "the result cannot be written"
            raise _bad_result(text, error, value, encode, writes_nan_as_null=writes_nan_as_null) from error
        return body

    return write


def _without_line_ends(body: bytes) -> bytes:
    """Return JSON without line ends, which only a `msgspec.Raw` brings; in texts they are escaped.

    Raises:
        DecodeError: It is no JSON.
    """
    if body.partition(b"\n")[1] or body.partition(b"\r")[1]:
        return msgspec.json.format(body, indent=-1)
    return body


def _bad_result(
    what: str, error: Exception, value: Any, encode: Callable[[Any], bytes], *, writes_nan_as_null: bool
) -> ModelError:
    """Make the caller's error, which names the place in the result. If that is NaN, the error says
    so, instead of naming null.
    """

    def check(part: Any) -> None:
        if encode(part).partition(_NULL)[1] and writes_nan_as_null:
            _refuse_nan(part)

    with contextlib.suppress(BaseException):  # writing runs code of the types
        why = plain.why_unwritable(value, check)
        if why is not None:
            return ModelError(f"{what}: {why}", code="bad_result")
    return ModelError(f"{what}: {error}", code="bad_result")


def _refuse_nan(value: Any) -> None:
    """Raise ValueError if nulls in a written result stand for numbers that JSON does not have."""
    if _holds_nan(value):
        raise ValueError("NaN and infinities cannot be written as JSON (as msgpack they can)")


def _holds_nan(value: Any) -> bool:
    try:
        if _MAYBE_NAN.search(_msgpack_encoder.encode(value)) is None:
            return False
    except _DOES_NOT_FIT:  # an integer of more than 64 bits, for example
        pass
    try:
        json.dumps(msgspec.to_builtins(value, str_keys=True, enc_hook=to_builtins), allow_nan=False)
    except _DOES_NOT_FIT as error:
        return "JSON compliant" in str(error)
    return False


def _kinds_in(kind: Any) -> set[type]:
    return {type(info) for info in _parts_of(kind)}


def _parts_of(kind: Any) -> list[Any]:
    seen: dict[int, Any] = {}
    todo: list[Any] = [msgspec.inspect.type_info(kind)]
    while todo:
        info = todo.pop()
        if id(info) in seen:
            continue
        seen[id(info)] = info
        for name in info.__struct_fields__:
            value = getattr(info, name)
            parts = value if isinstance(value, tuple) else (value,)
            todo += [part for part in parts if isinstance(part, msgspec.inspect.Type | msgspec.inspect.Field)]
    return list(seen.values())


def _object_check(kind: Any) -> Callable[[Any], bool]:
    """Make a check of values that may hold objects which msgspec cannot read.

    It writes the value as msgpack, with a number in place of each such object, and reads it as
    `kind`. Where the hint names the type of the object, the number is turned back into the object,
    and nothing else about it is checked; the rest is checked as usual.
    """
    objects: list[Any] = []

    def number(value: Any) -> Any:
        if getattr(value, "ndim", None) == 0 and not is_array_type(type(value)):
            return to_builtins(value)  # a numpy scalar counts as a number
        objects.append(value)
        return msgspec.msgpack.Ext(0, str(len(objects) - 1).encode())

    encode = msgspec.msgpack.Encoder(enc_hook=number).encode
    read = msgspec.msgpack.Decoder(kind, dec_hook=_as_it_is, ext_hook=lambda _, data: objects[int(bytes(data))]).decode

    def fits(value: Any) -> bool:
        try:
            read(encode(value))
        except _DOES_NOT_FIT:
            return False
        finally:
            objects.clear()
        return True

    return fits


def _as_it_is(kind: Any, value: Any) -> Any:
    """Return an object in a result, if it is of the type that the hint names. Raises ValueError."""
    if is_array_type(kind):
        if not is_array_type(type(value)) or dtype_of(kind) not in (None, value.dtype):
            raise ValueError("not of this dtype")
    elif not isinstance(value, kind):
        raise ValueError("not of this type")
    return value


def _from_builtins(kind: Any, value: Any) -> Any:
    if is_array_type(kind):
        return _to_array(kind, value)
    if _is_pydantic(kind):
        return _validated(kind.model_validate, value, kind, value)
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    raise NotImplementedError(f"items of type {type_name(kind)} cannot be read from a request body")


def _from_json(kind: Any, value: Any) -> Any:
    """Convert a part of a JSON item: a strict pydantic model expects dates as text."""
    if _is_pydantic(kind):
        return _validated(kind.model_validate_json, _json_encoder.encode(value), kind, value)
    return _from_builtins(kind, value)


def _pydantic_reader(kind: Any) -> Callable[[bytes], Any]:
    """Make a reader of pydantic models: msgspec checks the JSON, pydantic the content."""
    decode, validate = msgspec.json.Decoder().decode, kind.model_validate_json

    def read(body: bytes) -> Any:
        value = decode(body)
        try:
            return _validated(validate, body, kind, value)
        except misfits.Unfit as error:
            raise ValidationError(str(error), details=error.details) from error

    return read


def _validated(validate: Callable[[Any], Any], form: Any, kind: Any, value: Any) -> Any:
    """Make a pydantic model of a part of an item.

    Raises:
        ValueError: The part does not fit.
    """
    try:
        return validate(form)
    except ValueError as error:
        if form is not value and _problems(error)[0].get("type") == "json_invalid":
            return _validated(kind.model_validate, value, kind, value)  # valid JSON, but too deep for pydantic's parser
        problems = _problems(error)
        text = _in_one_line(problems[0]) if problems[0] else str(error)
        raise misfits.Unfit(text, sanitized(each for each in problems if each)) from error


def fitted(value: Any, kind: Any) -> Any:
    """Return a value made of builtins and arrays as an item of type `kind`.

    Raises:
        ValidationError: It does not fit.
    """
    try:
        if _is_pydantic(kind):
            return _validated(kind.model_validate, value, kind, value)
        return msgspec.convert(value, kind, dec_hook=_as_it_is)
    except BaseException as error:  # converting runs code of the types
        raise ValidationError(text_of(error)) from error


def _is_pydantic(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(kind, "model_validate_json")


def _problems(error: ValueError) -> list[dict[str, Any]]:
    """Return pydantic's descriptions of the faults; an empty one if the error is not pydantic's."""
    problems = getattr(error, "errors", None)
    return [{}] if problems is None else problems(include_url=False, include_input=False)


def _in_one_line(problem: dict[str, Any]) -> str:
    path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in problem["loc"])
    return f"{problem['msg']} - at `${path}`"


def _to_array(kind: Any, value: Any) -> Any:
    import numpy as np

    array = as_array(value)  # ragged lists raise ValueError here
    if array.dtype.kind not in "biuf":
        raise ValueError("Expected an array of numbers")
    wanted = dtype_of(kind)
    if wanted is None or array.dtype == wanted:
        return array
    if wanted.kind in "iu" and array.size:
        if array.dtype.kind == "f":
            raise ValueError(f"Expected an array of {wanted}, got decimal numbers")
        limits = np.iinfo(wanted)
        if array.min() < limits.min or array.max() > limits.max:
            raise ValueError(f"Expected an array of {wanted}, got numbers out of its range")
    with np.errstate(over="ignore"):
        narrowed = array.astype(wanted)
    if wanted.kind == "f" and (np.isinf(narrowed) & ~np.isinf(array)).any():
        raise ValueError(f"Expected an array of {wanted}, got numbers out of its range")
    return narrowed


def dtype_of(kind: Any) -> Any:
    """Return the dtype in `NDArray[...]`; None for a bare `np.ndarray`."""
    import numpy as np

    for argument in typing.get_args(kind)[1:]:
        for scalar in typing.get_args(argument):
            try:
                return np.dtype(scalar)
            except TypeError:
                return None
    return None


def _schema_hook(kind: Any) -> dict[str, Any]:
    if is_array_type(kind):
        dtype = dtype_of(kind)
        numbers = "numbers" if dtype is None else str(dtype)
        return {"type": "array", "items": {}, "description": f"array of {numbers}, as nested lists"}
    model_json_schema = getattr(kind, "model_json_schema", None)
    if model_json_schema is not None:
        schema: dict[str, Any] = model_json_schema()
        return schema
    return {"description": type_name(kind)}
