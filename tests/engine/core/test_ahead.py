"""Batches ahead of time: a worker has its next one before it asks, if waiting could not have made that any better."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from sys import maxsize
from typing import Any

import pytest

from carpool.engine.core.batch import Batch, Reply
from carpool.engine.core.core import Core
from carpool.engine.core.safe_size import SafeSize
from carpool.engine.core.times import Times
from carpool.engine.policy import AIMD, Adaptive, Cork, Deadline, DoneBatch, Greedy, OneByOne, Policy, Static, View
from carpool.engine.policy.base import Decision
from carpool.engine.request import DONE, Request
from carpool.errors import DeadlineExceeded, Unavailable
from tests.support.pipelines import ask, asks, items, outcome, pipeline_of, reply, stage

U = 2**-9  # about two milliseconds
TOOK_S = 8 * U  # what batches take here; where it matters who comes meanwhile, one may go ahead after half of it


def saturated(core: Core, now: float = 0, took_s: float = TOOK_S) -> float:
    """A few full batches one after the other, so that it is known what they take. Returns the time then."""
    for _ in range(3):
        n = sum(one.lobby.policy.limit for one in core.crews[:1]) * core.crews[0].idle
        core.flow.submit(now, asks(["warm"] * n))
        batches = core.poll(now).run
        now += took_s
        for batch in batches:
            reply(core, now, batch, busy_s=took_s)
        core.poll(now)
    return now


def runs(core: Core, now: float) -> list[Batch]:
    return core.poll(now).run


def what(batches: list[Batch]) -> list[tuple[list[Any], int, bool]]:
    return [(items(batch.requests), batch.place, batch.ahead) for batch in batches]


def test_a_full_batch_goes_before_its_worker_is_free() -> None:
    """While a worker is at work, at most one full batch is handed to it in advance; it begins when
    the reply before it comes.
    """
    core = pipeline_of(stage(2, runs_ahead=True))
    now = saturated(core)
    core.flow.submit(now, asks("abc"))
    assert what(runs(core, now)) == [(["a", "b"], 0, False)]
    core.flow.submit(now + 1 * U, asks("defgh"))
    ahead = runs(core, now + 1 * U)
    assert what(ahead) == [(["c", "d"], 0, True)]
    assert runs(core, now + 7 * U) == []
    for request in list(core.crews[0].queue):
        core.cancel(now + 7 * U, request)
    batcher = core.crews[0]
    assert (batcher.running, len(batcher.in_flight), core.waiting) == (4, 1, 0)

    reply(core, now + 8 * U, batcher.in_flight[0], busy_s=TOOK_S)
    assert ahead[0].started == now + 8 * U
    reply(core, now + 16 * U, ahead[0], busy_s=TOOK_S)
    answers = [outcome(request) for request in core.poll(now + 16 * U).answer]
    assert answers == ["a'", "b'", "c'", "d'"]
    assert (batcher.running, batcher.idle, batcher.times.usual_s) == (0, 1, TOOK_S)


def test_where_requests_differ_it_goes_no_sooner_than_it_must() -> None:
    """Where requests differ in urgency, a batch goes ahead as late as it may, so that one of a
    higher priority that comes until then is not overtaken.
    """
    core = pipeline_of(stage(2, runs_ahead=True))
    now = saturated(core)
    core.flow.submit(now, [*asks("ab"), ask("urgent", priority=1), ask("more urgent", priority=1)])
    assert what(runs(core, now)) == [(["urgent", "more urgent"], 0, False)]
    todo = core.poll(now + 1 * U)
    assert (todo.run, todo.wake_at) == ([], now + 4 * U)
    assert what(runs(core, now + 4 * U)) == [(["a", "b"], 0, True)]


def test_while_a_long_call_runs_all_wait() -> None:
    """During a long call all requests wait, and can be cancelled, until shortly before its learned
    end; once that end has passed, none goes ahead, since nobody knows when the call ends.
    """
    core = pipeline_of(stage(1, runs_ahead=True))
    now = saturated(core, took_s=8)
    core.flow.submit(now, asks("ab"))
    assert what(runs(core, now)) == [(["a"], 0, False)]
    todo = core.poll(now + 7)
    assert (todo.run, todo.wake_at) == ([], now + 8 - 0.02)
    assert runs(core, now + 9) == []
    assert what(runs(core, now + 8)) == [(["b"], 0, True)]


def test_short_batches_go_at_once() -> None:
    """Behind calls of about a millisecond the next batch goes at once: no timer is fine enough to
    hit their end.
    """
    core = pipeline_of(stage(1, runs_ahead=True), workers=2)
    now = saturated(core, took_s=2**-10)
    core.flow.submit(now, asks("abcd"))
    assert [ahead for _, _, ahead in what(runs(core, now))] == [False, False, True, True]


@pytest.mark.parametrize(
    ("took_s", "after_s", "goes"),
    [
        (0.0023, 0, True),
        (0.0029, 0, True),
        (0.0031, 0, False),
        (TOOK_S, 4 * U - 0.0011, False),
        (TOOK_S, 4 * U - 0.0009, True),
    ],
)
def test_none_waits_for_less_than_timers_can_tell(took_s: float, after_s: float, goes: bool) -> None:
    """A batch that might go ahead within the next millisecond goes now: uvloop has a shorter timer
    fire at once, so a driver that waited would ask again and again until then.
    """
    core = pipeline_of(stage(2, runs_ahead=True))
    now = saturated(core, took_s=took_s)
    core.flow.submit(now, [*asks("ab"), ask("urgent", priority=1), ask("more urgent", priority=1)])
    at_once = what(runs(core, now))
    todo = core.poll(now + after_s)
    gone = at_once + what(todo.run)
    assert gone == [(["urgent", "more urgent"], 0, False), (["a", "b"], 0, True)][: 1 + goes]
    assert goes or todo.wake_at - (now + after_s) > 0.001


@pytest.mark.parametrize(
    ("policy", "goes"),
    [
        (Greedy(2), True),
        (Static(2, 100), True),
        (OneByOne(), True),
        (AIMD(2), False),
        (Cork(2), False),
        (Deadline(2), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Policy) else "",
)
def test_policies_say_whether_a_full_batch_may_go(policy: Policy, goes: bool) -> None:
    """A policy that refuses requests or shrinks batches by what it sees when a worker is free keeps
    all of them until then; the others let a full batch go ahead.
    """
    core = pipeline_of(stage(policy=policy, runs_ahead=True))
    now = saturated(core)
    core.flow.submit(now, asks("abcdefgh"))
    assert any(batch.ahead for batch in runs(core, now)) is goes


def test_what_is_not_full_waits() -> None:
    """A batch that is not full waits for its worker: those who come back with the reply could still
    join it.
    """
    core = pipeline_of(stage(3, runs_ahead=True))
    now = saturated(core)
    core.flow.submit(now, asks("abcde"))
    assert what(runs(core, now)) == [(["a", "b", "c"], 0, False)]
    assert runs(core, now + 7 * U) == []
    core.flow.submit(now + 7 * U, asks("f"))
    assert what(runs(core, now + 7 * U)) == [(["d", "e", "f"], 0, True)]


def test_who_is_urgent_is_not_overtaken() -> None:
    """Where several priorities, keys or buckets wait, nothing goes ahead: the queue decides when a
    worker is free.
    """
    core = pipeline_of(stage(2, runs_ahead=True))
    now = saturated(core)
    core.flow.submit(now, asks("ab"))
    runs(core, now)
    core.flow.submit(now + 5 * U, [ask("urgent", priority=20), *asks("cde")])
    assert runs(core, now + 7 * U) == []
    reply(core, now + 8 * U, core.crews[0].in_flight[0])
    assert what(runs(core, now + 8 * U)) == [(["urgent", "c"], 0, False)]


def test_the_worker_that_is_free_first_gets_it_and_one_that_is_late_does_not() -> None:
    """Of several workers the one that will be free first gets the batch ahead, one that is late
    does not; where ends cannot be foretold, no worker gets anything before it is free.
    """
    core = pipeline_of(stage(1, runs_ahead=True), workers=2)
    now = saturated(core)
    core.flow.submit(now, asks("a"))
    (first,) = runs(core, now)
    core.flow.submit(now + 3 * U, asks("bcd"))
    (second,) = runs(core, now + 3 * U)
    assert what(runs(core, now + 4 * U)) == [(["c"], first.place, True)]
    assert runs(core, now + 6 * U) == []
    assert what(runs(core, now + 7 * U)) == [(["d"], second.place, True)]

    late = pipeline_of(stage(1, runs_ahead=True), workers=2)
    now = saturated(late)
    late.flow.submit(now, asks("ab"))
    runs(late, now)
    late.flow.submit(now + 13 * U, asks("c"))
    assert runs(late, now + 13 * U) == []

    unsteady = pipeline_of(stage(1, runs_ahead=True), workers=2)
    now = saturated(unsteady, saturated(unsteady), took_s=U)
    unsteady.flow.submit(now, asks("abc"))
    runs(unsteady, now)
    assert not [batch for at in range(40) for batch in runs(unsteady, now + at / 4 * U)]


def test_where_much_waits_it_does_not_matter_who_is_free_first() -> None:
    """With four full batches waiting for each of several workers, each has its next batch as soon as
    a single worker would.
    """
    core = pipeline_of(stage(1, runs_ahead=True), workers=2)
    now = saturated(core)
    core.flow.submit(now, asks("ab" + "cdefghij"))
    assert what(runs(core, now)) == [(["a"], 0, False), (["b"], 1, False), (["c"], 0, True)]
    assert runs(core, now + 1 * U) == []  # seven are not eight
    core.flow.submit(now + 2 * U, asks("k"))
    assert what(runs(core, now + 2 * U)) == [(["d"], 1, True)]


@pytest.mark.parametrize(("took_s", "lying"), [(U, 4), (4 * U, 2), (TOOK_S, 1)])
def test_where_much_waits_a_worker_has_several_short_batches_ahead(took_s: float, lying: int) -> None:
    """Where much waits and calls are short, several batches lie with each worker, so that it has
    work while the service waits for a core: as many as should end within 20 ms, and at most four.
    """
    core = pipeline_of(stage(1, runs_ahead=True), workers=2)
    now = saturated(core, took_s=took_s)
    core.flow.submit(now, asks(range(40)))
    first, second, *ahead = what(runs(core, now))
    assert [first, second] == [([0], 0, False), ([1], 1, False)]
    assert ahead == [([2 + i], i % 2, True) for i in range(2 * lying)]
    batcher = core.crews[0]
    assert (batcher.running, len(batcher.handed_over)) == (2 + 2 * lying,) * 2

    reply(core, now + took_s, batcher.in_flight[0], busy_s=took_s)
    assert items(batcher.in_flight[0].requests) == [2]
    assert batcher.in_flight[0].started == now + took_s
    assert what(runs(core, now + took_s))[0] == ([2 + 2 * lying], 0, True)


@pytest.mark.parametrize(("took_s", "lying"), [(U / 4, 4), (U, 1)])
def test_where_requests_differ_several_batches_go_only_if_they_end_soon(took_s: float, lying: int) -> None:
    """Where requests may differ in urgency, no more lies with a worker than ends within two milliseconds or so: that
    long is what is more urgent overtaken at most.
    """
    core = pipeline_of(stage(1, runs_ahead=True))
    core.flow.submit(0, [ask("urgent", priority=1)])
    (first,) = core.poll(0).run
    reply(core, took_s, first, busy_s=took_s)
    now = saturated(core, now=1, took_s=took_s)
    core.flow.submit(now, asks(range(40)))
    assert what(runs(core, now)) == [([0], 0, False), *[([1 + i], 0, True) for i in range(lying)]]


class Counting(Greedy):
    """Counts how often it is asked."""

    asked = 0

    def decide(self, view: View) -> Decision:
        self.asked += view.free_in_s is None
        return super().decide(view)


def test_what_goes_ahead_is_no_reason_to_ask_the_policy_once_more() -> None:
    """In one poll the policy is asked once for each batch that an idle worker gets, and once when
    none is idle any more, however many batches go ahead then; and anew in the next poll.
    """
    policy = Counting(1)
    core = pipeline_of(stage(policy=policy, runs_ahead=True))
    now = saturated(core, took_s=U)
    core.flow.submit(now, asks(range(12)))
    policy.asked = 0
    assert [batch.ahead for batch in runs(core, now)] == [False, True, True, True, True]
    assert policy.asked == 2
    assert runs(core, now) == []
    assert policy.asked == 3


def test_no_timer_is_set_for_a_further_batch_ahead() -> None:
    """A second batch ahead goes when something happens anyway: the loop is not woken for it."""
    core = pipeline_of(stage(1, runs_ahead=True))
    now = saturated(core)
    core.flow.submit(now, asks(range(9)))
    todo = core.poll(now)
    assert (what(todo.run), todo.wake_at) == ([([0], 0, False), ([1], 0, True)], inf)
    assert what(runs(core, now + 6 * U)) == [([2], 0, True)]


def test_what_lay_ahead_of_a_lost_worker_waits_again_in_its_order() -> None:
    """All batches that lay ahead of a lost worker go back to their places in the queue, and none of
    their requests is blamed.
    """
    core = pipeline_of(stage(1, runs_ahead=True))
    now = saturated(core, took_s=4 * U)
    requests = asks(range(12))
    core.flow.submit(now, requests)
    assert what(runs(core, now)) == [([0], 0, False), ([1], 0, True), ([2], 0, True)]
    core.worker_lost(now + U, 0, 0)
    batcher = core.crews[0]
    assert (batcher.running, batcher.ahead, core.waiting) == (0, {}, 12)
    assert [request.losses for request in requests] == [1] + [0] * 11
    core.worker_ready(0, 0)
    done = []
    while core.unanswered:
        done += [items(batch.requests)[0] for batch in runs(core, now)]
        now += 4 * U
        reply(core, now, batcher.in_flight[0], busy_s=4 * U)
        core.collect_answers()
    assert done == list(range(12))


def test_one_of_several_batches_ahead_that_never_reached_its_worker() -> None:
    """If one of several batches ahead cannot be sent, its callers hear of it; those before and
    behind it are answered.
    """
    core = pipeline_of(stage(1, runs_ahead=True))
    now = saturated(core, took_s=U)
    core.flow.submit(now, asks(range(9)))
    batches = runs(core, now)
    assert [batch.ahead for batch in batches] == [False, True, True, True, True]
    unsent = batches[2]
    core.completed(now, Reply(0, 0, unsent.id, unsent.ids, [None], {0: RuntimeError("no memory")}))
    assert outcome(unsent.requests[0]) is RuntimeError
    for batch in (batches[0], batches[1], batches[3], batches[4]):
        now += U
        reply(core, now, batch, busy_s=U)
        assert outcome(batch.requests[0]) == f"{batch.requests[0].item}'"
    assert (core.crews[0].running, core.crews[0].stray_replies) == (0, 0)


def test_replies_that_are_read_together_are_no_reason_to_keep_batches() -> None:
    """Whether ends can be foretold is judged by what workers say of their calls: a service that is
    late to read finds two replies at once, and the calls were of one length all the same.
    """
    core = pipeline_of(stage(1, runs_ahead=True), workers=2)
    now = saturated(core)
    for _ in range(20):
        core.flow.submit(now, asks(range(12)))
        runs(core, now)
        now += 2 * TOOK_S
        while core.crews[0].in_flight:
            for batch in list(core.crews[0].in_flight.values()):
                reply(core, now, batch, busy_s=TOOK_S)
            runs(core, now)
    core.flow.submit(now, asks(range(12)))
    assert any(batch.ahead for at in range(8) for batch in runs(core, now + at * U))


@pytest.mark.parametrize(("took_s", "goes"), [((6 * U, 14 * U), True), ((U, 40 * U), False)])
def test_where_much_waits_ends_need_be_foretold_but_roughly(took_s: tuple[float, float], goes: bool) -> None:
    """Where much waits, a share of the cores that comes and goes is no reason to keep batches; calls
    of quite different lengths are.
    """
    core = pipeline_of(stage(1, runs_ahead=True), workers=2)
    now = 0.0
    for i in range(20):
        now = saturated(core, now, took_s[i % 2])
    times = core.crews[0].times
    assert times.deviation_s / times.usual_s > 0.25
    core.flow.submit(now, asks(range(8)))
    runs(core, now)
    assert not [batch for at in range(80) for batch in runs(core, now + at / 4 * U)]
    core.flow.submit(now, asks(range(8)))
    assert bool([batch for at in range(80) for batch in runs(core, now + at / 4 * U)]) is goes


def test_a_lost_worker_has_not_looked_at_what_lay_ahead() -> None:
    """A batch that lay ahead of a lost worker goes back to its place in the queue: none of its
    requests is blamed, and one whose caller has gone meanwhile is not run.
    """
    core = pipeline_of(stage(2, runs_ahead=True), workers=1)
    now = saturated(core)
    requests = asks("abcdef")
    core.flow.submit(now, requests)
    runs(core, now)
    runs(core, now + 7 * U)
    core.cancel(now + 7 * U, requests[2])
    core.worker_lost(now + 7 * U, 0, 0)
    core.worker_ready(0, 0)
    assert what(runs(core, now + 8 * U)) == [(["a"], 0, False)]  # alone, since it may have killed the worker
    assert [request.losses for request in requests] == [1, 1, 0, 0, 0, 0]
    assert requests[2].state == DONE
    for _ in range(4):
        now += TOOK_S
        for batch in list(core.crews[0].in_flight.values()):
            reply(core, now, batch)
        runs(core, now)
    assert [outcome(request) for request in requests] == ["a'", "b'", None, "d'", "e'", "f'"]
    assert (core.unanswered, core.crews[0].running) == (0, 0)


def test_a_deadline_that_passes_ahead_is_told_at_once() -> None:
    """A caller whose deadline passes while its request lies ahead hears it at once, and does not
    wait for the worker to come to it.
    """
    core = pipeline_of(stage(1, runs_ahead=True))
    now = saturated(core)
    core.flow.submit(now, asks("a"))
    runs(core, now)
    core.flow.submit(now + 1 * U, [ask("b", deadline=now + 7.5 * U, patient=True)])
    todo = core.poll(now + 6 * U)
    assert (what(todo.run), todo.wake_at) == ([(["b"], 0, True)], now + 7.5 * U)
    assert [type(request.error) for request in core.poll(now + 7.5 * U).answer] == [DeadlineExceeded]
    reply(core, now + 8 * U, core.crews[0].in_flight[0])
    reply(core, now + 9 * U, core.crews[0].in_flight[0])  # the worker has passed over it
    assert (core.crews[0].late_results, core.unanswered) == (1, 0)


def test_credits_count_what_lies_ahead() -> None:
    """The next stage keeps room for all that was handed to the stage before it, a batch ahead
    included.
    """
    core = pipeline_of(stage(1, runs_ahead=True), stage(1, max_size=1), workers=[1, 0])
    first = core.crews[0]
    core.flow.submit(0, asks("a"))
    runs(core, 0)
    first.times.usual_s = TOOK_S  # as if it had run before
    core.flow.submit(U, asks("bc"))
    assert runs(core, 7 * U) == []
    assert (first.running, len(first.ahead)) == (1, 0)


@pytest.mark.parametrize("settings", [{}, {"runs_ahead": True, "idempotent": False}])
def test_only_where_a_request_may_be_run_twice(settings: dict[str, bool]) -> None:
    """Nothing goes ahead where a request must not run twice: a worker that is given up may still
    run what lies with it.
    """
    core = pipeline_of(stage(1, **settings))
    now = saturated(core)
    core.flow.submit(now, asks("ab"))
    runs(core, now)
    assert runs(core, now + 7 * U) == []


def test_no_batch_ahead_is_larger_than_memory_allows() -> None:
    """Where memory is short, a full batch is one that is known to fit, and no batch ahead is
    larger.
    """
    core = pipeline_of(stage(4, runs_ahead=True))
    now = saturated(core)
    learned = SafeSize(None)
    learned.ran_out(4, 2)
    core.crews[0].safe_size = learned
    core.flow.submit(now, asks("abcdefgh"))
    assert [len(batch.requests) for batch in runs(core, now)] == [int(learned.limit)] * 2


def test_a_batch_ahead_that_never_reached_its_worker_is_answered() -> None:
    """If a batch ahead cannot be sent, for want of memory for its message for example, its callers
    hear of it, and the batch under way is left as it was.
    """
    core = pipeline_of(stage(1, runs_ahead=True))
    now = saturated(core)
    core.flow.submit(now, asks("abc"))
    under_way, ahead = runs(core, now)
    error = RuntimeError("no memory")
    core.completed(now + 7 * U, Reply(0, 0, ahead.id, ahead.ids, [None], {0: error}))
    assert [request.error for request in core.collect_answers()] == [error]
    reply(core, now + 8 * U, under_way)
    assert [outcome(request) for request in core.collect_answers()] == ["a'"]


class Greedier(Greedy):
    """A policy that asks for more than it may."""

    def decide(self, view: View) -> Decision:
        return super().decide(view) if view.free_in_s is None else Decision(take=self.limit + 1)


def test_a_policy_that_asks_for_what_is_not_possible_is_told() -> None:
    """If a policy asks for what is not possible for a busy worker its stage fails, as for an idle one."""
    core = pipeline_of(stage(policy=Greedier(1), runs_ahead=True))
    core.crews[0].times.usual_s = TOOK_S  # as if it had run before
    core.flow.submit(0, asks("abc"))
    with pytest.raises(RuntimeError, match="asked for a batch of 2 for a busy worker and a limit of 1"):
        core.poll(0)


def test_adaptive_goes_ahead_with_the_size_that_is_best() -> None:
    """`Adaptive` sends a batch ahead once it knows what batches cost, with the size that it finds
    best; requests that would be late that way stay in the queue, where they are judged.
    """
    for slo_s, ahead in ((None, True), (100.0, True), (1.5 * TOOK_S, False)):
        policy = Adaptive(4)
        policy._sizes._next_try = maxsize  # no size is tried for its own sake
        core = pipeline_of(stage(policy=policy, runs_ahead=True), slo_s=slo_s)
        now: float = 0
        for _ in range(12):
            now = saturated(core, now, took_s=TOOK_S)
        core.flow.submit(now, asks("abcdefghijkl"))
        batch, *following = runs(core, now)
        assert len(following) == ahead
        assert all(len(batch) == 4 for batch in [batch, *following])


def stage_with_a_gap(setup_s: float, gap_s: float) -> Core:
    """A stage of which it is known what batches cost (`setup_s` and 2 U an item), and how long its
    worker is idle between two of them.
    """
    policy = Adaptive(4)
    core = pipeline_of(stage(policy=policy, runs_ahead=True))
    for n in (1, 2, 3, 4) * 4:
        core.crews[0].trained(0, n, n, setup_s + n * 2 * U)
    core.crews[0].times.usual_s = TOOK_S
    core.crews[0].times.gap_s = core.crews[0].lobby.view.gap_s = gap_s
    return core


@pytest.mark.parametrize(
    ("n", "setup_s", "gap_s", "goes"),
    [
        (3, 8 * U, U, False),  # the fourth would need another setup
        (3, 8 * U, 4 * U, True),
        (2, 8 * U, 4 * U, False),
        (2, 8 * U, 9 * U, True),
        (3, 8 * U, 0.0, False),  # nothing is lost by waiting
    ],
)
def test_a_smaller_batch_goes_where_its_worker_would_lose_more_by_being_idle(
    n: int, setup_s: float, gap_s: float, goes: bool
) -> None:
    """Where all clients of a closed loop are inside, no other request comes before the worker is
    free. Then `Adaptive` sends what waits ahead, though the batch is not full, if the worker would
    lose more by being idle than a larger batch saves.
    """
    core = stage_with_a_gap(setup_s, gap_s)
    batcher = core.crews[0]
    assert isinstance(batcher.lobby.policy, Adaptive)
    for _ in range(40):
        batcher.lobby.policy.inside.note(4 + n, 1)
    core.flow.submit(0, asks("abcd"))
    assert [len(batch) for batch in runs(core, 0)] == [4]
    core.flow.submit(0, asks("efg"[:n]))
    assert runs(core, 0) == []
    assert (core.poll(0).wake_at < inf) == goes
    assert what(runs(core, 7 * U)) == [(list("efg"[:n]), 0, True)] * goes


def test_a_smaller_batch_waits_for_clients_that_are_outside() -> None:
    """As long as a client is outside, or where there is no telling how many there are, the batch
    may still get better.
    """
    for inside in ([8] * 100, [7, 7, 5, 5] * 50):
        core = stage_with_a_gap(8 * U, 4 * U)
        policy = core.crews[0].lobby.policy
        assert isinstance(policy, Adaptive)
        for n in inside:
            policy.inside.note(n, 1)
        core.flow.submit(0, asks("abcd"))
        runs(core, 0)
        core.flow.submit(0, asks("efg"))
        assert runs(core, 7 * U) == []


def test_how_long_a_worker_is_idle_is_looked_at_again() -> None:
    """What was learned of it fades while all batches go ahead, and a stall counts for no more than
    a batch.
    """
    times = Times(watches_gaps=True)
    times.learn(took_s=1000, busy_s=U, n=1, size=1, went_ahead=False)
    learned_s = times.gap_s
    assert 0 < learned_s <= U
    for _ in range(1000):
        times.learn(took_s=U, busy_s=U, n=1, size=1, went_ahead=True)
    assert 0 < times.gap_s < learned_s / 2


class Learning(Greedy):
    """Greedy, with something to learn."""

    def learn(self, now: float, done: DoneBatch) -> None:
        """Do nothing."""


def test_the_policy_hears_how_long_workers_are_idle() -> None:
    """It counts what batches are on their way that did not go ahead."""
    batcher = stage(policy=Learning(2), runs_ahead=True)
    core = pipeline_of(batcher)
    now = saturated(core)
    assert batcher.lobby.view.gap_s == 0
    core.flow.submit(now, asks("abcd"))
    first, ahead = runs(core, now)
    assert (first.ahead, ahead.ahead) == (False, True)
    reply(core, now + TOOK_S + U, first, busy_s=TOOK_S)
    gap_s = batcher.lobby.view.gap_s
    assert gap_s > 0
    reply(core, now + 2 * TOOK_S + 2 * U, ahead, busy_s=TOOK_S)
    assert 0 < batcher.lobby.view.gap_s < gap_s


class DeafTo(Greedy):
    """Raises when it is told of arrivals, once it is switched on."""

    broken = False

    def arrived(self, now: float, requests: Sequence[Request]) -> None:
        if self.broken:
            raise ValueError("of the policy")


def test_all_that_a_lost_worker_had_is_back_before_the_policy_hears_of_it() -> None:
    """When a worker is lost, its requests are back in the queue before the policy hears of it: if
    the policy raises then, neither what had not been sent nor what lay ahead is forgotten.
    """
    policy = DeafTo(2)
    core = pipeline_of(stage(policy=policy, runs_ahead=True))
    now = saturated(core)
    requests = asks("abcd")
    core.flow.submit(now, requests)
    assert len(runs(core, now)) == 2
    policy.broken = True
    with pytest.raises(ValueError, match="of the policy"):
        core.worker_lost(now + U, 0, 0, unsent={requests[1].id})
    core.abort(now + U, Unavailable("the policy is broken"))
    assert set(core.poll(now + U).answer) == set(requests)
