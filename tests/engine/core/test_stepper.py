"""What a stage of steps does, rule by rule, in virtual time: a step takes 1 s, an item is the number of its parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

import pytest

from carpool.engine.core.core import Core
from carpool.engine.core.journal import Journal
from carpool.engine.core.running_set import (
    END,
    EVERY_STEP,
    FAILED,
    GO_ON,
    LAST,
    MORE,
    ON_LEAVING,
    Order,
    Parts,
    SetReport,
    stream_of,
)
from carpool.engine.drive.virtual import StepCosts, VirtualDriver
from carpool.engine.policy.steps import GreedySteps, SetView
from carpool.engine.request import DONE, QUEUED, RUNNING, Lane, Request, Stream
from carpool.errors import DeadlineExceeded, ModelError, Overloaded, Unavailable
from tests.support.pipelines import stage as batch_stage
from tests.support.steps import Said, ask, columns, drive, reader, stepper


def code_of(request: Request) -> str:
    """The code of the error with which a request has ended."""
    assert request.state == DONE
    return getattr(request.error, "code", "none")


def submitted(core: Core, now: float, n: int, size: int = 1) -> list[Request]:
    """So many streams that have just come."""
    requests = [Request(i, inf) for i in range(n)]
    for request in requests:
        request.stream = Stream()
        request.size = size
    core.flow.submit(now, requests)
    return requests


def only_order(core: Core, now: float) -> Order:
    """The one order that is to be sent now."""
    (order,) = core.poll(now).orders
    return order


# -- joining and leaving


def test_a_request_joins_at_the_next_boundary_and_leaves_with_its_last_part() -> None:
    """A newcomer's first part comes after the step under way and one of its own; nobody waits for anybody's end."""
    driver = drive(stepper())
    long, short = ask(driver, 6), ask(driver, 2, 2.5)
    driver.run()

    assert reader(long).parts == [0, 1, 2, 3, 4, 5] and reader(long).times == [1, 2, 3, 4, 5, 6]
    assert reader(short).parts == [0, 1] and reader(short).times == [4, 5]
    assert reader(short).ended == 5 and short.error is None and short.result is None


def test_starting_costs_those_who_run_a_pause() -> None:
    """All who join together are started in one call, before the step."""
    driver = drive(stepper(), start_s=lambda length: 0.5 * length)
    first, second, third = ask(driver, 4), ask(driver, 2, 1.5, length=2), ask(driver, 2, 1.5, length=4)
    driver.run()

    assert reader(first).times == [1.5, 2.5, 6.5, 7.5]
    assert reader(second).times == reader(third).times == [6.5, 7.5]


def test_a_set_holds_no_more_rows_than_its_limit_and_a_free_one_is_used_in_the_next_step() -> None:
    """Whoever waits joins in the step after the one in which a stream has ended, since the worker stops then."""
    driver = drive(stepper(rows=2))
    requests = [ask(driver, 3), ask(driver, 5), ask(driver, 2, 0.5)]
    driver.run()

    assert [reader(request).times for request in requests] == [[1, 2, 3], [1, 2, 3, 4, 5], [4, 5]]


def test_a_set_holds_no_more_units_than_its_limit_and_one_that_is_larger_runs_alone() -> None:
    """The queue's order is kept: nobody small overtakes one that does not fit yet."""
    driver = drive(stepper(limit=5))
    sizes = [3, 2, 9, 1]
    requests = [ask(driver, 2, size=size) for size in sizes]
    driver.run()

    assert [reader(request).times[0] for request in requests] == [1, 1, 3, 5]


def test_streams_of_different_keys_never_share_a_set() -> None:
    """A set is of one key and bucket; the head of another waits until it is empty, and nobody overtakes it."""
    driver = drive(stepper())
    lanes = [Lane(0, "a", 0), Lane(0, "b", 0), Lane(0, "a", 0), Lane(0, "a", 1)]
    requests = [ask(driver, 2, i / 10, lane=lane) for i, lane in enumerate(lanes)]
    driver.run()

    assert [reader(request).times[0] for request in requests] == [1, 3, 5, 7]


def test_the_emptiest_set_is_joined_first() -> None:
    """Requests spread over the workers."""
    driver = drive(stepper(rows=2), workers=2)
    requests = [ask(driver, 3, i / 10) for i in range(4)]
    driver.run(until=2.5)

    assert sorted(stream_of(request).place for request in requests) == [0, 0, 1, 1]


def test_a_client_that_leaves_frees_its_row_before_the_next_step_that_has_not_begun() -> None:
    """The step under way makes one more part of it, which is dropped and counted."""
    stage = stepper(rows=1)
    driver = drive(stage)
    gone, following = ask(driver, 100), ask(driver, 2, 1.0)
    was_there = reader(gone)
    driver.at(3.5, lambda: driver.core.cancel(3.5, gone))
    driver.run()

    assert was_there.times == [1, 2, 3] and was_there.ended < 0
    assert reader(following).times == [5, 6]
    assert stage.stray_parts == 1 and driver.core.unanswered == 0


def test_a_stream_of_which_its_caller_has_enough_ends_as_complete() -> None:
    """A caller that needs no more gets the end of its stream at once and without an error, and its row is free as if
    it had left; the stream counts as answered and not as cancelled, and once, however often that is said.
    """
    driver = drive(stepper(rows=1))
    enough, following, waiting = ask(driver, 100), ask(driver, 2, 1.0), ask(driver, 2, 1.0)
    core = driver.core

    def suffice() -> None:
        for request in (enough, waiting, enough):
            core.suffice(3.5, request)

    driver.at(3.5, suffice)
    driver.run()

    assert reader(enough).times == [1, 2, 3] and reader(enough).ended == 3.5
    assert reader(waiting).times == [] and reader(waiting).ended == 3.5
    assert enough.error is None and waiting.error is None
    assert reader(following).times == [5, 6]
    assert (core.flow.cancelled, core.flow.answered, core.unanswered) == (0, 3, 0)


@pytest.mark.parametrize("way", ["cancelled", "silent", "late", "collected"])
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("rows", [1, 4])
def test_nobody_is_sent_behind_a_step_for_nobody_while_another_worker_is_idle(
    rows: int, workers: int, way: str
) -> None:
    """Once its caller has left, or its time is up, a stream's worker is passed over until the step under way is made,
    as far as another one has nothing to do.
    """
    driver = drive(
        stepper(rows=rows, silence_s=10.0 if way == "silent" else inf),
        workers=workers,
        start_s=lambda length: 3.0 * length,
        step_s=lambda n: 6.0,
    )
    timeout_s = 10.0 if way in ("late", "collected") else inf
    gone = ask(driver, 5, collected=way == "collected", timeout_s=timeout_s, length=9)
    if way == "cancelled":
        driver.at(10.0, lambda: driver.core.cancel(10.0, gone))
    following = [ask(driver, 1, 11.0 + i / 10) for i in range(workers - 1)]
    driver.run()

    left = stream_of(gone).place
    assert gone.state == DONE
    assert sorted(stream_of(request).place for request in following) == [i for i in range(workers) if i != left]
    assert [reader(request).times for request in following] == [[20.0 + i / 10] for i in range(workers - 1)]


@pytest.mark.parametrize("first", [0, 1])
def test_where_workers_hold_one_stream_the_first_one_that_is_free_takes_the_next_request(first: int) -> None:
    """Between a step for nobody and one for another stream, a request waits for whichever ends first."""
    core = Core([stepper(rows=1)])
    for place in (0, 1):
        core.worker_ready(0, place)
    gone, other = submitted(core, 0.0, 2)
    core.poll(0.0)
    core.cancel(1.0, gone)
    (following,) = submitted(core, 2.0, 1)
    orders = {order.place: order for order in core.poll(2.0).orders}
    assert orders[0].leave == [gone.id] and not orders[0].join and not orders[1].join
    if first:
        core.reported(3.0, SetReport(0, 1, 2, True, columns([Said(other.id, "x", last=True)]), 1, 1.0))
    else:
        core.reported(3.0, SetReport(0, 0, 2, True))
    (order,) = [order for order in core.poll(3.0).orders if order.join]
    assert (order.place, order.join) == (first, [following])


def test_the_only_worker_is_told_at_once_who_leaves_and_who_joins() -> None:
    """Nothing is gained by waiting for the step under way where there is no other worker."""
    core = Core([stepper(rows=1)])
    core.worker_ready(0, 0)
    (gone,) = submitted(core, 0.0, 1)
    core.poll(0.0)
    core.cancel(1.0, gone)
    (following,) = submitted(core, 1.0, 1)
    order = only_order(core, 1.0)
    assert (order.leave, order.join) == ([gone.id], [following])


def test_collected_answers_come_whole() -> None:
    """A caller that does not stream gets the list of parts, even if its request has no `Stream`."""
    driver = drive(stepper())
    collected, plain = ask(driver, 3, collected=True), driver.arrive(0.0, 2)
    driver.run()

    assert collected.result == [0, 1, 2] and reader(collected).parts == [] and reader(collected).ended == 3
    assert plain.result == [0, 1]


def test_nothing_this_time_an_end_without_a_part_and_an_exception() -> None:
    """A step may make no part of a stream, end it without one, or fail it alone."""
    answers: dict[str, list[object]] = {
        "none": [None, "a", None, "b"],
        "empty": [],
        "bad": ["a", ModelError("bad row")],
        "good": ["a", "b", "c"],
    }
    driver = drive(stepper(), answer=lambda item: answers[item])
    none, empty, bad, good = (ask(driver, item) for item in answers)
    driver.run()

    assert reader(none).parts == ["a", "b"] and reader(none).times == [2, 4]
    assert reader(empty).parts == [] and empty.error is None and reader(empty).ended == 1
    assert reader(bad).parts == ["a"] and str(bad.error) == "bad row"
    assert reader(good).parts == ["a", "b", "c"] and reader(good).times == [1, 2, 3]


# -- orders


def test_orders_are_numbered_and_a_worker_that_runs_ahead_is_told_nothing() -> None:
    """An order goes out only if there is news; while nobody waits, the worker goes on by itself."""
    core = Core([stepper(rows=2)])
    core.worker_ready(0, 0)
    (first,) = submitted(core, 0.0, 1)
    assert only_order(core, 0.0) == Order(0, 0, 1, [], [first], [], [], GO_ON)

    for step in range(3):
        core.reported(1.0 + step, SetReport(0, 0, 1, False, columns([Said(first.id, step)]), 1, 1.0))
        todo = core.poll(1.0 + step)
        assert todo.orders == [] and list(todo.parts) == [(first, step)]
    core.cancel(5.0, first)
    assert only_order(core, 5.0) == Order(0, 0, 2, [first.id], [], [], [], GO_ON)


@pytest.mark.parametrize(("step_s", "asked"), [(0.001, ON_LEAVING), (0.1, EVERY_STEP)])
def test_while_others_wait_a_worker_stops_where_that_costs_little(step_s: float, asked: int) -> None:
    """It stops after every step if a stop is less than a twentieth of one, else only after a step that frees a row."""
    refusing = Picky(4)
    core = Core([stepper(rows=4, policy=refusing)])
    core.worker_ready(0, 0)
    (first,) = submitted(core, 0.0, 1)
    core.poll(0.0)
    refusing.most = 0
    submitted(core, 0.0, 1)
    core.reported(1.0, SetReport(0, 0, 1, False, columns([Said(first.id, 0)]), 1, step_s))

    assert only_order(core, 1.0).stop_when == asked


def test_a_full_set_stops_only_when_a_stream_has_ended() -> None:
    """As nobody could join before, however cheap a stop is."""
    core = Core([stepper(rows=1)])
    core.worker_ready(0, 0)
    first, _ = submitted(core, 0.0, 2)
    order = only_order(core, 0.0)
    assert order.join == [first] and order.stop_when == ON_LEAVING


def test_a_worker_that_has_stopped_is_told_to_go_on() -> None:
    """Even if there is no other news."""
    refusing = Picky(4)
    core = Core([stepper(policy=refusing)])
    core.worker_ready(0, 0)
    (first,) = submitted(core, 0.0, 1)
    core.poll(0.0)
    refusing.most = 0
    submitted(core, 0.0, 1)
    core.reported(1.0, SetReport(0, 0, 1, False, columns([Said(first.id, 0)]), 1, 1.0))
    assert only_order(core, 1.0).stop_when == EVERY_STEP
    core.reported(2.0, SetReport(0, 0, 2, True, columns([Said(first.id, 1)]), 1, 1.0))

    assert only_order(core, 2.0) == Order(0, 0, 3, [], [], [], [], EVERY_STEP)


class Picky(GreedySteps):
    """Lets so many join at a time."""

    most = 100

    def join(self, now: float, heads: Sequence[Request], running: SetView) -> int:
        return min(self.most, len(heads))


@pytest.mark.parametrize("n", [-1, 3])
def test_a_policy_that_asks_for_what_is_not_there_is_told_so(n: int) -> None:
    """It is an error of the policy's, and a loud one; nothing was done."""

    class Wrong(GreedySteps):
        def join(self, now: float, heads: Sequence[Request], running: SetView) -> int:
            return n

    core = Core([stepper(policy=Wrong(4))])
    core.worker_ready(0, 0)
    requests = submitted(core, 0.0, 2)
    with pytest.raises(RuntimeError, match=f"policy Wrong of stage steps has {n} of 2 requests join a set"):
        core.poll(0.0)
    assert all(request.state == QUEUED for request in requests)

    core.abort(0.0, Unavailable("its policy raised"))
    assert core.poll(0.0).answer == requests


def test_what_a_policy_raises_amid_joins_loses_no_request() -> None:
    """Those that have joined another set meanwhile are answered like all others, and no worker hears of them."""

    class Raises(GreedySteps):
        calls = 0

        def join(self, now: float, heads: Sequence[Request], running: SetView) -> int:
            self.calls += 1
            if self.calls == 2:
                raise KeyError("second set")
            return 1

    core = Core([stepper(policy=Raises(4))])
    core.worker_ready(0, 0)
    core.worker_ready(0, 1)
    requests = submitted(core, 0.0, 3)
    with pytest.raises(KeyError):
        core.poll(0.0)
    core.abort(0.0, Unavailable("its policy raised"))
    todo = core.poll(0.0)

    assert todo.orders == [] and sorted(request.id for request in todo.answer) == [request.id for request in requests]


@pytest.mark.parametrize("call", ["join", "is_late", "first_part_s", "learn", "pace_s"])
@pytest.mark.parametrize("nth", [1, 2])
def test_whatever_a_policy_raises_everybody_is_answered(call: str, nth: int) -> None:
    """In each of its calls: the stage is aborted, as drivers do, and no request is lost or told twice."""

    class Raises(GreedySteps):
        calls = 0

        def __getattribute__(self, name: str) -> Any:
            if name == call:
                self.calls += 1
                if self.calls == nth:
                    raise KeyboardInterrupt(name)
            return super().__getattribute__(name)

    driver = drive(stepper(rows=2, policy=Raises(2), resumable=True), slo_s=3.0, workers=2)
    requests = [ask(driver, 4, i / 4, timeout_s=30.0) for i in range(12)]
    readers = [reader(request) for request in requests]
    for _ in range(50):
        try:
            driver.run()
            break
        except KeyboardInterrupt:
            driver.core.abort(driver.clock.now, Unavailable("its policy raised", code="stage_failed"))
            for request in driver.core.poll(driver.clock.now).answer:
                request.tell()
    driver.run()

    assert driver.core.flow.closed_because is not None and driver.core.unanswered == 0
    assert all(one.ended >= 0 for one in readers)
    assert all(one.parts == list(range(len(one.parts))) for one in readers)


def test_closing_lets_in_what_a_policy_holds_back() -> None:
    """Nobody is held back for company that cannot come."""
    refusing = Picky(4)
    refusing.most = 0
    driver = drive(stepper(policy=refusing))
    held = ask(driver, 2)
    driver.at(5.0, lambda: driver.core.close(Unavailable("closing")))
    driver.run()

    assert reader(held).times == [6, 7]


def test_abort_ends_all_streams_and_empties_the_sets() -> None:
    """Each caller gets the error, and workers are told to stop what they run."""
    driver = drive(stepper(rows=2))
    requests = [ask(driver, 100) for _ in range(3)]
    driver.at(2.5, lambda: driver.core.abort(2.5, Unavailable("failed", code="stage_failed")))
    driver.run()

    assert [code_of(request) for request in requests] == ["stage_failed"] * 3
    assert driver.step_workers[0].steps == 3  # the step under way was the last


# -- pauses


def test_a_paused_stream_keeps_its_row_and_is_not_stepped() -> None:
    """The others go on, the row stays taken, and the stream goes on where it was."""
    driver = drive(stepper(rows=2))
    lagging, mate, waits = ask(driver, 4), ask(driver, 8), ask(driver, 1, 0.5)
    driver.at(1.5, lambda: driver.core.pause(1.5, lagging, True))
    driver.at(4.5, lambda: driver.core.pause(4.5, lagging, False))
    driver.run()

    assert reader(lagging).parts == [0, 1, 2, 3] and reader(lagging).times == [1, 2, 6, 7]
    assert reader(mate).times == [1, 2, 3, 4, 5, 6, 7, 8] and reader(waits).times == [8]


def test_a_set_of_which_all_pause_rests() -> None:
    """Its worker makes no steps, and goes on when one is wanted again."""
    driver = drive(stepper())
    only = ask(driver, 4)
    driver.at(1.5, lambda: driver.core.pause(1.5, only, True))
    driver.at(9.5, lambda: driver.core.pause(9.5, only, False))
    driver.run()

    assert reader(only).times == [1, 2, 10.5, 11.5] and driver.step_workers[0].steps == 4


# -- times


def test_the_service_s_time_out_bounds_each_silence_and_not_the_whole() -> None:
    """A stream that goes on may take as long as it likes; one that falls silent for too long expires."""
    answers: dict[str, list[object]] = {"steady": [*range(40)], "silent": ["a", "b", *[None] * 30]}
    driver = drive(stepper(silence_s=10), answer=lambda item: answers[item])
    steady, silent = ask(driver, "steady"), ask(driver, "silent")
    driver.run()

    assert len(reader(steady).parts) == 40 and steady.error is None
    assert reader(silent).ended == 12
    assert isinstance(silent.error, DeadlineExceeded)
    assert "of 2 parts the last one came 10.000 s ago" in str(silent.error)


def test_a_stream_that_waits_for_its_first_part_expires_after_one_silence() -> None:
    """In the queue, too."""
    driver = drive(stepper(silence_s=3), workers=0)
    waits = ask(driver, 1, 0.5)
    driver.run()

    assert reader(waits).ended == 3.5 and code_of(waits) == "deadline_exceeded"


def test_no_stream_takes_longer_than_max_stream_s_or_its_caller_s_own_time_out() -> None:
    """The row is free for the next step; a caller's own time-out bounds the whole."""
    driver = drive(stepper(max_stream_s=6, silence_s=4))
    whole, own = ask(driver, 100), ask(driver, 100, timeout_s=2.5)
    driver.run()

    assert reader(whole).ended == 6 and code_of(whole) == "deadline_exceeded"
    assert reader(own).ended == 2.5 and reader(own).times == [1, 2]
    assert driver.step_workers[0].rows == 7 + 3  # a step was under way each time


def test_a_pause_is_no_silence() -> None:
    """A reader that lags is dropped by whoever writes to it, not by the service's time-out."""
    driver = drive(stepper(silence_s=5))
    lagging = ask(driver, 4)
    driver.at(1.5, lambda: driver.core.pause(1.5, lagging, True))
    driver.at(20.5, lambda: driver.core.pause(20.5, lagging, False))
    driver.run()

    assert reader(lagging).parts == [0, 1, 2, 3] and lagging.error is None


def test_requests_whose_first_part_cannot_come_in_time_are_refused() -> None:
    """The service's SLO counts to the first part; starting one of 4 units takes 4 s."""
    policy = GreedySteps(1)
    policy.start.b = 1.0
    driver = drive(stepper(rows=1, policy=policy), start_s=lambda length: float(length), slo_s=7.0)
    first, second, third = ask(driver, 3), ask(driver, 1, 1.0, length=4), ask(driver, 1, 1.0, length=2)
    driver.run()

    assert reader(first).times == [2, 3, 4]
    assert reader(second).times == [9.0]  # it joined at 4, and was due to start by then
    assert isinstance(third.error, Overloaded) and reader(third).ended == 8.0


def test_while_nothing_runs_one_is_let_through_though_it_seems_late() -> None:
    """What starting takes may have been learned wrongly, from a compiling warm-up say; so it is learned anew."""
    stage = stepper()
    driver = drive(stage, start_s=lambda length: 0.1, slo_s=5.0)
    driver.core.crews[0].trained_steps(0.0, rows=1, step_s=1.0, length=1, start_s=60.0)
    first, second = ask(driver, 1), ask(driver, 1, 10.0)
    driver.run()

    assert first.error is None and second.error is None


@pytest.mark.parametrize("goal", [2.0, None])
def test_parts_are_due_one_pace_apart(goal: float | None) -> None:
    """From the first part on; after a pause, or five paces late, it is counted from anew. Where no
    goal is set, so it is as soon as a part is late.
    """

    class Paced(GreedySteps):
        pace_s = 2.0  # type: ignore[assignment]

    policy = Paced(4, part_slo_s=goal)
    core = Core([stepper(policy=policy)])
    core.worker_ready(0, 0)
    (request,) = submitted(core, 0.0, 1)
    core.poll(0.0)
    stream = stream_of(request)

    def part(now: float) -> float:
        core.reported(now, SetReport(0, 0, 1, False, columns([Said(request.id, "x")]), 1, 1.0))
        return stream.next_due

    assert stream.next_due == inf
    assert [part(now) for now in (1.0, 2.0, 9.0)] == [3.0, 5.0, 7.0 if goal else 11.0]
    assert part(17.5) == 19.5  # more than five paces late
    core.pause(18.0, request, True)
    assert stream.next_due == inf and part(18.0) == inf  # the step that was under way
    core.pause(30.0, request, False)
    assert part(31.0) == 33.0


# -- faults


@pytest.mark.parametrize("resumable", [True, False])
def test_streams_of_a_dead_worker_go_on_where_the_model_can_resume(resumable: bool) -> None:
    """With it, no part is missing or double; without it those with parts fail, and the others start again."""
    driver = drive(stepper(rows=4, resumable=resumable))
    old = [ask(driver, 9), ask(driver, 8)]
    new, collected = ask(driver, 3, 2.5), ask(driver, 6, collected=True)
    driver.at(3.5, lambda: driver.lose(0, 0, back_after_s=1.0))
    driver.run()

    assert new.error is None and reader(new).parts == [0, 1, 2]
    assert collected.result == [0, 1, 2, 3, 4, 5]
    if resumable:
        assert [reader(request).parts for request in old] == [list(range(9)), list(range(8))]
    else:
        assert [reader(request).parts for request in old] == [[0, 1, 2]] * 2
        assert [code_of(request) for request in old] == ["worker_lost"] * 2
    assert driver.core.crews[0].queue.nbytes == 0


def test_a_stream_that_was_put_back_is_due_one_pace_after_its_next_part() -> None:
    """What was due while it had no worker holds no door."""
    core = Core([stepper(resumable=True, policy=GreedySteps(4, part_slo_s=2.0))])
    core.worker_ready(0, 0)
    (request,) = submitted(core, 0.0, 1)
    core.poll(0.0)
    core.reported(1.0, SetReport(0, 0, 1, False, columns([Said(request.id, 0)]), 1, 1.0))
    core.worker_left(2.0, 0, 0)
    core.worker_ready(0, 0)
    core.poll(4.0)
    assert stream_of(request).next_due == inf
    core.reported(6.0, SetReport(0, 0, 1, False, columns([Said(request.id, 1)]), 1, 1.0))
    assert stream_of(request).next_due == 8.0


def test_a_stream_that_kills_its_workers_costs_two_and_harms_nobody() -> None:
    """Each suspect runs its start and one step alone, while the others rest; then the guilty one is known."""
    stage = stepper(rows=8, resumable=True)
    killers: list[Request] = []

    def answer(item: int) -> Iterator[object]:
        for i in range(item):
            if item == 13 and i == 4:  # the step that would make its part 4 kills
                now = driver.clock.now
                driver.at(now, lambda: driver.lose(0, stream_of(killers[0]).place, back_after_s=0.25))
            yield i

    driver = drive(stage, answer=answer, journal=Journal())
    mates = [ask(driver, n) for n in (9, 10, 11, 12)]
    killers.append(ask(driver, 13))
    mates += [ask(driver, n, 0.5) for n in (8, 14)]
    lost: list[float] = []
    lose = driver.lose
    driver.lose = lambda *args, **more: (lost.append(driver.clock.now), lose(*args, **more))  # type: ignore
    driver.run()

    assert len(lost) == 2
    assert code_of(killers[0]) == "request_crashed_worker" and reader(killers[0]).parts == [0, 1, 2, 3]
    for request in mates:
        assert request.error is None and reader(request).parts == list(range(request.item))  # type: ignore[call-overload]
        assert request.losses == 0


def test_steps_in_which_a_stream_rests_are_none_that_it_has_lost() -> None:
    """What a stream has to make again is what it has made, whoever was stepped meanwhile."""
    core = Core([stepper(resumable=True)])
    core.worker_ready(0, 0)
    rests, mate = submitted(core, 0.0, 2)
    stream_of(rests).is_collected = True
    core.poll(0.0)
    parts = iter(range(100))

    def step(seen: int, rows: int) -> None:
        core.reported(1.0, SetReport(0, 0, seen, False, columns([Said(mate.id, next(parts))]), rows, 1.0))
        core.poll(1.0)

    step(1, 2)
    step(1, 2)
    core.pause(1.0, rests, True)
    assert only_order(core, 1.0).pause == [rests.id]
    step(1, 2)  # the one that was under way
    for _ in range(5):
        step(2, 1)
    core.pause(1.0, rests, False)
    assert only_order(core, 1.0).resume == [rests.id]
    step(2, 1)
    step(3, 2)
    core.worker_lost(2.0, 0, 0)

    assert stream_of(rests).redo == 4
    assert stream_of(mate).redo == 0


def test_a_killer_that_collects_costs_three_workers_wherever_it_waits() -> None:
    """Its mates run on probation after it, one by one; the steps in which it rests meanwhile do not hide that it
    comes to the same step again. Once it is convicted, no mate that was lost with it makes more than one step alone.
    """
    killer: list[Request] = []

    def answer(item: int) -> Iterator[object]:
        for i in range(item):
            if item == 13 and i == 4:
                driver.at(driver.clock.now, lambda: driver.lose(0, stream_of(killer[0]).place, back_after_s=0.25))
            yield i

    driver = drive(stepper(rows=8), answer=answer)
    killer.append(ask(driver, 13, collected=True))
    mates = [ask(driver, 20 + i, collected=True) for i in range(6)]
    lost: list[float] = []
    lose = driver.lose
    driver.lose = lambda *args, **more: (lost.append(driver.clock.now), lose(*args, **more))  # type: ignore
    driver.run()

    assert len(lost) == 3 and code_of(killer[0]) == "request_crashed_worker"
    assert [mate.result for mate in mates] == [list(range(20 + i)) for i in range(6)]
    assert max(reader(mate).ended for mate in mates) < lost[-1] + 0.25 + 6 + 26


def test_streams_that_were_lost_in_different_steps_make_one_step_alone() -> None:
    """Where workers are killed from outside, hardly a stream is lost twice in the same step, and none is held up."""
    driver = drive(stepper(rows=4))
    requests = [ask(driver, 100, when, collected=True) for when in (0.0, 10.0, 20.0)]
    driver.at(40.5, lambda: driver.lose(0, 0, back_after_s=1.0))
    driver.at(60.5, lambda: driver.lose(0, 0, back_after_s=1.0))
    driver.run()

    assert [request.result for request in requests] == [list(range(100))] * 3
    assert max(reader(request).ended for request in requests) < 61.5 + 3 + 100


def test_on_probation_all_others_of_a_set_rest() -> None:
    """First an order has them rest; once it is followed, the suspect joins, and after one step it is acquitted."""
    stage = stepper(rows=4, resumable=True)
    core = Core([stage])
    core.worker_ready(0, 0)
    core.worker_ready(0, 1)
    suspect, mate = submitted(core, 0.0, 2)
    orders = {order.place: order for order in core.poll(0.0).orders}
    assert {place: len(order.join) for place, order in orders.items()} == {0: 2}
    core.cancel(0.5, mate)
    core.worker_lost(1.0, 0, 0)
    (other,) = submitted(core, 1.0, 1)
    assert suspect.state == QUEUED

    order = only_order(core, 1.0)
    assert order.join == [suspect] and order.stop_when == EVERY_STEP
    core.reported(2.0, SetReport(0, 1, 1, True, columns([Said(suspect.id, 0)]), 1, 1.0))
    assert suspect.losses == 0
    order = only_order(core, 2.0)
    assert order.join == [other]


def test_a_suspect_joins_a_running_set_only_once_its_members_rest() -> None:
    """So that only the suspect is to blame if the worker is lost."""
    stage = stepper(rows=4, resumable=True)
    core = Core([stage])
    core.worker_ready(0, 0)
    core.worker_ready(0, 1)
    (suspect,) = submitted(core, 0.0, 1)
    first = only_order(core, 0.0)
    (runs,) = submitted(core, 0.0, 1)
    second = only_order(core, 0.0)
    assert (first.join, second.join) == ([suspect], [runs]) and first.place != second.place
    assert not core.worker_lost(1.0, 0, first.place)

    order = only_order(core, 1.0)
    assert (order.join, order.pause) == ([], [runs.id])
    core.reported(1.5, SetReport(0, second.place, 1, False, columns([Said(runs.id, 0)]), 1, 1.0))
    assert core.poll(1.5).orders == []
    core.reported(1.5, SetReport(0, second.place, 2, True))
    order = only_order(core, 1.5)
    assert order.join == [suspect] and order.stop_when == EVERY_STEP

    assert core.worker_lost(2.0, 0, second.place)
    assert code_of(suspect) == "request_crashed_worker"
    assert runs.state == QUEUED and runs.losses == 0


def cleared_for_a_suspect() -> tuple[Core, Request, Request, int]:
    """A pipeline whose only stream that runs rests, so that the suspect which waits may join its set, and the place of
    that set; no other request waits.
    """
    core = Core([stepper(rows=4, resumable=True)])
    core.worker_ready(0, 0)
    core.worker_ready(0, 1)
    (suspect,) = submitted(core, 0.0, 1)
    lost = only_order(core, 0.0).place
    (runs,) = submitted(core, 0.0, 1)
    place = only_order(core, 0.0).place
    core.worker_lost(1.0, 0, lost)
    assert only_order(core, 1.0).pause == [runs.id]
    return core, suspect, runs, place


def test_a_set_that_was_cleared_for_a_suspect_goes_on_when_another_worker_takes_it() -> None:
    """Even if nothing else waits then, and no other request ever comes."""
    core, suspect, runs, place = cleared_for_a_suspect()
    core.worker_ready(0, 2)
    orders = {order.place: order for order in core.poll(1.5).orders}

    assert orders[2].join == [suspect]
    assert orders[place].resume == [runs.id]


def test_a_set_that_was_cleared_for_a_suspect_goes_on_when_the_caller_of_it_leaves() -> None:
    """Even if nothing else waits then, and no other request ever comes."""
    core, suspect, runs, place = cleared_for_a_suspect()
    core.cancel(1.5, suspect)
    order = only_order(core, 1.5)

    assert (order.place, order.resume) == (place, [runs.id])


def test_a_suspect_joins_no_set_that_would_run_out_of_memory() -> None:
    """Those that rest hold memory, too: it waits for a set with room, as all others do."""
    stage = stepper(rows=4, resumable=True)
    core = Core([stage])
    core.worker_ready(0, 0)
    core.worker_ready(0, 1)
    (suspect,) = submitted(core, 0.0, 1)
    lost = only_order(core, 0.0).place
    runs = submitted(core, 0.0, 2)
    other = only_order(core, 0.0)
    stage.safe_size.ran_out(3, 2)
    core.worker_lost(1.0, 0, lost)
    assert only_order(core, 1.0) == Order(0, other.place, 2, [], [], [], [], ON_LEAVING)
    assert suspect.state == QUEUED
    ended = columns([Said(request.id, 0, last=True) for request in runs[:1]])
    core.reported(2.0, SetReport(0, other.place, 1, False, ended, 2, 1.0))

    assert only_order(core, 2.0).pause == [runs[1].id]


def test_where_requests_must_not_run_twice_a_lost_worker_ends_its_streams() -> None:
    """They are never started again, nor resumed."""
    driver = drive(stepper(resumable=True, idempotent=False))
    old, new = ask(driver, 9), ask(driver, 9, 2.5)
    driver.at(3.25, lambda: driver.lose(0, 0))
    later = ask(driver, 2, 4.0)
    driver.run()

    assert [code_of(old), code_of(new)] == ["worker_lost"] * 2 and later.error is None


def test_streams_of_which_a_lost_worker_had_not_heard_are_not_blamed() -> None:
    """They wait again as if they had not been taken, even where requests must not run twice."""
    core = Core([stepper(idempotent=False)])
    core.worker_ready(0, 0)
    told, untold = submitted(core, 0.0, 2)
    core.poll(0.0)
    core.worker_lost(1.0, 0, 0, unsent=[untold.id])

    assert code_of(told) == "worker_lost" and told.losses == 1
    assert untold.state == QUEUED and untold.losses == 0


def test_when_memory_runs_out_the_newest_go_back_and_what_fits_is_remembered() -> None:
    """It is nobody's fault; with `resume` they go on from their parts, once there is room by the new limit."""
    stage = stepper(rows=4, resumable=True)
    core = Core([stage])
    core.worker_ready(0, 0)
    requests = submitted(core, 0.0, 4)
    ids = [request.id for request in requests]
    core.poll(0.0)
    core.reported(1.0, SetReport(0, 0, 1, False, columns([Said(id, 0) for id in ids]), 4, 1.0))
    core.reported(2.0, SetReport(0, 0, 1, False, columns([Said(id, 1) for id in ids[:2]], ids[2:]), 2, 1.0))
    todo = core.poll(2.0)

    assert stage.safe_size.limit == 2 and [order.join for order in todo.orders] in ([], [[]])
    assert [request.state for request in requests] == [RUNNING, RUNNING, QUEUED, QUEUED]
    assert [request.losses for request in requests] == [0] * 4
    core.reported(
        3.0, SetReport(0, 0, stage.sets[0].number, True, columns([Said(id, 2, last=True) for id in ids[:2]]), 2, 1.0)
    )
    order = only_order(core, 3.0)
    assert order.join == requests[2:] and [stream_of(request).kept for request in order.join] == [[0], [0]]


def test_without_resume_those_with_parts_fail_when_memory_runs_out() -> None:
    """A worker sends back those without parts first; those start again."""
    core = Core([stepper(rows=4)])
    core.worker_ready(0, 0)
    (old,) = submitted(core, 0.0, 1)
    core.poll(0.0)
    core.reported(1.0, SetReport(0, 0, 1, False, columns([Said(old.id, 0)]), 1, 1.0))
    (new,) = submitted(core, 1.0, 1)
    core.poll(1.0)
    core.reported(2.0, SetReport(0, 0, 2, True, columns([], [old.id, new.id])))

    assert isinstance(old.error, ModelError) and old.error.type_name == "MemoryError" and new.state == QUEUED


def test_a_set_that_has_grown_beyond_what_was_known_to_fit_raises_the_limit() -> None:
    """Now and then, when a stream has ended, a larger set is tried; if its step goes through, that much fits."""
    stage = stepper(rows=8)
    driver = drive(stage)
    stage.safe_size.ran_out(8, 2)
    for i in range(60):
        ask(driver, 2, i / 100)
    driver.run()

    assert stage.safe_size.limit > 2 and driver.core.unanswered == 0


def test_a_worker_that_should_step_and_says_nothing_hangs() -> None:
    """It is given up after `max_batch_time_s`; one whose streams all rest says nothing rightly."""
    stage = stepper(max_batch_time_s=5.0)
    core = Core([stage])
    core.worker_ready(0, 0)
    (request,) = submitted(core, 0.0, 1)
    core.poll(0.0)
    assert core.poll(4.0).kill == []
    core.reported(4.5, SetReport(0, 0, 1, False, columns([Said(request.id, 0)]), 1, 1.0))
    assert core.poll(9.0).kill == []
    todo = core.poll(9.5)
    assert todo.kill == [(0, 0)] and core.poll(9.6).kill == []  # it is being killed
    assert not core.worker_lost(10.0, 0, 0)
    assert "longer than max_batch_time_s" in str(request.error)


def test_a_worker_that_waits_does_not_hang() -> None:
    """Neither with all streams at rest nor without any."""
    driver = drive(stepper(max_batch_time_s=5.0))
    request = ask(driver, 3)
    driver.at(1.5, lambda: driver.core.pause(1.5, request, True))
    driver.at(50.5, lambda: driver.core.pause(50.5, request, False))
    driver.run()

    assert reader(request).times == [1, 2, 51.5]


def test_a_step_that_nobody_waits_for_is_given_up_after_a_while() -> None:
    """Without `max_batch_time_s`: all callers have left, and the worker has not come to the order that says so."""
    stage = stepper(patience_s=4.0)
    core = Core([stage])
    core.worker_ready(0, 0)
    (request,) = submitted(core, 0.0, 1)
    core.poll(0.0)
    core.cancel(10.0, request)
    assert core.poll(10.0).kill == [] and core.poll(13.9).kill == []
    assert core.poll(14.0).kill == [(0, 0)]


def test_newcomers_do_not_keep_a_worker_that_hangs() -> None:
    """Requests that come while nobody waits for the step under way do not make it wanted; they are not blamed for it,
    and a worker that speaks again is kept.
    """
    stage = stepper(patience_s=4.0)
    core = Core([stage])
    core.worker_ready(0, 0)
    (first,) = submitted(core, 0.0, 1)
    core.poll(0.0)
    (second,) = submitted(core, 9.0, 1)
    core.poll(9.0)
    core.cancel(10.0, first)
    (third,) = submitted(core, 11.0, 1)
    assert core.poll(11.0).kill == []
    core.cancel(12.0, second)
    assert core.poll(13.9).kill == []
    assert core.poll(14.0).kill == [(0, 0)]
    stage.restart_hang_timer(14.1, 0)
    core.reported(14.2, SetReport(0, 0, stage.sets[0].number, False, columns([Said(third.id, 0)]), 1, 1.0))
    assert core.poll(60.0).kill == []


@pytest.mark.parametrize("kind", [LAST, END, FAILED])
def test_a_part_and_the_end_of_its_stream_may_come_in_one_report(kind: int) -> None:
    """The part is handed on, and then the request ends: with its whole answer where its caller takes that."""
    stage = stepper()
    core = Core([stage])
    core.worker_ready(0, 0)
    (request,) = submitted(core, 0.0, 1)
    stream_of(request).is_told_both = kind == LAST
    core.poll(0.0)
    value = {LAST: "whole", END: b"", FAILED: ModelError("bad end")}[kind]
    said = Parts([request.id] * 2, bytes([MORE, kind]), ["x", value])
    core.reported(1.0, SetReport(0, 0, 1, True, said, 1, 1.0))
    todo = core.poll(1.0)
    assert list(todo.parts) == [(request, "x")] and todo.answer == [request]
    assert request.result == ("whole" if kind == LAST else None)
    assert request.error is (value if kind == FAILED else None)
    assert stream_of(request).parts == 1 and stage.running == 0


@pytest.mark.parametrize(
    "report",
    [
        SetReport(0, 0, 2, False),
        SetReport(0, 1, 0, False),
        SetReport(1, 0, 1, False),
        SetReport(0, 0, 1, False, columns([Said(77, "x")])),
        SetReport(0, 0, 1, False, columns([Said(1, "x"), Said(1, "y")])),
        SetReport(0, 0, 1, False, columns([Said(1, "x", last=True), Said(1, "y")])),
        SetReport(0, 0, 1, False, columns([Said(1, last=True), Said(1, error=ModelError("twice"))])),
        SetReport(0, 0, 1, False, columns([Said(1, last=True)], [1])),
        SetReport(0, 0, 1, False, columns([], [77])),
        SetReport(0, 0, 1, False, rows=5, step_s=1.0),
    ],
)
def test_a_worker_that_breaks_the_protocol_is_found_out(report: SetReport) -> None:
    """An order not sent, a worker or a stage not there, a stream that it never had: nothing is done."""
    core = Core([stepper()])
    core.worker_ready(0, 0)
    (request,) = submitted(core, 0.0, 1)
    core.poll(0.0)
    with pytest.raises(ValueError, match=r"worker|stage"):
        core.reported(1.0, report)
    assert request.state == RUNNING and list(core.poll(1.0).parts) == []


def test_nothing_comes_after_an_end() -> None:
    """A part of a stream that has ended breaks the protocol."""
    core = Core([stepper()])
    core.worker_ready(0, 0)
    first, second = submitted(core, 0.0, 2)
    core.poll(0.0)
    core.reported(1.0, SetReport(0, 0, 1, False, columns([Said(first.id, 0, last=True), Said(second.id, 0)]), 2, 1.0))
    with pytest.raises(ValueError, match="has no streams"):
        core.reported(2.0, SetReport(0, 0, 1, False, columns([Said(first.id, 1)]), 1, 1.0))


def test_parts_of_a_stream_that_has_left_are_dropped_until_the_worker_has_heard() -> None:
    """Then they break the protocol, too."""
    stage = stepper()
    core = Core([stage])
    core.worker_ready(0, 0)
    gone, stays = submitted(core, 0.0, 2)
    core.poll(0.0)
    core.cancel(0.5, gone)
    assert only_order(core, 0.5).leave == [gone.id]
    core.reported(1.0, SetReport(0, 0, 1, False, columns([Said(gone.id, 0), Said(stays.id, 0)]), 2, 1.0))
    assert list(core.poll(1.0).parts) == [(stays, 0)] and stage.stray_parts == 1
    core.reported(2.0, SetReport(0, 0, 2, False, columns([Said(stays.id, 1)]), 1, 1.0))
    with pytest.raises(ValueError, match="has no streams"):
        core.reported(3.0, SetReport(0, 0, 2, False, columns([Said(gone.id, 1)]), 1, 1.0))


# -- draining and recycling


def test_nobody_joins_a_worker_that_drains() -> None:
    """Its streams go on to their ends."""
    stage = stepper()
    driver = drive(stage)
    first, second = ask(driver, 4), ask(driver, 1, 1.5)
    driver.at(1.0, lambda: driver.drain(0, 0))
    driver.at(6.0, lambda: driver.add(0))
    driver.run()

    assert reader(first).times == [1, 2, 3, 4] and reader(second).times == [7]
    assert stage.is_empty(0)


@pytest.mark.parametrize("resumable", [True, False])
def test_streams_move_when_their_worker_is_replaced(resumable: bool) -> None:
    """Nobody is to blame; without `resume` those with parts end with `Unavailable`."""
    driver = drive(stepper(resumable=resumable))
    old, new = ask(driver, 6), ask(driver, 3, 2.25)
    driver.at(2.5, lambda: driver.recycle(0))
    driver.run()

    assert reader(new).parts == [0, 1, 2]
    if resumable:
        assert reader(old).parts == [0, 1, 2, 3, 4, 5]
    else:
        assert isinstance(old.error, Unavailable) and code_of(old) == "worker_lost"
    assert old.losses == new.losses == 0


# -- around it


def test_a_stage_of_steps_is_the_last_one_of_a_pipeline() -> None:
    """Requests come from the stage before, and their item is its result."""
    core = Core([batch_stage(4), stepper(rows=2)])
    costs = StepCosts(lambda length: 0.0, lambda n: 1.0)
    driver = VirtualDriver(core, [lambda n: 1.0], steps=costs, computes=[lambda xs: [x + 1 for x in xs]])
    request = driver.submit(2, timeout_s=60.0)
    driver.run()

    assert request.result == [0, 1, 2] and core.unanswered == 0


def test_a_story_tells_joins_pauses_and_what_became_of_it() -> None:
    """The journal knows which worker a stream joined, by which order, and that it went on elsewhere."""
    journal = Journal()
    driver = drive(stepper(resumable=True), journal=journal)
    request = ask(driver, 5)
    driver.at(1.5, lambda: driver.core.pause(1.5, request, True))
    driver.at(1.6, lambda: driver.core.pause(1.6, request, False))
    driver.at(2.5, lambda: driver.lose(0, 0))
    driver.run()

    assert [f"{entry.event} {entry.detail}".rstrip() for entry in journal.story(request.id)] == [
        "admitted",
        "runs joins worker 0 by order 1",
        "first part from worker 0",
        "paused",
        "rests on worker 0 by order 2",
        "goes on",
        "is stepped again on worker 0 by order 3",
        "worker lost, queued again, alone",
        "resumed after 2 parts joins worker 0 by order 1",
        "answered after 5 parts",
    ]
    assert reader(request).parts == [0, 1, 2, 3, 4]


def test_a_story_tells_of_parts_and_of_memory_that_ran_out() -> None:
    """The first part has an entry of its own; the end, and a way back into the queue, say how many there were."""
    journal = Journal()
    core = Core([stepper(resumable=True)], journal=journal)
    core.worker_ready(0, 0)
    (kept, back, gone) = submitted(core, 0.0, 3)
    core.poll(0.0)
    core.reported(
        1.0, SetReport(0, 0, 1, False, columns([Said(kept.id, 0), Said(back.id, 0), Said(gone.id, 0)]), 3, 1.0)
    )
    core.reported(2.0, SetReport(0, 0, 1, False, columns([Said(kept.id, 1), Said(gone.id, 1)], [back.id]), 2, 1.0))
    core.cancel(2.5, gone)
    core.reported(3.0, SetReport(0, 0, 1, False, columns([Said(kept.id, error=ModelError("bad row"))]), 1, 1.0))

    def told(request: Request) -> list[str]:
        return [str(entry) for entry in journal.story(request.id)[2:]]

    first = "1.000000 first part steps from worker 0"
    assert told(kept) == [first, "3.000000 failed: bad row after 2 parts, the last one 1.000 s ago"]
    again = "2.000000 out of memory, queued again steps after 1 part, the last one 1.000 s ago"
    assert told(back) == [first, again]
    assert told(gone) == [first, "2.500000 cancelled after 2 parts, the last one 0.500 s ago"]


def test_a_stream_that_has_begun_gives_no_place_to_a_higher_priority() -> None:
    """Its caller has parts already; a newcomer that finds only such streams in a full queue is refused."""
    core = Core([stepper(rows=1, resumable=True, max_size=1)])
    core.worker_ready(0, 0)
    (begun,) = submitted(core, 0.0, 1)
    core.poll(0.0)
    core.reported(1.0, SetReport(0, 0, 1, False, columns([Said(begun.id, 0)]), 1, 1.0))
    core.worker_left(1.0, 0, 0)
    newcomer = Request("x", inf)
    newcomer.lane = Lane(5, None, 0)
    core.flow.submit(1.0, [newcomer])

    assert begun.state == QUEUED and isinstance(newcomer.error, Overloaded)


def test_kept_parts_count_among_the_queue_s_bytes_until_the_end() -> None:
    """Parts are kept only where the model can resume."""
    stage = stepper(resumable=True, measure=lambda part: 10)
    driver = drive(stage)
    ask(driver, 3)
    gone = ask(driver, 9)
    driver.at(4.5, lambda: driver.core.cancel(4.5, gone))
    driver.run(until=2.5)
    assert stage.queue.nbytes == 40
    driver.run()
    assert stage.queue.nbytes == 0
