"""Requests that are admitted together or not at all, as the items of a list are."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import pytest

from carpool.core.journal import Journal
from carpool.errors import InvalidRequest, Overloaded, Unavailable
from carpool.request import Request
from tests.support.pipelines import ask, assert_counts, items, outcome, pipeline_of, reply, stage


class Listed(Request):
    """One of several."""

    __slots__ = ("others",)

    @property
    def companions(self) -> Sequence[Request]:
        return self.others  # type: ignore[no-any-return]


def together(values: Sequence[Any], deadline: float = inf, *, nbytes: int = 0, patient: bool = False) -> list[Request]:
    requests = [Listed(value, deadline, None, nbytes) for value in values]
    for request in requests:
        request.others = requests
        request.patient = patient
    return list(requests)


@pytest.mark.parametrize("journal", [None, Journal(100)])
def test_all_or_none_are_admitted(journal: Journal | None) -> None:
    """Where there is no room for all of them, none enters; what comes before and after is judged
    for itself.
    """
    pipeline = pipeline_of(stage(1, max_size=4), workers=0, journal=journal)
    first, second = together("ab"), together("cde")
    pipeline.submit(0, [*first, ask("single"), *second, ask("last"), ask("too many")])

    answers = pipeline.poll(0).answer
    assert items(answers) == ["c", "d", "e", "too many"]
    assert {outcome(request) for request in answers} == {Overloaded}
    assert items(list(pipeline.batchers[0].queue)) == ["a", "b", "single", "last"]
    assert_counts(pipeline, waiting=4, admitted=4, refused=4)


def test_bytes_count_together() -> None:
    """The bytes of all of them have to fit, and more than the queue ever holds are too large."""
    pipeline = pipeline_of(stage(1, max_bytes=10), workers=0)
    pipeline.submit(0, [*together("ab", nbytes=3), *together("cd", nbytes=3), *together("ef", nbytes=6)])

    kinds = [outcome(request) for request in pipeline.poll(0).answer]
    assert kinds == [Overloaded, Overloaded, InvalidRequest, InvalidRequest]
    assert items(list(pipeline.batchers[0].queue)) == ["a", "b"]


def test_the_last_of_them_has_to_make_its_deadline() -> None:
    """They are refused if the last of them could not be in time, but not while nothing waits or
    runs, since then the estimate is all that speaks against them.
    """
    pipeline = pipeline_of(stage(1))
    (warm,) = together("x")
    for now in (0, 10):
        pipeline.submit(now, [warm if now == 0 else ask("y")])
        (batch,) = pipeline.poll(now).run
        reply(pipeline, now + 10, batch, busy_s=10)
    pipeline.poll(20)

    idle = together("abc", 45)
    pipeline.submit(20, idle)
    (batch,) = pipeline.poll(20).run
    late, soon = together("def", 55), together("g", 90)
    pipeline.submit(20, [*late, *soon])
    refused = [request for request in pipeline.poll(20).answer if request.id == 0]
    assert items(refused) == ["d", "e", "f"]
    assert all(request.id for request in [*idle, *soon])


def test_patient_ones_wait_at_the_door() -> None:
    """With `when_full="wait"` they wait for room like any other, all of them."""
    pipeline = pipeline_of(stage(1, max_size=2, max_bytes=10))
    many = together(range(5), nbytes=1, patient=True)
    pipeline.submit(0, [*many, *together("ab", nbytes=11, patient=True)])
    served = []
    for now in range(5):
        todo = pipeline.poll(now)
        served += items(todo.run[0].requests)
        reply(pipeline, now, todo.run[0])
        if now == 0:
            assert {outcome(request) for request in todo.answer} == {InvalidRequest}
    assert served == list(range(5))


def test_a_closed_service_refuses_all_of_them() -> None:
    """They are refused as a closed service refuses any other, and those that were cancelled before
    are passed over.
    """
    pipeline = pipeline_of(stage(1))
    gone, *rest = together("abc")
    pipeline.cancel(0, gone)
    pipeline.submit(0, [gone, *rest])
    assert [request.id > 0 for request in [gone, *rest]] == [False, True, True]
    pipeline.close(Unavailable("closed"))
    others = together("de")
    pipeline.submit(0, others)
    assert {outcome(request) for request in others} == {Unavailable}
