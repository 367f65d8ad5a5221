"""Types of items: reading and checking them, writing results, and their JSON Schema. msgspec does the work.

Beyond what msgspec knows (builtins, dataclasses, TypedDict, Struct, ...) an item may be a numpy array (nested lists on
the wire) or a pydantic model; both are recognised without importing their libraries.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import msgspec

from carpool import nesting
from carpool.errors import InvalidRequest, ModelError, ValidationError
from carpool.foreign import text_of

_DOES_NOT_FIT = (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError)


def json_reader(kind: Any) -> Callable[[bytes], Any]:
    """A function that reads one JSON item of `kind`; `as_our_error` tells what its exceptions mean."""
    return nesting.bounded(msgspec.json.Decoder(kind, dec_hook=_from_builtins).decode, nesting.is_deep_json)


def msgpack_reader(kind: Any) -> Callable[[bytes], Any]:
    """A function that reads one msgpack item of `kind`; `as_our_error` tells what its exceptions mean."""
    return nesting.bounded(msgspec.msgpack.Decoder(kind, dec_hook=_from_builtins).decode, nesting.is_deep_msgpack)


def as_our_error(error: BaseException, what: str) -> BaseException:
    """What a reader's exception means for the caller: an item that does not fit, or a body that is malformed."""
    if isinstance(error, msgspec.ValidationError):  # a subclass of DecodeError: first
        return ValidationError(text_of(error))
    if isinstance(error, msgspec.DecodeError):
        text = str(error).partition("malformed: ")[2] or str(error)
        return InvalidRequest(f"the body is no valid {what}: {text}")
    if isinstance(error, UnicodeDecodeError):
        return InvalidRequest(f"the body is no valid {what}: byte {error.start} is not UTF-8")
    if isinstance(error, RecursionError):
        return InvalidRequest(f"the {what} is nested too deep")
    if isinstance(error, NotImplementedError | TypeError):
        return ValidationError(text_of(error))
    return error


def json_writer(kind: Any) -> Callable[[Any], bytes]:
    """A function that writes one result as JSON and raises `ModelError` if it does not fit `kind`."""
    return _writer(msgspec.json.Encoder(enc_hook=_to_builtins).encode, json_reader(kind), kind)


def msgpack_writer(kind: Any) -> Callable[[Any], bytes]:
    """A function that writes one result as msgpack and raises `ModelError` if it does not fit `kind`."""
    return _writer(msgspec.msgpack.Encoder(enc_hook=_to_builtins).encode, msgpack_reader(kind), kind)


def json_schema(types: list[Any], ref_template: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """JSON Schemas (2020-12) of `types`, and the components they refer to."""
    schemas, components = msgspec.json.schema_components(
        [Any if t is None else t for t in types], schema_hook=_schema_hook, ref_template=ref_template
    )
    return list(schemas), components


def as_example(value: Any) -> Any:
    """An example as JSON would show it."""
    return msgspec.to_builtins(value, enc_hook=_to_builtins)


def type_name(kind: Any) -> str:
    """A type as a person would write it."""
    return getattr(kind, "__name__", None) or str(kind).replace("typing.", "")


def _writer(encode: Callable[[Any], bytes], read: Callable[[bytes], Any], kind: Any) -> Callable[[Any], bytes]:
    """Encode and check in one: a result fits if what is written reads as `kind`.

    That is strict about what is inside, takes numpy scalars for numbers as the wire does, and costs less than looking
    at the object, because the reader is compiled once.
    """
    dtype = _dtype(kind) if _is_array(kind) else None

    def write(value: Any) -> bytes:
        try:
            body = encode(value)
            read(body)
        except _DOES_NOT_FIT as error:
            text = f"the result does not fit {type_name(kind)}: {error}"
            raise ModelError(text, code="bad_result") from error
        return body

    def write_array(value: Any) -> bytes:
        return write_anything(value) if getattr(value, "dtype", None) == dtype else write(value)

    def write_anything(value: Any) -> bytes:
        try:
            return encode(value)
        except _DOES_NOT_FIT as error:
            raise ModelError(f"the result cannot be written: {error}", code="bad_result") from error

    if kind is Any:
        return write_anything
    return write if dtype is None else write_array


def _from_builtins(kind: Any, value: Any) -> Any:
    """msgspec's hook for types it does not know."""
    if _is_array(kind):
        return _to_array(kind, value)
    validate = getattr(kind, "model_validate", None)
    if validate is not None:
        try:
            return validate(value)
        except ValueError as error:
            raise ValueError(_first_problem(error)) from error
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    raise NotImplementedError(f"items of type {type_name(kind)} cannot be read from a request body")


def _to_builtins(value: Any) -> Any:
    """msgspec's hook for results it does not know: arrays, tensors, numpy scalars, pydantic models."""
    for method in ("tolist", "model_dump"):
        convert = getattr(value, method, None)
        if convert is not None:
            return convert()
    raise TypeError(f"a result of type {value.__class__.__name__} cannot be written as JSON or msgpack")


def _first_problem(error: ValueError) -> str:
    """pydantic's first complaint in one line, with the field's path."""
    problems = getattr(error, "errors", None)
    if problems is None:
        return str(error)
    first = problems(include_url=False, include_input=False)[0]
    path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])
    return f"{first['msg']} - at `${path}`"


def _is_array(kind: Any) -> bool:
    base = typing.get_origin(kind) or kind
    return getattr(base, "__module__", "") == "numpy" and getattr(base, "__name__", "") == "ndarray"


def _to_array(kind: Any, value: Any) -> Any:
    """A numpy array from nested lists of numbers, of the dtype the hint names."""
    import numpy as np

    array = np.asarray(value)  # ragged lists raise ValueError here
    if array.dtype.kind not in "biuf":
        raise ValueError("Expected an array of numbers")
    wanted = _dtype(kind)
    if wanted is None or array.dtype == wanted:
        return array
    if wanted.kind in "iu" and array.size:
        if array.dtype.kind == "f":
            raise ValueError(f"Expected an array of {wanted}, got decimal numbers")
        limits = np.iinfo(wanted)
        if array.min() < limits.min or array.max() > limits.max:
            raise ValueError(f"Expected an array of {wanted}, got numbers out of its range")
    return array.astype(wanted)


def _dtype(kind: Any) -> Any:
    """The dtype in `NDArray[np.float32]`; None for a bare `np.ndarray`."""
    import numpy as np

    for argument in typing.get_args(kind)[1:]:
        for scalar in typing.get_args(argument):
            try:
                return np.dtype(scalar)
            except TypeError:
                return None
    return None


def _schema_hook(kind: Any) -> dict[str, Any]:
    if _is_array(kind):
        dtype = _dtype(kind)
        numbers = "numbers" if dtype is None else str(dtype)
        return {"type": "array", "items": {}, "description": f"array of {numbers}, as nested lists"}
    model_json_schema = getattr(kind, "model_json_schema", None)
    if model_json_schema is not None:
        schema: dict[str, Any] = model_json_schema()
        return schema
    return {"description": type_name(kind)}
