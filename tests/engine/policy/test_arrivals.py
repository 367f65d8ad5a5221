"""What arrival rates are, and how many had come by a moment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.policy.clients import Arrivals
from tests.support.properties import PROPERTY

gaps = st.lists(st.tuples(st.floats(0.001, 1), st.integers(1, 40)), min_size=1, max_size=300)


def came(*arrivals: tuple[float, int]) -> Arrivals:
    """What is remembered of so many at each of these times."""
    made = Arrivals()
    for when, n in arrivals:
        made.add(when, n)
    return made


def test_a_steady_stream_has_its_rate() -> None:
    """Four requests a second have a rate of four, by any window, before that is full and after."""
    for n in (2, 20, 32, 100, 256, 1000):
        arrivals = came(*[(i / 4, 1) for i in range(n)])

        assert arrivals.rate((n - 1) / 4) == pytest.approx(4)
        assert arrivals.rate((n - 1) / 4, 32) == pytest.approx(4)


def test_the_short_window_follows_sooner() -> None:
    """After 32 arrivals at ten times the rate it knows only these; the long one still counts 224 of before."""
    arrivals = came(*[(float(i), 1) for i in range(-300, 1)], *[(0.1 * i, 1) for i in range(1, 33)])

    assert arrivals.rate(3.2, 32) == pytest.approx(10)
    assert arrivals.rate(3.2) == pytest.approx(256 / (224 + 3.2))


def test_silence_counts() -> None:
    """Rates are measured up to now, so they fall while no request comes."""
    arrivals = came(*[(i / 4, 1) for i in range(33)])

    assert arrivals.rate(8 + 8, 32) == pytest.approx(2)
    assert arrivals.rate(8 + 72, 32) == pytest.approx(0.4)


def test_one_moment_is_no_rate() -> None:
    """However many requests come in one moment, they say nothing of a rate."""
    assert Arrivals().rate(5) == 0
    assert came((5, 1000)).rate(5) == 0
    assert came((5, 1000)).rate(6) == 0


def test_bursts_have_the_rate_of_their_requests() -> None:
    """Eight requests at a time, twice a second, have a rate of sixteen."""
    arrivals = came(*[(i / 2, 8) for i in range(200)])

    assert arrivals.rate(99.5) == pytest.approx(16)


@PROPERTY
@given(gaps, st.floats(-1, 300))
def test_who_had_come_by_a_moment(gaps: list[tuple[float, int]], when: float) -> None:
    """The count of arrivals by a moment includes those at the moment itself."""
    arrivals, now, by_then = Arrivals(), 0.0, 0
    for gap, n in gaps:
        now += gap
        arrivals.add(now, n)
        by_then += n if now <= when else 0

    assert arrivals.until(when) == by_then
    assert arrivals.until(now) == arrivals.total == sum(n for _, n in gaps)


def test_only_the_latest_moments_are_kept() -> None:
    """After a hundred thousand arrivals the count is still exact for the last thousand, and memory
    is that of a few thousand.
    """
    arrivals = came(*[(i / 1000, 1) for i in range(100_000)])

    assert len(arrivals._times) == len(arrivals._totals) <= 5000
    assert arrivals.until(99.0) == 99_001
    assert arrivals.until(1.0) <= 98_999
    assert arrivals.rate(99.999) == pytest.approx(1000)
