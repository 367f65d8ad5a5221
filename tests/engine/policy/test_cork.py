"""Cork: BentoML's rule of when to hold and whom to drop, its training and its regression."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.core.queue import Queue
from carpool.engine.policy import Cork, Decision
from carpool.engine.policy.base import NOTHING
from carpool.engine.policy.cork import DECAY, TICK_S, TRAINING, Account
from tests.support.properties import PROPERTY
from tests.support.view import done, view_of, waiting


def trained(
    item_s: float = 1.0, fixed_s: float = 2.0, wait_s: float = 0.0, *, slo_s: float = 100.0, limit: int = 8
) -> Cork:
    """A policy that has learned from these batches."""
    policy = Cork(limit, slo_s=slo_s)
    for _ in range(TRAINING):
        policy.learn(0, done(1, 1, 1.0, True))
    policy.account.item_s, policy.account.fixed_s, policy.account.wait_s = item_s, fixed_s, wait_s
    return policy


def seen(policy: Cork, *arrivals: float) -> Queue:
    """A queue of one request per arrival, of which the policy has been told."""
    queue = waiting(*arrivals)
    for request in queue:
        policy.arrived(request.arrived, [request])
    return queue


def test_nobody_is_held_where_nobody_usually_waits() -> None:
    """Where nobody usually waits, requests go as soon as a worker is free, up to the limit."""
    policy = trained()

    assert policy.decide(view_of(0, seen(policy, 0, 0), free=1, busy=0)) == Decision((), 2, "free")
    assert policy.decide(view_of(0, seen(policy, *[0.0] * 9), free=1, busy=0)) == Decision((), 8, "full")
    assert policy.decide(view_of(0, waiting(), free=1, busy=0)) is NOTHING


def test_a_batch_is_held_while_a_newcomer_gains_more_than_the_others_lose() -> None:
    """Two requests are held, with 8 s as the usual wait, until n·(wn + dt + a) reaches 0.95·wait,
    when the newest is 2.799 s old.
    """
    policy = trained(wait_s=8.0)
    queue = seen(policy, 9, 10)
    end = 10 + (DECAY * 8 / 2 - TICK_S - 1)

    assert policy.decide(view_of(10, queue, free=1, busy=0)) == Decision((), wake_at=end)
    assert policy.decide(view_of(12.79, queue, free=1, busy=0)) == Decision((), wake_at=end)
    assert policy.decide(view_of(end, queue, free=1, busy=0)) == Decision((), 2, "free")


def test_every_arrival_prolongs_and_shortens_the_hold() -> None:
    """An arrival makes the newest request young again but delays more of them: four are not held
    for long, a full batch never.
    """
    policy = trained(wait_s=8.0)

    assert policy.decide(view_of(10, seen(policy, 9, 10, 10, 10), 1, 0)).wake_at == 10 + (DECAY * 8 / 4 - TICK_S - 1)
    assert policy.decide(view_of(10, seen(policy, *[10] * 8), free=1, busy=0)).take == 8


def test_a_hold_ends_where_the_oldest_would_be_dropped() -> None:
    """A hold ends where the oldest request would be dropped: two take 4 s, so one that came at 9
    goes at 15.
    """
    policy = trained(wait_s=80.0, slo_s=10)

    assert policy.decide(view_of(10, seen(policy, 9, 10), free=1, busy=0)) == Decision((), wake_at=15)


def test_the_bound_on_holding_back_counts() -> None:
    """`max_queue_delay_s` bounds the hold, counted from the oldest arrival."""
    policy = trained(wait_s=8.0)
    policy.max_queue_delay_s = 2.5

    assert policy.decide(view_of(10, seen(policy, 9, 10), free=1, busy=0)).wake_at == 11.5


def test_the_oldest_are_dropped_when_the_whole_queue_would_make_them_late() -> None:
    """The oldest requests are dropped when the whole queue would make them late: three more take 5
    s of 10, so one that is 5 s old goes; the next, with two left, only at 6 s.
    """
    policy = trained(slo_s=10)
    queue = seen(policy, 4, 5, 9)
    head = queue.peek(1)

    assert policy.decide(view_of(10, queue, free=1, busy=0)) == Decision(head, 2, "free")
    assert policy.decide(view_of(10, queue, free=0, busy=1)) == Decision(head, wake_at=5 + (10 - 4))


def test_the_oldest_is_dropped_in_its_time_while_all_are_busy() -> None:
    """The oldest request is dropped in its time although all workers are busy and nothing else
    happens.
    """
    policy = trained(slo_s=10)

    assert policy.decide(view_of(6, seen(policy, 4, 5, 6), free=0, busy=1)) == Decision((), wake_at=9)


def test_the_last_one_is_dropped_only_behind_busy_workers() -> None:
    """The last request is dropped only while all workers are busy, and only if it is by itself as
    old as the maximum.
    """
    policy = trained(slo_s=10)
    queue = seen(policy, 5)

    assert policy.decide(view_of(14, queue, free=0, busy=1)) == Decision((), wake_at=15)
    assert policy.decide(view_of(15, queue, free=0, busy=1)) == Decision(queue.peek(1))
    assert policy.decide(view_of(99, queue, free=1, busy=0)) == Decision((), 1, "free")


def test_the_training_waits_for_two_and_for_three() -> None:
    """In training nine batches go at once; the next two are held until two and three requests wait
    or time is up, and take all that waits.
    """
    policy = Cork(8, slo_s=30)
    account = policy.account
    assert (account.item_s, account.fixed_s) == (2, 1)
    for _ in range(9):
        assert policy.decide(view_of(0, seen(policy, 0), free=1, busy=0)).take == 1
        policy.learn(0, done(1, 1, 0.5, True))
    assert account.batch_s(1) == pytest.approx(0.5)

    for size in (2, 3):
        end = account.batch_s(2 * size + 1) - account.batch_s(size)
        held = policy.decide(view_of(0, seen(policy, *[0.0] * (size - 1)), free=1, busy=0))
        assert held == Decision((), wake_at=pytest.approx(end))
        assert policy.decide(view_of(held.wake_at or 0.0, seen(policy, 0), free=1, busy=0)).take == 1
        assert policy.decide(view_of(0, seen(policy, *[0.0] * size), free=1, busy=0)).take == size
        assert policy.decide(view_of(0, seen(policy, *[0.0] * 7), free=1, busy=0)).take == 7
        policy.learn(0, done(size, size, 0.5 + 0.25 * size, True))
    assert policy.decide(view_of(0, seen(policy, 0), free=1, busy=0)).take == 1


def test_batches_under_way_count_in_training() -> None:
    """Batches under way count in training, so that with many workers it is no longer than with one."""
    policy = Cork(8, slo_s=30)

    assert policy.decide(view_of(0, seen(policy, 0), free=1, busy=8)).take == 1
    assert policy.decide(view_of(0, seen(policy, 0), free=1, busy=9)).wake_at is not None
    assert policy.decide(view_of(0, seen(policy, 0), free=1, busy=11)).take == 1


def test_in_training_only_what_is_too_old_is_dropped() -> None:
    """In training only requests that are too old are dropped, and only if enough are left to learn
    from.
    """
    policy = Cork(8, slo_s=30)
    queue = seen(policy, 0, 0, 5)

    assert policy.decide(view_of(29, queue, free=0, busy=0)) == Decision((), wake_at=30)
    assert policy.decide(view_of(30, queue, free=0, busy=0)) == Decision(queue.peek(1))


def test_the_usual_wait_is_that_of_the_oldest_when_its_batch_went() -> None:
    """The usual wait is that of the oldest request when its batch was sent; of several answers only
    the last before the batch counts.
    """
    policy = trained()
    policy.learn(100, done(1, 1, 3.0, True))
    before = policy.account.wait_s
    policy.decide(view_of(101, seen(policy, 100, 101), free=1, busy=0))
    policy.decide(view_of(108, seen(policy, 100, 101), free=1, busy=0))
    policy.learn(110, done(2, 2, 3.0, True))
    policy.account.refresh()

    assert policy.account.wait_s == pytest.approx(8 / 11)
    assert before == 0


def test_a_failed_batch_teaches_nothing() -> None:
    """The wait of a failed batch is not learned from, nor taken for that of the next."""
    policy = trained()
    policy.decide(view_of(50, seen(policy, 0), free=1, busy=0))
    policy.learn(60, done(1, 1, 3.0, False))
    policy.decide(view_of(70, seen(policy, 70), free=1, busy=0))
    policy.learn(80, done(1, 1, 3.0, True))

    assert policy.account.wait_s == 0


def account(*batches: tuple[int, float]) -> Account:
    """What is learned from these sizes and seconds, after the two that are skipped."""
    made = Account(60)
    for n, seconds in ((1, 99.0), (1, 99.0), *batches):
        made.add(0, n, seconds, 0.0)
    made.refresh()
    return made


def test_the_regression_finds_a_line() -> None:
    """The regression finds a + b·n for the seconds of a batch, from the last fifty batches and
    without the first two.
    """
    learned = account(*[(9, 1.0)] * 20, *[(n, 2 + 0.5 * n) for n in range(1, 51)])

    assert (learned.item_s, learned.fixed_s) == (pytest.approx(0.5), pytest.approx(2))


def test_the_regression_has_the_faults_of_the_original() -> None:
    """As in the original, with one size nearly all of the time is put on the items, and of a
    falling line both ends are cut off, each by itself.
    """
    assert account((10, 10.1)).item_s == pytest.approx(1.0)
    assert account((10, 10.1)).fixed_s == pytest.approx(0.1)
    assert account((1, 5.0), (3, 1.0)).item_s == 1e-6
    assert account((1, 5.0), (3, 1.0)).fixed_s == pytest.approx(7)
    assert account((4, 1.0), (6, 5.0)).fixed_s == 0


def test_what_was_learned_is_used_every_five_seconds() -> None:
    """The first batch changes what is used at once; later ones do so every five seconds."""
    learned = account((10, 10.1))
    for now, expected in ((1, 1.0), (4.99, 1.0), (5, 2.0)):
        learned.add(now, 1, 10.1 - 9 * 2.0, 0.0)
        assert learned.item_s == pytest.approx(expected)


@pytest.mark.parametrize("slo_s", [0, -1, float("nan")])
def test_an_slo_must_be_positive(slo_s: float) -> None:
    """An SLO that is not positive is refused by the name of the setting; without one it is
    BentoML's minute.
    """
    assert Cork().max_latency_s == 60
    with pytest.raises(ValueError, match="slo_s must be a positive number of seconds"):
        Cork(slo_s=slo_s)


@PROPERTY
@given(st.integers(1, 7), st.floats(0, 2), st.floats(0.01, 0.5), st.floats(0, 20), st.floats(0, 1))
def test_the_hold_ends_when_a_poll_would_end_it(n: int, age: float, item_s: float, wait_s: float, part: float) -> None:
    """At any moment before the named one the original's condition for holding is true, and at any
    moment after it is not.
    """
    policy = trained(item_s, 0.0, wait_s)
    queue = seen(policy, *[10.0] * n)
    now = 10 + age
    decision = policy.decide(view_of(now, queue, free=1, busy=0))
    held = n * (age + TICK_S + item_s) <= DECAY * wait_s

    if decision.wake_at is None:
        assert decision.take == n
        assert not held or n * (age + TICK_S + item_s) == pytest.approx(DECAY * wait_s)
    else:
        between = now + part * (decision.wake_at - now)
        assert n * (between - 10 + TICK_S + item_s) <= DECAY * wait_s + 1e-9
        assert n * (decision.wake_at + 1e-6 - 10 + TICK_S + item_s) > DECAY * wait_s


@PROPERTY
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 2.0]), st.integers(1, 5), st.booleans()), max_size=30))
def test_asking_changes_nothing(script: list[tuple[float, int, bool]]) -> None:
    """A policy that is asked at times at which nothing goes says and learns the same as one that is not."""
    asked, other = Cork(4, slo_s=30.0), Cork(4, slo_s=30.0)
    now = 0.0
    for held_s, n, ends_unasked in script:
        now += 1.0
        arrivals = [now + 0.125 * i for i in range(n)]
        queues = seen(asked, *arrivals), seen(other, *arrivals)
        now += held_s
        asked.decide(view_of(now, queues[0], free=1, busy=0))  # and nothing comes of it
        asked.decide(view_of(now, queues[0], free=1, busy=1))
        asked.decide(view_of(now, waiting(), free=1, busy=0))
        now += 0.25
        if not ends_unasked:
            assert asked.decide(view_of(now, queues[0], free=1, busy=0)) == other.decide(
                view_of(now, queues[1], free=1, busy=0)
            )
        now += 0.5
        for policy in (asked, other):
            policy.learn(now, done(n, n, 0.5, True))
        assert vars(asked.account) == vars(other.account)
