"""Workers that are to go: they finish what they have and get nothing more, and the pipeline says when they have."""

from __future__ import annotations

from carpool.engine.core.batch import Reply
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.queue import Queue
from carpool.engine.drive.virtual import VirtualDriver
from carpool.engine.policy import Greedy
from carpool.engine.request import Request

INFINITY = float("inf")


def pipeline(stages: int = 1, workers: int = 1) -> Core:
    made = Core([Batcher(f"s{i}", Greedy(2), Queue()) for i in range(stages)])
    for stage in range(stages):
        for place in range(workers):
            made.worker_ready(stage, place)
    return made


def ask(made: Core, n: int = 1, now: float = 0.0) -> list[Request]:
    requests = [Request(i, INFINITY) for i in range(n)]
    made.flow.submit(now, requests)
    return requests


def test_an_idle_worker_is_drained_at_once() -> None:
    """It is named by the next poll, once, and is no worker of the stage any more."""
    made = pipeline()
    made.drain(0, 0)
    assert made.poll(0).drained == [(0, 0)]
    assert not made.poll(1).drained
    ask(made)
    assert made.poll(1).run == []
    made.worker_ready(0, 1)
    assert [batch.place for batch in made.poll(2).run] == [1]


def test_a_busy_worker_is_drained_when_it_has_answered() -> None:
    """It gets nothing after its batch, whatever waits; its answer counts like any other."""
    made = pipeline()
    first = ask(made)
    (batch,) = made.poll(0).run
    made.drain(0, 0)
    ask(made)
    todo = made.poll(1)
    assert (todo.run, list(todo.drained)) == ([], [])
    made.completed(2, Reply(0, 0, batch.id, batch.ids, ["done"], None, 1.0))
    todo = made.poll(2)
    assert (todo.run, todo.drained, todo.answer) == ([], [(0, 0)], first)
    assert made.waiting == 1


def test_a_worker_that_dies_while_it_drains_is_lost_like_any_other() -> None:
    """Its requests run once more elsewhere, and it is not named any more."""
    made = pipeline(workers=2)
    ask(made)
    (batch,) = made.poll(0).run
    made.drain(0, batch.place)
    made.worker_lost(1, 0, batch.place)
    todo = made.poll(1)
    assert not todo.drained
    assert [again.place for again in todo.run] == [1 - batch.place]


def test_a_stage_that_is_held_runs_empty_behind_its_queue() -> None:
    """While it is held the first stage starts nothing; the others finish what they have."""
    made = pipeline(stages=2)
    (request,) = ask(made)
    (batch,) = made.poll(0).run
    made.hold(True)
    ask(made)
    made.completed(1, Reply(0, 0, batch.id, batch.ids, ["half"], None, 1.0))
    assert not made.is_empty_behind_queue
    (second,) = made.poll(1).run
    assert second.stage == 1
    made.completed(2, Reply(1, 0, second.id, second.ids, ["whole"], None, 1.0))
    assert made.poll(2).run == []
    assert made.is_empty_behind_queue
    assert request.result == "whole"
    made.hold(False)
    assert [batch.stage for batch in made.poll(3).run] == [0]


def test_a_single_stage_is_never_held() -> None:
    """There is nothing behind it that could run empty."""
    made = pipeline()
    made.hold(True)
    ask(made)
    assert len(made.poll(0).run) == 1


def test_in_virtual_time_workers_come_and_go() -> None:
    """A worker that is added is ready later, one that goes finishes, and one that is not there yet never comes."""
    gone: list[tuple[int, int]] = []
    driver = VirtualDriver(Core([Batcher("s", Greedy(1), Queue())]), [lambda n: 1.0])
    driver.drained = lambda stage, place: gone.append((stage, place))
    assert driver.add(0, 2.0) == 1
    assert driver.add(0, 2.0) == 2
    requests = [driver.submit(i) for i in range(6)]
    driver.run(until=1.5)
    driver.drain(0, 2)
    driver.run(until=2.5)
    driver.drain(0, 0)
    driver.run()

    assert gone == [(0, 2), (0, 0)]
    assert sorted(batch.place for batch in driver.batches) == [0, 0, 0, 1, 1, 1]
    assert [request.result for request in requests] == list(range(6))
