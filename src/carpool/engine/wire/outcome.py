"""A worker's word on an item: an outcome, and a report of a failure or the head of a `Response`.
Sans-IO.

If the exception itself can be pickled, its pickle travels along. It is opened only when a Python
caller asks for the `__cause__` of its `ModelError`, in the thread that asks, and only if the module
of its class has been imported there: nothing is imported for it. HTTP does not ask.

A `Response` is its status, headers and content type as a head, and the body beside it. The head
comes from a worker, which runs the user's code, and its headers are written to a socket. So it is
checked once more where it is read.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from carpool.engine import details
from carpool.engine.details import Detail
from carpool.engine.http_response import BODILESS, HTTPError, Response, check_content_type, check_headers, check_status
from carpool.engine.wire.payload import Buffer, Payload, dumps, load
from carpool.errors import CarpoolError, DeadlineExceeded, InvalidRequest, ModelError, ValidationError, too_large

LONGEST_CAUSE = 64 * 1024
"""The most bytes of a pickled exception; a larger one is reported as text only."""

_LONGEST_MESSAGE = 2 * 1024  # characters
_LONGEST_TRACEBACK = 16 * 1024  # characters
_LONGEST_NAME = 256  # characters


class Outcome(IntEnum):
    """What became of an item in a worker. All but OK, RESPONSE and DONE carry a `FailureReport`
    instead of a result; so do none of those from `WAY` on.
    """

    OK = 0
    INVALID = 1  # the body could not be read
    INVALID_ITEM = 2  # the body was read, but the item does not fit the type hint
    MODEL_ERROR = 3  # user code raised
    BAD_RESULT = 4  # user code returned something that does not fit
    EXPIRED = 5  # its deadline passed before the worker came to it
    RESPONSE = 6  # user code returned a `Response`
    REFUSED = 7  # user code raised an `HTTPError`
    DONE = 8  # the result is the answer, whatever would follow


WAY: Final = 16
"""The outcome of a result that takes the first of several ways on; the other ways' follow."""

MOST_WAYS: Final = 256 - WAY


class FailureReport(msgspec.Struct, array_like=True, frozen=True):
    """The report of a failed item.

    Attributes:
        details: What is wrong with an item that does not fit.
        cause: The exception itself, pickled; empty if it does not travel.
        module: The module of its class.
        refusal: Status, code and headers of an `HTTPError`, or of a body that is too large.
    """

    message: str
    type_name: str = ""
    traceback: str = ""
    details: list[Detail] = []
    cause: bytes = b""
    module: str = ""
    refusal: tuple[int, str, tuple[tuple[str, str], ...]] | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode_report = msgspec.msgpack.Decoder(FailureReport).decode


def with_cause(report: FailureReport, error: BaseException) -> FailureReport:
    """Return the report with the exception itself, if that can be pickled."""
    try:
        cause = dumps(error, longest=LONGEST_CAUSE)
        return msgspec.structs.replace(report, cause=cause, module=str(type(error).__module__))
    except BaseException:  # pickling runs the user's code
        return report


def portable(error: Exception) -> Exception:
    """Return a copy of an error that can be pickled with its cause, as one from a worker has it."""
    if type(error) is not ModelError or error._find_cause is not None:
        return error  # one from another process has its cause as a pickle
    cause = error.__cause__
    if cause is None:
        return error
    found = ModelError(str(error), code=error.code, type_name=error.type_name, traceback=error.traceback)
    found._find_cause = partial(_cause_of, with_cause(FailureReport(""), cause))
    return found


def pack_report(report: FailureReport) -> bytes:
    """Return a report as bytes, cut to a bounded length; characters that UTF-8 cannot encode are
    replaced.
    """
    return _encode(
        FailureReport(
            _clean(report.message, _LONGEST_MESSAGE),
            _clean(report.type_name, _LONGEST_NAME),
            _clean(str.__getitem__(report.traceback, slice(-_LONGEST_TRACEBACK, None)), _LONGEST_TRACEBACK),
            details.sanitized(report.details),
            report.cause,
            _clean(report.module, _LONGEST_NAME),
            report.refusal,
        )
    )


def read_report(payload: Payload) -> FailureReport:
    """Read what `pack_report` has made; whatever cannot be read becomes a report that says so."""
    try:
        return _decode_report(payload)  # type: ignore[arg-type]
    except (msgspec.DecodeError, TypeError, UnicodeDecodeError, RecursionError):
        return FailureReport("the item failed, but the worker's report of the error could not be read")


def unpack_error(outcome: int, payload: Payload, cause: BaseException | None = None) -> CarpoolError:
    """Return the error that a caller gets for a failed item; `cause` is the exception itself, from
    a worker in this process.
    """
    report = read_report(payload)
    if outcome == Outcome.INVALID:
        is_too_large = report.refusal is not None and report.refusal[0] == 413
        return too_large(report.message) if is_too_large else InvalidRequest(report.message)
    if outcome == Outcome.INVALID_ITEM:
        return ValidationError(report.message, details=details.sanitized(report.details))
    if outcome == Outcome.EXPIRED:
        return DeadlineExceeded(report.message)
    if outcome == Outcome.REFUSED:
        return _refusal(report)
    code = "bad_result" if outcome == Outcome.BAD_RESULT else "model_error"
    error = ModelError(report.message, code=code, type_name=report.type_name, traceback=report.traceback)
    if cause is not None:
        error.__cause__ = cause  # with its frames, so that the traceback need not be shown as text
        return error
    error._note_traceback()
    if 0 < len(report.cause) <= LONGEST_CAUSE:
        error._find_cause = partial(_cause_of, report)
    return error


def _refusal(report: FailureReport) -> CarpoolError:
    """Return the `HTTPError` of a report, checked again, since a worker may send anything."""
    status, code, headers = report.refusal or (0, "", ())
    try:
        return HTTPError(report.message, status=status, code=code, headers=headers)
    except ValueError:
        return ModelError(report.message, type_name=report.type_name)


def _cause_of(report: FailureReport) -> BaseException | None:
    """Return the exception that a worker has sent; None if it cannot be opened here."""
    if report.module not in sys.modules:
        return None
    try:
        cause: Any = load(report.cause)
    # unpickling runs code of its class, which may need other arguments, for example
    except BaseException:
        return None
    return cause if issubclass(type(cause), BaseException) else None


def _clean(text: str, longest: int) -> str:
    # with the methods of str itself, since the text may be of a class that overrides them
    return str.__getitem__(text, slice(longest)).encode("utf-8", "replace").decode()


# -- responses of models' own


class CheckedResponse(NamedTuple):
    """A response that may be sent to a client.

    Attributes:
        content_type: Empty for the content type of any good answer.
        headers: Further headers, with names in lower case.
    """

    status: int
    body: Buffer
    content_type: bytes
    headers: tuple[tuple[bytes, bytes], ...]


class _Head(msgspec.Struct, array_like=True):
    status: int
    content_type: str | None
    headers: tuple[tuple[str, str], ...]


_decode_head = msgspec.msgpack.Decoder(_Head).decode


def pack_response(response: Response, body: Buffer) -> Payload:
    """Return a response as a payload; its value has been written as `body`."""
    return [_encode(_Head(response.status, response.content_type, response.headers)), body]


def unpack_response(payload: Payload) -> CheckedResponse:
    """Read what `pack_response` has made.

    Raises:
        ValueError: The payload is not a response, or one that must not be sent to a client.
    """
    if type(payload) is not list or len(payload) != 2:
        raise ValueError("a response must consist of a head and a body")
    try:
        head = _decode_head(payload[0])
        check_status(head.status)
        check_headers(head.headers)
        if head.content_type is not None:
            check_content_type(head.content_type)
    except (msgspec.MsgspecError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"the head of a response cannot be read: {error}") from error
    if head.status in BODILESS and len(payload[1]):
        raise ValueError(f"a response with status {head.status} must not have a body")
    headers = tuple([(name.lower().encode(), value.encode("latin-1")) for name, value in head.headers])
    return CheckedResponse(head.status, payload[1], (head.content_type or "").encode(), headers)
