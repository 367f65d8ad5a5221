"""AIMD: one more after a full batch in time, a tenth less after a slow one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.policy import AIMD, Decision
from carpool.engine.policy.base import NOTHING
from tests.support.pipelines import ask
from tests.support.properties import PROPERTY
from tests.support.view import done, view_of, waiting


def after(policy: AIMD, *batches: tuple[int, float]) -> AIMD:
    """The policy once batches of these sizes have taken these seconds."""
    for n, busy_s in batches:
        policy.learn(0, done(n, n, busy_s, True))
    return policy


def test_it_starts_alone_and_grows_by_one() -> None:
    """The cap begins at one and grows by one with each full batch that is in time."""
    policy = AIMD(8, slo_s=1)

    assert [after(policy, (n, 0.5)).cap for n in (1, 2, 3)] == [2, 3, 4]


def test_a_batch_that_is_not_full_teaches_nothing() -> None:
    """A batch that is not full does not change the cap, since it says nothing of a batch of that
    size.
    """
    assert after(AIMD(8, slo_s=1), (1, 0.5), (2, 0.5), (2, 0.5), (1, 0.5)).cap == 3


def test_a_slow_batch_takes_back_a_tenth() -> None:
    """A batch that is slower than the objective, however full it was, takes a tenth off the cap;
    one exactly as slow does not.
    """
    grown = [(n, 1.0) for n in range(1, 20)]

    assert after(AIMD(64, slo_s=1), *grown).cap == 20
    assert after(AIMD(64, slo_s=1), *grown, (3, 1.01)).cap == 18
    assert after(AIMD(64, slo_s=1), *grown, (3, 1.01), (3, 1.01)).cap == 16
    assert after(AIMD(64, slo_s=1), *[(1, 9.0)] * 50).cap == 1


def test_it_does_not_grow_beyond_the_limit() -> None:
    """The cap stays at the limit, and the first slow batch takes it below, however long it has been
    there.
    """
    assert after(AIMD(10, slo_s=1), *[(n, 1.0) for n in range(1, 10)], *[(10, 1.0)] * 99, (10, 2.0)).cap == 9


def test_a_failed_batch_teaches_nothing() -> None:
    """A failed batch changes the cap neither as a quick nor as a slow one."""
    policy = after(AIMD(8, slo_s=1), (1, 0.5))
    policy.learn(0, done(2, 2, 0.001, False))
    policy.learn(0, done(2, 2, 9.0, False))

    assert policy.cap == 2


def test_it_takes_what_waits_up_to_the_cap() -> None:
    """What waits is sent up to the cap as soon as a worker is free."""
    policy = after(AIMD(8, slo_s=1), (1, 0.5), (2, 0.5))

    assert policy.decide(view_of(0, waiting(*[0.0] * 9), free=1, busy=0)) == Decision([], 3, "full")
    assert policy.decide(view_of(0, waiting(0, 0), free=1, busy=1)) == Decision([], 2, "free")
    assert policy.decide(view_of(0, waiting(0, 0), free=0, busy=1)) is NOTHING
    assert policy.decide(view_of(0, waiting(), free=1, busy=0)) is NOTHING


def test_what_is_late_is_dropped() -> None:
    """Requests that are late are dropped when the next batch is formed, and not before."""
    policy = after(AIMD(8, slo_s=1), (1, 0.5))
    queue = waiting(0, 1, 2, 3, deadlines=[4, 5, 6, 7])
    late = queue.peek(2)

    assert policy.decide(view_of(5, queue, free=0, busy=1)) is NOTHING
    assert policy.decide(view_of(5, queue, free=1, busy=0)) == Decision(late, 2, "full")
    assert policy.decide(view_of(7, queue, free=1, busy=0)) == Decision(queue.peek(4), 0, "")


def test_without_an_slo_of_its_own_it_takes_the_tightest_it_sees() -> None:
    """Without an SLO of its own the policy takes the tightest of the requests that wait, from
    arrival to due; requests without one do not count, and those that have gone are forgotten.
    """
    policy = AIMD(8)
    assert policy.objective_s == float("inf")

    for due in (float("inf"), 15.0, 12.0, 13.0, float("inf")):
        policy.arrived(10, [ask(deadline=due, arrived=10)])
    assert 2 < policy.objective_s < 2.1
    for _ in range(500):
        policy.arrived(10, [ask(deadline=15, arrived=10)])
    assert 4.9 < policy.objective_s <= 5


def test_an_slo_must_be_positive() -> None:
    """An SLO that is not positive is refused by the name of the setting."""
    with pytest.raises(ValueError, match="slo_s must be a positive number of seconds, not 0"):
        AIMD(slo_s=0)


@PROPERTY
@given(st.integers(1, 64), st.lists(st.tuples(st.integers(1, 64), st.floats(0, 3)), max_size=100))
def test_the_cap_stays_between_one_and_the_limit(limit: int, batches: list[tuple[int, float]]) -> None:
    """Whatever batches do, the cap stays between one and the limit."""
    assert 1 <= after(AIMD(limit, slo_s=1), *batches).cap <= limit
