"""Requests whose bodies are converted here and not in the worker: forms and .npy files."""

from __future__ import annotations

from typing import Any

from carpool.engine.hints import schema
from carpool.engine.rows import is_array_type
from carpool.engine.wire.payload import ARRAYS, MSGPACK, OBJECT, RAW
from carpool.errors import InvalidRequest, ValidationError
from carpool.http.codec import Formats
from carpool.http.exchange import HttpResponse
from carpool.http.multipart import FORM_TYPE, can_read_forms, item_of, parts_of
from carpool.http.npy import NPY_TYPE, array_in, as_npy
from carpool.http.protocols.base import ModelOfApp, Submission


def is_converted(content_type: bytes | None, accept: bytes | None, formats: Formats) -> bool:
    """Report whether a request's body or answer is converted here.

    Args:
        content_type: The header of that name.
        accept: The header of that name.
        formats: Of the address.
    """
    sent, wanted = _kind(content_type), _kind(accept)
    is_read = sent == NPY_TYPE or (sent == FORM_TYPE and can_read_forms())
    return (is_read and not formats.owns_input) or (wanted == NPY_TYPE and not (formats.owns_output or formats.joins))


def submission_of(
    model: ModelOfApp, body: bytes | bytearray, content_type: bytes | None, accept: bytes | None
) -> Submission:
    """Return what a request submits.

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
