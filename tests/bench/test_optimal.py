"""The least mean latency: against closed forms, against published figures, and its table as a policy."""

from __future__ import annotations

from math import ceil, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.policies.optimal import Optimal, optimal_mean_latency
from carpool.engine.core.queue import Queue
from carpool.engine.policy.base import NOTHING, Decision
from tests.effort import examples, slow_where
from tests.support.pipelines import ask
from tests.support.view import view_of

COSTS_MS = {
    "fixed": lambda n: 8 + 0.25 * n,
    "balanced": lambda n: 2 + n,
    "item": lambda n: 0.5 + 2 * n,
    "tile16": lambda n: 3 + 4 * ceil(n / 16),
    "sqrt": lambda n: 5 * sqrt(n),
    "knee": lambda n: 8 + 0.25 * n + 0.9 * max(0, n - 32),
}
OPTIMA_MS = {
    "fixed": (15.28, 20.36, 28.17),
    "balanced": (5.00, 9.03, 21.47),
    "item": (3.24, 5.49, 14.36),
    "tile16": (10.49, 11.41, 18.77),
    "sqrt": (18.71, 36.35, 51.29),
    "knee": (14.36, 17.46, 21.38),
}
"""Computed once by another implementation, at 0.3, 0.6 and 0.85 of capacity with a batch limit of 64."""


@slow_where(lambda name: name != "fixed")
@pytest.mark.parametrize("name", COSTS_MS)
def test_another_implementation_found_the_same(name: str) -> None:
    """For six shapes of cost at three loads the optimum is what another implementation found, to
    the hundredth of a millisecond that was written down.
    """
    cost_ms = COSTS_MS[name]
    capacity = max(n / cost_ms(n) for n in range(1, 65)) * 1000

    found = [optimal_mean_latency(lambda n: cost_ms(n) / 1000, load * capacity, 64).mean_s for load in (0.3, 0.6, 0.85)]

    assert [mean_s * 1000 for mean_s in found] == pytest.approx(OPTIMA_MS[name], abs=0.0051)


@given(load=st.floats(0.05, 0.9), seconds=st.floats(1e-4, 10.0))
@examples(25)
def test_single_items_wait_as_pollaczek_and_khinchin_say(load: float, seconds: float) -> None:
    """With a batch limit of 1 there is nothing to decide, and the mean latency is that of an M/D/1
    queue.
    """
    expected = seconds + load * seconds / (2 * (1 - load))

    assert optimal_mean_latency(lambda n: seconds, load / seconds, 1).mean_s == pytest.approx(expected, rel=1e-5)


@given(load=st.floats(0.1, 0.9), setup=st.floats(0.1, 10.0), limit=st.integers(2, 12))
@examples(25)
def test_a_larger_batch_limit_never_hurts(load: float, setup: float, limit: int) -> None:
    """With a larger batch limit the optimum can only fall, since what was possible stays possible."""
    rate = load / (setup + 1)

    def mean_s(limit: int) -> float:
        return optimal_mean_latency(lambda n: setup + n, rate, limit).mean_s

    assert mean_s(limit) <= mean_s(limit - 1) * (1 + 1e-6)


def test_the_table_stays_within_the_batch_limit_and_the_queue() -> None:
    """The table of the optimum has an entry for each state, and never takes more than waits or than
    the batch limit.
    """
    sizes = optimal_mean_latency(lambda n: (3 + 4 * ceil(n / 16)) / 1000, 2000.0, 64).batch_sizes

    assert sizes[0] == 0 and max(sizes) == 64
    assert all(n <= waiting for waiting, n in enumerate(sizes))


@pytest.mark.parametrize("rate", [0.0, -1.0, 1000.0, 2000.0])
def test_a_rate_that_no_policy_can_serve_is_an_error(rate: float) -> None:
    """A rate that no policy can serve is an error that names the capacity."""
    with pytest.raises(ValueError, match="below the capacity of 1000 requests/s"):
        optimal_mean_latency(lambda n: n / 1000, rate, 8)


def test_a_rate_too_near_to_the_capacity_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate too near to the capacity is an error: the queue would be too long to be cut off
    anywhere.
    """
    monkeypatch.setattr("bench.policies.optimal._LONGEST_QUEUE", 500)
    with pytest.raises(ValueError, match="too near to the capacity"):
        optimal_mean_latency(lambda n: n / 1000, 999.999, 1)


def test_the_policy_plays_the_table() -> None:
    """The optimal policy takes what the table has for the number waiting, by its last entry for all
    beyond, and nothing while no worker is free.
    """
    policy = Optimal([0, 0, 2, 2], max_batch_size=8)
    queue = Queue()
    decisions = []
    for _ in range(6):
        decisions.append(policy.decide(view_of(0.0, queue, 1, 0)))
        queue.push([ask(None, 1.0)])

    play = Decision(take=2, reason="table")
    assert decisions == [NOTHING, NOTHING, play, play, play, play]
    assert policy.decide(view_of(0.0, queue, 0, 1)) == NOTHING


def test_the_last_requests_do_not_wait_for_ever() -> None:
    """Where the table waits for more, the last requests go after the longest delay."""
    policy = Optimal([0, 0, 2], max_batch_size=8, max_queue_delay_s=0.5)
    queue = Queue()
    queue.push([ask(None, 9.0, arrived=1.0)])

    assert policy.decide(view_of(1.0, queue, 1, 0)) == Decision(wake_at=1.5)
    assert policy.decide(view_of(1.5, queue, 1, 0)) == Decision(take=1, reason="delay")
