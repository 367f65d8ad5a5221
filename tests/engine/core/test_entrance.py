"""The way in: lots are admitted or refused as a whole, patient callers wait at the door, nobody is forgotten."""

from __future__ import annotations

import pytest

from carpool.engine.core.journal import Journal
from carpool.engine.policy import Decision, Static
from carpool.engine.request import Lane
from carpool.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from tests.support.pipelines import Scripted, ask, asks, assert_counts, items, lot, outcome, pipeline_of, reply, stage

# -- the door


def test_patient_callers_wait_and_impatient_ones_are_refused() -> None:
    """When the first queue is full, patient callers wait at the door up to its bound, and impatient
    ones are refused.
    """
    core = pipeline_of(stage(1, max_size=1), workers=0)
    requests = [ask("a"), ask("b", patient=True), ask("c"), ask("d", patient=True)]
    core.flow.submit(0, requests)

    assert [outcome(request) for request in core.poll(0).answer] == [Overloaded]
    assert len(core.crews[0].queue) == 1
    assert_counts(core, waiting=3, admitted=3, refused=1)


def test_the_line_at_the_door_is_kept() -> None:
    """Callers are let in in the order in which they came; a newcomer does not overtake those at the
    door, even when there is room for it.
    """
    core = pipeline_of(stage(1, max_size=1))
    core.flow.submit(0, asks(range(5), patient=True))
    served = []
    for now in range(6):
        (batch,) = core.poll(now).run
        served += items(batch.requests)
        if now == 0:
            core.flow.submit(0, [ask("impatient")])
            core.flow.submit(0, [ask(5, patient=True)])
        reply(core, now, batch)

    assert served == list(range(6))
    assert core.flow.refused == 1


def test_priorities_count_at_the_door() -> None:
    """Of those at the door, the ones with the higher priority are let in first."""
    core = pipeline_of(stage(1, max_size=1), workers=0)
    core.flow.submit(0, [ask("first"), ask("low", patient=True), ask("high", patient=True, priority=1)])
    core.worker_ready(0, 0)
    core.poll(0)

    assert items(list(core.crews[0].queue)) == ["high"]


def test_a_large_request_waits_for_its_bytes_and_is_not_overtaken() -> None:
    """A large request at the door waits until there is room for its bytes and is not overtaken:
    small ones behind it would keep it waiting for ever.
    """
    core = pipeline_of(stage(1, max_bytes=10), workers=0)
    core.flow.submit(0, [ask("a", nbytes=4), ask("b", nbytes=4)])
    core.flow.submit(0, [ask("large", nbytes=9, patient=True), ask("small", nbytes=1, patient=True)])
    core.poll(0)
    inside = [items(list(core.crews[0].queue))]
    core.worker_ready(0, 0)
    core.poll(1)
    inside.append(items(list(core.crews[0].queue)))
    core.worker_ready(0, 1)
    core.poll(2)
    inside.append(items(list(core.crews[0].queue)))

    assert inside == [["a", "b"], ["b"], ["large", "small"]]


def test_who_expires_at_the_door_hears_at_once() -> None:
    """A caller whose deadline passes at the door hears it at that moment, for which the poll before
    has asked; nobody is let in at its deadline.
    """
    core = pipeline_of(stage(1, max_size=1), workers=0)
    core.flow.submit(0, [ask("a"), ask("b", 7, patient=True), ask("c", 9, patient=True)])
    wake_at = [core.poll(0).wake_at]
    core.worker_ready(0, 0)
    todo = core.poll(7)
    wake_at.append(todo.wake_at)

    assert [(request.item, outcome(request)) for request in todo.answer] == [("b", DeadlineExceeded)]
    assert items(list(core.crews[0].queue)) == ["c"]
    assert wake_at == [7, 9]


def test_who_leaves_the_door_is_not_let_in() -> None:
    """A caller that is cancelled at the door is not let in, and its place goes to the next one."""
    core = pipeline_of(stage(1, max_size=1), workers=0)
    requests = asks("abc", patient=True)
    core.flow.submit(0, requests)
    core.cancel(1, requests[1])
    core.worker_ready(0, 0)
    core.poll(1)

    assert items(list(core.crews[0].queue)) == ["c"]
    assert_counts(core, cancelled=1, unanswered=2)


def test_the_door_stays_open_while_workers_are_idle() -> None:
    """One poll lets in as many full queues as there are idle workers."""
    core = pipeline_of(stage(2, max_size=2), workers=4)
    core.flow.submit(0, asks(range(9), patient=True))

    todo = core.poll(0)

    assert [items(batch.requests) for batch in todo.run] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert core.waiting == 1


def test_time_at_the_door_is_not_time_in_the_queue() -> None:
    """For `Static` the waiting time of a caller counts from when it was let in: before that the
    queue was full anyway.
    """
    core = pipeline_of(stage(2, max_size=2, policy=Static(2, 10)))
    core.flow.submit(0, asks("abc", patient=True))
    (batch,) = core.poll(3).run
    reply(core, 4, batch)

    todo = core.poll(4)

    assert (todo.run, todo.wake_at) == ([], 13)
    assert items(core.poll(13).run[0].requests) == ["c"]


# -- a full queue and a higher priority


def test_a_higher_priority_takes_the_place_of_the_last_of_the_lowest() -> None:
    """A request of higher priority takes the place of the last one of the lowest priority, which is
    refused and told when to come again.
    """
    core = pipeline_of(stage(1, max_size=3), workers=0)
    low = asks("abc")
    core.flow.submit(0, low)
    core.flow.submit(0.25, [ask("same"), ask("high", priority=1)])
    todo = core.poll(0.25)

    assert [(request.item, outcome(request)) for request in todo.answer] == [("same", Overloaded), ("c", Overloaded)]
    assert str(low[2].error) == "the queue is full, and others have a higher priority"
    assert isinstance(low[2].error, Overloaded)
    assert low[2].error.retry_after_s == core.flow.retry_after_s(0.25)
    assert items(list(core.crews[0].queue)) == ["high", "a", "b"]
    assert_counts(core, admitted=4, answered=1, refused=1, unanswered=3)


def test_a_patient_one_waits_outside_again() -> None:
    """A patient caller that is displaced waits at the door in its old place, ahead of those who
    came later; it hears nothing and is served in the end.
    """
    core = pipeline_of(stage(1, max_size=2), workers=0)
    core.flow.submit(0, asks("abc", patient=True))
    core.flow.submit(0.25, asks("xy", priority=1, patient=True))
    assert items(list(core.crews[0].queue)) == ["x", "a"]
    assert items(list(core.flow.door)) == ["y", "b", "c"]  # a is the next of its priority and stays
    core.cancel(0.25, core.flow.door.peek(3)[2])
    core.worker_ready(0, 0)
    served = []
    for now in range(4, 8):
        todo = core.poll(now / 16)
        served += items(todo.run[0].requests)
        reply(core, now / 16, todo.run[0])

    assert served == ["x", "y", "a", "b"]
    assert_counts(core, answered=4, cancelled=1, refused=0)


def test_who_is_refused_all_the_same_displaces_nobody() -> None:
    """A request that is refused because the pipeline is closed, or because it is too large or too
    late, displaces nobody.
    """
    core = pipeline_of(stage(1, max_size=2, max_bytes=9), workers=0)
    core.flow.submit(0, asks("ab"))
    core.flow.submit(0, [ask("large", nbytes=10, priority=1)])
    core.close(Unavailable("closing"))
    core.flow.submit(0, [ask("late", priority=1)])

    assert items(list(core.crews[0].queue)) == ["a", "b"]
    assert core.flow.refused == 2


def test_the_policy_hears_who_was_displaced() -> None:
    """The policy hears that a displaced request has left its queue."""
    policy = Scripted(Decision())
    core = pipeline_of(stage(policy=policy, max_size=2))
    core.flow.submit(0, asks("ab"))
    core.flow.submit(1, [ask("c", priority=1)])

    assert policy.heard[2:] == [("left", 1, "b"), ("arrived", 1, "c")]


# -- lots, as the items of a list are: admitted together or not at all


@pytest.mark.parametrize("journal", [None, Journal(100)])
def test_all_or_none_are_admitted(journal: Journal | None) -> None:
    """Where there is no room for all of them, none enters; what comes before and after is judged
    for itself.
    """
    core = pipeline_of(stage(1, max_size=4), workers=0, journal=journal)
    first, second = lot("ab"), lot("cde")
    core.flow.submit(0, [*first, ask("single"), *second, ask("last"), ask("too many")])

    answers = core.poll(0).answer
    assert items(answers) == ["c", "d", "e", "too many"]
    assert {outcome(request) for request in answers} == {Overloaded}
    assert items(list(core.crews[0].queue)) == ["a", "b", "single", "last"]
    assert_counts(core, waiting=4, admitted=4, refused=4)


def test_bytes_count_together() -> None:
    """The bytes of all of them have to fit, and more than the queue ever holds are too large."""
    core = pipeline_of(stage(1, max_bytes=10), workers=0)
    core.flow.submit(0, [*lot("ab", nbytes=3), *lot("cd", nbytes=3), *lot("ef", nbytes=6)])

    kinds = [outcome(request) for request in core.poll(0).answer]
    assert kinds == [Overloaded, Overloaded, InvalidRequest, InvalidRequest]
    assert items(list(core.crews[0].queue)) == ["a", "b"]


def test_a_lot_of_one_is_a_request() -> None:
    """A list of one item is admitted, displaces others and is refused, in the same words, as a
    single request is.
    """
    core = pipeline_of(stage(1, max_size=3, max_bytes=10), workers=0)
    core.flow.submit(0, asks("abc"))
    for number, form in enumerate([asks, lot]):
        (large,), (high,) = form([number], nbytes=11), form([number])
        high.lane = Lane(number + 1, None, 0)
        core.flow.submit(0, [large, high])
        assert str(large.error) == "a request of 11 bytes is over the queue's 10"

    assert items(list(core.crews[0].queue)) == [1, 0, "a"]
    assert_counts(core, admitted=5, refused=2)


def test_each_of_a_lot_has_an_error_of_its_own() -> None:
    """A lot is refused for one reason, but no two callers get the same exception to raise."""
    core = pipeline_of(stage(1, max_size=2, max_bytes=10), workers=0)
    full, large = lot("abc"), lot("de", nbytes=6)
    core.flow.submit(0, [*full, *large])
    core.close(Unavailable("closed"))
    closed = lot("fg")
    core.flow.submit(0, closed)

    for each in (full, large, closed):
        assert len({id(request.error) for request in each}) == len(each)
        assert len({str(request.error) for request in each}) == 1
    assert str(large[0].error) == "2 items with 12 bytes are over the queue's 10 bytes"


def test_the_last_of_them_has_to_make_its_deadline() -> None:
    """They are refused if the last of them could not be in time, but not while nothing waits or
    runs, since then the estimate is all that speaks against them.
    """
    core = pipeline_of(stage(1))
    (warm,) = lot("x")
    for now in (0, 10):
        core.flow.submit(now, [warm if now == 0 else ask("y")])
        (batch,) = core.poll(now).run
        reply(core, now + 10, batch, busy_s=10)
    core.poll(20)

    idle = lot("abc", 45)
    core.flow.submit(20, idle)
    (batch,) = core.poll(20).run
    late, soon = lot("def", 55), lot("g", 90)
    core.flow.submit(20, [*late, *soon])
    refused = [request for request in core.poll(20).answer if request.id == 0]
    assert items(refused) == ["d", "e", "f"]
    assert all(request.id for request in [*idle, *soon])


def test_the_others_of_a_lot_go_before_its_last() -> None:
    """A lot is late if its last one is, although nobody else waits and its first one would be in
    time.
    """
    core = pipeline_of(stage(1))
    core.flow.submit(0, [ask("x"), ask("y")])
    reply(core, 10, core.poll(0).run[0], busy_s=10)
    core.poll(10)  # y runs until 20

    three, one = lot("abc", 45), lot("d", 45)
    core.flow.submit(10, [*three, *one])

    assert {outcome(request) for request in three} == {Overloaded}
    assert one[0].id


def test_only_patient_ones_of_a_lot_displace_others() -> None:
    """A lot that must have room for all at once displaces nobody, whatever its priority; where each
    may wait, each takes a place in a full queue as a single request does.
    """
    core = pipeline_of(stage(1, max_size=3, max_bytes=10), workers=0)
    core.flow.submit(0, [ask("a"), ask("b", nbytes=9)])
    hasty, patient = lot("xy", nbytes=2), lot("123", patient=True)
    for request in [*hasty, *patient]:
        request.lane = Lane(1, None, 0)
    core.flow.submit(0, hasty)  # to let b go would make room for both
    assert {outcome(request) for request in hasty} == {Overloaded}
    assert items(list(core.crews[0].queue)) == ["a", "b"]

    core.flow.submit(0, patient)
    assert items(list(core.crews[0].queue)) == ["1", "2", "a"]  # one of each priority stays
    assert items(list(core.flow.door)) == ["3"]


def test_patient_ones_wait_at_the_door() -> None:
    """With `when_full="wait"` they wait for room like any other, all of them."""
    core = pipeline_of(stage(1, max_size=2, max_bytes=10))
    many = lot(range(5), nbytes=1, patient=True)
    core.flow.submit(0, [*many, *lot("ab", nbytes=11, patient=True)])
    assert (core.crews[0].queue.count, core.flow.door.count) == (2, 3)
    served = []
    for now in range(5):
        todo = core.poll(now)
        served += items(todo.run[0].requests)
        reply(core, now, todo.run[0])
        if now == 0:
            assert {outcome(request) for request in todo.answer} == {InvalidRequest}
    assert served == list(range(5))


def test_a_closed_service_refuses_all_of_them() -> None:
    """They are refused as a closed service refuses any other, and those that were cancelled before
    are passed over.
    """
    core = pipeline_of(stage(1))
    gone, *rest = lot("abc")
    core.cancel(0, gone)
    core.flow.submit(0, [gone, *rest])
    assert [request.id > 0 for request in [gone, *rest]] == [False, True, True]
    core.close(Unavailable("closed"))
    others = lot("de")
    core.flow.submit(0, others)
    assert {outcome(request) for request in others} == {Unavailable}
