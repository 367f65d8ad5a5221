"""A caller who finds nobody in the line runs its item alone: the quick way and the long one come to the same."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import carpool
from carpool.batch_function.base import Settings, invoker_of
from carpool.batch_function.threads import ThreadBatch
from carpool.engine.clock import VirtualClock
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.queue import Queue
from carpool.engine.drive.threads import LineDriver, Sleep
from carpool.engine.policy import BY_NAME, Adaptive, Decision, DoneBatch, Greedy, Policy, Static, View
from tests.effort import examples
from tests.support.values import flat
from tests.support.waiting import PATIENCE_S, wait_until


class Listening(Greedy):
    """One that overrides a part of the rule, and not what its base says of lone requests."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[Any, ...]] = []

    def learn(self, now: float, done: DoneBatch) -> None:
        self.heard.append((now, done.n, done.size, done.busy_s, done.ok))


class Virtual(LineDriver):
    """Whose threads do not sleep: the clock moves to when they would look up."""

    def _sleep(self, sleep: Sleep) -> None:
        assert sleep.seconds < 100.0
        self._clock.now += max(sleep.seconds, 0.0)  # type: ignore[attr-defined]
        sleep.sleepers.remove(sleep.lock)


class Side:
    """A batch function on a clock of its own, whose items say how long they take and what becomes of them."""

    def __init__(self, quick: bool, policy: Policy | str, **others: Any) -> None:
        self.clock = VirtualClock(100.0)
        self.batches: list[list[Any]] = []
        self.tickets: list[Any] = []
        chosen = Settings(policy=policy, max_batch_size=4, max_queue_size=8, **others)
        self.driver = Virtual("f", chosen.new_batcher("f"), slo_s=chosen.slo_s, clock=self.clock)
        self.f: ThreadBatch[Any, Any] = ThreadBatch(self.run, chosen, invoker_of(self.run, chosen, False), self.driver)
        self.f._each_counts_as_one = quick  # what is weighed goes the long way

    def run(self, items: list[Any]) -> list[Any]:
        self.batches.append(list(items))
        for fate, took_s in items:
            if fate == "company":  # somebody comes meanwhile
                meanwhile = threading.Thread(target=self.ticket, args=(("good", took_s),))
                meanwhile.start()
                meanwhile.join(PATIENCE_S)
            self.clock.now += took_s
        fates = [fate for fate, _ in items]
        if "raise" in fates:
            raise LookupError("no such thing")
        if "interrupt" in fates:
            raise KeyboardInterrupt
        if "leave" in fates:
            raise SystemExit(3)
        if "short" in fates:
            return []
        return [ValueError(len(self.batches)) if fate == "error" else (fate, took_s) for fate, took_s in items]

    def ticket(self, item: Any) -> None:
        self.tickets.append(self.f.submit(item))

    def do(self, what: str, item: Any) -> Any:
        """One step, and what its caller hears."""
        try:
            if what == "call":
                return self.f(item)
            if what == "many":
                return self.f.many([item, ("good", 0.0)])
            if what == "ticket" and len(self.tickets) < 6:
                self.ticket(item)
            elif what == "result" and self.tickets:
                return self.tickets.pop(0).result(timeout_s=0.5)
            elif what == "cancel" and self.tickets:
                return self.tickets.pop().cancel()
            elif what == "pause":
                self.clock.now += item[1]
        except BaseException as error:
            return type(error), str(error)
        return None

    def state(self) -> Any:
        """All that has been counted and learned."""
        core = self.driver._line.core
        (batcher,) = core.crews
        counted = (
            core.flow.admitted,
            core.flow.answered,
            core.flow.cancelled,
            core.flow.refused,
            core.waiting,
        )
        timed = (
            batcher._batch_ids,
            batcher.times.usual_s,
            batcher.times.fastest_s,
            batcher.late_results,
            len(batcher.in_flight),
        )
        return counted, timed, flat(batcher.lobby.policy)


POLICIES: dict[str, Callable[[], Policy]] = {
    "adaptive": Adaptive,
    "greedy": Greedy,
    "static": Static,
    "aimd": BY_NAME["aimd"],
    "deadline": BY_NAME["deadline"],
    "listening": Listening,
}
FATES = st.sampled_from(["good"] * 6 + ["company", "company", "error", "raise", "interrupt", "leave", "short"])
TIMES = st.sampled_from([0.0, 1e-5, 1e-5, 1e-4, 0.003, 0.02, 1.0])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["call"] * 8 + ["many", "ticket", "result", "cancel", "pause"]),
        st.tuples(FATES, TIMES),
        st.sampled_from([1, 1, 1, 10, 80]),  # so many times
    ),
    max_size=30,
)


@pytest.mark.parametrize("policy", POLICIES)
@examples(40)
@given(
    steps=STEPS,
    timeout_s=st.sampled_from([None, None, 0.01, 5.0]),
    slo_s=st.sampled_from([None, None, 0.005, 1.0]),
    isolated=st.booleans(),
)
def test_both_ways_come_to_the_same(
    policy: str, steps: list[Any], timeout_s: float | None, slo_s: float | None, isolated: bool
) -> None:
    """The quick way of a lone caller and the long one make the same batches in the same order, the
    same answers, errors and counts, and teach the policy the same.
    """
    others = {"timeout_s": timeout_s, "slo_s": slo_s, "isolate_errors": isolated}
    quick, slow = (Side(each, POLICIES[policy](), **others) for each in (True, False))
    for what, item, times in steps:
        for _ in range(times if what == "call" and item[0] == "good" else 1):
            assert quick.do(what, item) == slow.do(what, item)
            assert quick.clock.now == slow.clock.now
        assert quick.state() == slow.state()
    assert quick.batches == slow.batches


# -- which way is taken


@contextlib.contextmanager
def joins(f: Any) -> Iterator[list[Any]]:
    """Return the list of the items of those who join the line meanwhile."""
    driver, seen = f._driver, []
    join = driver.join

    def joined(items: Any, *rest: Any) -> Any:
        seen.extend(items)
        return join(items, *rest)

    driver.join = joined
    yield seen
    driver.join = join


def same(xs: list[Any]) -> list[Any]:
    return xs


@pytest.mark.parametrize("lock", [None, carpool.Lock, threading.Lock, threading.RLock])
def test_a_lone_caller_does_not_join_the_line(lock: Callable[[], Any] | None) -> None:
    """With the default policy a lone caller runs its item without joining the line as soon as a few
    batches have been seen, also with a lock that is free.
    """
    f = carpool.batch(execution_lock=lock and lock(), timeout_s=5.0)(same)
    for x in range(10):
        assert f(x) == x
    with joins(f) as seen:
        assert [f(x) for x in range(200)] == list(range(200))

    assert len(seen) < 20  # now and then the policy thinks about what it has learned


def test_who_is_behind_somebody_joins_the_line() -> None:
    """A caller behind another one joins the line, whether that one runs alone or is a ticket that
    nobody has run yet.
    """
    entered, go = threading.Event(), threading.Event()

    def slow(xs: list[int]) -> list[int]:
        entered.set()
        go.wait(PATIENCE_S)
        return [len(xs)] * len(xs)

    f = carpool.batch(policy="greedy")(slow)
    with ThreadPoolExecutor(4) as pool, joins(f) as seen:
        first = pool.submit(f, 0)
        entered.wait(PATIENCE_S)
        others = [pool.submit(f, x) for x in (1, 2)]
        wait_until(lambda: len(seen) == 2)
        go.set()
        assert first.result(PATIENCE_S) == 1
        assert [other.result(PATIENCE_S) for other in others] in (
            [2, 2],
            [1, 1],
        )
        ticket = f.submit(3)
        assert f(4) == 2
        assert ticket.result() == 2

    assert sorted(seen) == [1, 2, 3, 4]


def test_a_policy_of_ones_own_is_asked_and_told_step_by_step() -> None:
    """A policy of one's own is asked and told step by step, also one that inherits what is said of
    lone requests, but not the rule of which it is said.
    """

    class Late(Greedy):
        def decide(self, view: View) -> Decision:
            asked.append(len(view.queue))
            return super().decide(view)

    asked: list[int] = []
    f = carpool.batch(policy=Late())(same)
    assert f(1) == 1
    assert 1 in asked
    assert not Batcher("f", Listening(), Queue()).lets_go(0.0, inf, inf)
    assert Batcher("f", Greedy(), Queue()).lets_go(0.0, inf, inf)


def test_a_policy_that_raises_when_a_lone_caller_is_done_fails_loudly(caplog: pytest.LogCaptureFixture) -> None:
    """A policy that lets a lone caller go and raises afterwards fails its line loudly: the caller
    has its answer, and everybody after it hears of it.
    """

    class Fickle(Policy):
        lone_slack_s = -inf

        def learn(self, now: float, done: DoneBatch) -> None:
            raise ValueError("a bug")

        def decide(self, view: View) -> Decision:
            return Decision()

    f = carpool.batch(policy=Fickle(), timeout_s=5.0)(same)
    assert f(1) == 1
    with pytest.raises(carpool.Unavailable, match="its policy raised ValueError"):
        f(2)
    assert "its policy raised ValueError: a bug" in caplog.text


def test_a_policy_that_raises_when_a_lone_caller_is_done_and_others_have_come() -> None:
    """If a policy raises when a lone caller is done, it has its answer, and all hear of it who are
    inside by then.
    """

    class Bad(Greedy):
        lone_slack_s = -inf

        def learn(self, now: float, done: DoneBatch) -> None:
            if not done.is_alone:
                raise ValueError("a bug")

    def run(xs: list[int]) -> list[int]:
        other = threading.Thread(target=lambda: tickets.append(f.submit(2)))
        other.start()
        other.join(PATIENCE_S)
        return xs

    tickets: list[Any] = []
    f = carpool.batch(policy=Bad())(run)
    assert f(1) == 1
    with pytest.raises(carpool.Unavailable, match="its policy raised ValueError"):
        tickets[0].result()


# -- nothing is given up


def test_a_lone_caller_inside_its_function_is_an_error_at_once() -> None:
    """A lone caller that calls its own function from inside, directly or through another function,
    gets an error at once, as any leader does.
    """

    @carpool.batch(policy="greedy")
    def f(xs: list[int]) -> list[int]:
        return [g(x) for x in xs]

    @carpool.batch(policy="greedy")
    def g(xs: list[int]) -> list[int]:
        return [f(x) if x < 0 else x for x in xs]

    assert f(1) == 1
    with pytest.raises(RuntimeError, match="f was called from inside itself"):
        f(-1)
    assert f(2) == 2


def test_two_lone_callers_who_wait_for_each_other_are_told() -> None:
    """When two lone callers wait for each other from inside their functions, one of them hears of
    the circle.
    """
    together = threading.Barrier(2)

    def calls(other: Callable[[], Any]) -> Callable[[list[int]], list[int]]:
        def run(xs: list[int]) -> list[int]:
            if 0 in xs:
                with contextlib.suppress(threading.BrokenBarrierError):
                    together.wait(PATIENCE_S)
                return [other()(1)]
            return xs

        return run

    f = carpool.batch(policy="greedy")(calls(lambda: g))
    g = carpool.batch(policy="greedy")(calls(lambda: f))
    with ThreadPoolExecutor(2) as pool:
        calls_made = [pool.submit(each, 0) for each in (f, g)]
        errors = [call.exception(PATIENCE_S) for call in calls_made]

    assert RuntimeError in {type(error) for error in errors}
    assert (f(3), g(3)) == (3, 3)


def test_a_lone_caller_is_interrupted_and_others_have_come() -> None:
    """If a lone caller is interrupted its own call ends, and those that have come meanwhile are run
    by another leader.
    """
    entered, go = threading.Event(), threading.Event()

    def slow(xs: list[Any]) -> list[Any]:
        if "interrupt" in xs:
            entered.set()
            go.wait(PATIENCE_S)
            raise KeyboardInterrupt
        return xs

    f = carpool.batch(policy="greedy")(slow)
    with ThreadPoolExecutor(3) as pool, joins(f) as seen:
        first = pool.submit(f, "interrupt")
        entered.wait(PATIENCE_S)
        others = [pool.submit(f, x) for x in (1, 2)]
        wait_until(lambda: len(seen) == 2)
        go.set()
        assert [other.result(PATIENCE_S) for other in others] == [1, 2]
        assert isinstance(first.exception(PATIENCE_S), KeyboardInterrupt)


def test_closing_waits_for_a_lone_caller() -> None:
    """Closing waits for a lone caller, and refuses those who come after."""
    entered, go = threading.Event(), threading.Event()

    def slow(xs: list[int]) -> list[int]:
        entered.set()
        go.wait(PATIENCE_S)
        return xs

    f = carpool.batch(policy="greedy")(slow)
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(f, 1)
        entered.wait(PATIENCE_S)
        closing = pool.submit(f.close)
        with contextlib.suppress(TimeoutError):
            closing.result(0.05)
        assert not closing.done()
        with pytest.raises(carpool.Unavailable, match="is closed"):
            f(2)
        go.set()
        assert call.result(PATIENCE_S) == 1
        closing.result(PATIENCE_S)


@pytest.mark.filterwarnings("ignore:this process was forked after:RuntimeWarning")
@pytest.mark.parametrize("company", [False, True])
def test_a_fork_inside_a_lone_call(company: bool) -> None:
    """When a lone call forks, the child's copy of the caller gets its answer and its line is a new
    one; the parent's goes on.
    """
    read, write = os.pipe()
    pids: list[int] = []

    def forks(xs: list[int]) -> list[int]:
        if 0 in xs:
            if company:
                other = threading.Thread(target=f.submit, args=(5,))
                other.start()
                other.join(PATIENCE_S)
            pids.append(os.fork())
        return xs

    f = carpool.batch(policy="greedy")(forks)
    answer = f(0)
    if not pids[0]:
        try:
            os.write(write, b"%d %d" % (answer, f(7)))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"0 7"
    os.waitpid(pids[0], 0)
    assert (answer, f(8)) == (0, 8)


def test_a_signal_handler_that_calls_a_function_that_its_thread_runs_alone() -> None:
    """A signal handler that calls the function which its own thread is running alone gets an error
    at once, and the interrupted call goes on.
    """
    heard: list[BaseException | int] = []

    @carpool.batch(policy="greedy")
    def f(xs: list[int]) -> list[int]:
        if 1 in xs:
            signal.raise_signal(signal.SIGUSR1)
        return xs

    def handler(*_: Any) -> None:
        try:
            heard.append(f(2))
        except RuntimeError as error:
            heard.append(error)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        assert f(1) == 1
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert isinstance(heard[0], RuntimeError)
    assert f(3) == 3


def test_an_interrupt_of_who_joins_a_lone_caller_leaves_no_place_taken() -> None:
    """If Ctrl-C or a raising policy meets the second caller while it catches up with a lone one, no
    place stays taken, and those after it are served.
    """
    inside, go_on = threading.Event(), threading.Event()
    asked = iter([KeyboardInterrupt])

    class Interrupted(Greedy):
        lone_slack_s = -inf

        def decide(self, view: View) -> Decision:
            for kind in asked:
                raise kind
            return super().decide(view)

    @carpool.batch(policy=Interrupted(8), max_batch_size=8, timeout_s=10.0)
    def double(xs: list[int]) -> list[int]:
        inside.set()
        go_on.wait(10.0)
        return [2 * x for x in xs]

    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(double, 1)
        assert inside.wait(10.0)
        second = pool.submit(double, 2)
        assert isinstance(second.exception(10.0), KeyboardInterrupt)
        go_on.set()
        assert first.result(10.0) == 2
        assert [call.result(10.0) for call in [pool.submit(double, 3), pool.submit(double, 4)]] == [6, 8]
    double.close()
