"""The batcher: pairs replies with requests, keeps limits and deadlines whatever the policy says."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from carpool.engine.core.batch import Batch
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.graph import Node
from carpool.engine.policy import Decision, Greedy, Policy, QueueView, Static
from carpool.engine.policy.adapted import Adapted
from carpool.engine.policy.base import TOO_LATE
from carpool.engine.request import DONE, RUNNING, Request
from tests.support.models import Trainee
from tests.support.pipelines import Scripted, ask, asks, items, stage, state_of


def enter(batcher: Batcher, now: float, requests: list[Request]) -> list[Request]:
    for id, request in enumerate(requests, 1):
        request.id = id
        request.arrived = now
    batcher.enter(now, requests)
    return requests


def node_of(batcher: Batcher) -> Node:
    return Core([batcher]).batchers[0].lobby.nodes[0]  # type: ignore[no-any-return]


def go(batcher: Batcher, now: float = 0.0, room: float = inf) -> Batch:
    batch = batcher.next_batch(now, room, [])
    assert batch is not None
    return batch


def running(n: int = 4, now: float = 0.0, **settings: object) -> tuple[Batcher, Batch, list[Request]]:
    """One worker with a batch of `n` on it."""
    batcher = stage(n, **settings)  # type: ignore[arg-type]
    requests = enter(batcher, now, asks(range(n)))
    batcher.worker_ready(0)
    return batcher, go(batcher, now), requests


def test_a_batch_is_at_most_as_large_as_the_limit() -> None:
    """A batch holds at most `max_batch_size` requests; the others wait for the next worker."""
    batcher = stage(4)
    enter(batcher, 0, asks(range(6)))
    for worker in (0, 1, 2):
        batcher.worker_ready(worker)

    batches = [batcher.next_batch(0, inf, []) for _ in range(3)]

    assert [items(batch.requests) if batch else None for batch in batches] == [[0, 1, 2, 3], [4, 5], None]
    assert (batcher.running, batcher.idle) == (6, 1)


def test_a_batch_knows_its_size_and_deadline() -> None:
    """A batch's size is the sum of its requests' sizes, and its deadline the earliest of theirs."""
    batcher = stage(6)
    requests = [ask("a", 9), ask("b", 5), ask("c", 7)]
    for size, request in enumerate(requests, 1):
        request.size = size
    enter(batcher, 2, requests)
    batcher.worker_ready(3)

    batch = go(batcher, 2)

    assert (batch.n, batch.size, batch.earliest_deadline, batch.started, batch.place) == (3, 6, 5, 2, 3)
    assert batch.ids == [2, 3, 1]


def test_the_worker_that_was_busy_last_is_used_first() -> None:
    """Of several idle workers the one that was busy last gets the next batch, since its caches are
    warm.
    """
    batcher = stage(1)
    enter(batcher, 0, asks("abc"))
    for worker in (0, 1, 2):
        batcher.worker_ready(worker)
    first, second = go(batcher), go(batcher)
    batcher.completed(1, second.place, second.id, second.ids, 1, True)
    batcher.completed(1, first.place, first.id, first.ids, 1, True)

    assert go(batcher).place == first.place


def test_a_reply_is_paired_by_id_and_not_by_place() -> None:
    """Replies are paired with requests by id, whatever order they come in."""
    batcher, batch, requests = running(4)

    takers = batcher.completed(1, 0, batch.id, [3, 1, 4, 2], 1, True)

    assert takers == [requests[2], requests[0], requests[3], requests[1]]
    assert (batcher.running, batcher.idle) == (0, 1)


def test_a_reply_may_be_partial() -> None:
    """A reply may come in parts: the worker is free when it has answered all, and the policy hears
    of the batch once, as a whole.
    """
    policy = Scripted(Decision(take=4, reason="now"))
    batcher, batch, requests = running(4, policy=policy)
    policy.heard.clear()

    first = batcher.completed(1, 0, batch.id, [2], 1, False)
    between = (batcher.running, batcher.idle, items(batch.requests), batch.ids)
    second = batcher.completed(2, 0, batch.id, [4, 1], 2, True)
    third = batcher.completed(3, 0, batch.id, [3], 5, True)

    assert [*first, *second, *third] == [requests[i] for i in (1, 3, 0, 2)]
    assert between == (3, 0, [0, 2, 3], [1, 3, 4])
    assert (batcher.running, batcher.idle) == (0, 1)
    assert policy.heard == [("learn", 3, 4, 4, 8, False)]
    assert (batcher.times.usual_s, batcher.times.fastest_s) == (3, 3)


@pytest.mark.fault("F49")
def test_what_was_never_asked_for_is_dropped_and_counted() -> None:
    """A result with a foreign id, a second answer, and a reply for another batch or from another
    worker are dropped and counted, and change nothing else.
    """
    batcher, batch, requests = running(4)

    assert batcher.completed(1, 0, batch.id + 1, batch.ids, 1, True) == [None] * 4
    assert batcher.completed(1, 1, batch.id, batch.ids, 1, True) == [None] * 4
    assert batcher.completed(1, 0, batch.id, [99, 2, 2], 1, True) == [None, requests[1], None]
    assert batcher.completed(1, 0, batch.id, [2], 1, True) == [None]

    assert (batcher.stray_replies, batcher.late_results) == (11, 0)
    assert batcher.running == 3


def test_a_finished_batch_is_finished() -> None:
    """A reply that comes a second time has no takers."""
    batcher, batch, _ = running(2)
    batcher.completed(1, 0, batch.id, batch.ids, 1, True)

    assert batcher.completed(1, 0, batch.id, batch.ids, 1, True) == [None, None]
    assert (batcher.idle, batcher.stray_replies) == (1, 2)


@pytest.mark.parametrize("busy", [False, True])
def test_a_worker_is_ready_once(busy: bool) -> None:
    """A worker that is idle or at work cannot become ready a second time; to say so changes
    nothing.
    """
    batcher = stage(4)
    batcher.worker_ready(0)
    if busy:
        enter(batcher, 0, asks("ab"))
        go(batcher)
    before = state_of(batcher)

    with pytest.raises(ValueError, match="worker 0 of stage stage is ready already"):
        batcher.worker_ready(0)

    assert state_of(batcher) == before


def test_a_lost_worker_owes_what_is_unanswered() -> None:
    """A lost worker owes the requests that were neither answered nor given up by their callers; if
    its reply comes after all, nobody takes it.
    """
    batcher, batch, requests = running(4)
    batcher.completed(1, 0, batch.id, [3], 1, True)
    requests[0].state = DONE

    lost = batcher.worker_gone(2, 0)

    assert lost is not None
    assert items(lost.alone) == [1, 3]
    assert (batcher.running, batcher.idle) == (0, 0)
    assert batcher.completed(2, 0, batch.id, [2], 1, True) == [None]


def test_losing_an_idle_or_unknown_worker_loses_nothing() -> None:
    """Losing a worker that is idle or unknown loses no request; it only takes no batches any more."""
    batcher = stage(4)
    batcher.worker_ready(0)
    lost = (batcher.worker_gone(0, 0), batcher.worker_gone(0, 7))
    enter(batcher, 0, asks("a"))

    assert lost == (None, None)
    assert batcher.next_batch(0, inf, []) is None


@pytest.mark.parametrize(("take", "drops", "workers"), [(5, 0, 1), (-1, 0, 1), (1, 0, 0), (5, 1, 1)])
def test_an_impossible_batch_is_an_error_that_changes_nothing(take: int, drops: int, workers: int) -> None:
    """A policy that asks for more than its limit, for less than nothing, or for a worker that is
    not there gets an error, and nothing has changed.
    """
    policy = Scripted(Decision(), max_batch_size=4)
    batcher = stage(policy=policy)
    requests = enter(batcher, 0, asks(range(6)))
    for worker in range(workers):
        batcher.worker_ready(worker)
    policy.decision = Decision(drop=requests[:drops], take=take)
    before = state_of(batcher)
    refused: list[tuple[Request, str]] = []

    with pytest.raises(RuntimeError, match=r"policy Scripted of stage stage asked for a batch of -?\d+ with"):
        batcher.next_batch(0, inf, refused)

    assert state_of(batcher) == before
    assert refused == []


@pytest.mark.parametrize("case", ["twice", "running", "stranger", "of another stage"])
def test_dropping_what_is_not_queued_is_an_error_that_changes_nothing(case: str) -> None:
    """A policy may drop what waits in its own queue, each request once; anything else is an error
    that changes nothing.
    """
    policy = Scripted(Decision(take=1))
    batcher = stage(policy=policy)
    requests = enter(batcher, 0, asks(range(6)))
    batcher.worker_ready(0)
    go(batcher)
    elsewhere = stage()
    elsewhere.lobby.stage = 1
    (foreign,) = enter(elsewhere, 0, asks("x"))
    foreign.node = object()
    culprit = {"twice": requests[1], "running": requests[0], "stranger": ask(), "of another stage": foreign}[case]
    policy.decision = Decision(drop=[requests[1], culprit])
    before = state_of(batcher)
    refused: list[tuple[Request, str]] = []

    with pytest.raises(RuntimeError, match="policy Scripted of stage stage drops what is not queued"):
        batcher.next_batch(0, inf, refused)

    assert state_of(batcher) == before
    assert refused == []


def test_drops_are_refused_and_the_rest_is_taken() -> None:
    """What the policy drops is handed back to be refused, and the batch is formed from what is
    left.
    """
    policy = Scripted(Decision())
    batcher = stage(policy=policy)
    requests = enter(batcher, 0, asks(range(3)))
    batcher.worker_ready(0)
    policy.decision = Decision(drop=[requests[0]], take=2)
    refused: list[tuple[Request, str]] = []

    batch = batcher.next_batch(0, inf, refused)

    assert batch is not None
    assert (refused, items(batch.requests)) == ([(requests[0], TOO_LATE)], [1, 2])
    assert [r.state for r in requests] == [DONE, RUNNING, RUNNING]


def test_a_policy_may_drop_all_it_wanted_to_take() -> None:
    """If the policy drops all that it wanted to take, there is no batch."""
    policy = Scripted(Decision())
    batcher = stage(policy=policy)
    requests = enter(batcher, 0, asks(range(3)))
    batcher.worker_ready(0)
    policy.decision = Decision(drop=requests, take=2)
    refused: list[tuple[Request, str]] = []

    assert batcher.next_batch(0, inf, refused) is None
    assert ([request.item for request, _ in refused], batcher.idle) == ([0, 1, 2], 1)


def test_a_policy_hears_what_happens() -> None:
    """A policy hears of arrivals, leavings and completions with their times; it does not hear of a
    running request that expires, since that has not left a queue.
    """
    policy = Scripted(Decision())
    batcher = stage(policy=policy)
    requests = enter(batcher, 1, [ask("a", 20), ask("b", 5), ask("c", 30), ask("d", 9)])
    batcher.worker_ready(0)
    batcher.lobby.leave(2, requests[2])
    batcher.attend(5)
    policy.decision = Decision(take=2)
    batch = go(batcher, 6)
    batcher.attend(9)
    batcher.completed(11, 0, batch.id, batch.ids, 5, True)

    assert policy.heard == [
        *[("arrived", 1, item) for item in "abcd"],
        ("left", 2, "c"),
        ("left", 5, "b"),
        ("learn", 11, 2, 2, 5, True),
    ]


def test_a_policy_hears_again_of_requests_put_back() -> None:
    """When the worker of a batch has left, its requests wait again, and the policy hears of them as
    of arrivals.
    """
    policy = Scripted(Decision(take=2))
    batcher, _, _ = running(2, policy=policy)
    batcher.worker_gone(7, 0, blames=False)

    assert policy.heard[-2:] == [("arrived", 7, 0), ("arrived", 7, 1)]


def test_requests_put_back_have_waited_since_they_arrived() -> None:
    """A request that is put back has waited since it first arrived, so `Static` does not hold it
    back a second time.
    """
    batcher = stage(policy=Static(4, 10))
    enter(batcher, 0, asks("a"))
    batcher.worker_ready(0)
    go(batcher, 10)
    enter(batcher, 11, asks("b"))
    batcher.worker_gone(12, 0, blames=False)
    batcher.worker_ready(1)

    assert items(go(batcher, 12).requests) == ["a", "b"]


def after_batches(*seconds: float, workers: int = 1, **settings: Any) -> Batcher:
    """A stage of batches of four that has had some which took so long; it is time 0 again, and all workers are idle."""
    batcher = stage(4, **settings)
    for worker in range(workers):
        batcher.worker_ready(worker)
    for took_s in seconds:
        enter(batcher, -took_s, asks("a"))
        batch = go(batcher, -took_s)
        batcher.completed(0, batch.place, batch.id, batch.ids, took_s, True)
    return batcher


def test_the_time_of_a_batch_is_smoothed() -> None:
    """The first batch sets the mean time of a batch; each further one moves it by a fifth of the
    difference.
    """
    seen = [after_batches(*[4.0, 9.0, 4.0][:n]).times.usual_s for n in range(4)]

    assert seen == [0, 4.0, 5.0, 5.0 + 0.2 * (4.0 - 5.0)]


def test_the_fastest_batch_is_remembered_for_a_while() -> None:
    """The time of the fastest batch falls at once when a faster one comes, and rises little by
    little with slower ones, in case all batches have become slower.
    """
    seen = [after_batches(*[4.0, 2.0, 3.0, 3.0][:n]).times.fastest_s for n in range(5)]

    assert seen == [0, 4.0, 2.0, 2.01, 2.01 + 0.01 * (3.0 - 2.01)]
    assert after_batches(2.0, *[3.0] * 500).times.fastest_s > 2.99


@pytest.mark.parametrize(
    ("now", "queued", "workers", "ahead", "wait_s"),
    [
        (0, 0, 1, 3, 0),  # an idle worker takes up to four
        (0, 1, 1, 0, 8),  # it has just begun
        (3, 1, 1, 3, 5),
        (9, 1, 1, 3, 0),  # it is late: any moment now
        (3, 1, 1, 4, 5 + 8),
        (3, 1, 1, 11, 5 + 2 * 8),
        (3, 1, 2, 3, 0),  # the other one is idle
        (3, 1, 2, 8, 2 * 8 / 2),
    ],
)
def test_how_long_a_request_would_wait(now: int, queued: int, workers: int, ahead: int, wait_s: float) -> None:
    """A new request is predicted to wait until the first worker is free, and then for as many
    batches as are wholly ahead of it, shared by the workers.
    """
    batcher = after_batches(8.0, workers=workers)
    if queued:
        enter(batcher, 0, asks(range(queued)))
        go(batcher)

    assert batcher.predicted_wait_s(now, ahead) == wait_s


def test_nothing_is_predicted_before_anything_was_learned() -> None:
    """No wait is predicted before a batch has been timed, nor for workers that are not there."""
    batcher = stage(4)
    enter(batcher, 0, asks("ab"))

    assert (batcher.predicted_wait_s(0, 99), node_of(batcher).expected_s(0)) == (0, 0)


def test_a_policy_that_knows_better_is_believed() -> None:
    """A policy of the former interface that predicts waits itself is asked about what is queued;
    what is left of the present batches is added.
    """

    class Knows(Policy):
        def decide(self, now: float, queue: QueueView, free: int, busy: int) -> Decision:  # type: ignore[override]
            return Decision(take=min(queue.size, self.limit), reason="free")

        def predicted_wait_s(self, waiting: int, workers: int) -> float | None:
            return 100.0 * waiting + workers

    batcher = after_batches(8.0, policy=Adapted(Knows(4)))
    enter(batcher, 0, asks("a"))
    go(batcher)

    assert batcher.predicted_wait_s(2, 5) == 501 + 6


def test_what_a_newcomer_would_spend_in_a_stage() -> None:
    """In an idle stage a newcomer spends the time of the quickest batch, else its wait and a usual
    batch.
    """
    batcher = after_batches(8.0, 4.0)
    idle_s = node_of(batcher).expected_s(0)
    requests = enter(batcher, 0, asks(range(9)))
    go(batcher)
    busy_s = node_of(batcher).expected_s(1)

    assert idle_s == 4.0
    assert busy_s == (7.2 - 1) + 7.2 + 7.2
    assert len(requests) == 9


def test_a_warm_up_teaches_only_before_the_first_batch() -> None:
    """Timings of a warm-up teach the policy only until the first batch: a worker that is started
    again later has nothing to tell that the policy does not know better.
    """
    policy = Trainee()
    batcher = stage(policy=policy)
    batcher.trained(0, 2, 6, 0.5)
    enter(batcher, 0, asks("a"))
    batcher.worker_ready(0)
    go(batcher)
    batcher.trained(2, 4, 12, 0.75)

    assert policy.lessons == [(2, 6, 0.5)]


# -- deadlines and hang limits


def test_what_expires_in_the_queue_is_done_at_its_deadline() -> None:
    """A request that expires in the queue is answered exactly at its deadline, which is when
    `attention_at` says to look.
    """
    batcher = stage(4)
    requests = enter(batcher, 0, [ask("a", 9), ask("b", 5)])

    assert batcher.lobby.attention_at == 5
    assert batcher.attend(5) == ([(requests[1], None, "")], [])
    assert batcher.lobby.attention_at == 9
    assert batcher.attend(9) == ([(requests[0], None, "")], [])
    assert (batcher.lobby.attention_at, len(batcher.queue)) == (inf, 0)


@pytest.mark.fault("F48")
def test_what_expires_in_a_worker_is_done_at_its_deadline() -> None:
    """A request that expires in a worker is answered at its deadline, and its mates wait on; it
    says when its batch was sent.
    """
    batcher = stage(4)
    batcher.worker_ready(0)
    requests = enter(batcher, 0, [ask("a", 9), ask("b", 5), ask("c")])
    batch = go(batcher, 3)

    assert batcher.attend(5) == ([(requests[1], 3, "")], [])
    assert batcher.lobby.attention_at == 9
    assert batcher.completed(6, 0, batch.id, [1, 2, 3], 6, True) == requests
    assert [request.state for request in requests] == [RUNNING, DONE, RUNNING]


def test_the_hang_limit_counts_from_the_start_of_the_call() -> None:
    """A worker hangs exactly `max_batch_time_s` after a batch was handed to it, which is said once,
    however often one looks.
    """
    batcher, _, _ = running(4, now=3, max_batch_time_s=10)

    assert batcher.lobby.attention_at == 13
    assert batcher.attend(12) == ([], [])
    assert batcher.attend(13) == ([], [0])
    assert batcher.attend(14) == ([], [])
    assert batcher.lobby.attention_at == inf


def test_each_call_of_a_batch_has_the_whole_time() -> None:
    """Each call that a batch is run in has the whole of `max_batch_time_s`; a report of a call for
    another batch does not count.
    """
    batcher, batch, _ = running(4, max_batch_time_s=10)
    batcher.restart_hang_timer(8, 0, batch.id)
    batcher.restart_hang_timer(9, 0, batch.id + 1)
    batcher.restart_hang_timer(9, 1, batch.id)

    assert batcher.attend(10) == ([], [])
    assert batcher.lobby.attention_at == 18
    assert batcher.attend(18) == ([], [0])


def test_who_hangs_cannot_come_back() -> None:
    """A report that was under way when a worker was given up changes nothing: the worker is being
    killed.
    """
    batcher, batch, _ = running(4, max_batch_time_s=10)
    batcher.attend(10)
    batcher.restart_hang_timer(11, 0, batch.id)

    assert batcher.lobby.attention_at == inf
    assert batcher.attend(50) == ([], [])


def test_when_to_look_again_is_known_from_the_start() -> None:
    """`attention_at` is the earliest of all deadlines and hang limits, from the moment that a batch
    starts.
    """
    batcher = stage(1, max_batch_time_s=10)
    seen = [batcher.lobby.attention_at]
    enter(batcher, 0, asks("a", 50))
    seen.append(batcher.lobby.attention_at)
    batcher.worker_ready(0)
    go(batcher, 3)
    seen.append(batcher.lobby.attention_at)
    enter(batcher, 4, asks("b", 7))
    seen.append(batcher.lobby.attention_at)

    assert seen == [inf, 50, 13, 7]


# -- credits


@pytest.mark.parametrize(("room", "goes"), [(0, False), (2, False), (3, True), (9, True)])
def test_a_batch_waits_until_the_next_stage_has_room_for_all_of_it(room: int, goes: bool) -> None:
    """A batch waits until the next stage has room for all of it; it is not cut to the room there
    is, since more will come.
    """
    batcher = stage(4)
    batcher.lobby.most_room = 9
    batcher.worker_ready(0)
    enter(batcher, 0, asks("abc"))

    assert (batcher.next_batch(0, room, []) is not None) == goes


@pytest.mark.parametrize(("room", "takes"), [(2, 0), (3, 2), (9, 2)])
def test_credits_count_requests_also_where_batches_count_sizes(room: int, takes: int) -> None:
    """Where batches count sizes, room in the next stage still counts requests: a batch of 100 units
    that holds two requests waits for room for two, not for a hundred.
    """
    batcher = stage(100)
    batcher.lobby.most_room = 20
    batcher.worker_ready(0)
    requests = asks(range(12))
    for request in requests:
        request.size = 50
    enter(batcher, 0, requests)
    batch = batcher.next_batch(0, room, [])

    assert (0 if batch is None else len(batch)) == takes


@pytest.mark.parametrize(("room", "takes"), [(1, 0), (2, 2)])
def test_a_batch_is_cut_where_the_next_stage_can_never_take_it_whole(room: int, takes: int) -> None:
    """A batch that is larger than the whole of the next queue is cut to it, because it would wait
    for ever for more room.
    """
    batcher = stage(4)
    batcher.lobby.most_room = 2
    batcher.worker_ready(0)
    enter(batcher, 0, asks(range(9)))

    batch = batcher.next_batch(0, room, [])

    assert (len(batch) if batch else 0) == takes


def test_without_credit_nobody_is_woken() -> None:
    """A stage without room behind it names no time at which to be asked again: only an event makes
    room.
    """
    batcher = stage(policy=Static(4, 10))
    batcher.worker_ready(0)
    enter(batcher, 0, asks("abc"))

    assert batcher.next_batch(0, inf, []) is None
    assert batcher.lobby.wake_at == 10
    assert batcher.next_batch(0, 2, []) is None
    batcher.lobby.most_room = 9
    assert batcher.next_batch(0, 2, []) is None
    assert batcher.lobby.wake_at is None


def test_it_tells_what_it_is() -> None:
    """The `repr` of a batcher says what waits in it and what runs."""
    batcher, batch, _ = running(2)
    enter(batcher, 0, asks("x"))

    assert repr(batcher) == "<Batcher stage queued=1 running=2 idle=0>"
    assert repr(batch) == "<Batch 1 stage=0 place=0 n=2 full>"
    assert isinstance(batcher.lobby.policy, Greedy)
