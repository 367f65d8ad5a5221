"""What holds for every policy there is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.policy import (
    AIMD,
    BY_NAME,
    STEPS_BY_NAME,
    Adaptive,
    Cork,
    Deadline,
    Greedy,
    OneByOne,
    Policy,
    Static,
    new_step_policy,
)
from tests.support.properties import PROPERTY
from tests.support.view import done, view_of, waiting

arrivals = st.lists(st.integers(0, 50).map(float), max_size=12)
delays = st.one_of(st.none(), st.integers(0, 20).map(float))


def policies(limit: int, delay_s: float | None) -> list[Policy]:
    """One of each kind, with something learned."""
    made = [kind(limit, delay_s) for kind in (*BY_NAME.values(), OneByOne)]
    made.append(Static(limit, delay_s, from_idle=True))
    for policy in made:
        policy.learn(0, done(2, 2, 2**-14, True))
    return made


def test_policies_have_names() -> None:
    """`Stage(policy=...)` takes names, each of which makes a policy without arguments."""
    named = {"greedy": Greedy, "static": Static, "aimd": AIMD, "cork": Cork, "deadline": Deadline}

    assert {name: BY_NAME[name] for name in named} == named
    assert [type(BY_NAME[name]()) for name in ("adaptive", "efficient")] == [Adaptive, Adaptive]
    assert BY_NAME.keys() == {"adaptive", "efficient", *named}


@pytest.mark.parametrize("kind", BY_NAME.values())
def test_the_limit_is_the_batch_size(kind: type[Policy]) -> None:
    """A policy's limit is the largest batch of its stage; without one, a batch has one request."""
    assert (kind(7).limit, kind().limit) == (7, 1)


@PROPERTY
@given(arrivals, delays, st.integers(1, 6), st.integers(0, 80), st.integers(0, 3), st.integers(0, 3))
def test_deciding_changes_nothing(
    arrived: Sequence[float], delay_s: float | None, limit: int, now: float, free: int, busy: int
) -> None:
    """A policy that is asked twice says the same, and the queue is what it was."""
    for policy in policies(limit, delay_s):
        queue = waiting(*sorted(arrived))
        before = list(queue)
        first = policy.decide(view_of(now, queue, free, busy))

        assert policy.decide(view_of(now, queue, free, busy)) == first
        assert list(queue) == before


@PROPERTY
@given(arrivals, delays, st.integers(1, 6), st.integers(0, 80), st.integers(0, 3), st.integers(0, 3))
def test_a_decision_is_possible(
    arrived: Sequence[float], delay_s: float | None, limit: int, now: float, free: int, busy: int
) -> None:
    """A decision never asks for more than waits or than the limit, nor for a worker that is not
    free, and holding back ends within its bound.
    """
    for policy in policies(limit, delay_s):
        decision = policy.decide(view_of(now, waiting(*sorted(arrived)), free, busy))

        assert 0 <= decision.take <= min(len(arrived), policy.limit)
        assert free or not decision.take
        assert (decision.reason != "") == (decision.take > 0)
        kept = sorted(arrived)[len(decision.drop) :]
        if free and kept and not decision.take:
            assert decision.wake_at is not None
            assert decision.wake_at > now
            assert delay_s is None or decision.wake_at <= kept[0] + delay_s


@PROPERTY
@given(arrivals, delays, st.integers(1, 6), st.integers(0, 80), st.sampled_from([0.25, 2.0, 1024.0]))
def test_time_has_no_scale(
    arrived: Sequence[float], delay_s: float | None, limit: int, now: float, scale: float
) -> None:
    """If all times are multiplied by one number, the batch stays the same and the wake-up time is
    multiplied by it.
    """
    for kind in (Greedy, Static):
        plain = kind(limit, delay_s).decide(view_of(now, waiting(*arrived), 1, 0))
        scaled_delay_s = None if delay_s is None else delay_s * scale
        scaled = kind(limit, scaled_delay_s).decide(view_of(now * scale, waiting(*[t * scale for t in arrived]), 1, 0))

        assert (scaled.take, scaled.reason) == (plain.take, plain.reason)
        assert scaled.wake_at == (None if plain.wake_at is None else plain.wake_at * scale)


class OfOnesOwn(Greedy):
    """A policy of a user's."""


@pytest.mark.parametrize(
    ("policy", "name"), [*((BY_NAME[name](), name) for name in BY_NAME), (OfOnesOwn(), "OfOnesOwn")]
)
def test_a_policy_is_called_as_users_write_it(policy: Policy, name: str) -> None:
    """In statistics and logs a policy has the name by which stages know it, or that of the user's class."""
    assert policy.explain(0.0)["policy"] == name


@pytest.mark.parametrize("name", STEPS_BY_NAME)
def test_a_policy_of_steps_is_called_as_users_write_it(name: str) -> None:
    """The same of policies of steps, whose classes are called otherwise."""
    assert new_step_policy(name, 4).explain(0.0)["policy"] == name
