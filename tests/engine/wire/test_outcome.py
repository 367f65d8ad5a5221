"""Outcomes: what a worker says about a failed item, and the error that its caller gets for it."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.engine.wire.outcome import FailureReport, Outcome, pack_report, read_report, unpack_error
from carpool.engine.wire.payload import Payload
from carpool.errors import CarpoolError, DeadlineExceeded, InvalidRequest, ModelError, ValidationError
from tests.support.properties import PROPERTY

UNREADABLE = FailureReport("the item failed, but the worker's report of the error could not be read")


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (Outcome.INVALID, InvalidRequest),
        (Outcome.INVALID_ITEM, ValidationError),
        (Outcome.MODEL_ERROR, ModelError),
        (Outcome.BAD_RESULT, ModelError),
        (Outcome.EXPIRED, DeadlineExceeded),
    ],
)
def test_each_outcome_has_its_error(outcome: Outcome, error: type[CarpoolError]) -> None:
    """Each outcome gives the caller exactly its class of error, with the worker's words."""
    raised = unpack_error(outcome, pack_report(FailureReport("because of × and 車")))

    assert type(raised) is error
    assert str(raised) == "because of × and 車"


GOOD = (Outcome.OK, Outcome.RESPONSE, Outcome.DONE)


def test_every_outcome_but_success_is_told_by_name() -> None:
    """The codes of all outcomes but success differ, so that an answer says which it was; a new
    outcome must find its place.
    """
    report = pack_report(FailureReport("x", refusal=(404, "refused", ())))
    codes = {outcome: unpack_error(outcome, report).code for outcome in Outcome if outcome not in GOOD}

    assert codes == {
        Outcome.INVALID: InvalidRequest.code,
        Outcome.INVALID_ITEM: ValidationError.code,
        Outcome.MODEL_ERROR: "model_error",
        Outcome.BAD_RESULT: "bad_result",
        Outcome.EXPIRED: DeadlineExceeded.code,
        Outcome.REFUSED: "refused",
    }
    assert len(set(codes.values())) == len(codes)


def test_a_model_error_tells_what_was_raised_where() -> None:
    """A `ModelError` has the message, the name of the exception's class, and the traceback."""
    error = unpack_error(Outcome.MODEL_ERROR, pack_report(FailureReport("message", "KeyError", "Traceback: line 7")))

    assert isinstance(error, ModelError)
    assert (str(error), error.type_name, error.traceback) == ("message", "KeyError", "Traceback: line 7")


def test_an_unknown_outcome_is_a_model_error() -> None:
    """An outcome with a number that this version does not know is a `ModelError`."""
    assert type(unpack_error(200, pack_report(FailureReport("x")))) is ModelError


@pytest.mark.fault("F42", "F43")
@PROPERTY
@given(st.text(max_size=9), st.text(max_size=9), st.text(max_size=9))
def test_reports_come_back(message: str, type_name: str, traceback: str) -> None:
    """Reports with any texts come back as they were."""
    report = FailureReport(message, type_name, traceback)

    assert read_report(pack_report(report)) == report


@pytest.mark.parametrize("character", ["x", "é", "車", "🚗"])
def test_long_texts_are_cut(character: str) -> None:
    """Of a long message the beginning is kept, and of a long traceback the end, where it says what
    was raised.
    """
    report = read_report(
        pack_report(
            FailureReport(
                "begin" + character * 1_000_000,
                "Name" + character * 1_000_000,
                character * 1_000_000 + "the end",
            )
        )
    )

    assert report == FailureReport(
        "begin" + character * (2048 - 5), "Name" + character * (256 - 4), character * (16_384 - 7) + "the end"
    )


def test_texts_up_to_the_bound_are_kept() -> None:
    """Texts exactly up to the bound are kept whole."""
    report = FailureReport("m" * 2048, "n" * 256, "t" * 16_384)

    assert read_report(pack_report(report)) == report


def test_what_utf8_cannot_say_is_replaced() -> None:
    """Half a surrogate pair in a message of user code is replaced, and does not cost the report."""
    report = FailureReport("a\ud83db", "\udc80", "x\udfffy")

    assert read_report(pack_report(report)) == FailureReport("a?b", "?", "x?y")


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\x93",
        b"\x90",
        b"\xc0",
        b"\x93\x01\x02\x03",
        b"\x93\xa1\xff\xa0\xa0",
        b"\x91\xa3abcd",
        b"\xdd\xff\xff\xff\xff",
        b"\x91\xdb\xff\xff\xff\xff",
        b"\x94\xa1m\xa0\xa0" + b"\x91" * 100_000 + b"\xc0",
        b"\x81\xa7message\xa1m",
        pickle.dumps(FailureReport("m")),
        [b"\x91\xa1m", b"more"],
        [],
    ],
    ids=[
        "nothing",
        "cut short",
        "no message",
        "nil",
        "numbers",
        "no UTF-8",
        "more behind",
        "longer than it is",
        "a text longer than it is",
        "nested without end",
        "a map",
        "a pickle",
        "several buffers",
        "no buffer",
    ],
)
def test_a_report_that_is_none_does_no_harm(garbage: Payload) -> None:
    """If bytes are no report the item fails with a text that says so, and the process that reads
    them goes on.
    """
    assert read_report(garbage) == UNREADABLE
    assert str(unpack_error(Outcome.MODEL_ERROR, garbage)) == UNREADABLE.message


@PROPERTY
@given(st.binary(max_size=100))
@example(b"\x93\xa1a\xa1b\xa1c")
@example(b"\x92\xa1\xc3\xa0")
def test_any_bytes_are_a_report_or_unreadable(payload: bytes) -> None:
    """Any bytes are read as three texts, or are unreadable."""
    report = read_report(payload)

    assert [type(text) for text in (report.message, report.type_name, report.traceback)] == [str] * 3


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_report_is_read_from_any_buffer(kind: type[bytes]) -> None:
    """A report can be read from any buffer, also from a large one that has memory of its own."""
    assert read_report(kind(pack_report(FailureReport("m", "n", "t")))) == FailureReport("m", "n", "t")
