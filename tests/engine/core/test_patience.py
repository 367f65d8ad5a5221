"""When a call is given up: never only for being slow while somebody waits, always some time after nobody does."""

from __future__ import annotations

from math import inf

import pytest

from carpool.engine.core.batch import Batch, Reply
from carpool.engine.core.core import Core
from carpool.engine.core.times import Times
from carpool.errors import DeadlineExceeded, Unavailable
from tests.support.pipelines import ask, asks, items, outcome, pipeline_of, reply, stage


def running(*requests: object, timeout: float = inf, **settings: object) -> tuple[Core, Batch]:
    """A stage that waits for 3 s for calls that nobody waits for, with one batch at work since 0."""
    core = pipeline_of(stage(64, patience_s=3, **settings))  # type: ignore[arg-type]
    core.flow.submit(0, asks(requests, timeout))
    (batch,) = core.poll(0).run
    return core, batch


def taught(core: Core, batch: Batch, *, took_s: float, times: int = 8) -> Batch:
    """So many batches of its size have run, each for so long; returns the next one, which starts when they are over."""
    n, now = len(batch), 0.0
    for _ in range(times):
        now += took_s
        reply(core, now, batch)
        core.flow.submit(now, asks(range(n)))
        (batch,) = core.poll(now).run
    return batch


@pytest.mark.fault("F78")
def test_a_call_may_take_as_long_as_somebody_waits() -> None:
    """While nothing is known of what calls take, a call may last for as long as somebody waits for
    it.
    """
    core, batch = running("a")

    assert [core.poll(now).kill for now in (3, 10, 1e6)] == [[], [], []]
    reply(core, 1e6, batch)
    assert [outcome(request) for request in core.poll(1e6).answer] == ["a'"]


def test_the_hint_has_no_more_digits_than_it_needs() -> None:
    """A client is told 0.667 s, not 0.666667 s."""
    patience = Times(unwanted_s=2 / 3)
    assert "goes on for 0.667 s at most" in patience.hint(2.0)


@pytest.mark.fault("F78")
def test_a_call_that_nobody_waits_for_is_given_up() -> None:
    """A call is given up some time after the last deadline in its batch. Its callers have heard by
    then which setting limits it, and no request runs again.
    """
    core, _ = running("a", timeout=9)
    core.flow.submit(1, [ask("b", 30)])
    todo = core.poll(9)
    (late,) = todo.answer

    assert (todo.kill, todo.wake_at) == ([], 12)
    assert str(late.error) == (
        "no answer within 9.000 s: 0.000 s waiting for stage, 9.000 s in stage;"
        " the call goes on for 3 s at most if nobody waits for it: see max_batch_time_s"
    )
    assert core.poll(11).kill == []
    assert core.poll(12).kill == [(0, 0)]
    assert core.poll(13).kill == []
    assert core.crews[0].in_flight[0].given_up.startswith("nobody has waited for its call for 3 s, and max_batch_time")
    assert core.worker_lost(12, 0, 0) is False
    core.worker_ready(0, 0)
    assert [items(batch.requests) for batch in core.poll(12).run] == [["b"]]


def test_a_deadline_soon_after_the_start_says_nothing_of_the_call() -> None:
    """A deadline soon after the start of a call does not make the call a slow one."""
    core, _ = running("a", timeout=2)
    (late,) = core.poll(2).answer

    assert str(late.error) == "no answer within 2.000 s: 0.000 s waiting for stage, 2.000 s in stage"


def test_callers_who_go_are_waited_for_no_longer() -> None:
    """A call is given up some time after the last of its callers has left, by deadline or by
    itself; the first one that leaves does not count.
    """
    core, batch = running("a", "b")
    for now, request in zip((1, 4), batch.requests, strict=True):
        core.cancel(now, request)

    assert core.poll(4).wake_at <= 7
    assert [core.poll(now).kill for now in (6, 7)] == [[], [(0, 0)]]


def test_an_answer_to_the_others_counts_too() -> None:
    """Once those who still waited are answered by a part of the reply, nobody waits for the call
    any more.
    """
    core, batch = running("a", "b")
    first, second = batch.requests
    core.cancel(1, first)
    core.completed(5, Reply(0, batch.place, batch.id, [second.id], ["b'"]))

    assert [core.poll(now).kill for now in (7, 8)] == [[], [(0, 0)]]


def test_each_call_of_a_batch_has_its_time() -> None:
    """A worker that reports another call is alive and gets its time anew, although nobody waits."""
    core, batch = running("a", timeout=1)
    core.poll(1)
    core.restart_hang_timer(3, 0, batch.place, batch.id)

    assert [core.poll(now).kill for now in (4, 5, 6)] == [[], [], [(0, 0)]]


def test_a_call_of_ten_times_its_cost_is_given_up_sooner() -> None:
    """A call that takes ten times what its size usually takes is given up although somebody waits,
    but no sooner than one for which nobody waits.
    """
    core, batch = running("a")
    batch = taught(core, batch, took_s=0.5)

    assert [core.poll(4 + ran_s).kill for ran_s in (3, 4.9, 5)] == [[], [], [(0, 0)]]
    assert "more than ten times as long as its batches do (0.5 s at most), and max_batch_time_s" in batch.given_up
    core.worker_lost(9, 0, 0)
    core.worker_ready(0, 0)
    (again,) = core.poll(9).run
    assert (again.requests, again.reason) == (batch.requests, "quarantine")


def test_what_is_quick_may_be_slow_for_the_whole_time() -> None:
    """A call is not given up for taking ten times a trifle: ten times a millisecond is no reason."""
    core, batch = running("a")
    taught(core, batch, took_s=0.125)

    assert [core.poll(1 + ran_s).kill for ran_s in (2.9, 3)] == [[], [(0, 0)]]


@pytest.mark.parametrize("times", [0, 1, 7])
def test_few_batches_teach_nothing(times: int) -> None:
    """As long as few batches have been timed no call is given up for its duration, since the first
    ones may have been trifles.
    """
    core, batch = running("a")
    taught(core, batch, took_s=0.125, times=times)

    assert core.poll(1e6).kill == []


def test_who_hangs_twice_is_told_of_the_limit() -> None:
    """A request that hangs twice, in company and then alone, is answered with 504 and the setting
    that limits it; no other request fails.
    """
    core, batch = running(*"ab")
    batch = taught(core, batch, took_s=0.5)
    core.poll(9)
    core.worker_lost(9, 0, 0)
    core.worker_ready(0, 0)
    (batch,) = core.poll(9).run
    (suspect,) = batch.requests
    assert core.poll(19).kill == [(0, 0)]

    assert core.worker_lost(19, 0, 0) is True
    assert isinstance(suspect.error, DeadlineExceeded)
    assert "max_batch_time_s" in str(suspect.error)
    core.worker_ready(0, 0)
    (batch,) = core.poll(19).run
    reply(core, 20, batch)
    assert [outcome(request) for request in core.poll(20).answer] == ["1'"]


def test_what_must_not_run_twice_is_told_of_the_limit() -> None:
    """A request that must not run twice is answered with 503 after a hang, as after a crash, and
    hears the reason.
    """
    core, batch = running("a", idempotent=False)
    batch = taught(core, batch, took_s=0.125)
    core.poll(4)
    core.worker_lost(4, 0, 0)
    (request,) = batch.requests

    assert isinstance(request.error, Unavailable)
    assert request.error.code == "worker_lost"
    assert "was given up with this request: its call takes more than ten times" in str(request.error)


@pytest.mark.fault("F78")
def test_a_limit_of_the_users_own_is_the_only_one() -> None:
    """With `max_batch_time_s` neither what was learned nor who waits makes a difference: it is the
    only limit.
    """
    core, batch = running("a", max_batch_time_s=20)
    taught(core, batch, took_s=0.125, times=20)
    core.cancel(2.5, core.crews[0].in_flight[0].requests[0])

    assert [core.poll(2.5 + ran_s).kill for ran_s in (5, 19.9, 20)] == [[], [], [(0, 0)]]


def test_larger_batches_are_given_more_time() -> None:
    """Larger batches are given more time: after single items of 1 s a batch of 64 may take ten
    times 64 s, and after those a single item as much.
    """
    patience = Times(unwanted_s=3)
    for _ in range(8):
        patience.learn_most(1, 1.0)
    seen = [patience.until(0, inf, size) for size in (1, 2, 64)]
    patience.learn_most(64, 64.0)
    seen.append(patience.until(0, inf, 1))

    assert seen == [10, 20, 640, 640]


def test_the_slowest_is_forgotten() -> None:
    """One batch that took an hour does not give all others ten hours for ever: the slowest time is
    forgotten again.
    """
    patience = Times(unwanted_s=3)
    for took_s in [3600.0, *[1.0] * 1000]:
        patience.learn_most(1, took_s)

    assert 10 < patience.until(0, inf, 1) < 12


def test_without_time_limits_nothing_is_ever_given_up() -> None:
    """Where there are no time limits, as in services without a time-out and in batched functions,
    no call is ever given up.
    """
    patience = Times()

    assert patience.until(0, 0, 1) == inf
    assert not patience.learns
