"""How a worker tells what became of an item: a number, and for failures a text. Never an exception object."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from carpool.errors import CarpoolError, DeadlineExceeded, InvalidRequest, ModelError, ValidationError
from carpool.wire.payload import Payload

_LONGEST_MESSAGE = 2 * 1024
_LONGEST_TRACEBACK = 16 * 1024


class Outcome(IntEnum):
    """What became of an item in a worker. Anything but OK and RESPONSE carries a `Report` instead of a result."""

    OK = 0
    INVALID = 1  # the body could not be read
    INVALID_ITEM = 2  # it was read but does not fit
    MODEL_ERROR = 3  # user code raised
    BAD_RESULT = 4  # user code returned what does not fit
    EXPIRED = 5  # its deadline passed before its turn came
    RESPONSE = 6  # it is well, and its result says how to answer; see `wire/answer.py`


class Report(msgspec.Struct, array_like=True, frozen=True):
    """What a worker says about a failed item."""

    message: str
    type_name: str = ""
    traceback: str = ""


def pack(report: Report) -> bytes:
    """A report as bytes, cut to a bounded length; characters that UTF-8 cannot say are replaced."""
    return _encoder.encode(
        Report(
            _clean(report.message, _LONGEST_MESSAGE),
            _clean(report.type_name, 256),
            _clean(str.__getitem__(report.traceback, slice(-_LONGEST_TRACEBACK, None)), _LONGEST_TRACEBACK),
        )
    )


def read(payload: Payload) -> Report:
    """The report that `pack` made."""
    try:
        return _decoder.decode(payload)  # type: ignore[arg-type]
    except (msgspec.DecodeError, TypeError, UnicodeDecodeError, RecursionError):
        return Report("the worker's report could not be read")


def unpack(outcome: int, payload: Payload) -> CarpoolError:
    """The error that a caller gets for a failed item."""
    report = read(payload)
    if outcome == Outcome.INVALID:
        return InvalidRequest(report.message)
    if outcome == Outcome.INVALID_ITEM:
        return ValidationError(report.message)
    if outcome == Outcome.EXPIRED:
        return DeadlineExceeded(report.message)
    code = "bad_result" if outcome == Outcome.BAD_RESULT else "model_error"
    return ModelError(report.message, code=code, type_name=report.type_name, traceback=report.traceback)


def _clean(text: str, longest: int) -> str:
    # by the methods of str itself: it may be of a class of the user's that has others
    return str.__getitem__(text, slice(longest)).encode("utf-8", "replace").decode()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Report)
