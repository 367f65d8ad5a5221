"""Batches of like lengths without a cost: the first in line goes with those nearest to it."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.core.levels import BY_LENGTH
from carpool.engine.core.queue import Queue
from carpool.engine.policy import Greedy
from carpool.engine.policy.greedy import nearest
from carpool.engine.request import Request
from tests.support.properties import PROPERTY
from tests.support.view import view_of


def waiting(*lengths: int) -> Queue:
    """A queue in which requests of these lengths wait, in this order."""
    queue = Queue(levels=BY_LENGTH)
    for at, length in enumerate(lengths):
        request = Request(length, inf)
        request.length = length
        request.arrived = request.admitted = float(at)
        queue.push([request])
    return queue


def greedy(limit: int, most_padded: float = inf) -> Greedy:
    """A greedy policy with these limits."""
    policy = Greedy(limit)
    policy.max_padded_size = most_padded
    return policy


@pytest.mark.parametrize(
    ("lengths", "limit", "most_padded", "batch"),
    [
        pytest.param((100, 10, 90, 400, 110), 3, inf, [90, 100, 110], id="those of about its length"),
        pytest.param((10, 400, 390), 2, inf, [10, 390], id="the others, where there are no such"),
        pytest.param((50, 10, 12, 11, 300), 4, inf, [10, 11, 12, 50], id="shorter ones"),
        pytest.param((50, 60, 70, 20, 10), 5, 200, [20, 50, 60], id="as many as the padded size allows"),
        pytest.param((500, 10, 20), 3, 200, [500], id="alone, if it is longer than that by itself"),
        pytest.param((10, 500, 600), 3, 200, [10], id="none that is longer than that"),
    ],
)
def test_the_head_goes_with_those_nearest_to_it(
    lengths: tuple[int, ...], limit: int, most_padded: float, batch: list[int]
) -> None:
    """Where not all can go together, the first in line goes with those nearest to it in length."""
    decision = greedy(limit, most_padded).decide(view_of(0.0, waiting(*lengths), 1, 0))
    assert sorted(r.length for r in decision.chosen) == batch
    assert decision.chosen[0].length == lengths[0]
    assert decision.take == len(batch)


@pytest.mark.parametrize("lengths", [(10, 10, 10), (10, 300)])
def test_lengths_do_not_matter_where_they_are_equal_or_all_can_go(lengths: tuple[int, ...]) -> None:
    """Requests of one length, and requests that can all go, are taken in order, as ever."""
    assert not greedy(2).decide(view_of(0.0, waiting(*lengths), 1, 0)).chosen


@given(
    st.lists(st.integers(1, 2000), min_size=1, max_size=80),
    st.integers(1, 40),
    st.one_of(st.just(inf), st.integers(1, 20000)),
)
@PROPERTY
def test_a_batch_of_like_lengths_is_within_its_limits(lengths: list[int], limit: int, most_padded: float) -> None:
    """A batch of like lengths has its head, nobody twice, and is within both limits."""
    queue = waiting(*lengths)
    (head,) = queue.peek(1)
    batch = nearest(queue.levels[0].rising(), head, limit, most_padded)
    assert batch[0] is head and len(set(batch)) == len(batch) <= limit
    assert len(batch) == 1 or len(batch) * max(r.length for r in batch) <= most_padded
