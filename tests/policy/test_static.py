"""Static: full, or `max_queue_delay_s` since the oldest arrival; nothing waits without a reason."""

from __future__ import annotations

import pytest

from carpool.policy import Decision, Static
from carpool.policy.base import NOTHING
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
