"""Closing: what waits for company goes as soon as nobody can come any more."""

from __future__ import annotations

import pytest

from carpool.engine.core.core import Core
from carpool.engine.core.line import Line
from carpool.engine.policy import AIMD, Adaptive, Cork, Deadline, Decision, Greedy, Policy, Static, View
from carpool.errors import Unavailable
from tests.support.pipelines import Scripted, ask, asks, items, outcome, pipeline_of, reply, stage

CLOSED = Unavailable("closed")


class Patient(Policy):
    """A policy that waits for ever for a full batch."""

    def decide(self, view: View) -> Decision:
        return Decision(wake_at=1e9)


def closing(core: Core, now: float) -> list[tuple[int, list[object], str]]:
    """What runs at once when the line is closed: by stage."""
    core.close(CLOSED)
    return [(batch.stage, items(batch.requests), batch.reason) for batch in core.poll(now).run]


@pytest.mark.fault("F79")
@pytest.mark.parametrize("policy", [Static(4, 100), Patient(4), Scripted(Decision())])
def test_nothing_is_held_back(policy: Policy) -> None:
    """Once the pipeline is closing, waiting requests go to each free worker up to the batch limit,
    whatever the policy says.
    """
    core = pipeline_of(stage(policy=policy), workers=2)
    core.flow.submit(0, asks("abc"))
    assert core.poll(0).run == []

    assert closing(core, 1) == [(0, ["a", "b", "c"], "closing")]


def test_no_batch_is_larger_than_the_limit() -> None:
    """Also when closing, no batch is above the limit: the rest goes to the next worker, and then to
    the first that is free.
    """
    core = pipeline_of(stage(policy=Patient(2)), workers=2)
    core.flow.submit(0, asks("abcde"))

    assert closing(core, 1) == [(0, ["a", "b"], "closing"), (0, ["c", "d"], "closing")]
    reply(core, 2, core.crews[0].in_flight[0])
    assert [items(batch.requests) for batch in core.poll(2).run] == [["e"]]


def test_what_the_policy_refuses_is_refused() -> None:
    """A policy may still drop requests while closing, and a batch that it forms itself keeps the
    reason that it gives.
    """
    policy = Scripted(Decision())
    core = pipeline_of(stage(policy=policy))
    requests = asks("ab")
    core.flow.submit(0, requests)
    policy.decision = Decision(drop=requests[:1], drop_reason="not today")

    assert closing(core, 1) == [(0, ["b"], "closing")]
    assert str(requests[0].error) == "not today"


def test_lanes_go_one_by_one() -> None:
    """Requests of different keys are not mixed in a batch, closing or not."""
    core = pipeline_of(stage(policy=Patient(4)), workers=2)
    core.flow.submit(0, [ask("a", key=1), ask("b", key=2), ask("c", key=1)])

    assert sorted(closing(core, 1)) == [(0, ["a", "c"], "closing"), (0, ["b"], "closing")]


def test_later_stages_wait_for_those_who_can_still_come() -> None:
    """While an earlier stage holds or runs requests, a later one may wait for them as company; when
    there are none, it holds nothing back either.
    """
    core = pipeline_of(stage(1, policy=Greedy(1)), stage(policy=Static(4, 100)))
    core.flow.submit(0, asks("ab"))
    (first,) = core.poll(0).run
    reply(core, 1, first)
    (second,) = core.poll(1).run

    assert closing(core, 2) == []
    reply(core, 3, second)
    assert [(batch.stage, batch.reason) for batch in core.poll(3).run] == [(1, "closing")]


def test_whom_nobody_waits_for_is_no_company() -> None:
    """A request whose caller has gone is no company that a later stage would wait for, although its
    call goes on.
    """
    core = pipeline_of(stage(1), stage(policy=Static(4, 100)))
    requests = asks("ab")
    core.flow.submit(0, requests)
    reply(core, 1, core.poll(0).run[0])
    core.poll(1)
    core.cancel(2, requests[1])

    assert closing(core, 2) == [(1, ["a'"], "closing")]


def test_those_at_the_door_are_company_if_there_is_room() -> None:
    """While closing, a queue with room is first filled with those at the door; a full one goes at
    once, whatever waits outside.
    """
    core = pipeline_of(stage(policy=Patient(8), max_size=2))
    core.flow.submit(0, asks("abcd", patient=True))
    assert core.poll(0).run == []

    assert closing(core, 1) == [(0, ["a", "b"], "closing")]
    reply(core, 2, core.crews[0].in_flight[0])
    assert [items(batch.requests) for batch in core.poll(2).run] == [["c", "d"]]


def test_credits_count_all_the_same() -> None:
    """Also when closing, no more goes than the next stage has room for."""
    core = pipeline_of(stage(policy=Patient(4)), stage(1, max_size=2))
    core.flow.submit(0, asks("abcd"))

    assert closing(core, 1) == [(0, ["a", "b"], "closing")]


@pytest.mark.fault("F79")
@pytest.mark.parametrize("policy", [Greedy, Static, AIMD, Cork, Deadline, Adaptive])
def test_every_policy_drains(policy: type[Policy]) -> None:
    """With each of our policies, at any point of what it has learned, a waiting request is sent at
    the poll after closing.
    """
    for known in range(40):
        core = pipeline_of(stage(policy=policy(4, 1e6)))
        now = 0.0
        for _ in range(known):
            core.flow.submit(now, asks("ab"))
            for batch in core.poll(now).run:
                reply(core, now + 1, batch, busy_s=1.0)
            now += 1.0
        core.flow.submit(now, asks("x"))
        core.poll(now)
        core.close(CLOSED)
        for _ in range(20):
            for batch in list(core.crews[0].in_flight.values()):
                reply(core, now, batch)
            core.poll(now)

        assert core.unanswered == 0


def test_a_line_of_threads_is_run_at_once() -> None:
    """A thread that leads after its line was closed gets a batch at once, although the policy would
    wait for more.
    """
    line = Line(stage(policy=Static(4, 100)), 1)
    (request,) = asks("a", patient=True)
    waiter = Waiting([request])
    line.join(0, [request])
    slot = line.step(0, waiter, "me")
    assert line.take_batch(0, slot) is None
    line.close(CLOSED)
    slot = line.step(1, waiter, "me")
    batch = line.take_batch(1, slot)
    assert batch is not None
    line.finished(2, batch, ["done"], None, 1.0)

    assert outcome(request) == "done"


class Waiting:
    """The seat of a thread in a line."""

    asleep = False
    deadline = 1e9

    def __init__(self, requests: list[object]) -> None:
        self.requests = requests
        self.pending = len(requests)
        for request in requests:
            request.caller = self  # type: ignore[attr-defined]

    def answered(self, request: object) -> None:
        self.pending -= 1


def test_what_waits_for_somebody_who_expires_goes_in_the_same_moment() -> None:
    """If the last request that could have joined a later stage's batch expires, that batch goes in
    the same moment.
    """
    core = pipeline_of(stage(1), stage(policy=Static(4, 100)), workers=[1, 1])
    core.flow.submit(0, asks("a"))
    core.poll(0)
    reply(core, 1, core.crews[0].in_flight[0])
    core.worker_lost(1, 0, 0)
    core.flow.submit(1, [ask("b", deadline=5)])
    assert core.poll(1).run == []
    core.close(CLOSED)
    assert core.poll(2).run == []

    todo = core.poll(5)
    assert [items(batch.requests) for batch in todo.run] == [["a'"]]
    assert [request.item for request in todo.answer] == ["b"]
