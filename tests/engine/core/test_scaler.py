"""How many workers a stage should have: by arrivals and costs, up at once, down slowly, within its bounds."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.core.scaler import Scaler, Steady
from carpool.engine.core.times import Times
from carpool.engine.policy import Adaptive, Greedy, Policy
from tests.effort import examples
from tests.support.pipelines import asks, pipeline_of, reply, stage


def learned(least: int = 1, most: int = 8, slo_s: float = 0.06, limit: int = 64) -> Scaler:
    """A scaler that is told a cost of 8 ms and 0.25 ms for each unit."""
    return Scaler(least, most, limit, slo_s, lambda n: 0.008 + 0.00025 * n)


def load(scaler: Scaler, rate: int, seconds: range, workers: int = 1, wait_s: float = 0.0, unit: float = 1.0) -> int:
    """What is wanted after some seconds with so many requests each."""
    wanted = 0
    for second in seconds:
        wanted = scaler.wanted(second, rate * second, unit, wait_s, workers)
    return wanted


def test_the_capacity_is_that_of_the_largest_batch_twice_within_the_slo() -> None:
    """A request waits for one batch and is in the next; without an SLO the largest batch counts."""
    assert learned(slo_s=0.06).capacity(1) == pytest.approx(64 / 0.024)
    assert learned(slo_s=0.0241).capacity(1) == pytest.approx(16 / 0.012)
    assert learned(slo_s=inf).capacity(3) == pytest.approx(3 * 64 / 0.024)


@pytest.mark.parametrize(("workers", "batch"), [(2, 16), (3, 18), (5, 24)])
def test_several_workers_take_turns(workers: int, batch: int) -> None:
    """Of several workers one is free sooner, so that batches may take more of the SLO."""
    assert learned(slo_s=0.0241).capacity(workers) == pytest.approx(workers * batch / (0.008 + 0.00025 * batch))


@pytest.mark.parametrize(("rate", "wanted"), [(0, 1), (1000, 1), (3000, 2), (9300, 5), (50_000, 8)])
def test_as_many_as_the_load_needs(rate: int, wanted: int) -> None:
    """The number of workers is the load over 0.8 of a worker's capacity, within its bounds."""
    assert load(learned(), rate, range(10)) == wanted


def test_one_more_while_requests_would_wait_too_long() -> None:
    """If the queue is longer than the SLO allows, one more is wanted than the load needs, not ever more."""
    scaler = learned()

    assert load(scaler, 3000, range(30), workers=2, wait_s=0.5) == 3
    assert load(scaler, 3000, range(30, 60), workers=3, wait_s=0.5) == 3


def test_nothing_is_guessed_before_a_batch_has_run() -> None:
    """While no cost is known, the stage keeps the fewest workers."""
    assert load(Scaler(2, 8, 64, 0.06, lambda n: 0.0), 10_000, range(30), workers=2) == 2


def test_up_at_once_and_down_after_a_while() -> None:
    """A number that was wanted within the last 20 s is kept."""
    steady = Steady(1, 8)

    assert steady.settled(0, 1, 1) == 1
    assert steady.settled(1, 5, 1) == 5
    assert [steady.settled(1 + t, 2, 5) for t in range(1, 20)] == [5] * 19
    assert steady.settled(21, 2, 5) == 2
    assert steady.settled(22, 6, 2) == 6


def test_a_running_stage_does_not_shrink_at_first_sight() -> None:
    """Workers that were there when it began to look stay for the same time."""
    steady = Steady(1, 8)

    assert [steady.settled(t, 1, 4) for t in (0, 10, 19.9, 20)] == [4, 4, 4, 1]


@examples(200)
@given(
    st.integers(1, 4),
    st.integers(0, 6),
    st.lists(st.tuples(st.floats(0.1, 30), st.integers(-3, 20), st.integers(0, 12)), min_size=1, max_size=40),
)
def test_never_below_the_least_nor_above_the_most(least: int, more: int, looks: list[tuple[float, int, int]]) -> None:
    """Whatever is wanted and whenever, the number is within its bounds, and no less than what is wanted now."""
    steady, now = Steady(least, least + more), 0.0
    for pause_s, wanted, workers in looks:
        now += pause_s
        settled = steady.settled(now, wanted, workers)
        assert settled <= least + more
        assert settled >= min(max(wanted, least), least + more)


def test_sizes_count() -> None:
    """Where requests are larger than one unit of the limit, as many more workers are needed."""
    assert load(learned(), 2000, range(10), unit=4.0) == load(learned(), 8000, range(10))


@pytest.mark.parametrize("policy", [Greedy(64), Adaptive(64)], ids=["stage", "policy"])
def test_what_batches_cost_is_learned_once(policy: Policy) -> None:
    """A scaler asks its stage, which asks the policy if that learns costs, and else learns them itself."""
    batcher = stage(policy=policy)
    batcher.learn_costs()
    assert batcher.cost_s(8) == 0.0
    core, now = pipeline_of(batcher), 0.0
    for n in (1, 8, 16, 32, 64) * 12:
        core.flow.submit(now, asks(range(n)))
        while core.unanswered:
            for batch in core.poll(now).run:
                now += 0.009 + 0.00025 * batch.size
                reply(core, now, batch, busy_s=0.008 + 0.00025 * batch.size)
        now += 1.0
    assert batcher.cost_s(32) == pytest.approx(0.009 + 0.00025 * 32, rel=0.05)
    assert (batcher.times.cost_s(32) == 0.0) == isinstance(policy, Adaptive)
    assert batcher.times.unit == 1.0


def test_how_large_requests_are_is_learned() -> None:
    """The mean size of requests, too, is what the stage has seen."""
    times = Times()
    for _ in range(200):
        times.learn(0.01, 0.01, 4, 16, went_ahead=False)
    assert times.unit == pytest.approx(4.0, rel=0.01)
