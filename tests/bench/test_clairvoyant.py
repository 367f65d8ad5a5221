"""The clairvoyant bound, against every schedule there is."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.policies.optimal import clairvoyant_attainment
from tests.effort import examples


def most_on_time(arrivals: list[float], dues: list[float], seconds: list[float]) -> int:
    """Try every order of batches of every set of requests."""

    def best(left: frozenset[int], free_at: float) -> int:
        most = 0
        for n in range(1, min(len(left), len(seconds)) + 1):
            for batch in combinations(sorted(left), n):
                end = max(free_at, *(arrivals[i] for i in batch)) + seconds[n - 1]
                on_time = sum(end <= dues[i] for i in batch)
                if on_time:
                    most = max(most, on_time + best(left - set(batch), end))
        return most

    return best(frozenset(range(len(arrivals))), float("-inf"))


@st.composite
def instances(draw: st.DrawFn) -> tuple[list[float], list[float], list[float]]:
    """A few requests on a grid of quarters, so that equal times and tight fits are common."""
    quarters = st.integers(0, 24).map(lambda k: k / 4)
    n = draw(st.integers(1, 6))
    arrivals = sorted(draw(st.lists(quarters, min_size=n, max_size=n)))
    slo_s = draw(st.lists(quarters, min_size=n, max_size=n))
    dues = sorted(arrival + slack for arrival, slack in zip(arrivals, slo_s, strict=True))
    costs = sorted(draw(st.lists(st.integers(1, 12).map(lambda k: k / 4), min_size=1, max_size=4)))
    return arrivals, dues, costs


@given(instances())
@examples(150)
def test_no_schedule_does_better_and_one_does_as_well(instance: tuple[list[float], list[float], list[float]]) -> None:
    """For any rising batch costs, and while later arrivals are due later, no schedule beats the
    bound, and one reaches it.
    """
    arrivals, dues, seconds = instance

    attainment = clairvoyant_attainment(arrivals, dues, lambda n: seconds[n - 1], len(seconds))

    assert round(attainment * len(arrivals), 9) == most_on_time(arrivals, dues, seconds)


def test_everything_is_in_time_at_a_load_that_allows_it() -> None:
    """Where the arrivals are far apart, batches of one suffice for all to be in time."""
    arrivals = [float(i) for i in range(100)]

    assert clairvoyant_attainment(arrivals, [t + 0.5 for t in arrivals], lambda n: 0.1 * n, 8) == 1.0


def test_overload_leaves_what_the_worker_can_do() -> None:
    """Far above capacity the bound is the share that full batches serve, give or take the ends."""
    arrivals = np.arange(4000) / 4000
    dues = arrivals + 0.02

    share = clairvoyant_attainment(arrivals, dues, lambda n: 0.002 + 0.0005 * n, 16)  # 1600/s at best, of 4000

    assert share == pytest.approx(0.4 * 1.02, rel=0.02)


@pytest.mark.parametrize(
    ("arrivals", "dues", "message"),
    [
        ([], [], "above 0"),
        ([0.0, 1.0], [2.0], "same length"),
        ([1.0, 0.0], [2.0, 2.0], "must both rise"),
        ([0.0, 1.0], [3.0, 2.0], "must both rise"),
    ],
)
def test_times_that_the_bound_does_not_hold_for_are_an_error(
    arrivals: list[float], dues: list[float], message: str
) -> None:
    """The bound refuses times for which it does not hold: none, unequal lengths, wrong order, and
    requests due in another order than they came.
    """
    with pytest.raises(ValueError, match=message):
        clairvoyant_attainment(arrivals, dues, lambda n: 1.0, 2)


def test_a_cost_that_falls_is_an_error() -> None:
    """A cost that falls is refused: a late request could then be worth taking along."""
    with pytest.raises(ValueError, match="must not fall"):
        clairvoyant_attainment([0.0, 1.0], [2.0, 3.0], lambda n: 1.0 / n, 2)
