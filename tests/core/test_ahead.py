"""Batches ahead of time: a worker has its next one before it asks, if waiting could not have made that any better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from carpool.core.batch import Batch
from carpool.core.pipeline import Pipeline
from carpool.core.reply import Reply
from carpool.core.safe_size import SafeSize
from carpool.errors import DeadlineExceeded, Unavailable
from carpool.policy import AIMD, Adaptive, Cork, Deadline, Greedy, OneByOne, Policy, Static
from carpool.policy.base import Decision, QueueView
from carpool.request import DONE, Request
from tests.core.stub import ask, asks, items, outcome, pipeline, reply, stage

U = 2**-9  # about two milliseconds
TOOK_S = 8 * U  # what batches take here; where it matters who comes meanwhile, one may go ahead after half of it


def saturated(line: Pipeline, now: float = 0, took_s: float = TOOK_S) -> float:
    """A few full batches one after the other, so that it is known what they take. Returns the time then."""
    for _ in range(3):
        n = sum(one.policy.limit for one in line.batchers[:1]) * line.batchers[0].idle
        line.submit(now, asks(["warm"] * n))
        batches = line.poll(now).run
        now += took_s
        for batch in batches:
            reply(line, now, batch, busy_s=took_s)
        line.poll(now)
    return now


def runs(line: Pipeline, now: float) -> list[Batch]:
    return line.poll(now).run


def what(batches: list[Batch]) -> list[tuple[list[Any], int, bool]]:
    return [(items(batch.requests), batch.place, batch.ahead) for batch in batches]


def test_a_full_batch_goes_before_its_worker_is_free() -> None:
    """One at the most: it begins when the reply before it comes."""
    line = pipeline(stage(2, runs_ahead=True))
    now = saturated(line)
    line.submit(now, asks("abc"))
    assert what(runs(line, now)) == [(["a", "b"], 0, False)]
    line.submit(now + 1 * U, asks("defgh"))
    ahead = runs(line, now + 1 * U)
    assert what(ahead) == [(["c", "d"], 0, True)]
    assert runs(line, now + 7 * U) == []
    for request in list(line.batchers[0].queue):
        line.cancel(now + 7 * U, request)
    batcher = line.batchers[0]
    assert (batcher.running, len(batcher.in_flight), line.waiting) == (4, 1, 0)

    reply(line, now + 8 * U, batcher.in_flight[0], busy_s=TOOK_S)
    assert ahead[0].started == now + 8 * U
    reply(line, now + 16 * U, ahead[0], busy_s=TOOK_S)
    answers = [outcome(request) for request in line.poll(now + 16 * U).answer]
    assert answers == ["a'", "b'", "c'", "d'"]
    assert (batcher.running, batcher.idle, batcher.times.usual_s) == (0, 1, TOOK_S)


def test_where_requests_differ_it_goes_no_sooner_than_it_must() -> None:
    """Who comes with a higher priority until then is not overtaken."""
    line = pipeline(stage(2, runs_ahead=True))
    now = saturated(line)
    line.submit(now, [*asks("ab"), ask("urgent", priority=1), ask("more urgent", priority=1)])
    assert what(runs(line, now)) == [(["urgent", "more urgent"], 0, False)]
    todo = line.poll(now + 1 * U)
    assert (todo.run, todo.wake_at) == ([], now + 4 * U)
    assert what(runs(line, now + 4 * U)) == [(["a", "b"], 0, True)]


def test_while_a_long_call_runs_all_wait() -> None:
    """Until shortly before its learned end they can be cancelled; once that has passed, nobody knows when it ends."""
    line = pipeline(stage(1, runs_ahead=True))
    now = saturated(line, took_s=8)
    line.submit(now, asks("ab"))
    assert what(runs(line, now)) == [(["a"], 0, False)]
    todo = line.poll(now + 7)
    assert (todo.run, todo.wake_at) == ([], now + 8 - 0.02)
    assert runs(line, now + 9) == []
    assert what(runs(line, now + 8)) == [(["b"], 0, True)]


def test_short_batches_go_at_once() -> None:
    """No timer is fine enough to hit the end of a call of a millisecond."""
    line = pipeline(stage(1, runs_ahead=True), workers=2)
    now = saturated(line, took_s=2**-10)
    line.submit(now, asks("abcd"))
    assert [ahead for _, _, ahead in what(runs(line, now))] == [False, False, True, True]


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
    """Those that refuse or shrink batches by what they see when a worker is free keep all until then."""
    line = pipeline(stage(policy=policy, runs_ahead=True))
    now = saturated(line)
    line.submit(now, asks("abcdefgh"))
    assert any(batch.ahead for batch in runs(line, now)) is goes


def test_what_is_not_full_waits() -> None:
    """Those who come back with the reply could make it better."""
    line = pipeline(stage(3, runs_ahead=True))
    now = saturated(line)
    line.submit(now, asks("abcde"))
    assert what(runs(line, now)) == [(["a", "b", "c"], 0, False)]
    assert runs(line, now + 7 * U) == []
    line.submit(now + 7 * U, asks("f"))
    assert what(runs(line, now + 7 * U)) == [(["d", "e", "f"], 0, True)]


def test_who_is_urgent_is_not_overtaken() -> None:
    """Where several priorities, keys or buckets wait, nothing goes ahead: the queue decides when a worker is free."""
    line = pipeline(stage(2, runs_ahead=True))
    now = saturated(line)
    line.submit(now, asks("ab"))
    runs(line, now)
    line.submit(now + 5 * U, [ask("urgent", priority=20), *asks("cde")])
    assert runs(line, now + 7 * U) == []
    reply(line, now + 8 * U, line.batchers[0].in_flight[0])
    assert what(runs(line, now + 8 * U)) == [(["urgent", "c"], 0, False)]


def test_the_worker_that_is_free_first_gets_it_and_one_that_is_late_does_not() -> None:
    """Of several workers; and if ends cannot be foretold, nobody gets anything before it is free."""
    line = pipeline(stage(1, runs_ahead=True), workers=2)
    now = saturated(line)
    line.submit(now, asks("a"))
    (first,) = runs(line, now)
    line.submit(now + 3 * U, asks("bcd"))
    (second,) = runs(line, now + 3 * U)
    assert what(runs(line, now + 4 * U)) == [(["c"], first.place, True)]
    assert runs(line, now + 6 * U) == []
    assert what(runs(line, now + 7 * U)) == [(["d"], second.place, True)]

    late = pipeline(stage(1, runs_ahead=True), workers=2)
    now = saturated(late)
    late.submit(now, asks("ab"))
    runs(late, now)
    late.submit(now + 13 * U, asks("c"))
    assert runs(late, now + 13 * U) == []

    unsteady = pipeline(stage(1, runs_ahead=True), workers=2)
    now = saturated(unsteady, saturated(unsteady), took_s=U)
    unsteady.submit(now, asks("abc"))
    runs(unsteady, now)
    assert not [batch for at in range(40) for batch in runs(unsteady, now + at / 4 * U)]


def test_a_lost_worker_has_not_looked_at_what_lay_ahead() -> None:
    """It is back in its place, nobody is blamed for it, and one whose caller has gone meanwhile is not run."""
    line = pipeline(stage(2, runs_ahead=True), workers=1)
    now = saturated(line)
    requests = asks("abcdef")
    line.submit(now, requests)
    runs(line, now)
    runs(line, now + 7 * U)
    line.cancel(now + 7 * U, requests[2])
    line.worker_lost(now + 7 * U, 0, 0)
    line.worker_ready(0, 0)
    assert what(runs(line, now + 8 * U)) == [(["a"], 0, False)]  # alone, since it may have killed the worker
    assert [request.losses for request in requests] == [1, 1, 0, 0, 0, 0]
    assert requests[2].state == DONE
    for _ in range(4):
        now += TOOK_S
        for batch in list(line.batchers[0].in_flight.values()):
            reply(line, now, batch)
        runs(line, now)
    assert [outcome(request) for request in requests] == ["a'", "b'", None, "d'", "e'", "f'"]
    assert (line.unanswered, line.batchers[0].running) == (0, 0)


def test_a_deadline_that_passes_ahead_is_told_at_once() -> None:
    """Its caller does not wait for the worker to come to it."""
    line = pipeline(stage(1, runs_ahead=True))
    now = saturated(line)
    line.submit(now, asks("a"))
    runs(line, now)
    line.submit(now + 1 * U, [ask("b", deadline=now + 7.5 * U, patient=True)])
    todo = line.poll(now + 6 * U)
    assert (what(todo.run), todo.wake_at) == ([(["b"], 0, True)], now + 7.5 * U)
    assert [type(request.error) for request in line.poll(now + 7.5 * U).answer] == [DeadlineExceeded]
    reply(line, now + 8 * U, line.batchers[0].in_flight[0])
    reply(line, now + 9 * U, line.batchers[0].in_flight[0])  # the worker has passed over it
    assert (line.batchers[0].late_results, line.unanswered) == (1, 0)


def test_credits_count_what_lies_ahead() -> None:
    """The next stage has room for all that its predecessor has been handed."""
    line = pipeline(stage(1, runs_ahead=True), stage(1, max_size=1), workers=[1, 0])
    first = line.batchers[0]
    line.submit(0, asks("a"))
    runs(line, 0)
    first.times.usual_s = TOOK_S  # as if it had run before
    line.submit(U, asks("bc"))
    assert runs(line, 7 * U) == []
    assert (first.running, len(first.ahead)) == (1, 0)


@pytest.mark.parametrize("settings", [{}, {"runs_ahead": True, "idempotent": False}])
def test_only_where_a_request_may_be_run_twice(settings: dict[str, bool]) -> None:
    """What lies with a worker that is given up may still be run by it."""
    line = pipeline(stage(1, **settings))
    now = saturated(line)
    line.submit(now, asks("ab"))
    runs(line, now)
    assert runs(line, now + 7 * U) == []


def test_no_batch_ahead_is_larger_than_memory_allows() -> None:
    """What is known to fit is a full batch then."""
    line = pipeline(stage(4, runs_ahead=True))
    now = saturated(line)
    learned = SafeSize(None)
    learned.ran_out(4, 2)
    line.batchers[0].safe_size = learned
    line.submit(now, asks("abcdefgh"))
    assert [len(batch.requests) for batch in runs(line, now)] == [int(learned.limit)] * 2


def test_a_batch_ahead_that_never_reached_its_worker_is_answered() -> None:
    """The driver had no memory for its message, say: its callers hear of it, and the batch under way is as it was."""
    line = pipeline(stage(1, runs_ahead=True))
    now = saturated(line)
    line.submit(now, asks("abc"))
    under_way, ahead = runs(line, now)
    error = RuntimeError("no memory")
    line.completed(now + 7 * U, Reply(0, 0, ahead.id, ahead.ids, [None], {0: error}))
    assert [request.error for request in line.collect_answers()] == [error]
    reply(line, now + 8 * U, under_way)
    assert [outcome(request) for request in line.collect_answers()] == ["a'"]


class Greedier(Greedy):
    """Asks for more than it may."""

    def decide_ahead(self, now: float, queue: QueueView, free_in_s: float) -> Decision:
        return Decision(take=self.limit + 1)


def test_a_policy_that_asks_for_what_is_not_possible_is_told() -> None:
    """As `decide` is: its stage fails, loudly."""
    line = pipeline(stage(policy=Greedier(1), runs_ahead=True))
    line.batchers[0].times.usual_s = TOOK_S  # as if it had run before
    line.submit(0, asks("abc"))
    with pytest.raises(RuntimeError, match="asked for a batch of 2 for a busy worker and a limit of 1"):
        line.poll(0)


def test_adaptive_goes_ahead_with_the_size_that_is_best() -> None:
    """Once it knows what batches cost; it keeps what may have to be refused, so that it is there to be judged."""
    for slo_s, ahead in ((None, True), (100.0, True), (4 * TOOK_S, False)):
        line = pipeline(stage(policy=Adaptive(4), runs_ahead=True), slo_s=slo_s)
        now: float = 0
        for _ in range(12):
            now = saturated(line, now, took_s=TOOK_S)
        line.submit(now, asks("abcdefghijkl"))
        batch, *following = runs(line, now)
        assert len(following) == ahead
        assert all(len(batch) in (3, 4) for batch in [batch, *following])  # now and then it tries a smaller one


class DeafTo(Greedy):
    """Raises when it is told of arrivals, once it is switched on."""

    broken = False

    def arrived_together(self, now: float, requests: Sequence[Request]) -> None:
        if self.broken:
            raise ValueError("of the policy")


def test_all_that_a_lost_worker_had_is_back_before_the_policy_hears_of_it() -> None:
    """It may raise, and then nobody is forgotten: neither what had not been sent nor what lay ahead."""
    policy = DeafTo(2)
    line = pipeline(stage(policy=policy, runs_ahead=True))
    now = saturated(line)
    requests = asks("abcd")
    line.submit(now, requests)
    assert len(runs(line, now)) == 2
    policy.broken = True
    with pytest.raises(ValueError, match="of the policy"):
        line.worker_lost(now + U, 0, 0, unsent={requests[1].id})
    line.abort(now + U, Unavailable("the policy is broken"))
    assert set(line.poll(now + U).answer) == set(requests)
