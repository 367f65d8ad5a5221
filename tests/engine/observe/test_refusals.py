"""Refused and late requests are summed up in the log: the first at once, then one line in ten seconds."""

from __future__ import annotations

import asyncio
import logging
from math import inf

import pytest

from carpool.engine.observe.refusals import EVERY_S, Refusals
from carpool.errors import CarpoolError, DeadlineExceeded, InvalidRequest, ModelError, Overloaded, Unavailable
from tests.support.http.front import Front, post
from tests.support.http.jump import on_a_jumping_loop, turns

FULL = Overloaded("the queue is full")


def told(refusals: Refusals, now: float) -> list[str]:
    return [str(line) for line in refusals.take(now)]


def test_the_first_refusal_is_told_at_once_and_the_rest_summed_up() -> None:
    """The first refusal of a kind is told at once, and those that follow once in ten seconds."""
    refusals = Refusals()
    refusals.count(FULL)
    assert refusals.is_due
    assert told(refusals, 5.0) == ["refused 1 (429): the queue is full"]
    for _ in range(21):
        refusals.count(FULL)
        assert not refusals.is_due
    assert told(refusals, 14.9) == []
    assert refusals.wake_at == 15.0
    assert told(refusals, 15.0) == ["refused 21 (429) in the last 10 s: the queue is full"]


def test_each_reason_has_lines_of_its_own() -> None:
    """A reason that comes up while another one is counted is told at once."""
    refusals = Refusals()
    refusals.count(FULL)
    refusals.take(0.0)
    refusals.count(FULL)
    refusals.count(DeadlineExceeded("no answer within 0.050 s: 0.031 s waiting for embed"))
    refusals.count(DeadlineExceeded("no answer within 0.051 s: 0.030 s waiting for embed"))
    assert refusals.is_due
    assert told(refusals, 4.0) == ["gave up 2 (504): the deadline passed before the answer was ready"]
    assert refusals.wake_at == EVERY_S
    assert told(refusals, 10.0) == ["refused 1 (429) in the last 10 s: the queue is full"]


def test_streams_that_break_off_or_go_on_have_lines_of_their_own() -> None:
    """What fails after its first part is told whoever has raised it, apart from what is refused
    with the same code; what goes on elsewhere has no status.
    """
    refusals = Refusals()
    lost = Unavailable("lost", code="worker_lost")
    refusals.count(lost)
    refusals.broke_off(lost)
    refusals.broke_off(lost)
    refusals.broke_off(ModelError("ValueError: bad row"))
    refusals.broke_off(ValueError("bad row"))
    refusals.broke_off(Unavailable("over", code="draining"))
    refusals.went_on(0)
    refusals.went_on(31)
    lines = refusals.take(5.0)
    assert [str(line) for line in lines] == [
        "failed 1 (503): the worker that had the request died",
        "broke off 2 (503): after the first part, the worker that had the request died",
        "broke off 2 (500): after the first part, the model raised an error",
        "broke off 1 (503): after the first part, the service is shutting down",
        "resumed 31: they go on from the parts that they have had",
    ]
    assert [line.reason.is_alarming for line in lines] == [True, True, True, False, False]
    refusals.went_on(2)
    assert not refusals.is_due
    assert told(refusals, 15.0) == ["resumed 2 in the last 10 s: they go on from the parts that they have had"]


def test_a_reason_that_is_quiet_is_forgotten() -> None:
    """After ten seconds without a refusal no timer is left, and the next one is told at once."""
    refusals = Refusals()
    refusals.count(FULL)
    refusals.take(0.0)
    assert told(refusals, 10.0) == []
    assert refusals.wake_at == inf
    refusals.count(FULL)
    assert refusals.is_due
    assert told(refusals, 500.0) == ["refused 1 (429): the queue is full"]


def test_at_the_end_everything_is_told() -> None:
    """What was counted since the last line is not lost where the service ends."""
    refusals = Refusals()
    refusals.count(FULL)
    refusals.take(0.0)
    refusals.count(FULL)
    assert [str(line) for line in refusals.take(2.0, everything=True)] == [
        "refused 1 (429) in the last 2 s: the queue is full"
    ]
    refusals.count(FULL)
    assert [str(line) for line in refusals.take(2.2, everything=True)] == [
        "refused 1 (429) in the last 1 s: the queue is full"  # and not in the last 0 s
    ]


def test_reasons_are_bounded() -> None:
    """However many texts there are, a bounded number of reasons is kept apart, and none is lost."""
    refusals = Refusals()
    for n in range(1000):
        refusals.count(Overloaded(f"reason {n}"))
    lines = refusals.take(0.0)
    assert len(lines) < 50
    assert sum(line.requests for line in lines) == 1000


def test_only_what_is_wrong_with_the_service_is_alarming() -> None:
    """Callers' mistakes and the service's own beginning and end are no cause for alarm, and what
    a model raises is told elsewhere.
    """
    alarming: dict[CarpoolError, bool] = {
        FULL: True,
        DeadlineExceeded("late"): True,
        Unavailable("lost", code="worker_lost"): True,
        Unavailable("ending", code="draining"): False,
        InvalidRequest("no", status=415, code="unsupported_media_type"): False,
    }
    for error, expected in alarming.items():
        refusals = Refusals()
        refusals.count(error)
        assert [line.reason.is_alarming for line in refusals.take(0.0)] == [expected]
    refusals = Refusals()
    refusals.count(ModelError("boom"))
    refusals.count(RuntimeError("boom"))
    assert refusals.take(0.0) == []


def test_who_may_have_killed_a_worker_has_a_line_of_its_own() -> None:
    """A time-out after a worker was lost with the request is told apart from any other."""
    refusals = Refusals()
    refusals.count(DeadlineExceeded("late"))
    suspect = DeadlineExceeded("late")
    suspect.worker_lost = True
    refusals.count(suspect)
    assert told(refusals, 0.0) == [
        "gave up 1 (504): the deadline passed before the answer was ready",
        "gave up 1 (504): a worker was lost with the request, which may be why, and the deadline passed before it"
        " had run again",
    ]


def test_an_error_whose_attributes_make_no_sense_is_counted() -> None:
    """An error of a user's class is counted whatever its attributes are."""

    class Odd(CarpoolError):
        status = "many"  # type: ignore[assignment]

    refusals = Refusals()
    refusals.count(Odd())
    assert told(refusals, 0.0) == ["refused 1 (500): other reasons"]


@on_a_jumping_loop
async def test_a_front_sums_up_what_it_refuses(caplog: pytest.LogCaptureFixture) -> None:
    """A service logs refusals of its queue and of its HTTP front: at once, after ten seconds without
    another event, and when it stops.
    """
    caplog.set_level(logging.INFO, logger="carpool")
    front = Front(queue=1, cost_s=None)
    full = "(429){}: the queue is full"
    for n in range(4):
        wire = front.connect()
        wire.send(post(b"%d" % n))
        await turns()
    wrong = front.connect()
    wrong.send(post(b"<x/>", "/predict", "Content-Type: text/xml"))
    await turns()
    first = [
        f"service echo refused 1 {full.format('')}",
        "service echo refused 1 (415): the model does not read the content type",
    ]
    assert caplog.messages == first
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]

    await asyncio.sleep(EVERY_S + 0.1)
    assert caplog.messages[2:] == [f"service echo refused 1 {full.format(' in the last 10 s')}"]

    front.connect().send(post(b"4"))
    await turns()
    assert len(caplog.messages) == 3
    stopping = asyncio.ensure_future(front.driver.stop(drain=False))
    await turns()
    assert any(message.startswith("service echo refused 1 (429) in the last") for message in caplog.messages[3:])
    await stopping
