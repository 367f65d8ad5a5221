"""While a stage has no worker, what cannot be in time for its SLO is refused, whatever the policy."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from carpool.engine.core.core import Core
from carpool.engine.core.journal import Journal
from carpool.engine.core.running_set import SetReport
from carpool.engine.policy import AIMD, Adaptive, Cork, Deadline, Decision, Greedy, Policy, Static
from carpool.engine.request import QUEUED, RUNNING, Request, Stream
from carpool.errors import Overloaded
from tests.support.models import RefusesWhatIsDue
from tests.support.pipelines import Scripted, ask, asks, pipeline_of, reply, stage
from tests.support.steps import Said, columns, stepper

SLO_S = 10.0
POLICIES = {
    "greedy": lambda: Greedy(4),
    "static": lambda: Static(4, 1.0),
    "cork": lambda: Cork(4),
    "aimd": lambda: AIMD(4),
    "deadline": lambda: Deadline(4),
    "adaptive": lambda: Adaptive(4),
    "of a user": lambda: Scripted(Decision()),
}


def is_refused(request: Request) -> bool:
    """Whether a request has ended, as it cannot be in time for the SLO."""
    return isinstance(request.error, Overloaded) and request.error.reason == "slo"


def submitted(core: Core, now: float, *requests: Request) -> float:
    """When the pipeline wants to be asked again, after new requests."""
    core.flow.submit(now, requests)
    return core.poll(now).wake_at


@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_what_is_late_is_refused_when_it_is_due_and_what_comes_later_at_once(policy: Any, patient: bool) -> None:
    """While no worker is there, a request waits until it is late for its SLO, and is refused then;
    one that comes when there has been none for as long as the SLO is refused at once. Once a worker
    is back, requests are served.
    """
    core = pipeline_of(stage(policy=policy()), workers=0, slo_s=SLO_S)
    first, second = ask(patient=patient), ask(patient=patient)
    assert submitted(core, 0, first) == 10
    assert submitted(core, 5, second) == 10
    assert not core.poll(9).answer
    todo = core.poll(10)
    assert todo.answer == [first] and is_refused(first) and todo.wake_at == 15
    third = ask(patient=patient)
    submitted(core, 10, third)
    assert is_refused(third) and second.state == QUEUED
    core.worker_ready(0, 0)
    fourth = ask(patient=patient)
    assert submitted(core, 14, fourth) > 14
    assert not is_refused(second) and not is_refused(fourth)


def test_the_time_without_a_worker_begins_anew_with_each_loss() -> None:
    """A request waits for its SLO once more where a worker has been there in the meantime."""
    core = pipeline_of(stage(), workers=0, slo_s=SLO_S)
    core.poll(0)
    core.worker_ready(0, 0)
    core.poll(20)
    core.worker_lost(21, 0, 0)
    request = ask()
    assert submitted(core, 21, request) == 31
    assert request.state == QUEUED


def test_a_request_of_a_lost_worker_is_refused_when_it_is_due() -> None:
    """What the lost worker had waits for a successor until it is late for its SLO."""
    core = pipeline_of(stage(), slo_s=SLO_S)
    request = ask()
    submitted(core, 0, request)
    core.worker_lost(2, 0, 0)
    assert core.poll(2).wake_at == 10
    assert core.poll(10).answer == [request] and is_refused(request)


def test_what_has_no_slo_waits_for_a_worker() -> None:
    """Requests of a mass that only has to be done, and those of a service without an SLO, wait."""
    mass = ask(deadline=100.0)
    mass.bulk = True
    for request, slo_s in ((mass, SLO_S), (ask(deadline=100.0), None), (ask(), None)):
        core = pipeline_of(stage(), workers=0, slo_s=slo_s)
        assert submitted(core, 0, request) == request.deadline
        assert not core.poll(50).answer and request.state == QUEUED


def test_what_a_busy_worker_keeps_waiting_is_the_policys_affair() -> None:
    """Where a worker is there, a policy that refuses nothing keeps what is late."""
    core = pipeline_of(stage(), slo_s=SLO_S)
    submitted(core, 0, *asks("abcd"))
    late = ask()
    submitted(core, 0, late)
    core.poll(50)
    assert late.state == QUEUED


def test_a_later_stage_without_a_worker_refuses_for_those_before_it() -> None:
    """Requests are refused in each queue from which they have yet to pass a stage without a worker."""
    core = pipeline_of(stage(1), stage(1, max_size=1), workers=[1, 0], slo_s=SLO_S)
    requests = asks("abc")
    core.flow.submit(0, requests)
    (batch,) = core.poll(0).run
    reply(core, 1, batch)
    assert [(request.state, request.node.crew) for request in requests[:2]] == [
        (QUEUED, core.crews[1]),
        (QUEUED, core.crews[0]),
    ]
    assert core.poll(1).wake_at == 10
    assert set(core.poll(10).answer) == set(requests) and all(map(is_refused, requests))
    assert submitted(core, 11, last := ask()) == inf
    assert is_refused(last)


def test_those_at_the_door_are_refused_like_the_others() -> None:
    """A patient request that waits for room is refused when it is late, or at once."""
    journal = Journal()
    core = pipeline_of(stage(max_size=1), workers=0, slo_s=SLO_S, journal=journal)
    requests = asks("ab", patient=True)
    assert submitted(core, 0, *requests) == 10
    assert core.flow.door.count == 1
    mass = asks("cd", patient=True)
    for request in mass:
        request.bulk = True
    core.flow.submit(1, mass)
    core.poll(10)
    assert all(map(is_refused, requests)) and [request.state for request in mass] == [QUEUED, QUEUED]
    last = ask(patient=True)
    submitted(core, 12, last)
    assert is_refused(last) and core.flow.door.count == 1


def test_a_policy_is_asked_all_the_same() -> None:
    """What is not late the policy may still drop while no worker is there."""
    core = pipeline_of(stage(policy=RefusesWhatIsDue(4)), workers=0, slo_s=SLO_S)
    request = ask()
    submitted(core, 0, request)
    assert isinstance(request.error, Overloaded)


def test_the_policy_is_told_of_what_is_refused() -> None:
    """A policy that keeps accounts of its queue learns of each request that leaves it so."""
    policy: Policy = Scripted(Decision())
    core = pipeline_of(stage(policy=policy), workers=0, slo_s=SLO_S)
    submitted(core, 0, ask("a"))
    core.poll(10)
    assert isinstance(policy, Scripted)
    assert policy.heard == [("arrived", 0, "a"), ("left", 10, "a")]


def test_streams_are_refused_until_they_have_had_a_part() -> None:
    """In a stage of steps a request is refused likewise; a stream that has had parts waits for a worker."""
    core = Core([stepper(resumable=True)], slo_s=SLO_S)
    core.worker_ready(0, 0)
    going, new, last = requests = [Request(i, inf) for i in range(3)]
    for request in requests:
        request.stream = Stream()
    core.flow.submit(0, [going])
    core.poll(0)
    said = columns([Said(going.id, "part")])
    core.reported(1, SetReport(0, 0, seen=1, stopped=False, parts=said, rows=1, step_s=1.0))
    core.poll(1)
    assert going.state == RUNNING
    core.worker_left(2, 0, 0)
    core.flow.submit(2, [new])
    assert core.poll(2).wake_at == 10
    todo = core.poll(10)
    assert (todo.answer, todo.wake_at) == ([], 12)
    assert core.poll(12).answer == [new] and is_refused(new)
    core.flow.submit(13, [last])
    assert core.poll(13).wake_at == inf
    assert is_refused(last) and going.state == QUEUED
