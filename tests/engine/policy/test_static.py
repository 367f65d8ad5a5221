"""Static: full, or `max_queue_delay_s` since the oldest arrival; nothing waits without a reason."""

from __future__ import annotations

from typing import Any

import pytest

from carpool.engine.core.queue import Queue
from carpool.engine.policy import Decision, Static
from carpool.engine.policy.base import FULL, NOTHING
from tests.support.pipelines import ask, items
from tests.support.view import done, view_of, waiting


@pytest.mark.parametrize("n", [4, 5, 100])
def test_a_full_batch_goes_at_once(n: int) -> None:
    """A batch goes as soon as the limit is reached, however young its requests are."""
    decision = Static(4, 10).decide(view_of(0, waiting(*[0.0] * n), free=1, busy=0))

    assert decision == Decision(take=4, reason="full")


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_nothing_waits_without_a_delay(n: int) -> None:
    """With a delay of 0, which is the default, no request is held back."""
    queue = waiting(*[7.0] * n)

    for policy in (Static(4), Static(4, 0), Static(4, 0.0)):
        decision = policy.decide(view_of(7, queue, free=1, busy=0))
        assert (decision.take, decision.reason) == (n, "full" if n == 4 else "delay")


def test_the_delay_counts_from_the_oldest_arrival() -> None:
    """The delay counts exactly from the oldest arrival, not from the last one, and not from when
    somebody asked.
    """
    policy, queue = Static(4, 10), waiting(3, 5, 8)

    assert policy.decide(view_of(8, queue, free=1, busy=0)) == Decision(wake_at=13)
    assert policy.decide(view_of(12, queue, free=1, busy=0)) == Decision(wake_at=13)
    assert policy.decide(view_of(13, queue, free=1, busy=0)) == Decision(take=3, reason="delay")


def test_the_oldest_arrival_need_not_be_the_first_in_line() -> None:
    """The oldest request sets the time of the batch, although the one with the earliest deadline
    goes first.
    """
    queue = waiting(3, 5, deadlines=[99, 50])

    assert Static(4, 10).decide(view_of(6, queue, free=1, busy=0)) == Decision(wake_at=13)


def test_waiting_for_a_busy_worker_counts() -> None:
    """A request that has waited long enough for a busy worker goes as soon as one is free; it is
    not held again.
    """
    policy, queue = Static(4, 10), waiting(0)

    assert policy.decide(view_of(10, queue, free=0, busy=1)) is NOTHING
    assert policy.decide(view_of(25, queue, free=1, busy=0)) == Decision(take=1, reason="delay")


def ended(policy: Static, *times: float) -> Static:
    """The same policy, after batches that ended then."""
    for now in times:
        policy.learn(now, done(1, 1, 0.5, True))
    return policy


def test_from_idle_a_worker_that_waited_long_enough_waits_no_more() -> None:
    """With `from_idle` the first request after a silence of the delay goes at once; by default it
    would be held.
    """
    queue = waiting(22.3)

    assert ended(Static(4, 1.0, from_idle=True), 20).decide(view_of(22.3, queue, 1, 0)) == Decision(
        take=1, reason="delay"
    )
    assert ended(Static(4, 1.0), 20).decide(view_of(22.3, queue, 1, 0)) == Decision(wake_at=23.3)


def test_from_idle_the_delay_ends_so_long_after_the_last_batch() -> None:
    """With `from_idle` a request that comes earlier than the delay after the last batch is held for
    what is left of it; the clock starts anew with each batch.
    """
    policy = ended(Static(4, 10, from_idle=True), 20)

    assert policy.decide(view_of(24, waiting(24), free=1, busy=0)) == Decision(wake_at=30)
    assert policy.decide(view_of(29, waiting(24, 29), free=1, busy=0)) == Decision(wake_at=30)
    assert policy.decide(view_of(30, waiting(24, 29), free=1, busy=0)) == Decision(take=2, reason="delay")
    assert ended(policy, 33).decide(view_of(34, waiting(34), free=1, busy=0)) == Decision(wake_at=43)


def test_from_idle_who_waited_behind_a_busy_worker_is_not_held_longer() -> None:
    """With `from_idle` a request that waited behind a busy worker is held no longer than without
    it: its arrival counts if that is earlier than the end of the last batch.
    """
    policy = ended(Static(4, 10, from_idle=True), 20)

    assert policy.decide(view_of(20, waiting(13, 19), free=1, busy=0)) == Decision(wake_at=23)
    assert policy.decide(view_of(20, waiting(7, 19), free=1, busy=0)) == Decision(take=2, reason="delay")


def test_from_idle_a_full_batch_never_waits() -> None:
    """With `from_idle` a full batch goes at once, as without it."""
    policy = ended(Static(2, 10, from_idle=True), 20)

    assert policy.decide(view_of(20, waiting(20, 20), free=1, busy=0)) == Decision(take=2, reason="full")


def test_from_idle_a_worker_that_ran_nothing_yet_is_idle_for_ever() -> None:
    """With `from_idle` the very first request is not held, nor one while a new worker is free
    beside those that have just ended.
    """
    policy = Static(4, 10, from_idle=True)

    assert policy.decide(view_of(0, waiting(0), free=1, busy=0)).take == 1
    assert ended(policy, 5).decide(view_of(6, waiting(6), free=2, busy=0)).take == 1
    assert policy.decide(view_of(6, waiting(6), free=1, busy=1)) == Decision(wake_at=15)


def test_from_idle_the_worker_that_has_been_idle_longest_counts() -> None:
    """With `from_idle` the worker that has been idle longest counts: of two idle ones at least one
    fell idle at the last end but one, or before.
    """
    policy = ended(Static(4, 10, from_idle=True), 20, 28)

    assert policy.decide(view_of(29, waiting(29), free=2, busy=0)) == Decision(wake_at=30)
    assert policy.decide(view_of(29, waiting(29), free=1, busy=1)) == Decision(wake_at=38)


@pytest.mark.parametrize("free", [1, 2, 5000])
def test_from_idle_is_never_later_than_static(free: int) -> None:
    """With `from_idle`, however many workers there are, no request is held beyond the delay since
    the oldest arrival.
    """
    policy = ended(Static(4, 10, from_idle=True), *range(3000))

    wake_at = policy.decide(view_of(2999, waiting(2998), free, 0)).wake_at
    assert wake_at is None or wake_at <= 3008
    assert (wake_at is None) == (free == 5000)


@pytest.mark.parametrize(("from_idle", "text"), [(False, "the oldest arrival"), (True, "a worker fell idle")])
def test_it_explains_from_when_the_delay_counts(from_idle: bool, text: str) -> None:
    """`explain` tells from when the delay counts, and how long it is."""
    why = Static(4, 10, from_idle=from_idle).explain(0)

    assert why["max_queue_delay_s"] == 10
    assert why["delay_counts_from"].startswith(text)


def test_without_a_free_worker_or_work_there_is_nothing_to_do() -> None:
    """Without a free worker or waiting requests nothing is sent and no wake-up is asked for: only
    an event can change that.
    """
    assert Static(4, 10).decide(view_of(0, waiting(*[0.0] * 9), free=0, busy=2)) is NOTHING
    assert Static(4, 10).decide(view_of(0, waiting(), free=2, busy=0)) is NOTHING


def test_only_so_many_batches_may_wait() -> None:
    """Of the requests beyond the largest queue, in batches, the newest are refused whatever their
    due times, with the reason; batches for idle workers do not count.
    """
    policy = Static(2, 10, max_queued_batches=2)
    queue = waiting(1, 2, 3, 4, 5, 6, deadlines=[60, 50, 40, 30, 20, 10])
    oldest_last = {request.arrived: request for request in queue}

    assert policy.decide(view_of(6, queue, free=0, busy=1)) == Decision(
        [oldest_last[6], oldest_last[5]], drop_reason=FULL
    )
    assert policy.decide(view_of(6, queue, free=1, busy=0)) == Decision((), 2, "full")
    assert policy.decide(view_of(6, waiting(1, 2, 3, 4), free=0, busy=1)) is NOTHING


def test_the_lowest_priority_is_refused_first() -> None:
    """Of the requests beyond the limit of the queue, the newest of the lowest priority is refused
    first, however new those of a higher one are.
    """
    policy, queue = Static(1, max_queued_batches=2), Queue()
    for arrived, priority in enumerate([0, 5, -1, 0, 5, -1]):
        queue.push([ask(arrived, priority=priority, arrived=arrived)])

    assert items(policy.decide(view_of(9, queue, free=0, busy=1)).drop) == [5, 2, 3, 0]


def test_the_queue_limit_counts_sizes() -> None:
    """A request is refused only if the whole of its size is beyond the limit of the queue."""
    policy, queue = Static(4, max_queued_batches=1), waiting(1, 2, 3)
    for request, size in zip(list(queue), (2, 3, 2), strict=True):
        queue.remove(request)
        request.size = size
        queue.push([request])

    assert [request.arrived for request in policy.decide(view_of(3, queue, free=0, busy=1)).drop] == [3]


@pytest.mark.parametrize(("n", "take", "reason"), [(1, 1, "delay"), (3, 3, "delay"), (5, 5, "delay"), (9, 8, "full")])
def test_padding_up_takes_all(n: int, take: int, reason: str) -> None:
    """With padding up all requests are taken, since the stage pads to the next allowed size; the
    largest one is the limit.
    """
    policy = Static(10, 0, allowed_batch_sizes=(2, 4, 8))

    assert policy.limit == 8
    assert policy.decide(view_of(0, waiting(*[0.0] * n), free=1, busy=0)) == Decision((), take, reason)


@pytest.mark.parametrize(("n", "take"), [(1, 1), (2, 2), (3, 2), (5, 4), (7, 4), (8, 8), (9, 8)])
def test_padding_down_takes_what_can_be_filled(n: int, take: int) -> None:
    """With padding down as many requests are taken as fill an allowed size; only fewer than the
    smallest one are padded.
    """
    policy = Static(8, 0, allowed_batch_sizes=(2, 4, 8), padding="down")

    assert policy.decide(view_of(0, waiting(*[0.0] * n), free=1, busy=0)).take == take


def test_what_padding_down_leaves_waits_from_its_arrival() -> None:
    """The delay of requests that padding down leaves behind counts from their arrival."""
    policy = Static(8, 10, allowed_batch_sizes=(2, 4, 8), padding="down")

    assert policy.decide(view_of(11, waiting(1, 2, 7), free=1, busy=0)).take == 2
    assert policy.decide(view_of(11, waiting(7), free=1, busy=0)) == Decision(wake_at=17)


def test_sizes_above_the_stages_limit_do_not_count() -> None:
    """Allowed sizes above the stage's limit are not used, not even the smallest one."""
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
        ({"from_idle": 0.01}, "from_idle must be True or False, not 0.01: the delay itself is max_queue_delay_s"),
        ({"padding": "left"}, "padding must be 'up' or 'down', not 'left'"),
    ],
)
def test_a_setting_that_cannot_be_is_named(settings: dict[str, Any], text: str) -> None:
    """A setting that cannot work is refused by its name, with what it was and what would do."""
    with pytest.raises(ValueError, match=text):
        Static(8, **settings)
