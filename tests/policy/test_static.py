"""Static: full, or `max_queue_delay_s` since the oldest arrival; nothing waits without a reason."""

from __future__ import annotations

from typing import Any

import pytest

from carpool.core.queue import Queue
from carpool.policy import Decision, Static
from carpool.policy.base import FULL, NOTHING
from tests.core.stub import ask, items
from tests.policy.view import waiting


@pytest.mark.parametrize("n", [4, 5, 100])
def test_a_full_batch_goes_at_once(n: int) -> None:
    """As soon as the limit is reached, however young its requests are."""
    decision = Static(4, 10).decide(0, waiting(*[0.0] * n), free=1, busy=0)

    assert decision == Decision(take=4, reason="full")


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_nothing_waits_without_a_delay(n: int) -> None:
    """A delay of 0, which is the default, holds nobody back."""
    queue = waiting(*[7.0] * n)

    for policy in (Static(4), Static(4, 0), Static(4, 0.0)):
        decision = policy.decide(7, queue, free=1, busy=0)
        assert (decision.take, decision.reason) == (n, "full" if n == 4 else "delay")


def test_the_delay_counts_from_the_oldest_arrival() -> None:
    """Not from the last one, and not from when somebody asked: `wake_at` is exact."""
    policy, queue = Static(4, 10), waiting(3, 5, 8)

    assert policy.decide(8, queue, free=1, busy=0) == Decision(wake_at=13)
    assert policy.decide(12, queue, free=1, busy=0) == Decision(wake_at=13)
    assert policy.decide(13, queue, free=1, busy=0) == Decision(take=3, reason="delay")


def test_the_oldest_arrival_need_not_be_the_first_in_line() -> None:
    """The earliest deadline goes first, but the oldest request sets the time."""
    queue = waiting(3, 5, deadlines=[99, 50])

    assert Static(4, 10).decide(6, queue, free=1, busy=0) == Decision(wake_at=13)


def test_waiting_for_a_busy_worker_counts() -> None:
    """A request that has waited long enough goes as soon as a worker is free; it is not held again."""
    policy, queue = Static(4, 10), waiting(0)

    assert policy.decide(10, queue, free=0, busy=1) is NOTHING
    assert policy.decide(25, queue, free=1, busy=0) == Decision(take=1, reason="delay")


def test_without_a_free_worker_or_work_there_is_nothing_to_do() -> None:
    """And no time to be woken at: only an event can change that."""
    assert Static(4, 10).decide(0, waiting(*[0.0] * 9), free=0, busy=2) is NOTHING
    assert Static(4, 10).decide(0, waiting(), free=2, busy=0) is NOTHING


def test_only_so_many_batches_may_wait() -> None:
    """The newest beyond them are refused, whatever their dues; idle workers' batches do not count. It says why."""
    policy = Static(2, 10, max_queued_batches=2)
    queue = waiting(1, 2, 3, 4, 5, 6, deadlines=[60, 50, 40, 30, 20, 10])
    oldest_last = {request.arrived: request for request in queue}

    assert policy.decide(6, queue, free=0, busy=1) == Decision([oldest_last[6], oldest_last[5]], drop_reason=FULL)
    assert policy.decide(6, queue, free=1, busy=0) == Decision((), 2, "full")
    assert policy.decide(6, waiting(1, 2, 3, 4), free=0, busy=1) is NOTHING


def test_the_lowest_priority_is_refused_first() -> None:
    """Of those beyond the limit: the newest of the lowest priority, however new those of a higher one are."""
    policy, queue = Static(1, max_queued_batches=2), Queue()
    for arrived, priority in enumerate([0, 5, -1, 0, 5, -1]):
        queue.push([ask(arrived, priority=priority, arrived=arrived)])

    assert items(policy.decide(9, queue, free=0, busy=1).drop) == [5, 2, 3, 0]


def test_the_queue_limit_counts_sizes() -> None:
    """A request is refused only if it is wholly beyond the limit."""
    policy, queue = Static(4, max_queued_batches=1), waiting(1, 2, 3)
    for request, size in zip(list(queue), (2, 3, 2), strict=True):
        queue.remove(request)
        request.size = size
        queue.push([request])

    assert [request.arrived for request in policy.decide(3, queue, free=0, busy=1).drop] == [3]


@pytest.mark.parametrize(("n", "take", "reason"), [(1, 1, "delay"), (3, 3, "delay"), (5, 5, "delay"), (9, 8, "full")])
def test_padding_up_takes_all(n: int, take: int, reason: str) -> None:
    """The stage pads to the next allowed size; the largest one is the limit."""
    policy = Static(10, 0, allowed_batch_sizes=(2, 4, 8))

    assert policy.limit == 8
    assert policy.decide(0, waiting(*[0.0] * n), free=1, busy=0) == Decision((), take, reason)


@pytest.mark.parametrize(("n", "take"), [(1, 1), (2, 2), (3, 2), (5, 4), (7, 4), (8, 8), (9, 8)])
def test_padding_down_takes_what_can_be_filled(n: int, take: int) -> None:
    """Only what is short of the smallest size has to be padded."""
    policy = Static(8, 0, allowed_batch_sizes=(2, 4, 8), padding="down")

    assert policy.decide(0, waiting(*[0.0] * n), free=1, busy=0).take == take


def test_what_padding_down_leaves_waits_from_its_arrival() -> None:
    """Its delay is not started again."""
    policy = Static(8, 10, allowed_batch_sizes=(2, 4, 8), padding="down")

    assert policy.decide(11, waiting(1, 2, 7), free=1, busy=0).take == 2
    assert policy.decide(11, waiting(7), free=1, busy=0) == Decision(wake_at=17)


def test_sizes_above_the_stages_limit_do_not_count() -> None:
    """No batch is larger than its stage allows, not even the smallest allowed one."""
    assert Static(6, allowed_batch_sizes=(2, 4, 8)).limit == 4
    assert Static(3, allowed_batch_sizes=(4, 8)).limit == 3


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_queued_batches": 0}, "max_queued_batches must be at least 1, or None for no limit, not 0"),
        ({"allowed_batch_sizes": ()}, "allowed_batch_sizes must be rising"),
        ({"allowed_batch_sizes": (0, 2)}, "allowed_batch_sizes must be rising"),
        ({"allowed_batch_sizes": (2, 2)}, "allowed_batch_sizes must be rising"),
        ({"allowed_batch_sizes": (4, 2)}, "allowed_batch_sizes must be rising"),
        ({"padding": "left"}, "padding must be 'up' or 'down', not 'left'"),
    ],
)
def test_a_setting_that_cannot_be_is_named(settings: dict[str, Any], text: str) -> None:
    """With what it was and what would do."""
    with pytest.raises(ValueError, match=text):
        Static(8, **settings)
