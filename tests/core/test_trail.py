"""What a caller is told at its deadline: how long its request was where."""

from __future__ import annotations

import pytest

from carpool.core.pipeline import Pipeline
from carpool.drive.virtual import VirtualDriver
from carpool.errors import DeadlineExceeded, Overloaded
from carpool.policy import Adaptive, Greedy, Policy, Static
from carpool.request import Request
from tests.core.stub import ask, asks, pipeline, reply, stage


def chain(**settings: int) -> Pipeline:
    return pipeline(stage(1, name="embed", **settings), stage(1, name="rank"), stage(1, name="sort"))


def told(line: Pipeline, now: float) -> str:
    """The error of the only one that is answered at `now`."""
    (request,) = line.poll(now).answer
    assert isinstance(request.error, DeadlineExceeded)
    return str(request.error)


def to_stage(line: Pipeline, stage: int, request: Request) -> None:
    """At times 0 to 1, 2 and so on it waits, a quarter of each longer, and then is worked on."""
    line.submit(0, [request])
    for index in range(stage):
        (batch,) = line.poll(index + 0.25 * (index + 1)).run
        reply(line, index + 1, batch)


NAMES = ("embed", "rank", "sort")
WAYS = [
    "0.250 s waiting for embed, 0.750 s in embed",
    "0.500 s waiting for rank, 0.500 s in rank",
    "0.750 s waiting for sort, 0.250 s in sort",
]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_in_a_queue(at: int) -> None:
    """All stages before, and the wait for this one."""
    line = chain()
    to_stage(line, at, ask("a", at + 0.125))

    spent = ", ".join([*WAYS[:at], f"0.125 s waiting for {NAMES[at]}"])
    assert told(line, at + 0.125) == f"no answer within {at}.125 s: {spent}"


@pytest.mark.parametrize("at", [0, 1, 2])
def test_in_a_worker(at: int) -> None:
    """The wait for it, and the time in it."""
    line = chain()
    to_stage(line, at, ask("a", at + 1))
    assert line.poll(at + 0.25 * (at + 1)).run

    assert told(line, at + 1) == f"no answer within {at + 1}.000 s: {', '.join(WAYS[: at + 1])}"


def test_a_result_that_comes_too_late_for_the_next_stage() -> None:
    """It has spent all of its time in stages that it has left."""
    line = chain()
    to_stage(line, 1, ask("a", 2))
    (batch,) = line.poll(1.5).run
    reply(line, 2, batch)

    assert told(line, 2) == f"no answer within 2.000 s: {', '.join(WAYS[:2])}"


def test_what_a_worker_refuses_as_too_late() -> None:
    """It only says so; how the time was spent is known here."""
    line = chain()
    to_stage(line, 2, ask("a", 3))
    (batch,) = line.poll(2.75).run
    reply(line, 3, batch, errors={0: DeadlineExceeded("expired")})

    assert told(line, 3) == f"no answer within 3.000 s: {', '.join(WAYS)}"


def test_at_the_door() -> None:
    """Before there was room in the queue."""
    line = chain(max_size=1)
    line.submit(0, asks("ab"))
    line.poll(0)
    line.submit(0, asks("c"))
    line.submit(1, [ask("d", 3, patient=True)])

    assert told(line, 3) == "no answer within 2.000 s: 2.000 s waiting for room in the queue"


def test_through_the_door() -> None:
    """The wait for room stays a part of it."""
    line = chain(max_size=1)
    line.submit(0, asks("a"))
    (batch,) = line.poll(0).run
    line.submit(0, asks("b", 50))
    line.submit(1, [ask("c", 4.5, patient=True)])
    line.poll(1)
    line.worker_ready(0, 7)
    line.poll(2)
    reply(line, 4, batch)
    line.poll(4)

    assert told(line, 4.5) == (
        "no answer within 3.500 s: 1.000 s waiting for room in the queue, 2.000 s waiting for embed, 0.500 s in embed"
    )


def test_through_the_door_and_on() -> None:
    """Once the first stage has been left, the wait for room is one for that stage."""
    line = chain(max_size=1)
    line.submit(0, asks("a"))
    (batch,) = line.poll(0).run
    line.submit(0, asks("b", 50))
    line.submit(1, [ask("c", 4.5, patient=True)])
    line.cancel(2, line.batchers[0].queue.peek(1)[0])
    line.poll(2)
    reply(line, 3, batch)
    batches = {batch.stage: batch for batch in line.poll(3).run}
    reply(line, 4, batches[0])

    assert told(line, 4.5) == (
        "no answer within 3.500 s: 2.000 s waiting for embed, 1.000 s in embed, 0.500 s waiting for rank"
    )


def test_after_a_worker_was_lost() -> None:
    """The time with it is told as waiting, and why."""
    line = chain()
    line.submit(0, [ask("a", 3)])
    (batch,) = line.poll(0).run
    line.worker_lost(1, 0, batch.place)
    line.worker_ready(0, 0)
    line.poll(2)

    assert (
        told(line, 3) == "no answer within 3.000 s: 2.000 s waiting for embed after a worker was lost, 1.000 s in embed"
    )


@pytest.mark.parametrize("policy", [Greedy, Static, Adaptive])
@pytest.mark.parametrize("patient", [True, False])
def test_expired_work_reaches_no_worker(policy: type[Policy], patient: bool) -> None:
    """Three stages, 50 ms, twice the load that can be served: no batch starts with an expired item, all are answered,
    and those whose time is up hear where it went."""
    line = pipeline(*[stage(policy=policy(8), name=name, max_size=256) for name in NAMES], workers=0)
    run = VirtualDriver(line, [lambda n: 0.004 + 0.001 * n] * 3, [1] * 3)
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
