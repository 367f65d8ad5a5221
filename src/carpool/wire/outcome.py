"""How a worker tells what became of an item: a number, and for failures a text.

The exception itself travels along as a pickle, where it can be pickled, and stays one until a Python caller asks for
the `__cause__` of its `ModelError`. It is opened in the thread that asks, and only if the module of its class has been
imported there: nothing is imported for it. HTTP does not ask.
"""

from __future__ import annotations

import sys
from enum import IntEnum
from functools import partial
from typing import Any

import msgspec

from carpool import details
from carpool.details import Detail
from carpool.errors import CarpoolError, DeadlineExceeded, InvalidRequest, ModelError, ValidationError
from carpool.wire.payload import Payload, dump_within, load

LONGEST_CAUSE = 64 * 1024
"""Bytes of a pickled exception; of one that is larger only texts are told."""

_LONGEST_MESSAGE = 2 * 1024
_LONGEST_TRACEBACK = 16 * 1024


class Outcome(IntEnum):
    """What became of an item in a worker. All but OK and RESPONSE carry a `FailureReport` instead of a result."""

    OK = 0
    INVALID = 1  # the body could not be read
    INVALID_ITEM = 2  # it was read but does not fit
    MODEL_ERROR = 3  # user code raised
    BAD_RESULT = 4  # user code returned what does not fit
    EXPIRED = 5  # its deadline passed before its turn came
    RESPONSE = 6  # it is well, and its result says how to answer; see `wire/answer.py`


class FailureReport(msgspec.Struct, array_like=True, frozen=True):
    """What a worker says about a failed item.

    Attributes:
        message, type_name, traceback: of the exception, as texts.
        details: what is wrong with an item that does not fit.
        cause: the exception itself, pickled, if anything; module: where its class is.
    """

    message: str
    type_name: str = ""
    traceback: str = ""
    details: list[Detail] = []
    cause: bytes = b""
    module: str = ""


def with_cause(report: FailureReport, error: BaseException) -> FailureReport:
    """The report with the exception itself, if that can be pickled."""
    try:
        cause = dump_within(error, LONGEST_CAUSE)
        return msgspec.structs.replace(report, cause=cause, module=str(type(error).__module__))
    except BaseException:  # that runs code of the user's
        return report


def pack(report: FailureReport) -> bytes:
    """A report as bytes, cut to a bounded length; characters that UTF-8 cannot say are replaced."""
    return _encoder.encode(
        FailureReport(
            _clean(report.message, _LONGEST_MESSAGE),
            _clean(report.type_name, 256),
            _clean(str.__getitem__(report.traceback, slice(-_LONGEST_TRACEBACK, None)), _LONGEST_TRACEBACK),
            details.sanitized(report.details),
            report.cause,
            _clean(report.module, 256),
        )
    )


def read(payload: Payload) -> FailureReport:
    """The report that `pack` made."""
    try:
        return _decoder.decode(payload)  # type: ignore[arg-type]
    except (msgspec.DecodeError, TypeError, UnicodeDecodeError, RecursionError):
        return FailureReport("the worker's report could not be read")


def unpack(outcome: int, payload: Payload) -> CarpoolError:
    """The error that a caller gets for a failed item."""
    report = read(payload)
    if outcome == Outcome.INVALID:
        return InvalidRequest(report.message)
    if outcome == Outcome.INVALID_ITEM:
        return ValidationError(report.message, details=details.sanitized(report.details))
    if outcome == Outcome.EXPIRED:
        return DeadlineExceeded(report.message)
    code = "bad_result" if outcome == Outcome.BAD_RESULT else "model_error"
    error = ModelError(report.message, code=code, type_name=report.type_name, traceback=report.traceback)
    if 0 < len(report.cause) <= LONGEST_CAUSE:
        error._find_cause = partial(_cause_of, report)
    return error


def _cause_of(report: FailureReport) -> BaseException | None:
    """The exception that a worker has sent, with the worker's traceback; None if it cannot be had here."""
    if report.module not in sys.modules:
        return None
    try:
        cause: Any = load(report.cause)
    except BaseException:  # that runs code of its class, which may want other arguments, say
        return None
    return _with_note(cause, report) if issubclass(type(cause), BaseException) else None


def _with_note(cause: BaseException, report: FailureReport) -> BaseException:
    try:
        BaseException.add_note(cause, f"In the worker:\n{report.traceback.rstrip()}")
    except BaseException:  # what its class has in the place of notes is the user's, too
        return cause
    return cause


def _clean(text: str, longest: int) -> str:
    # by the methods of str itself: it may be of a class of the user's that has others
    return str.__getitem__(text, slice(longest)).encode("utf-8", "replace").decode()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FailureReport)
