"""OneByOne: single items, several a hop only where their learned time is far below the hop's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.policy import Decision, OneByOne
from carpool.engine.policy.base import NOTHING
from carpool.engine.policy.one_by_one import HOP_BUDGET_S, MOST_IN_A_HOP
from tests.support.properties import PROPERTY
from tests.support.view import ahead_of, done, view_of, waiting


def learned(*item_s: float) -> OneByOne:
    """A policy that has seen items take these times, one after the other."""
    policy = OneByOne()
    for seconds in item_s:
        policy.learn(0, done(1, 1, seconds, True))
    return policy


def test_the_first_items_go_alone() -> None:
    """As long as no item's time is known, one item travels at a time."""
    assert OneByOne().decide(view_of(0, waiting(*[0.0] * 50), free=1, busy=0)) == Decision(take=1, reason="free")


@pytest.mark.parametrize(
    ("item_s", "together"), [(2**-6, 1), (0.001, 1), (2**-11, 2), (2**-13, 8), (2**-16, 65), (1e-7, 128), (0.0, 128)]
)
def test_about_a_millisecond_of_work_travels_together(item_s: float, together: int) -> None:
    """As many items as fit into the budget, at least one and at most `MOST_IN_A_HOP`."""
    policy = learned(item_s)

    assert policy.limit == together
    assert policy.decide(view_of(0, waiting(*[0.0] * 500), free=1, busy=0)).take == together


@pytest.mark.parametrize(("n", "free", "take"), [(1, 4, 1), (4, 4, 1), (5, 4, 2), (9, 2, 5), (500, 2, 65)])
def test_what_waits_is_shared_among_the_free_workers(n: int, free: int, take: int) -> None:
    """Waiting items are shared among the free workers: none gets a second one while another has
    none.
    """
    assert learned(2**-16).decide(view_of(0, waiting(*[0.0] * n), free, 0)) == Decision(take=take, reason="free")


@pytest.mark.parametrize(("nbytes", "together"), [(0, 65), (100, 65), (50_000, 20), (700_000, 1), (6_000_000, 1)])
def test_large_items_travel_with_few_others(nbytes: int, together: int) -> None:
    """About a megabyte travels together, also to a busy worker; a larger item goes alone."""
    queue = waiting(*[0.0] * 500)
    for request in queue:
        request.nbytes = nbytes
    policy = learned(2**-16)

    assert policy.decide(view_of(0, queue, free=1, busy=0)).take == together
    assert policy.decide(ahead_of(0, queue, 0.001)).take == together


def test_a_slow_item_is_believed_at_once() -> None:
    """One item as slow as the budget, and the next goes alone again."""
    policy = learned(2**-16, 2**-16, 0.5)

    assert policy.item_s == 0.5
    assert policy.limit == 1


def test_a_fast_item_is_believed_slowly() -> None:
    """The mean moves by a fifth of the difference."""
    assert learned(0.5, 0.25).item_s == 0.5 + 0.2 * (0.25 - 0.5)


def test_the_time_is_that_of_one_item() -> None:
    """What is learned from a frame is the time of one item: eight items that took 8 ms teach 1 ms."""
    policy = OneByOne()
    policy.learn(0, done(8, 8, 2**-7, True))

    assert policy.item_s == 2**-10


def test_without_a_free_worker_or_work_there_is_nothing_to_do() -> None:
    """Without a free worker or waiting items nothing is sent: nothing goes ahead to a busy worker."""
    assert learned(1e-6).decide(view_of(0, waiting(0, 0), free=0, busy=1)) is NOTHING
    assert learned(1e-6).decide(view_of(0, waiting(), free=1, busy=0)) is NOTHING


@PROPERTY
@given(st.lists(st.tuples(st.integers(1, 128), st.floats(0, 10)), max_size=20), st.integers(0, 300), st.integers(1, 8))
def test_a_hop_never_holds_more_than_the_budget(seen: list[tuple[int, float]], n: int, free: int) -> None:
    """Whatever was learned, several items travel together only within about a millisecond of work."""
    policy = OneByOne()
    for items, busy_s in seen:
        policy.learn(0, done(items, items, busy_s, True))

    take = policy.decide(view_of(0, waiting(*[0.0] * n), free=free, busy=0)).take

    assert take <= min(max(n, 0), policy.limit, MOST_IN_A_HOP)
    assert take >= min(n, 1)
    assert take <= 1 or take * (policy.item_s or 0.0) <= HOP_BUDGET_S
