"""Crash quarantine: who was in a crashed batch is run once more, alone, until it is known who is to blame."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import pytest

from carpool.core.batch import Batch
from carpool.core.pipeline import Pipeline
from carpool.drive.virtual import VirtualDriver
from carpool.errors import DeadlineExceeded, ModelError, Unavailable
from carpool.policy import AIMD, Adaptive, Cork, Deadline, Decision, Greedy, OneByOne, Policy, Static
from carpool.request import DEFAULT_LANE, Request
from tests.core.stub import Scripted, ask, asks, items, outcome, pipeline, reply, stage

POLICIES = [Greedy, Static, AIMD, Cork, Deadline, Adaptive]


def crash(line: Pipeline, now: float, batch: Batch) -> bool:
    """The worker of `batch` dies, and its successor is ready at once; whether a request is to blame."""
    blamed = line.worker_lost(now, batch.stage, batch.place)
    line.worker_ready(batch.stage, batch.place)
    return blamed


class Killer:
    """Kills the worker of each batch that holds poison, half-way through; counts how many."""

    def __init__(self) -> None:
        self.run: VirtualDriver
        self.killed = 0
        self.blamed = 0
        self.batches: list[list[Any]] = []
        self.answers: dict[Any, Any] = {}

    def started(self, now: float, batch: Batch, busy_s: float) -> None:
        self.batches.append(items(batch.requests))
        if any(str(request.item).startswith("poison") for request in batch.requests):
            self.run.at(now + busy_s / 2, lambda: self._kill(batch))

    def answered(self, now: float, requests: Sequence[Request]) -> None:
        for request in requests:
            assert request.item not in self.answers
            self.answers[request.item] = outcome(request)

    def _kill(self, batch: Batch) -> None:
        self.killed += 1
        self.run.lose(batch.stage, batch.place, back_after_s=0.25)


def killer(*policies: Policy, workers: int = 1) -> tuple[VirtualDriver, Killer]:
    watcher = Killer()
    line = pipeline(*[stage(policy=policy, name=f"s{i}") for i, policy in enumerate(policies)], workers=0)
    run = VirtualDriver(line, lambda batch, now: 0.5 + 0.125 * len(batch), [workers] * len(policies), watcher=watcher)
    watcher.run = run
    return run, watcher


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("stages", [1, 2])
def test_mates_of_a_poison_request_are_answered_right(policy: type[Policy], workers: int, stages: int) -> None:
    """Under traffic, whatever the policy: two workers are lost to each poison, and nobody else fails."""
    run, watcher = killer(*[policy(8, 1.0) for _ in range(stages)], workers=workers)
    for i in range(100):
        run.arrive(0.1 * i, "poison" + str(i) if i in (30, 31, 60) else i)

    run.run()

    failed = {item: error for item, error in watcher.answers.items() if item != error}
    assert failed == {"poison30": ModelError, "poison31": ModelError, "poison60": ModelError}
    assert len(watcher.answers) == 100
    assert watcher.killed in (5, 6)  # 30 and 31 may have shared their first one


@pytest.mark.parametrize("policy", [*POLICIES, OneByOne])
def test_a_suspect_runs_alone_and_at_once(policy: type[Policy]) -> None:
    """No policy makes it wait for company, although there is none and others are due to come."""
    made = policy() if policy is OneByOne else policy(8, 1000.0)
    for _ in range(12):
        made.completed(0, 1, 1, 1e-6, True)  # it is past its training, and lets single items travel together
    line = pipeline(stage(policy=made), workers=0)
    line.submit(0, asks("abc"))
    line.worker_ready(0, 0)
    todo = line.poll(0)
    while not todo.run:
        todo = line.poll(todo.wake_at)
    (batch,) = todo.run
    now = batch.started
    seen = []
    assert len(batch) > 1
    for number in range(len(batch)):
        crash(line, now, batch) if not number else reply(line, now, batch)
        now += 1
        (batch,) = line.poll(now).run
        seen.append((items(batch.requests), batch.reason, batch.started))

    assert seen == [([item], "quarantine", now + 1 + i - len(seen)) for i, item in enumerate("abc"[: len(seen)])]


def test_the_poison_is_found_and_only_its_deaths_are_forgiven() -> None:
    """The first death could be anybody's; the second, of a worker that had one suspect only, says whose both were."""
    line = pipeline(stage(4))
    requests = asks("abcd")
    line.submit(0, requests)
    (batch,) = line.poll(0).run
    blamed = [crash(line, 1, batch)]
    for now, poison in enumerate([False, True, False, False], start=2):
        (batch,) = line.poll(now).run
        if poison:
            blamed.append(crash(line, now, batch))
        else:
            reply(line, now, batch)
    line.poll(9)

    assert blamed == [False, True]
    assert [outcome(request) for request in requests] == ["a'", ModelError, "c'", "d'"]
    error = requests[1].error
    assert isinstance(error, ModelError)
    assert (error.status, error.code) == (500, "request_crashed_worker")
    assert str(error) == (
        "two workers of stage stage died with this request or had to be killed, the second one when it ran alone;"
        " it is not tried again"
    )


def test_a_request_whose_time_is_up_may_still_be_to_blame() -> None:
    """It hangs, its caller hears at its deadline, and the worker that is killed afterwards is its second."""
    line = pipeline(stage(max_batch_time_s=10))
    line.submit(0, [ask("hangs", 15)])
    (batch,) = line.poll(0).run
    assert line.poll(10).kill
    assert crash(line, 10, batch) is False
    (batch,) = line.poll(10).run
    assert [outcome(request) for request in line.poll(15).answer] == [DeadlineExceeded]
    assert line.poll(20).kill

    assert crash(line, 20, batch) is True
    assert (line.poll(20).answer, line.unanswered) == ([], 0)


def test_no_request_is_to_blame_for_a_worker_that_had_none() -> None:
    """Nor for one that is not there."""
    line = pipeline(stage())

    assert (line.worker_lost(0, 0, 0), line.worker_lost(0, 0, 7)) == (False, False)


def test_what_must_not_run_twice_has_no_second_chance() -> None:
    """`idempotent=False`: 503 for the whole batch at once, and nobody is blamed."""
    line = pipeline(stage(idempotent=False))
    requests = asks("ab")
    line.submit(0, requests)
    blamed = crash(line, 1, line.poll(0).run[0])
    todo = line.poll(1)

    assert (blamed, todo.run, todo.answer) == (False, [], requests)
    assert [type(request.error) for request in requests] == [Unavailable, Unavailable]


def test_suspects_keep_their_place() -> None:
    """Ahead of who came after them; behind who has a higher priority; nothing of their own lane gets past them."""
    line = pipeline(stage(2))
    line.submit(0, asks("ab"))
    (batch,) = line.poll(0).run
    line.submit(0.25, asks("cd"))
    line.submit(0.25, asks("xy", priority=1))
    line.submit(0.25, asks("uv", priority=-1))
    crash(line, 0.5, batch)
    seen = []
    for i in range(5):
        now = 0.5 + i / 16
        (batch,) = line.poll(now).run
        seen.append("".join(items(batch.requests)))
        reply(line, now, batch)

    assert seen == ["xy", "a", "b", "cd", "uv"]


def test_many_suspects_do_not_outlast_a_higher_priority() -> None:
    """They have waited for long, but are served: their lane does not rise for being many."""
    line = pipeline(stage(64))
    line.submit(0, asks(range(64)))
    (batch,) = line.poll(0).run
    crash(line, 10, batch)
    line.submit(10, [ask("high", priority=1)])
    seen = []
    for i in range(3):
        (batch,) = line.poll(10 + i / 16).run
        seen.append(items(batch.requests))
        reply(line, 10 + i / 16, batch)

    assert seen == [[0], ["high"], [1]]  # the first one has aged


def test_the_next_stage_knows_nothing_of_it() -> None:
    """Who came through alone shares the next batch, in its old lane, and may be run once more there too."""
    line = pipeline(stage(), stage(), workers=(1, 0))
    requests = asks("ab", key="k", priority=3)
    line.submit(0, requests)
    crash(line, 1, line.poll(0).run[0])
    for now in (2, 3):
        (batch,) = line.poll(now).run
        reply(line, now, batch)
    line.worker_ready(1, 0)
    (batch,) = line.poll(4).run

    assert items(batch.requests) == ["a'", "b'"]
    assert [(request.lane, request.losses) for request in requests] == [((3, "k", 0), 0)] * 2
    assert crash(line, 5, batch) is False
    assert items(line.poll(5).run[0].requests) == ["a'"]


def test_a_suspect_waits_for_credit_like_others() -> None:
    """The next stage's queue is bounded for it too."""
    line = pipeline(stage(1), stage(1, max_size=1), workers=(1, 0))
    line.submit(0, asks("ab"))
    reply(line, 0, line.poll(0).run[0])
    line.worker_ready(1, 0)
    (batch, other) = line.poll(1).run
    crash(line, 1, other)
    line.worker_lost(1, batch.stage, batch.place)

    assert line.poll(2).run == []  # a' is back in the queue of the last stage, which is full now

    line.worker_ready(1, 0)

    assert [(batch.stage, items(batch.requests)) for batch in line.poll(3).run] == [(1, ["a'"]), (0, ["b"])]


@pytest.mark.parametrize("how", ["answered", "cancelled", "expired", "poison"])
def test_lanes_of_suspects_are_forgotten(how: str) -> None:
    """However they end; nothing of the quarantine is left, and the queue goes on."""
    line = pipeline(stage(4))
    requests = asks("abcd", 50, key="key")
    queue = line.batchers[0].queue
    for number in range(3):
        now = 100.0 * number
        requests = asks("abcd", now + 50, key=number)
        line.submit(now, requests)
        (batch,) = line.poll(now).run
        line.worker_lost(now, 0, batch.place)
        if how == "cancelled":
            for request in requests:
                line.cancel(now, request)
        if how == "expired":
            line.poll(now + 60)
        line.worker_ready(0, 0)
        while todo := line.poll(now + 10).run:
            if how == "poison":
                crash(line, now + 10, todo[0])
            else:
                reply(line, now + 10, todo[0])
    line.submit(1000, asks("z"))

    assert (line.unanswered, queue.count, queue.nbytes, queue.size) == (1, 1, 0, 1)
    assert (queue.lanes, queue.next_goes_alone) == (1, False)
    assert items(line.poll(1000).run[0].requests) == ["z"]


def test_the_policy_is_not_told_of_the_quarantine() -> None:
    """Nobody has arrived, and a batch of one on a new worker teaches nothing about the usual ones."""
    policy = Scripted(Decision(take=2))
    line = pipeline(stage(policy=policy))
    line.submit(0, asks("ab"))
    crash(line, 1, line.poll(0).run[0])
    policy.decision = Decision()
    for now in (2, 3):
        (batch,) = line.poll(now).run
        reply(line, now, batch)

    assert policy.heard == [("arrived", 0, "a"), ("arrived", 0, "b")]


def test_suspects_count_in_the_bounds_of_the_queue() -> None:
    """They take up room, and may be over the bound by what had been taken out."""
    line = pipeline(stage(2, max_size=3))
    line.submit(0, asks("ab", nbytes=5))
    (batch,) = line.poll(0).run
    line.submit(0, asks("cd", nbytes=7))
    line.worker_lost(1, 0, batch.place)
    queue = line.batchers[0].queue

    assert (queue.count, queue.nbytes, queue.size, line.waiting) == (4, 24, 4, 4)
    assert not queue.has_room(0)
    assert queue.peek(9) == [batch.requests[0]]
    assert {request.lane == DEFAULT_LANE for request in queue} == {True, False}


def test_deadlines_of_suspects_are_watched() -> None:
    """The driver is woken for them."""
    line = pipeline(stage(2))
    line.submit(0, [ask("a", 9), ask("b", 7)])
    (batch,) = line.poll(0).run
    line.worker_lost(1, 0, batch.place)
    seen = []
    for now in (1, 7, 9):
        todo = line.poll(now)
        seen.append((todo.wake_at, items(todo.answer)))

    assert seen == [(7, []), (9, ["b"]), (inf, ["a"])]
