"""Plans for a queue whose head is in a hurry, against plain counting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from carpool.policy.cost import CostModel
from carpool.policy.due_plan import DuePlan
from carpool.request import Request
from tests.effort import examples
from tests.policy.learned import learned

PROPERTY = examples(100, derandomize=True)
LIMIT = 16
LINE = learned(lambda n: 2.0 + n, LIMIT)
STEPS = learned(lambda n: 2.0 + 4 * -(-n // 4), LIMIT)


@dataclass(frozen=True)
class Case:
    """Requests by when they are due and how large they are, in the order of dues."""

    dues: Sequence[float]
    sizes: Sequence[int]
    cost: CostModel
    most: int
    workers: int
    at: float

    @property
    def requests(self) -> list[Request]:
        made = []
        for due, size in zip(self.dues, self.sizes, strict=True):
            request = Request("x", 1e9)
            request.due, request.size = due, size
            made.append(request)
        return made

    def seconds(self, start: int) -> float:
        """Of the next batch, planned with the margin, if it begins with request `start`."""
        return self.cost.seconds(self.units(start)) * self.cost.margin

    def units(self, start: int) -> int:
        return min(sum(self.sizes[start:]), self.most)

    def fitting(self, start: int, units: int) -> int:
        """The first request behind a batch of so many units that begins with `start`; one always goes."""
        end = start + 1
        while end < len(self.sizes) and sum(self.sizes[start : end + 1]) <= units:
            end += 1
        return end


def cases(sizes: Sequence[int] = (1, 1, 2, 3, 7)) -> st.SearchStrategy[Case]:
    """Small queues of requests of these sizes."""
    return st.integers(1, 30).flatmap(
        lambda n: st.builds(
            Case,
            st.lists(st.floats(0, 80), min_size=n, max_size=n).map(sorted),
            st.lists(st.sampled_from(sizes), min_size=n, max_size=n),
            st.sampled_from([LINE, STEPS]),
            st.integers(7, LIMIT),
            st.integers(1, 3),
            st.floats(0, 40),
        )
    )


def plan(case: Case) -> DuePlan:
    """The plan that is under test."""
    return DuePlan(case.requests, sum(case.sizes), case.cost, case.most, case.workers)


def first_in_time(case: Case, start: int, at: float) -> int:
    """Look for the first request in time one after the other."""
    found = (i for i in range(start, len(case.dues)) if case.dues[i] - at >= case.seconds(i))
    return next(found, len(case.dues))


def drained(case: Case, start: int, at: float) -> tuple[int, float]:
    """Batch by batch: who is late makes room, who is in time goes with as many as fit."""
    in_time = 0
    while (start := first_in_time(case, start, at)) < len(case.dues):
        end = case.fitting(start, case.units(start))
        at += case.cost.seconds(case.units(start)) / case.workers
        in_time += end - start
        start = end
    return in_time, at


@PROPERTY
@given(cases(), st.integers(0, 30))
def test_the_first_in_time(case: Case, start: int) -> None:
    """The binary search for the first request in time finds what a look at each finds."""
    start = min(start, len(case.dues))

    assert plan(case).first_in_time(start, case.at) == first_in_time(case, start, case.at)


@PROPERTY
@given(cases(), st.integers(0, 30))
def test_units_from_a_request_on(case: Case, start: int) -> None:
    """The units from a request on are its own size and all sizes behind it."""
    start = min(start, len(case.dues))

    assert plan(case).units(start) == sum(case.sizes[start:])


@PROPERTY
@given(cases())
def test_a_drain(case: Case) -> None:
    """A drain in closed form comes to the same as one that is counted batch by batch."""
    in_time, end = plan(case).drain(0, case.at)
    counted, counted_end = drained(case, 0, case.at)

    assert in_time == counted
    assert abs(end - counted_end) < 1e-9


@PROPERTY
@given(cases(sizes=(1,)))
def test_a_drain_keeps_its_word(case: Case) -> None:
    """Of requests that count as in time, the head of each batch is, and those behind it are due
    later.
    """
    at, served, start = case.at, 0, 0
    dues = sorted(case.dues)
    while (start := first_in_time(case, start, at)) < len(dues):
        n = case.units(start)
        assert all(due >= at + case.cost.seconds(n) for due in dues[start : start + n])
        served, start, at = served + n, start + n, at + case.cost.seconds(n) / case.workers

    assert plan(case).drain(0, case.at)[0] == served


@PROPERTY
@given(cases(), st.floats(0, 30))
def test_serving_the_head(case: Case, slack_s: float) -> None:
    """The head of the queue goes in the largest batch that its slack allows, or alone; the others
    follow.
    """
    units, in_time, end = plan(case).serve_head(case.at, slack_s)
    most = case.units(0)
    allowed = [n for n in range(1, most + 1) if case.cost.seconds(n) <= slack_s / case.cost.margin]
    following = case.fitting(0, units)
    counted, counted_end = drained(case, following, case.at + case.cost.seconds(units) / case.workers)

    assert units == max(allowed, default=1)
    assert in_time == following + counted
    assert abs(end - counted_end) < 1e-9


@PROPERTY
@given(cases())
def test_who_is_given_up_is_late(case: Case) -> None:
    """Given up are all requests ahead, by their due times, of the first one in time, each only for
    its own lateness.
    """
    made = plan(case)
    start = made.first_in_time(0, case.at)

    assert made.late_before(start, case.at) == list(made.requests[:start])


@PROPERTY
@given(cases(), st.randoms())
def test_nobody_in_time_is_given_up_for_others(case: Case, dice: object) -> None:
    """Where priorities mix the due times, requests that would be in time are not among those given
    up ahead of another one.
    """
    dues = list(case.dues)
    dice.shuffle(dues)  # type: ignore[attr-defined]
    mixed = Case(dues, case.sizes, case.cost, case.most, case.workers, case.at)
    made = plan(mixed)
    start = len(dues)
    late = set(made.late_before(start, mixed.at))

    for i, request in enumerate(made.requests):
        assert (request in late) == (request.due - mixed.at < mixed.seconds(i))
