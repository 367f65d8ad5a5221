"""Admission: bounds, hopeless deadlines and when to try again."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.policy.admission import DISPLACED, LEAST_RETRY_S, MOST_RETRY_S, Admission, overloaded
from carpool.engine.policy.base import FULL, TOO_LATE
from carpool.errors import CarpoolError, InvalidRequest, Overloaded
from tests.support.pipelines import ask
from tests.support.properties import PROPERTY

INFINITY = float("inf")


def refusal(deadline: float = INFINITY, nbytes: int = 0, patient: bool = False, **state: Any) -> CarpoolError | None:
    """What becomes of a request at time 10, at a door for 4 requests and 100 bytes; nobody there unless said."""
    seen: dict[str, Any] = {"queued": 0, "queued_bytes": 0, "busy": 0, "wait_s": 0.0, "fastest_s": 0.0} | state
    return Admission(4, 100).refusal(10, [ask(deadline=deadline, nbytes=nbytes, patient=patient)], **seen)


def test_there_is_room_up_to_both_bounds() -> None:
    """A request still fits as the fourth of four, or with the hundredth byte of a hundred."""
    assert refusal(nbytes=40, queued=3, queued_bytes=60, busy=1) is None


@pytest.mark.parametrize("state", [{"queued": 4}, {"queued": 1, "queued_bytes": 61}])
def test_a_full_queue_refuses(state: dict[str, Any]) -> None:
    """A queue that is full by count or by bytes refuses requests and tells the predicted wait."""
    error = refusal(nbytes=40, busy=1, wait_s=2.5, fastest_s=0.5, **state)

    assert isinstance(error, Overloaded)
    assert (str(error), error.reason, error.retry_after_s) == ("the queue is full", "queue_full", 2.5)


@pytest.mark.parametrize(
    ("why", "due", "reason", "text"),
    [
        (TOO_LATE, 5.0, "slo", "the request would not be answered within its SLO"),
        (TOO_LATE, 9.0, "deadline", "the request would not be answered by its deadline"),
        (FULL, 5.0, "queue_full", FULL),
        (DISPLACED, 5.0, "priority", DISPLACED),
        ("not today", 5.0, "policy", "not today"),
    ],
)
def test_what_is_dropped_is_told_which_of_its_times_it_missed(why: str, due: float, reason: str, text: str) -> None:
    """A request that a policy drops as late hears of its SLO if that is what it would miss, and of
    its deadline otherwise; what a policy says in its own words stays as it is.
    """
    request = ask(deadline=9.0)
    request.due = due
    error = overloaded(request, why)
    assert (error.reason, str(error)) == (reason, text)


def test_what_could_never_fit_is_too_large() -> None:
    """A request that could never fit into the queue is refused as too large (413), also if it would
    wait for room.
    """
    for patient in (False, True):
        error = refusal(nbytes=101, patient=patient)
        assert isinstance(error, InvalidRequest)
        assert (error.status, error.code) == (413, "too_large")
        assert str(error) == "a request of 101 bytes is over the queue's 100"


@pytest.mark.parametrize("state", [{"queued": 1}, {"busy": 1}])
def test_a_hopeless_request_is_refused(state: dict[str, Any]) -> None:
    """A request is refused if its wait and the fastest answer end after its deadline; if they end
    at it, it is in time.
    """
    assert refusal(deadline=13.0, wait_s=2.0, fastest_s=1.0, **state) is None
    error = refusal(deadline=12.9, wait_s=2.0, fastest_s=1.0, **state)

    assert isinstance(error, Overloaded)
    assert str(error) == "the request would not be answered by its deadline"
    assert error.retry_after_s == 2.0


def test_an_idle_service_admits_whatever_it_believes() -> None:
    """An idle service admits every request, or one wrong estimate would refuse everybody for ever,
    with nothing to correct it.
    """
    assert refusal(deadline=10.001, wait_s=1e9, fastest_s=1e9) is None


def test_the_patient_wait() -> None:
    """A caller that prefers waiting to being refused is neither refused for its deadline nor turned
    away from a full queue.
    """
    assert refusal(deadline=11, patient=True, queued=4, busy=1, wait_s=50) is None


@pytest.mark.parametrize(
    ("wait_s", "fastest_s", "expected"),
    [(0.0, 0.0, LEAST_RETRY_S), (0.0, 0.3, 0.3), (7.0, 0.3, 7.0), (INFINITY, 0.0, MOST_RETRY_S)],
)
def test_when_to_try_again(wait_s: float, fastest_s: float, expected: float) -> None:
    """A refused caller is told to try again after the predicted wait, which is neither zero nor
    infinite.
    """
    error = refusal(queued=4, wait_s=wait_s, fastest_s=fastest_s)

    assert error is not None
    assert error.retry_after_s == expected


@PROPERTY
@given(
    st.integers(0, 6), st.integers(0, 120), st.integers(0, 2), st.floats(0, 100), st.floats(0, 100), st.floats(0, 50)
)
def test_whoever_is_admitted_fits(
    queued: int, nbytes: int, busy: int, wait_s: float, fastest_s: float, timeout_s: float
) -> None:
    """Whoever is admitted fits within both bounds; with a longer wait or less time a refused
    request is refused all the same; and an empty service refuses only what is too large.
    """
    state = {"queued": queued, "queued_bytes": queued * 20, "busy": busy, "fastest_s": fastest_s}
    error = refusal(10 + timeout_s, nbytes, wait_s=wait_s, **state)

    if error is None:
        assert queued < 4
        assert queued * 20 + nbytes <= 100
    else:
        assert refusal(10 + timeout_s / 2, nbytes, wait_s=wait_s * 2 + 1, **state) is not None
        assert queued or busy or isinstance(error, InvalidRequest)
