"""Deadline: the largest batch that meets the earliest due time; who would hold it up is dropped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.core.queue import Queue
from carpool.engine.policy import Deadline, Decision
from carpool.engine.policy.base import NOTHING
from carpool.engine.policy.deadline import LineFit
from tests.support.properties import PROPERTY
from tests.support.view import done, view_of, waiting, warm_up


def profiled(limit: int = 8) -> Deadline:
    """With a profile: 2 s a batch and 1 s an item."""
    return Deadline(limit, cost_s=lambda n: 2.0 + n)


def queued(n: int, due: float, arrived: float = 0.0) -> Queue:
    """So many requests, due one second after the other."""
    return waiting(*[arrived] * n, deadlines=[due + i for i in range(n)])


def test_all_go_where_there_is_time() -> None:
    """Where there is time all requests go as soon as a worker is free, up to the limit."""
    assert profiled().decide(view_of(0, queued(5, due=100), free=1, busy=0)) == Decision([], 5, "free")
    assert profiled().decide(view_of(0, queued(9, due=100), free=1, busy=0)) == Decision([], 8, "full")
    assert profiled().decide(view_of(0, queued(9, due=100), free=0, busy=1)) is NOTHING
    assert profiled().decide(view_of(0, queued(0, due=100), free=1, busy=0)) is NOTHING


@pytest.mark.parametrize(("slo_s", "most"), [(6, 1), (11, 3), (12, 4), (13, 4), (20, 8), (1000, 8), (float("inf"), 8)])
def test_two_batches_fit_into_the_slo(slo_s: float, most: int) -> None:
    """The batch is the largest of which two fit into the SLO: a request that just misses one waits
    for it and then for its own.
    """
    queue = waiting(*[0.0] * 9, deadlines=[slo_s] * 9)

    assert profiled().decide(view_of(0, queue, free=1, busy=0)).take == most


def test_heads_that_would_hold_up_the_batch_are_dropped() -> None:
    """Requests that would hold up the batch are dropped from its head instead of making it smaller:
    four take 6 s, so those due before 26 are dropped.
    """
    queue = waiting(*[0.0] * 6, deadlines=[24, 25, 26, 26, 26, 26])
    late = queue.peek(2)

    assert profiled(4).decide(view_of(20, queue, free=1, busy=0)) == Decision(late, 4, "full")


def test_with_fewer_left_the_batch_is_smaller_and_faster() -> None:
    """With fewer requests left the batch is faster: the last two take only 4 s and are in time,
    which all three would not have been.
    """
    queue = waiting(5, 5, 5, deadlines=[24, 24.5, 25])

    assert profiled().decide(view_of(20, queue, free=1, busy=0)) == Decision(queue.peek(1), 2, "free")


def test_who_cannot_make_it_even_alone_is_dropped() -> None:
    """A request that cannot be in time even alone is dropped, also the last one, where the profile
    is known to be right.
    """
    queue = waiting(0, deadlines=[22.9])

    assert profiled().decide(view_of(20, queue, free=1, busy=0)) == Decision(queue.peek(1), 0, "")


def test_the_way_there_and_the_stages_behind_count() -> None:
    """The way to the worker and the stages behind count on top of the batch's seconds."""
    policy = profiled()
    queue, shown = waiting(0, deadlines=[23.75]), {"hop_s": 0.5, "onward_s": 0.25}

    assert policy.decide(view_of(20.0, queue, free=1, busy=0, **shown)) == Decision([], 1, "free")
    assert policy.decide(view_of(20.25, queue, free=1, busy=0, **shown)) == Decision(queue.peek(1), 0, "")


def test_without_a_profile_it_learns_one() -> None:
    """Without a profile the policy learns one from batches that ran to their end, and from a
    warm-up.
    """
    policy = Deadline(64)
    policy.learn(0.0, warm_up(1, 1, 3.0))
    policy.learn(0, done(1, 1, 50.0, False))
    for n in (1, 4, 2, 8, 6, 3) * 20:
        policy.learn(0, done(n, n, 2.0 + n, True))

    assert policy.time_s(5) == pytest.approx(7.0, rel=0.01)
    assert policy.time_s(30) == pytest.approx(32.0, rel=0.02)


def test_a_wrong_lesson_does_not_refuse_everybody_for_ever() -> None:
    """After one batch that took longer than any request has, single requests are served until the
    true cost is known.
    """
    policy = Deadline(8)
    policy.learn(0, done(1, 1, 100.0, True))
    queue = waiting(20, 20, deadlines=[25, 25])
    assert policy.decide(view_of(20, queue, free=1, busy=0)) == Decision(queue.peek(1), 1, "free")

    for _ in range(150):
        policy.learn(0, done(1, 1, 1.0, True))
    assert policy.decide(view_of(20, queue, free=1, busy=0)).drop == []


def test_what_batches_took_long_ago_is_forgotten() -> None:
    """When a model has become twice as slow, that is known some sixty batches later."""
    learned = LineFit()
    for slower in (1, 2):
        for n in (1, 8, 4) * 30:
            learned.add(n, slower * (2.0 + n))

    assert learned(5) == pytest.approx(14, rel=0.02)


lines = st.tuples(st.floats(0, 5), st.floats(0, 5))


@PROPERTY
@given(lines, st.lists(st.integers(1, 64), min_size=2, max_size=60, unique=True))
def test_a_line_is_found(line: tuple[float, float], sizes: list[int]) -> None:
    """Batches that lie on a line teach it, but for the little that ties the slope to what it was."""
    a, b = line
    learned = LineFit()
    for n in sizes * 30:
        learned.add(n, a + b * n)

    for n in sizes:
        assert learned(n) == pytest.approx(a + b * n, rel=0.1, abs=0.1 * b + 1e-9)


@PROPERTY
@given(st.lists(st.tuples(st.integers(1, 64), st.floats(0, 10)), max_size=60))
def test_a_line_never_falls_and_is_never_negative(batches: list[tuple[int, float]]) -> None:
    """Whatever it has seen, the learned line never expects less time for more requests, nor less
    than none.
    """
    learned = LineFit()
    for n, seconds in batches:
        learned.add(n, seconds)

    assert learned(1) >= -1e-9
    assert learned(64) >= learned(1) - 1e-9
