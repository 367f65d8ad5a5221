"""Which worker is to be replaced since it is worn: by calls, memory or age, one at a time."""

from __future__ import annotations

from carpool.engine.core.roster import Recycling


def test_by_calls() -> None:
    """A worker is due when it has made as many calls as it may; a successor begins anew."""
    recycling = Recycling(max_calls=3)
    recycling.are_there(0, {0: 1, 1: 2})
    recycling.called(1, 2)
    assert recycling.due(0) is None
    recycling.called(1, 1)
    worn = recycling.due(0)
    assert worn is not None and worn.place == 1 and worn.why == "it has made 3 calls (max_calls=3)"
    recycling.are_there(1, {0: 1, 2: 3})
    assert recycling.due(1) is None


def test_by_memory() -> None:
    """A worker is due when its process holds more than it may."""
    recycling = Recycling(max_memory_mb=100)
    assert recycling.measures_memory and not Recycling(max_calls=1).measures_memory
    recycling.are_there(0, {0: 1})
    recycling.measured(0, 100)
    assert recycling.due(0) is None
    recycling.measured(0, 101)
    worn = recycling.due(0)
    assert worn is not None and "101 MiB" in worn.why


def test_by_age_and_the_oldest_first() -> None:
    """Of several that are due the oldest is named."""
    recycling = Recycling(max_age_s=10)
    recycling.are_there(0, {0: 1})
    recycling.are_there(5, {0: 1, 1: 2})
    assert recycling.due(9) is None
    worn = recycling.due(20)
    assert worn is not None and worn.place == 0


def test_a_worker_that_was_restarted_in_its_place_is_young() -> None:
    """After a crash the worker in the same place counts from its own start."""
    recycling = Recycling(max_age_s=10, max_calls=5)
    recycling.are_there(0, {0: 1})
    recycling.called(0, 5)
    recycling.are_there(8, {0: 2})
    assert recycling.due(17) is None
    assert recycling.due(18) is not None


def test_it_is_tried_ever_more_rarely_while_successors_fail() -> None:
    """After a successor that could not load there is a pause, longer each time, until one succeeds."""
    recycling = Recycling(max_age_s=1)
    recycling.are_there(0, {0: 1})
    assert [recycling.failed(10), recycling.failed(20)] == [5, 10]
    assert recycling.due(29) is None
    assert recycling.due(30) is not None
    recycling.succeeded(35)
    assert recycling.failed(40) == 5


def test_a_successor_that_is_over_the_limit_at_once_is_followed_ever_more_rarely() -> None:
    """A worker that holds too much memory when it has just loaded is replaced after pauses that
    double; one that does not ends the pauses.
    """
    recycling, now, pauses = Recycling(max_memory_mb=100), 0.0, []
    for order in range(10):
        recycling.are_there(now, {order: order})
        recycling.measured(order, 200)
        assert recycling.due(now) is not None
        pauses.append(recycling.succeeded(now, 200))
        recycling.are_there(now, {order + 1: order + 1})
        recycling.measured(order + 1, 200)
        assert recycling.due(now + pauses[-1] - 0.1) is None
        now += pauses[-1]
    assert pauses == [5, 10, 20, 40, 80, 160, 300, 300, 300, 300]
    assert recycling.succeeded(now, 90) == 0
    assert recycling.due(now) is not None
