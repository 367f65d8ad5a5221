"""The core: a request's way through the stages, and that it gets exactly one answer."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from carpool.engine.core.batch import Reply
from carpool.engine.core.core import Core
from carpool.engine.policy import Decision, Greedy, OneByOne, Static, View
from carpool.engine.request import DONE, Request
from carpool.errors import DeadlineExceeded, InvalidRequest, ModelError, Overloaded, Unavailable
from tests.support.pipelines import (
    Measured,
    Scripted,
    ask,
    asks,
    assert_counts,
    items,
    outcome,
    pipeline_of,
    reply,
    stage,
    state_of,
)
from tests.support.view import done


def answers(to: Core, now: float) -> list[object]:
    """What callers are told at `now`."""
    return [outcome(request) for request in to.poll(now).answer]


def test_a_request_goes_through_all_stages() -> None:
    """Each stage gets what the one before made of a request, and the last one's result is the
    answer.
    """
    core = pipeline_of(stage(), stage(), stage())
    (request,) = asks("x")
    core.flow.submit(0, [request])
    for now in (1, 2, 3):
        (batch,) = core.poll(now).run
        assert (batch.stage, batch.started) == (now - 1, now)
        reply(core, now, batch)

    assert core.poll(3).answer == [request]
    assert (request.result, request.state) == ("x'''", DONE)
    assert (request.admitted, request.arrived) == (0, 2)
    assert_counts(core, admitted=1, answered=1, unanswered=0)


def test_ids_are_unique_and_rise() -> None:
    """Ids rise and are never used again, so that they pair answers with callers; 0 belongs to
    nobody.
    """
    core = pipeline_of(stage(99))
    requests = asks(range(5))
    core.flow.submit(0, requests[:3])
    core.flow.submit(0, requests[3:])

    assert [request.id for request in requests] == [1, 2, 3, 4, 5]


def test_an_error_goes_straight_back() -> None:
    """An item's error goes straight back to its caller: the next stage never sees the item, and its
    mates go on.
    """
    core = pipeline_of(stage(), stage())
    requests = asks("abc")
    core.flow.submit(0, requests)
    (batch,) = core.poll(0).run
    error = ModelError("boom")
    reply(core, 1, batch, errors={1: error})

    todo = core.poll(1)

    assert todo.answer == [requests[1]]
    assert requests[1].error is error
    assert items(todo.run[0].requests) == ["a'", "c'"]


def test_an_error_in_the_last_stage_is_its_items_alone() -> None:
    """An error in the last stage fails only its own item; the others get their results."""
    core = pipeline_of(stage())
    requests = asks("abc")
    core.flow.submit(0, requests)
    (batch,) = core.poll(0).run
    reply(core, 1, batch, errors={0: ModelError("boom")})

    assert answers(core, 1) == [ModelError, "b'", "c'"]


def test_the_last_stage_is_asked_first() -> None:
    """Stages are asked from the last to the first, so that the room which one makes is used in the
    same poll.
    """
    core = pipeline_of(stage(2), stage(2, max_size=2))
    core.flow.submit(0, asks("abcdef"))
    (first,) = core.poll(0).run
    reply(core, 1, first)  # a and b wait in stage 1, whose queue is full now

    todo = core.poll(1)

    assert [(batch.stage, items(batch.requests)) for batch in todo.run] == [(1, ["a'", "b'"]), (0, ["c", "d"])]


def test_a_stage_waits_for_credit() -> None:
    """What runs in a stage and what waits in the next one fit into the next one's queue together,
    however many workers are idle.
    """
    core = pipeline_of(stage(2), stage(2, max_size=4), workers=(9, 0))
    core.flow.submit(0, asks(range(20)))

    started = core.poll(0).run
    assert [items(batch.requests) for batch in started] == [[0, 1], [2, 3]]

    for batch in started:
        reply(core, 1, batch)
    assert core.poll(1).run == []
    assert len(core.crews[1].queue) == 4

    core.worker_ready(1, 0)

    assert [(batch.stage, len(batch)) for batch in core.poll(2).run] == [(1, 2), (0, 2)]


class DropsTheOld(Greedy):
    """Refuses what has waited for 10 s, also while no worker may take a batch."""

    def decide(self, view: View) -> Decision:
        old = [request for request in view.queue if request.arrived <= view.now - 10]
        if old or not view.free:
            return Decision(drop=old)
        return super().decide(view)


def test_who_is_left_after_a_drop_may_have_room() -> None:
    """If a policy drops some requests because there was no room behind for all, the others are
    asked for again in the same poll: nobody would ask later.
    """
    core = pipeline_of(stage(policy=DropsTheOld(4)), stage(4, max_size=4), workers=(1, 0))
    core.flow.submit(0, asks("abc"))
    reply(core, 0, core.poll(0).run[0])
    core.flow.submit(1, asks("defg"))
    core.flow.submit(5, asks("h"))
    assert core.poll(5).run == []  # three wait for the second stage, which has room for one more

    todo = core.poll(11)

    assert items(todo.answer) == ["d", "e", "f", "g"]
    assert [items(batch.requests) for batch in todo.run] == [["h"]]


def test_a_queue_that_is_full_of_bytes_gives_no_credit() -> None:
    """A queue that is full by its bytes holds the stage before it back too, up to the batch that is
    on its way.
    """
    core = pipeline_of(stage(2), stage(2, max_bytes=10), content=Measured(5), workers=(1, 0))
    core.flow.submit(0, asks("abcd"))
    (batch,) = core.poll(0).run
    reply(core, 1, batch)

    assert core.crews[1].queue.nbytes == 10
    assert core.poll(1).run == []


def test_bytes_between_stages_count_also_when_callers_wait_at_the_door() -> None:
    """Bounds on bytes between stages hold also when callers at the door are let in."""
    core = pipeline_of(stage(1, max_size=1), stage(1, max_bytes=5), content=Measured(5), workers=(1, 0))
    core.flow.submit(0, asks("a"))
    reply(core, 1, core.poll(0).run[0])
    requests = asks("bc", patient=True)
    core.flow.submit(1, requests)
    core.cancel(1, requests[0])

    todo = core.poll(1)

    assert items(list(core.crews[0].queue)) == ["c"]
    assert (core.crews[1].queue.nbytes, todo.run) == (5, [])


def test_a_hop_of_many_does_not_wait_for_more_room_than_there_can_be() -> None:
    """Items that travel together without being batched fit the next queue, however small it is, and
    never stand still.
    """
    policy = OneByOne()
    policy.learn(0, done(1, 1, 1e-6, True))
    core = pipeline_of(stage(policy=policy), stage(9, max_size=10))
    core.flow.submit(0, asks(range(50)))

    served: list[str] = []
    for now in range(20):
        todo = core.poll(now)
        served += [outcome(request) for request in todo.answer]
        for batch in todo.run:
            reply(core, now, batch, busy_s=1e-6)

    assert served == [f"{i}''" for i in range(50)]


# -- sizes


def test_a_stage_weighs_the_results_of_the_one_before() -> None:
    """A stage that has `size=` weighs the results of the stage before it anew."""

    def weigh(request: Request, result: object) -> None:
        request.size = len(str(result))

    core = pipeline_of(stage(8), stage(8, weigh=weigh), stage(8))
    requests = [ask("abc"), ask("de"), ask("f")]
    for request in requests:
        request.size = 4
    core.flow.submit(0, requests)
    seen = []
    for now in range(4):
        todo = core.poll(now)
        seen.append([(batch.stage, len(batch), batch.size) for batch in todo.run])
        for batch in todo.run:
            reply(core, now, batch)

    assert seen == [[(0, 2, 8)], [(1, 2, 7), (0, 1, 4)], [(2, 2, 2), (1, 1, 2)], [(2, 1, 1)]]


def test_a_result_that_cannot_be_weighed_fails_alone() -> None:
    """A result that cannot be weighed fails alone, and its mates go on."""

    def weigh(request: Request, result: object) -> None:
        if result == "b'":
            raise ModelError("no size")

    core = pipeline_of(stage(), stage(weigh=weigh))
    core.flow.submit(0, asks("abc"))
    reply(core, 1, core.poll(0).run[0])
    todo = core.poll(1)

    assert [(request.item, str(request.error)) for request in todo.answer] == [("b", "no size")]
    assert items(todo.run[0].requests) == ["a'", "c'"]
    assert core.unanswered == 2


# -- deadlines


@pytest.mark.fault("F32")
@pytest.mark.parametrize("deadline", [4.0, 5.0])
def test_nothing_is_dispatched_at_or_after_its_deadline(deadline: float) -> None:
    """A request is never dispatched at or after its deadline; it is answered with that instead."""
    core = pipeline_of(stage())
    core.flow.submit(0, [ask("late", deadline), ask("good", 6)])

    todo = core.poll(5)

    assert [items(batch.requests) for batch in todo.run] == [["good"]]
    assert [outcome(request) for request in todo.answer] == [DeadlineExceeded]


def test_a_deadline_is_checked_between_stages() -> None:
    """A result that comes at its request's deadline is not passed on to the next stage."""
    core = pipeline_of(stage(), stage())
    core.flow.submit(0, [ask("a", 5), ask("b", 6)])
    (batch,) = core.poll(0).run
    reply(core, 5, batch)

    todo = core.poll(5)

    assert [outcome(request) for request in todo.answer] == [DeadlineExceeded]
    assert items(todo.run[0].requests) == ["b'"]


def test_a_deadline_ends_the_waiting_also_while_the_item_runs() -> None:
    """A caller hears at its deadline although its item still runs; the result is dropped and
    counted when it comes.
    """
    core = pipeline_of(stage())
    core.flow.submit(0, [ask("a", 5)])
    todo = core.poll(0)

    assert todo.wake_at == 5
    assert answers(core, 5) == [DeadlineExceeded]

    reply(core, 6, todo.run[0])

    assert core.poll(6).answer == []
    assert core.crews[0].late_results == 1
    assert_counts(core, answered=1, unanswered=0)


def test_a_reply_after_the_deadline_is_late_although_nobody_has_polled() -> None:
    """A reply after a deadline is late even if no poll came in between, as when the driver stood
    still; mates in the same batch that have time get their answers.
    """
    to = pipeline_of(stage())
    hasty, patient = ask(deadline=3), ask()
    to.flow.submit(0, [hasty, patient])
    (batch,) = to.poll(0).run
    reply(to, 5, batch)

    assert outcome(hasty) is DeadlineExceeded
    assert patient.error is None
    assert patient in to.poll(5).answer
    assert to.crews[0].late_results == 1


def test_the_next_wake_up_is_the_earliest_there_is() -> None:
    """The next wake-up is the earliest of all stages' deadlines, hang limits and wishes of
    policies.
    """
    core = pipeline_of(stage(max_batch_time_s=30), stage(policy=Static(4, 10)))
    core.flow.submit(0, asks("a", 50))
    todo = core.poll(0)
    seen = [todo.wake_at]
    reply(core, 2, todo.run[0])
    seen.append(core.poll(2).wake_at)
    core.flow.submit(3, asks("b", 11))
    seen.append(core.poll(3).wake_at)
    seen.append(core.poll(11).wake_at)

    assert seen == [30, 12, 11, 12]


def test_without_work_nobody_is_woken() -> None:
    """A pipeline without work asks to be woken at infinity, that is never."""
    core = pipeline_of(stage(), stage())

    assert core.poll(0).wake_at == inf


def test_a_worker_that_hangs_is_named_once() -> None:
    """A worker that hangs is named once, at its limit; its requests are owed until its death is
    reported.
    """
    core = pipeline_of(stage(1, max_batch_time_s=10), workers=2)
    core.flow.submit(0, asks("ab"))
    core.poll(0)

    assert sorted(core.poll(10).kill) == [(0, 0), (0, 1)]
    assert core.poll(11).kill == []
    assert core.unanswered == 2


def test_the_start_of_another_call_gives_a_worker_new_time() -> None:
    """When a batch is run in parts, the worker has the whole limit anew with each call that it
    reports.
    """
    core = pipeline_of(stage(max_batch_time_s=10))
    core.flow.submit(0, asks("ab"))
    (batch,) = core.poll(0).run
    core.restart_hang_timer(9, 0, batch.place, batch.id)

    assert (core.poll(10).kill, core.poll(18).kill, core.poll(19).kill) == ([], [], [(0, 0)])


# -- workers lost


def test_a_request_of_a_lost_worker_is_run_once_more() -> None:
    """A request of a lost worker is run once more by another one; a second loss is an error, and
    there is no third try.
    """
    core = pipeline_of(stage(max_batch_time_s=10), workers=3)
    requests = asks("a")
    core.flow.submit(0, requests)
    (first,) = core.poll(0).run
    core.worker_lost(1, 0, first.place)
    (second,) = core.poll(1).run

    assert second.place != first.place
    assert second.requests == requests

    core.worker_lost(2, 0, second.place)

    todo = core.poll(2)
    (error,) = [request.error for request in requests]
    assert (todo.run, todo.answer) == ([], requests)
    assert isinstance(error, ModelError)
    assert (error.status, error.code) == (500, "request_crashed_worker")


@pytest.mark.parametrize("idempotent", [True, False])
def test_what_a_lost_worker_had_not_been_sent_waits_again(idempotent: bool) -> None:
    """Requests that had not been sent to a lost worker wait again: they are not to blame, and have
    not used up their second try.
    """
    core = pipeline_of(stage(max_batch_time_s=10, idempotent=idempotent), workers=2)
    requests = asks("abc")
    core.flow.submit(0, requests)
    (batch,) = core.poll(0).run
    core.worker_lost(1, 0, batch.place, {requests[1].id, requests[2].id})
    todo = core.poll(1)

    assert [request.losses for request in requests] == [1, 0, 0]
    assert todo.answer == ([] if idempotent else [requests[0]])
    assert [one.requests for one in todo.run] == [[requests[0]] if idempotent else requests[1:]]


def test_what_must_not_run_twice_fails_at_once() -> None:
    """With `idempotent=False` the requests of a lost worker fail at once, since it may have done
    them before it died.
    """
    core = pipeline_of(stage(idempotent=False), workers=2)
    (request,) = asks("a")
    core.flow.submit(0, [request])
    (batch,) = core.poll(0).run
    core.worker_lost(1, 0, batch.place)

    todo = core.poll(1)

    assert (todo.run, todo.answer) == ([], [request])
    assert isinstance(request.error, Unavailable)
    assert request.error.code == "worker_lost"


def test_losses_are_counted_per_stage() -> None:
    """A request that was run again in one stage may be run again in the next, too."""
    core = pipeline_of(stage(), stage(), workers=3)
    (request,) = asks("a")
    core.flow.submit(0, [request])
    for now, index in enumerate((0, 1)):
        (batch,) = core.poll(now).run
        core.worker_lost(now, index, batch.place)
        (batch,) = core.poll(now).run
        reply(core, now, batch)

    assert answers(core, 2) == ["a''"]


def test_requests_of_a_lost_worker_go_ahead_of_later_ones() -> None:
    """Requests of a lost worker wait in the order of their arrival, ahead of later ones, whether
    they are to blame or not.
    """
    for lost in (Core.worker_lost, Core.worker_left):
        core = pipeline_of(stage(3), workers=1)
        core.flow.submit(0, asks("abc"))
        (batch,) = core.poll(0).run
        core.flow.submit(1, asks("de"))
        lost(core, 2, 0, batch.place)
        seen: list[str] = []
        for worker in range(9):
            core.worker_ready(0, worker)
            seen += ["".join(items(batch.requests)) for batch in core.poll(2).run]

        assert seen == (["a", "b", "c", "de"] if lost is Core.worker_lost else ["abc", "de"])


def test_a_worker_that_leaves_costs_its_requests_nothing() -> None:
    """A worker that leaves without a crash, such as an interrupted thread, costs its requests none
    of their tries, however often it happens.
    """
    core = pipeline_of(stage(), workers=0)
    requests = asks("ab")
    core.flow.submit(0, requests)
    for worker in range(5):
        core.worker_ready(0, worker)
        (batch,) = core.poll(worker).run
        assert batch.requests == requests
        core.worker_left(worker, 0, worker)

    assert [request.losses for request in requests] == [0, 0]


def test_answers_that_nobody_waits_for_are_late_in_whole_replies_and_in_parts() -> None:
    """In a whole reply or in a part of it, those who were answered already or have gone take
    nothing, and the others take their results.
    """
    core = pipeline_of(stage(6))
    requests = asks("abcdef")
    requests[1].deadline = 5
    core.flow.submit(0, requests[:3])
    core.flow.submit(0, requests[3:])
    (whole,) = core.poll(0).run
    core.cancel(1, requests[0])
    core.cancel(1, requests[5])
    assert answers(core, 5) == [DeadlineExceeded]

    core.completed(6, Reply(0, whole.place, whole.id, [1, 2, 3], ["a'", "b'", "c'"]))
    assert core.crews[0].late_results == 2
    assert answers(core, 6) == ["c'"]
    core.completed(7, Reply(0, whole.place, whole.id, [4, 5, 6], ["d'", "e'", "f'"]))

    assert answers(core, 7) == ["d'", "e'"]
    assert (core.crews[0].late_results, core.crews[0].stray_replies, core.unanswered) == (3, 0, 0)


def test_a_late_reply_of_a_lost_worker_is_nobodys() -> None:
    """A late reply of a lost worker is taken by nobody: its requests were given to another worker,
    whose answer counts.
    """
    core = pipeline_of(stage(), workers=2)
    (request,) = asks("a")
    core.flow.submit(0, [request])
    (first,) = core.poll(0).run
    core.worker_lost(1, 0, first.place)
    (second,) = core.poll(1).run
    reply(core, 2, first, compute=lambda item: "wrong")
    reply(core, 3, second)

    assert answers(core, 3) == ["a'"]
    assert core.crews[0].stray_replies == 1
    assert core.crews[0].late_results == 0


def test_who_was_answered_or_has_gone_is_not_run_again() -> None:
    """Requests of a lost worker that have expired or were cancelled are not run again."""
    core = pipeline_of(stage(), workers=2)
    requests = [ask("a", 5), ask("b"), ask("c")]
    core.flow.submit(0, requests)
    (batch,) = core.poll(0).run
    core.cancel(1, requests[1])
    core.poll(5)
    core.worker_lost(6, 0, batch.place)

    assert [items(again.requests) for again in core.poll(6).run] == [["c"]]


# -- callers that leave


def test_a_queued_request_that_is_cancelled_never_runs() -> None:
    """A queued request that is cancelled never runs, and nobody is told anything of it."""
    core = pipeline_of(stage())
    requests = asks("ab")
    core.flow.submit(0, requests)
    core.cancel(0, requests[0])
    todo = core.poll(0)

    assert items(todo.run[0].requests) == ["b"]
    assert todo.answer == []
    assert_counts(core, cancelled=1, unanswered=1)


def test_a_cancelled_request_goes_no_further() -> None:
    """A request that is cancelled while it runs is neither passed on nor answered."""
    core = pipeline_of(stage(), stage())
    requests = asks("ab")
    core.flow.submit(0, requests)
    (batch,) = core.poll(0).run
    core.cancel(1, requests[0])
    reply(core, 2, batch)
    todo = core.poll(2)

    assert items(todo.run[0].requests) == ["b'"]
    assert todo.answer == []
    assert core.crews[0].late_results == 1
    assert_counts(core, cancelled=1, unanswered=1)


def test_cancelling_in_a_later_queue_takes_it_out() -> None:
    """A request that is cancelled is taken out of whichever stage's queue it waits in."""
    core = pipeline_of(stage(), stage(), workers=(1, 0))
    requests = asks("ab")
    core.flow.submit(0, requests)
    reply(core, 1, core.poll(0).run[0])
    core.cancel(2, requests[0])
    core.worker_ready(1, 0)

    assert items(core.poll(2).run[0].requests) == ["b'"]


def test_cancelling_before_submission_or_twice_is_harmless() -> None:
    """A request that was cancelled before it was submitted is passed over; cancelling a second
    time, or after the answer, does nothing.
    """
    core = pipeline_of(stage(), journal=None)
    early, twice, answered = asks("abc")
    core.cancel(0, early)
    core.flow.submit(0, [early, twice, answered])
    core.cancel(0, twice)
    core.cancel(0, twice)
    (batch,) = core.poll(0).run
    reply(core, 1, batch)
    core.cancel(1, answered)

    assert items(batch.requests) == ["c"]
    assert answers(core, 1) == ["c'"]
    assert_counts(core, admitted=2, answered=1, cancelled=1)


# -- the end


def test_a_closed_pipeline_refuses_and_finishes() -> None:
    """A closed pipeline refuses each new request with an error of its own, and answers those
    inside.
    """
    core = pipeline_of(stage())
    inside, outside, patient = ask("a"), ask("b"), ask("c", patient=True)
    core.flow.submit(0, [inside])
    (batch,) = core.poll(0).run
    core.close(Unavailable("closing", code="draining"))
    core.flow.submit(1, [outside, patient])
    reply(core, 2, batch)
    core.poll(2)

    assert inside.result == "a'"
    assert [str(r.error) for r in (outside, patient)] == ["closing", "closing"]
    assert outside.error is not patient.error
    assert_counts(core, admitted=1, refused=2)


def test_the_last_that_expires_at_a_door_sets_free_what_is_held_back_behind_it() -> None:
    """Once the service closes, a stage takes what it holds back in the very poll in which the last
    request that could join it has expired, in the queue before it and at the door.
    """
    core = pipeline_of(stage(1, max_size=1), stage(policy=Static(4, 100.0)))
    core.flow.submit(0, [ask("a")])
    reply(core, 0, core.poll(0).run[0])
    assert core.poll(0).run == []
    core.worker_lost(0, 0, 0)
    core.flow.submit(0, asks("bc", deadline=3.0, patient=True))
    core.poll(0)
    core.close(Unavailable("closing", code="draining"))
    assert core.poll(1).run == []

    (batch,) = core.poll(3).run

    assert (batch.stage, items(batch.requests)) == (1, ["a'"])


def test_abort_answers_all_that_is_inside() -> None:
    """Aborting answers all requests at the door, in queues and in workers, each once; late replies
    change nothing then.
    """
    core = pipeline_of(stage(1, max_size=1), stage(1, max_size=1))
    requests = asks("abcdef", patient=True)
    core.flow.submit(0, requests)
    first = core.poll(0).run[0]
    reply(core, 0, first)
    batches = core.poll(0).run
    assert [batch.stage for batch in batches] == [1, 0]

    core.abort(1, Unavailable("over", code="stopped"))
    told = core.poll(1).answer
    for batch in batches:
        reply(core, 2, batch)

    assert sorted(items(told)) == sorted(items(requests))
    assert {str(request.error) for request in requests} == {"over"}
    assert len({id(request.error) for request in requests}) == 6
    assert core.poll(2).answer == []
    assert_counts(core, waiting=0, unanswered=0)
    core.flow.submit(3, asks("x"))
    assert answers(core, 3) == [Unavailable]


# -- refusals


def test_a_full_queue_refuses_and_says_when_to_try_again() -> None:
    """A full queue refuses a request, which is never admitted, and tells it to come again after the
    predicted wait.
    """
    core = pipeline_of(stage(2, max_size=2))
    core.flow.submit(0, asks("ab"))
    reply(core, 4, core.poll(0).run[0], busy_s=4)
    core.poll(4)
    core.flow.submit(5, asks("cd"))
    (refused,) = asks("e")
    core.flow.submit(5, [refused])

    assert isinstance(refused.error, Overloaded)
    assert refused.error.retry_after_s == 4
    assert_counts(core, admitted=4, refused=1)
    assert answers(core, 5) == [Overloaded]


def test_some_of_a_crowd_may_get_in() -> None:
    """Where a queue has room for three of five requests, it takes the first three."""
    core = pipeline_of(stage(2, max_size=3))
    requests = asks(range(5))
    core.flow.submit(0, requests)
    core.poll(0)

    assert [type(request.error) for request in requests] == [type(None)] * 3 + [Overloaded] * 2


def test_a_request_larger_than_the_queue_is_too_large() -> None:
    """A request that is larger than the whole queue gets 413 and not 429, since neither trying
    again nor waiting at the door would help.
    """
    core = pipeline_of(stage(max_bytes=10))
    fits, too_large = ask("a", nbytes=10), ask("b", nbytes=11, patient=True)
    core.flow.submit(0, [too_large])
    core.flow.submit(0, [fits])

    assert isinstance(too_large.error, InvalidRequest)
    assert (too_large.error.status, too_large.error.code) == (413, "too_large")
    assert fits.error is None


def test_what_a_policy_drops_is_overloaded() -> None:
    """A request that the policy drops is answered with `Overloaded`: it would not have made its
    deadline.
    """
    policy = Scripted(Decision())
    core = pipeline_of(stage(policy=policy))
    requests = asks("ab")
    core.flow.submit(0, requests)
    policy.decision = Decision(drop=requests[:1])

    assert answers(core, 0) == [Overloaded]
    assert_counts(core, answered=1, unanswered=1)


def test_trying_again_makes_sense_once_those_inside_are_served() -> None:
    """`Retry-After` is the rest of what runs plus what waits in batches, at the door too, and is
    never zero.
    """
    core = pipeline_of(stage(2, max_size=5), workers=2)
    unknown = core.flow.retry_after_s(0)
    core.flow.submit(0, asks("ab"))
    reply(core, 3, core.poll(0).run[0], busy_s=3)
    core.flow.submit(3, asks(range(13), patient=True))
    core.poll(3)

    assert unknown == 0.1
    assert (core.crews[0].running, core.waiting) == (4, 9)
    assert core.flow.retry_after_s(4) == 2 + 4 * 3 / 2


def test_without_a_worker_trying_again_makes_sense_after_a_second_at_least() -> None:
    """A worker that a stage lacks is not there in a moment: callers that are refused meanwhile, on
    arrival or from the queue, are told to wait for a second, or for the predicted wait if it is
    longer.
    """
    core = pipeline_of(stage(max_size=1), stage(), workers=0, slo_s=3)
    late, refused = asks("ab")
    core.flow.submit(0, [late, refused])
    core.poll(0)
    core.poll(9)
    seconds = [request.error.retry_after_s for request in (late, refused) if isinstance(request.error, Overloaded)]

    core.worker_ready(0, 0)
    lacks_one = core.flow.retry_after_s(9)
    core.worker_ready(1, 0)
    lacks_none = core.flow.retry_after_s(9)

    assert (seconds, lacks_one, lacks_none) == ([1.0, 1.0], 1.0, 0.1)
    core.flow.submit(9, asks("a"))
    reply(core, 13, core.poll(9).run[0], busy_s=4)
    core.worker_lost(13, 1, 0)
    assert core.flow.retry_after_s(13) == 4


# -- admission


def learned(*seconds: float, workers: int = 1, **settings: Any) -> Core:
    """Stages of batches of two that took so long, one after the other; it is time 0 again."""
    core = pipeline_of(*[stage(2, **settings) for _ in seconds], workers=workers)
    core.flow.submit(-sum(seconds), asks("x"))
    now = -sum(seconds)
    for took_s in seconds:
        (batch,) = core.poll(now).run
        now += took_s
        reply(core, now, batch, busy_s=took_s)
    core.poll(0)
    return core


def crowd(n: int) -> list[Request]:
    """So many requests that go before others and never expire."""
    requests = asks(range(n))
    for request in requests:
        request.due = 0.5
    return requests


def verdict(core: Core, now: float, request: Request) -> object:
    """What becomes of a newcomer at once: the class of its error, or None if it may wait."""
    core.flow.submit(now, [request])
    return outcome(request) if request.state == DONE else None


@pytest.mark.fault("F32")
@pytest.mark.parametrize(("deadline", "told"), [(15.9, Overloaded), (16.0, None)])
def test_who_cannot_make_its_deadline_is_refused_on_arrival(deadline: float, told: object) -> None:
    """A request that could not make its deadline behind the running batch, two more and its own is
    refused on arrival, and told when to come.
    """
    core = learned(4.0)
    core.flow.submit(0, crowd(2))
    core.poll(0)
    core.flow.submit(0, crowd(4))
    request = ask("newcomer", deadline)

    assert verdict(core, 1, request) is told
    assert core.flow.refused == (told is not None)
    if isinstance(request.error, Overloaded):
        assert str(request.error) == "the request would not be answered by its deadline"
        assert request.error.reason == "deadline"
        assert request.error.retry_after_s == 3 + 2 * 4


def test_an_idle_service_refuses_nobody() -> None:
    """An idle service admits every request, however long its batches took: the next one may be
    quicker, and only by trying can it learn.
    """
    core = learned(4.0)

    assert verdict(core, 0, ask("hurried", 0.5)) is None
    assert len(core.poll(0).run) == 1
    assert verdict(core, 0, ask("behind it", 0.5)) is Overloaded


def test_who_goes_first_does_not_wait_for_the_others() -> None:
    """The predicted wait counts only what is ahead of a request, by priority and by due time."""
    core = learned(4.0)
    core.flow.submit(0, asks(range(2)))
    core.poll(0)
    core.flow.submit(0, asks(range(40), 1000))

    assert verdict(core, 0, ask("same", 1000)) is None
    assert verdict(core, 0, ask("due first", 8)) is None
    assert verdict(core, 0, ask("low", 80, priority=-1)) is Overloaded
    assert verdict(core, 0, ask("high", 80, priority=1)) is None


def test_a_patient_caller_waits_for_its_deadline() -> None:
    """A patient caller is never refused on arrival; it waits until its deadline."""
    core = learned(4.0)
    core.flow.submit(0, asks(range(9)))
    core.poll(0)

    assert verdict(core, 0, ask("patient", 5, patient=True)) is None


def test_the_stages_behind_take_their_time_too() -> None:
    """The prediction on arrival adds the time that the stages behind need at least."""
    core = learned(4.0, 3.0)
    core.flow.submit(0, asks(range(2)))
    core.poll(0)

    assert verdict(core, 0, ask("late", 10.9)) is Overloaded
    assert verdict(core, 0, ask("in time", 11.0)) is None


def test_sizes_count_in_what_is_ahead() -> None:
    """The prediction on arrival counts sizes: two batches of one large request each go first."""
    core = learned(4.0)
    core.flow.submit(0, asks(range(2)))
    core.poll(0)
    large = crowd(2)
    for request in large:
        request.size = 2
    core.flow.submit(0, large)

    assert verdict(core, 0, ask("late", 15.9)) is Overloaded
    assert verdict(core, 0, ask("in time", 16)) is None


# -- what lies ahead


def test_each_stage_knows_what_lies_ahead() -> None:
    """Each stage knows how much time the stages behind it take: their fastest batch if they are
    empty, else their queue and one more batch.
    """
    core = learned(1.0, 2.0, 4.0)
    seen = [[one.lobby.view.onward_s for one in core.crews]]
    core.flow.submit(0, asks("abcd"))
    (batch,) = core.poll(0).run
    reply(core, 1, batch, busy_s=1)
    (batch, second) = core.poll(1).run
    assert (batch.stage, second.stage) == (1, 0)
    seen.append([one.lobby.view.onward_s for one in core.crews])
    reply(core, 2, second, busy_s=1)
    core.poll(2)
    core.poll(2)
    seen.append([one.lobby.view.onward_s for one in core.crews])

    assert seen == [[6, 4, 0], [2 + 2 + 4, 4, 0], [1 + 2 + 2 + 4, 4, 0]]


# -- mistakes of a driver


@pytest.mark.parametrize("case", ["queued", "running", "answered", "in one list"])
@pytest.mark.parametrize("full", [False, True])
def test_submitting_a_request_twice_is_an_error_that_changes_nothing(case: str, full: bool) -> None:
    """Submitting a request twice is an error, and none of the list is taken."""
    core = pipeline_of(stage(1, max_size=2))
    known, other = asks("ab", patient=True)
    again = [other, known]
    if case == "in one list":
        again = [other, known, other]
    else:
        core.flow.submit(0, [known])
    if case in ("running", "answered"):
        (batch,) = core.poll(0).run
        if case == "answered":
            reply(core, 1, batch)
            core.poll(1)
    if full:
        core.flow.submit(1, asks("cd"))
    before = (state_of(core.crews[0]), core.flow.admitted, core.waiting, other.state)

    with pytest.raises(ValueError, match="was submitted before"):
        core.flow.submit(2, again)

    assert (state_of(core.crews[0]), core.flow.admitted, core.waiting, other.state) == before


@pytest.mark.parametrize("results", [[], ["a'"], ["a'", "b'", "c'"]])
def test_a_reply_with_another_number_of_results_is_an_error_that_changes_nothing(results: list[str]) -> None:
    """A reply with another number of results is an error: nobody gets another one's answer, and the
    batch is still owed.
    """
    core = pipeline_of(stage())
    core.flow.submit(0, asks("ab"))
    (batch,) = core.poll(0).run
    before = state_of(core.crews[0])

    with pytest.raises(ValueError, match=rf"{len(results)} results for 2 requests"):
        core.completed(1, Reply(0, batch.place, batch.id, batch.ids, results))

    assert state_of(core.crews[0]) == before


def test_a_policy_that_asks_for_too_much_harms_nobody_else() -> None:
    """If a policy asks for too much, the poll fails, but what was decided before and after it is
    not lost.
    """
    policy = Scripted(Decision(take=9))
    core = pipeline_of(stage(), stage(policy=policy))
    core.flow.submit(0, asks("a"))
    reply(core, 1, core.poll(0).run[0])
    core.flow.submit(1, asks("b"))
    with pytest.raises(RuntimeError, match="policy Scripted"):
        core.poll(1)
    policy.decision = Decision(take=1)

    assert [items(batch.requests) for batch in core.poll(1).run] == [["a'"], ["b"]]


def test_it_tells_what_it_is() -> None:
    """The `repr` of a pipeline says of each stage what waits in it, what runs, and how many workers
    are idle.
    """
    core = pipeline_of(stage(name="decode"), stage(name="infer"))
    request = ask("a", 5)
    core.flow.submit(0, [request])

    assert repr(core) == (
        "<Core <Batcher decode queued=1 running=0 idle=1> -> <Batcher infer queued=0 running=0 idle=1>>"
    )
    assert repr(request) == "<Request 1 queued at decode deadline=5.000>"


def test_a_stage_whose_memory_is_short_needs_less_credit() -> None:
    """A stage whose memory is short asks for room behind it only for the batch that it can make
    now.
    """
    core = pipeline_of(stage(4), stage(4, max_size=5), workers=(1, 0))
    core.flow.submit(0, asks("abcd"))
    (batch,) = core.poll(0).run
    core.crews[0].ran_out_of_memory(batch.place, batch.id, [[0, 1, 2, 3]], [[0]])
    reply(core, 1, batch)
    core.flow.submit(1, asks("efgh"))

    assert [items(batch.requests) for batch in core.poll(1).run] == [["e"]]
