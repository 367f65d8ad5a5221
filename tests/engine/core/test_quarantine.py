"""Crash quarantine: who was in a crashed batch is run once more, alone, until it is known who is to blame."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import pytest

from carpool.engine.core.batch import Batch
from carpool.engine.core.core import Core
from carpool.engine.drive.virtual import VirtualDriver
from carpool.engine.policy import AIMD, Adaptive, Cork, Deadline, Decision, Greedy, OneByOne, Policy, Static
from carpool.engine.request import DEFAULT_LANE, Lane, Request
from carpool.errors import DeadlineExceeded, ModelError, Unavailable
from tests.support.pipelines import Scripted, ask, asks, items, outcome, pipeline_of, reply, stage
from tests.support.view import done

POLICIES = [Greedy, Static, AIMD, Cork, Deadline, Adaptive]


def crash(core: Core, now: float, batch: Batch) -> bool:
    """The worker of `batch` dies, and its successor is ready at once; whether a request is to blame."""
    blamed = core.worker_lost(now, batch.stage, batch.place)
    core.worker_ready(batch.stage, batch.place)
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
    core = pipeline_of(*[stage(policy=policy, name=f"s{i}") for i, policy in enumerate(policies)], workers=0)
    run = VirtualDriver(core, lambda batch, now: 0.5 + 0.125 * len(batch), [workers] * len(policies), watcher=watcher)
    watcher.run = run
    return run, watcher


@pytest.mark.fault("F14")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("stages", [1, 2])
def test_mates_of_a_poison_request_are_answered_right(policy: type[Policy], workers: int, stages: int) -> None:
    """Under traffic and whatever the policy, each poison request costs two workers and fails, and
    all others are answered right.
    """
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
    """A request that may have crashed a worker is run alone and at once: no policy makes it wait
    for company.
    """
    made = policy() if policy is OneByOne else policy(8, 1000.0)
    for _ in range(12):
        made.learn(0, done(1, 1, 1e-6, True))  # it is past its training, and lets single items travel together
    core = pipeline_of(stage(policy=made), workers=0)
    core.flow.submit(0, asks("abc"))
    core.worker_ready(0, 0)
    todo = core.poll(0)
    while not todo.run:
        todo = core.poll(todo.wake_at)
    (batch,) = todo.run
    now = batch.started
    seen = []
    assert len(batch) > 1
    for number in range(len(batch)):
        crash(core, now, batch) if not number else reply(core, now, batch)
        now += 1
        (batch,) = core.poll(now).run
        seen.append((items(batch.requests), batch.reason, batch.started))

    assert seen == [([item], "quarantine", now + 1 + i - len(seen)) for i, item in enumerate("abc"[: len(seen)])]


@pytest.mark.fault("F9", "F14")
def test_the_poison_is_found_and_only_its_deaths_are_forgiven() -> None:
    """The first death could be any request's fault; the second, with one suspect only, shows that
    both were this one's, and only these two are forgiven the stage.
    """
    core = pipeline_of(stage(4))
    requests = asks("abcd")
    core.flow.submit(0, requests)
    (batch,) = core.poll(0).run
    blamed = [crash(core, 1, batch)]
    for now, poison in enumerate([False, True, False, False], start=2):
        (batch,) = core.poll(now).run
        if poison:
            blamed.append(crash(core, now, batch))
        else:
            reply(core, now, batch)
    core.poll(9)

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
    """If a request hangs and its caller has already heard of its deadline, the worker that is
    killed for it afterwards still counts as its second.
    """
    core = pipeline_of(stage(max_batch_time_s=10))
    core.flow.submit(0, [ask("hangs", 15)])
    (batch,) = core.poll(0).run
    assert core.poll(10).kill
    assert crash(core, 10, batch) is False
    (batch,) = core.poll(10).run
    assert [outcome(request) for request in core.poll(15).answer] == [DeadlineExceeded]
    assert core.poll(20).kill

    assert crash(core, 20, batch) is True
    assert (core.poll(20).answer, core.unanswered) == ([], 0)


def test_no_request_is_to_blame_for_a_worker_that_had_none() -> None:
    """No request is blamed for the loss of a worker that had none, or that is not there."""
    core = pipeline_of(stage())

    assert (core.worker_lost(0, 0, 0), core.worker_lost(0, 0, 7)) == (False, False)


def test_what_must_not_run_twice_has_no_second_chance() -> None:
    """With `idempotent=False` the whole batch of a crashed worker is answered with 503 at once, and
    no request is blamed.
    """
    core = pipeline_of(stage(idempotent=False))
    requests = asks("ab")
    core.flow.submit(0, requests)
    blamed = crash(core, 1, core.poll(0).run[0])
    todo = core.poll(1)

    assert (blamed, todo.run, todo.answer) == (False, [], requests)
    assert [type(request.error) for request in requests] == [Unavailable, Unavailable]


def test_suspects_keep_their_place() -> None:
    """A suspect waits ahead of those that came after it and behind those of higher priority, and
    nothing of its own lane overtakes it.
    """
    core = pipeline_of(stage(2))
    core.flow.submit(0, asks("ab"))
    (batch,) = core.poll(0).run
    core.flow.submit(0.25, asks("cd"))
    core.flow.submit(0.25, asks("xy", priority=1))
    core.flow.submit(0.25, asks("uv", priority=-1))
    crash(core, 0.5, batch)
    seen = []
    for i in range(5):
        now = 0.5 + i / 16
        (batch,) = core.poll(now).run
        seen.append("".join(items(batch.requests)))
        reply(core, now, batch)

    assert seen == ["xy", "a", "b", "cd", "uv"]


def test_many_suspects_do_not_outlast_a_higher_priority() -> None:
    """Many suspects that have waited for long are served, but do not rise above a higher priority
    for being many.
    """
    core = pipeline_of(stage(64))
    core.flow.submit(0, asks(range(64)))
    (batch,) = core.poll(0).run
    crash(core, 10, batch)
    core.flow.submit(10, [ask("high", priority=1)])
    seen = []
    for i in range(3):
        (batch,) = core.poll(10 + i / 16).run
        seen.append(items(batch.requests))
        reply(core, 10 + i / 16, batch)

    assert seen == [[0], ["high"], [1]]  # the first one has aged


def test_the_next_stage_knows_nothing_of_it() -> None:
    """A suspect that came through alone shares the next stage's batch in its old lane, and may be
    run once more there, too.
    """
    core = pipeline_of(stage(), stage(), workers=(1, 0))
    requests = asks("ab", key="k", priority=3)
    core.flow.submit(0, requests)
    crash(core, 1, core.poll(0).run[0])
    for now in (2, 3):
        (batch,) = core.poll(now).run
        reply(core, now, batch)
    core.worker_ready(1, 0)
    (batch,) = core.poll(4).run

    assert items(batch.requests) == ["a'", "b'"]
    assert [(request.lane, request.losses) for request in requests] == [(Lane(3, "k", 0), 0)] * 2
    assert crash(core, 5, batch) is False
    assert items(core.poll(5).run[0].requests) == ["a'"]


def test_a_suspect_waits_for_credit_like_others() -> None:
    """A suspect waits for room in the next stage as all requests do."""
    core = pipeline_of(stage(1), stage(1, max_size=1), workers=(1, 0))
    core.flow.submit(0, asks("ab"))
    reply(core, 0, core.poll(0).run[0])
    core.worker_ready(1, 0)
    (batch, other) = core.poll(1).run
    crash(core, 1, other)
    core.worker_lost(1, batch.stage, batch.place)

    assert core.poll(2).run == []  # a' is back in the queue of the last stage, which is full now

    core.worker_ready(1, 0)

    assert [(batch.stage, items(batch.requests)) for batch in core.poll(3).run] == [(1, ["a'"]), (0, ["b"])]


@pytest.mark.parametrize("how", ["answered", "cancelled", "expired", "poison"])
def test_lanes_of_suspects_are_forgotten(how: str) -> None:
    """However suspects end, nothing of their lanes is left, and the queue goes on."""
    core = pipeline_of(stage(4))
    requests = asks("abcd", 50, key="key")
    queue = core.crews[0].queue
    for number in range(3):
        now = 100.0 * number
        requests = asks("abcd", now + 50, key=number)
        core.flow.submit(now, requests)
        (batch,) = core.poll(now).run
        core.worker_lost(now, 0, batch.place)
        if how == "cancelled":
            for request in requests:
                core.cancel(now, request)
        if how == "expired":
            core.poll(now + 60)
        core.worker_ready(0, 0)
        while todo := core.poll(now + 10).run:
            if how == "poison":
                crash(core, now + 10, todo[0])
            else:
                reply(core, now + 10, todo[0])
    core.flow.submit(1000, asks("z"))

    assert (core.unanswered, queue.count, queue.nbytes, queue.size) == (1, 1, 0, 1)
    assert (queue.lanes, queue.next_is_suspect) == (1, False)
    assert items(core.poll(1000).run[0].requests) == ["z"]


def test_the_policy_is_not_told_of_the_quarantine() -> None:
    """The policy hears of no arrival when a suspect waits again, and learns nothing from its batch
    of one on a new worker.
    """
    policy = Scripted(Decision(take=2))
    core = pipeline_of(stage(policy=policy))
    core.flow.submit(0, asks("ab"))
    crash(core, 1, core.poll(0).run[0])
    policy.decision = Decision()
    for now in (2, 3):
        (batch,) = core.poll(now).run
        reply(core, now, batch)

    assert policy.heard == [("arrived", 0, "a"), ("arrived", 0, "b")]


def test_suspects_count_in_the_bounds_of_the_queue() -> None:
    """Suspects count in the bounds of their queue, which they may exceed by what had been taken out
    of it.
    """
    core = pipeline_of(stage(2, max_size=3))
    core.flow.submit(0, asks("ab", nbytes=5))
    (batch,) = core.poll(0).run
    core.flow.submit(0, asks("cd", nbytes=7))
    core.worker_lost(1, 0, batch.place)
    queue = core.crews[0].queue

    assert (queue.count, queue.nbytes, queue.size, core.waiting) == (4, 24, 4, 4)
    assert not queue.has_room(0)
    assert queue.peek(9) == [batch.requests[0]]
    assert {request.lane == DEFAULT_LANE for request in queue} == {True, False}


def test_deadlines_of_suspects_are_watched() -> None:
    """The driver is woken for the deadlines of suspects, too."""
    core = pipeline_of(stage(2))
    core.flow.submit(0, [ask("a", 9), ask("b", 7)])
    (batch,) = core.poll(0).run
    core.worker_lost(1, 0, batch.place)
    seen = []
    for now in (1, 7, 9):
        todo = core.poll(now)
        seen.append((todo.wake_at, items(todo.answer)))

    assert seen == [(7, []), (9, ["b"]), (inf, ["a"])]
