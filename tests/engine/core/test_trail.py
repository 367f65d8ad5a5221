"""What a caller is told at its deadline: how long its request was where."""

from __future__ import annotations

import pytest

from carpool.engine.core.core import Core
from carpool.engine.drive.virtual import VirtualDriver
from carpool.engine.policy import Adaptive, Greedy, Policy, Static
from carpool.engine.request import Request
from carpool.errors import DeadlineExceeded, Overloaded
from tests.effort import slow_where
from tests.support.pipelines import ask, asks, pipeline_of, reply, stage


def chain(**settings: int) -> Core:
    return pipeline_of(stage(1, name="embed", **settings), stage(1, name="rank"), stage(1, name="sort"))


def told(core: Core, now: float) -> str:
    """The error of the only one that is answered at `now`."""
    (request,) = core.poll(now).answer
    assert isinstance(request.error, DeadlineExceeded)
    return str(request.error)


def to_stage(core: Core, stage: int, request: Request) -> None:
    """At times 0 to 1, 2 and so on it waits, a quarter of each longer, and then is worked on."""
    core.flow.submit(0, [request])
    for index in range(stage):
        (batch,) = core.poll(index + 0.25 * (index + 1)).run
        reply(core, index + 1, batch)


NAMES = ("embed", "rank", "sort")
WAYS = [
    "0.250 s waiting for embed, 0.750 s in embed",
    "0.500 s waiting for rank, 0.500 s in rank",
    "0.750 s waiting for sort, 0.250 s in sort",
]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_in_a_queue(at: int) -> None:
    """A request that expires in a queue is told its time in all stages before, and its wait for
    this one.
    """
    core = chain()
    to_stage(core, at, ask("a", at + 0.125))

    spent = ", ".join([*WAYS[:at], f"0.125 s waiting for {NAMES[at]}"])
    assert told(core, at + 0.125) == f"no answer within {at}.125 s: {spent}"


def test_a_time_out_of_less_than_a_millisecond_is_told_in_milliseconds() -> None:
    """A caller with a very short time-out reads how short it was, and not that it was 0.000 s."""
    core = chain()
    core.flow.submit(0, [ask("a", 0.0005)])

    assert told(core, 0.0005) == "no answer within 0.500 ms: 0.500 ms waiting for embed"


@pytest.mark.parametrize("at", [0, 1, 2])
def test_in_a_worker(at: int) -> None:
    """A request that expires in a worker is told its wait for the worker and its time in it."""
    core = chain()
    to_stage(core, at, ask("a", at + 1))
    assert core.poll(at + 0.25 * (at + 1)).run

    assert told(core, at + 1) == f"no answer within {at + 1}.000 s: {', '.join(WAYS[: at + 1])}"


def test_a_result_that_comes_too_late_for_the_next_stage() -> None:
    """A result that comes too late for the next stage has spent all of its time in stages that it
    has left, and is told so.
    """
    core = chain()
    to_stage(core, 1, ask("a", 2))
    (batch,) = core.poll(1.5).run
    reply(core, 2, batch)

    assert told(core, 2) == f"no answer within 2.000 s: {', '.join(WAYS[:2])}"


def test_what_a_worker_refuses_as_too_late() -> None:
    """When a worker refuses an item as too late, the caller is told how the time was spent, which
    only the pipeline knows.
    """
    core = chain()
    to_stage(core, 2, ask("a", 3))
    (batch,) = core.poll(2.75).run
    reply(core, 3, batch, errors={0: DeadlineExceeded("expired")})

    assert told(core, 3) == f"no answer within 3.000 s: {', '.join(WAYS)}"


def test_at_the_door() -> None:
    """A request that expires at the door is told how long it waited for room."""
    core = chain(max_size=1)
    core.flow.submit(0, asks("ab"))
    core.poll(0)
    core.flow.submit(0, asks("c"))
    core.flow.submit(1, [ask("d", 3, patient=True)])

    assert told(core, 3) == "no answer within 2.000 s: 2.000 s waiting for room in the queue"


def test_through_the_door() -> None:
    """A request that came through the door is told its wait for room as well."""
    core = chain(max_size=1)
    core.flow.submit(0, asks("a"))
    (batch,) = core.poll(0).run
    core.flow.submit(0, asks("b", 50))
    core.flow.submit(1, [ask("c", 4.5, patient=True)])
    core.poll(1)
    core.worker_ready(0, 7)
    core.poll(2)
    reply(core, 4, batch)
    core.poll(4)

    assert told(core, 4.5) == (
        "no answer within 3.500 s: 1.000 s waiting for room in the queue, 2.000 s waiting for embed, 0.500 s in embed"
    )


def test_through_the_door_and_on() -> None:
    """For a request that has left the first stage, the wait for room is told as part of the wait
    for that stage.
    """
    core = chain(max_size=1)
    core.flow.submit(0, asks("a"))
    (batch,) = core.poll(0).run
    core.flow.submit(0, asks("b", 50))
    core.flow.submit(1, [ask("c", 4.5, patient=True)])
    core.cancel(2, core.crews[0].queue.peek(1)[0])
    core.poll(2)
    reply(core, 3, batch)
    batches = {batch.stage: batch for batch in core.poll(3).run}
    reply(core, 4, batches[0])

    assert told(core, 4.5) == (
        "no answer within 3.500 s: 2.000 s waiting for embed, 1.000 s in embed, 0.500 s waiting for rank"
    )


def test_after_a_worker_was_lost() -> None:
    """Time with a worker that was lost is told as waiting, with the reason."""
    core = chain()
    core.flow.submit(0, [ask("a", 3)])
    (batch,) = core.poll(0).run
    core.worker_lost(1, 0, batch.place)
    core.worker_ready(0, 0)
    core.poll(2)

    text = told(core, 3)
    assert text == "no answer within 3.000 s: 2.000 s waiting for embed after a worker was lost, 1.000 s in embed"


def test_who_may_have_killed_a_worker_is_told_so() -> None:
    """The error of an expired request says whether a worker was lost with it."""
    found = []
    for is_lost in (False, True):
        core = chain()
        request = ask("a", 3)
        core.flow.submit(0, [request])
        (batch,) = core.poll(0).run
        if is_lost:
            core.worker_lost(1, 0, batch.place)
        core.poll(3)
        assert isinstance(request.error, DeadlineExceeded)
        found.append(request.error.worker_lost)
    assert found == [False, True]


@slow_where(lambda policy, patient: patient is (policy is Adaptive))
@pytest.mark.parametrize("policy", [Greedy, Static, Adaptive])
@pytest.mark.parametrize("patient", [True, False])
def test_expired_work_reaches_no_worker(policy: type[Policy], patient: bool) -> None:
    """With three stages, 50 ms and twice the load that can be served, no batch starts with an
    expired item, all requests are answered, and those whose time is up hear where it went.
    """
    core = pipeline_of(*[stage(policy=policy(8), name=name, max_size=256) for name in NAMES], workers=0)
    run = VirtualDriver(core, [lambda n: 0.004 + 0.001 * n] * 3, [1] * 3)
    capacity = 8 / 0.012
    for i in range(4000):
        run.arrive(i / (2 * capacity), i, 0.05, patient=patient)
    run.run()
    late = [str(request.error) for request in run.answers if isinstance(request.error, DeadlineExceeded)]
    served = sum(request.error is None for request in run.answers)
    refused = sum(isinstance(request.error, Overloaded) for request in run.answers)

    assert not [r for batch in run.batches for r in batch.requests if r.deadline <= batch.started]
    assert served + len(late) + refused == len(run.answers) == 4000
    assert served
    assert len(run.batches) > 200
    for text in late:
        total, _, places = text.removeprefix("no answer within ").partition(" s: ")
        assert float(total) == pytest.approx(0.05, abs=0.001)
        assert sum(float(place.split()[0]) for place in places.split(", ")) == pytest.approx(0.05, abs=0.004)
    if policy is not Adaptive:
        assert any("sort" in text for text in late)
