"""Deadlines by the clock of another machine: what the two clocks differ by."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.worker.remote import ClockOffset


@given(st.floats(-1e6, 1e6), st.lists(st.tuples(st.floats(0.001, 60), st.floats(0, 30)), min_size=1, max_size=20))
def test_an_offset_is_never_too_small(truth: float, messages: list[tuple[float, float]]) -> None:
    """A deadline is never taken to be sooner than it is, and it is off by no more than the quickest message took."""
    clocks, now = ClockOffset(), 1000.0
    quickest = float("inf")
    for pause_s, way_s in messages:
        now += pause_s
        clocks.learn(now - truth, now + way_s)
        quickest = min(quickest, way_s)
        assert clocks.offset_s is not None
        assert truth - 1e-6 <= clocks.offset_s <= truth + quickest + 1200 * 2e-4 + 1e-6
        now += way_s


def test_clocks_that_drift_apart_are_followed() -> None:
    """An estimate that has become too small is given up in time: clocks drift, and the least of long ago misleads."""
    clocks = ClockOffset()
    for second in range(100_000):
        clocks.learn(second * (1 - 1e-4), second + 0.001)
    assert clocks.offset_s is not None
    assert abs(clocks.offset_s - 10.0) < 0.01
