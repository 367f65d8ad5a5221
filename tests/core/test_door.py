"""The door: patient callers wait in line while the first queue is full; it is nobody's way to be forgotten."""

from __future__ import annotations

from carpool.errors import DeadlineExceeded, Overloaded, Unavailable
from carpool.policy import Decision, Static
from tests.core.stub import Scripted, ask, asks, items, outcome, pipeline, reply, stage


def test_patient_callers_wait_and_impatient_ones_are_refused() -> None:
    """The bound holds for both."""
    line = pipeline(stage(1, max_size=1), workers=0)
    requests = [ask("a"), ask("b", patient=True), ask("c"), ask("d", patient=True)]
    line.submit(0, requests)

    assert [outcome(request) for request in line.poll(0).answer] == [Overloaded]
    assert (len(line.batchers[0].queue), line.waiting, line.admitted, line.refused) == (1, 3, 3, 1)


def test_the_line_at_the_door_is_kept() -> None:
    """First come, first let in; a newcomer does not get past those who wait, even when there is room for it."""
    line = pipeline(stage(1, max_size=1))
    line.submit(0, asks(range(5), patient=True))
    served = []
    for now in range(6):
        (batch,) = line.poll(now).run
        served += items(batch.requests)
        if now == 0:
            line.submit(0, [ask("impatient")])
            line.submit(0, [ask(5, patient=True)])
        reply(line, now, batch)

    assert served == list(range(6))
    assert line.refused == 1


def test_priorities_count_at_the_door() -> None:
    """Those who go first inside are let in first."""
    line = pipeline(stage(1, max_size=1), workers=0)
    line.submit(0, [ask("first"), ask("low", patient=True), ask("high", patient=True, priority=1)])
    line.worker_ready(0, 0)
    line.poll(0)

    assert items(list(line.batchers[0].queue)) == ["high"]


def test_a_large_request_waits_for_its_bytes_and_is_not_overtaken() -> None:
    """Small ones behind it would keep it waiting for ever."""
    line = pipeline(stage(1, max_bytes=10), workers=0)
    line.submit(0, [ask("a", nbytes=4), ask("b", nbytes=4)])
    line.submit(0, [ask("large", nbytes=9, patient=True), ask("small", nbytes=1, patient=True)])
    line.poll(0)
    inside = [items(list(line.batchers[0].queue))]
    line.worker_ready(0, 0)
    line.poll(1)
    inside.append(items(list(line.batchers[0].queue)))
    line.worker_ready(0, 1)
    line.poll(2)
    inside.append(items(list(line.batchers[0].queue)))

    assert inside == [["a", "b"], ["b"], ["large", "small"]]


def test_who_expires_at_the_door_hears_at_once() -> None:
    """The poll before says when; nobody is let in at its deadline."""
    line = pipeline(stage(1, max_size=1), workers=0)
    line.submit(0, [ask("a"), ask("b", 7, patient=True), ask("c", 9, patient=True)])
    wake_at = [line.poll(0).wake_at]
    line.worker_ready(0, 0)
    todo = line.poll(7)
    wake_at.append(todo.wake_at)

    assert [(request.item, outcome(request)) for request in todo.answer] == [("b", DeadlineExceeded)]
    assert items(list(line.batchers[0].queue)) == ["c"]
    assert wake_at == [7, 9]


def test_who_leaves_the_door_is_not_let_in() -> None:
    """A cancelled caller's place goes to the next one."""
    line = pipeline(stage(1, max_size=1), workers=0)
    requests = asks("abc", patient=True)
    line.submit(0, requests)
    line.cancel(1, requests[1])
    line.worker_ready(0, 0)
    line.poll(1)

    assert items(list(line.batchers[0].queue)) == ["c"]
    assert (line.cancelled, line.unanswered) == (1, 2)


def test_the_door_stays_open_while_workers_are_idle() -> None:
    """One poll serves as many full queues as there are workers for."""
    line = pipeline(stage(2, max_size=2), workers=4)
    line.submit(0, asks(range(9), patient=True))

    todo = line.poll(0)

    assert [items(batch.requests) for batch in todo.run] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert line.waiting == 1


def test_time_at_the_door_is_not_time_in_the_queue() -> None:
    """Static counts from when a caller was let in: before that the queue was full anyway."""
    line = pipeline(stage(2, max_size=2, policy=Static(2, 10)))
    line.submit(0, asks("abc", patient=True))
    (batch,) = line.poll(3).run
    reply(line, 4, batch)

    todo = line.poll(4)

    assert (todo.run, todo.wake_at) == ([], 13)
    assert items(line.poll(13).run[0].requests) == ["c"]


# -- a full queue and a higher priority


def test_a_higher_priority_takes_the_place_of_the_last_of_the_lowest() -> None:
    """Who has to go is refused if it would have been, and told when to come again."""
    line = pipeline(stage(1, max_size=3), workers=0)
    low = asks("abc")
    line.submit(0, low)
    line.submit(0.25, [ask("same"), ask("high", priority=1)])
    todo = line.poll(0.25)

    assert [(request.item, outcome(request)) for request in todo.answer] == [("same", Overloaded), ("c", Overloaded)]
    assert str(low[2].error) == "the queue is full, and others have a higher priority"
    assert isinstance(low[2].error, Overloaded)
    assert low[2].error.retry_after_s == line.retry_after_s(0.25)
    assert items(list(line.batchers[0].queue)) == ["high", "a", "b"]
    assert (line.admitted, line.answered, line.refused, line.unanswered) == (4, 1, 1, 3)


def test_a_patient_one_waits_outside_again() -> None:
    """In its old place, ahead of those who came later; it is served in the end, and nobody is told anything before."""
    line = pipeline(stage(1, max_size=2), workers=0)
    line.submit(0, asks("abc", patient=True))
    line.submit(0.25, asks("xy", priority=1, patient=True))
    assert items(list(line.batchers[0].queue)) == ["x", "a"]
    assert items(list(line.door)) == ["y", "b", "c"]  # a is the next of its priority and stays
    line.cancel(0.25, line.door.peek(3)[2])
    line.worker_ready(0, 0)
    served = []
    for now in range(4, 8):
        todo = line.poll(now / 16)
        served += items(todo.run[0].requests)
        reply(line, now / 16, todo.run[0])

    assert served == ["x", "y", "a", "b"]
    assert (line.answered, line.cancelled, line.refused) == (4, 1, 0)


def test_who_is_refused_all_the_same_displaces_nobody() -> None:
    """Closed, or too large for the queue, or too late."""
    line = pipeline(stage(1, max_size=2, max_bytes=9), workers=0)
    line.submit(0, asks("ab"))
    line.submit(0, [ask("large", nbytes=10, priority=1)])
    line.close(Unavailable("closing"))
    line.submit(0, [ask("late", priority=1)])

    assert items(list(line.batchers[0].queue)) == ["a", "b"]
    assert line.refused == 2


def test_the_policy_hears_who_was_displaced() -> None:
    """They have left its queue."""
    policy = Scripted(Decision())
    line = pipeline(stage(policy=policy, max_size=2))
    line.submit(0, asks("ab"))
    line.submit(1, [ask("c", priority=1)])

    assert policy.heard[2:] == [("left", 1, "b"), ("arrived", 1, "c")]
