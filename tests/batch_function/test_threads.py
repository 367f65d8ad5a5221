"""`@carpool.batch` over a `def`: callers' threads, and no thread of ours."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import multiprocessing
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import carpool
from carpool.engine.policy import BY_NAME, DoneBatch, Static, View
from carpool.engine.policy.base import Decision
from tests.effort import slow_where
from tests.support import models
from tests.support.waiting import wait_until


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(64) as pool:
        yield pool


class Gated:
    """A batch function that waits inside until it is let go, and remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def __call__(self, xs: list[Any]) -> list[Any]:
        self.batches.append(xs)
        self.entered.release()
        assert self.gate.acquire(timeout=10)
        if "interrupt" in xs and len(self.batches) == 1:
            raise KeyboardInterrupt
        if "raise" in xs:
            raise LookupError("no such thing")
        return [(x, len(xs)) for x in xs]

    def let(self, n: int = 1) -> None:
        for _ in range(n):
            self.gate.release()


def waiting(batched: Any) -> int:
    """How many wait in the line."""
    n: int = batched._driver._line.core.waiting
    return n


def test_a_lone_call_is_a_batch_of_one() -> None:
    """A lone call runs at once, in the caller's own thread."""
    seen = []

    @carpool.batch
    def double(xs: list[int]) -> list[int]:
        seen.append((xs, threading.get_ident()))
        return [2 * x for x in xs]

    assert double(21) == 42
    assert seen == [([21], threading.get_ident())]
    assert double.__name__ == "double"


def test_those_behind_share_the_next_call(pool: ThreadPoolExecutor) -> None:
    """Callers that come while a batch runs share the next one."""
    function = Gated()
    f = carpool.batch(function)
    first = pool.submit(f, 0)
    function.entered.acquire()
    others = [pool.submit(f, x) for x in range(1, 6)]
    wait_until(lambda: waiting(f) == 5)
    function.let(2)

    assert first.result() == (0, 1)
    assert sorted(other.result() for other in others) == [(x, 5) for x in range(1, 6)]
    assert len(function.batches) == 2


@pytest.mark.slow
def test_two_hundred_threads_of_five_hundred_calls() -> None:
    """Of two hundred threads with 500 calls each all get the right answers, and while they run
    there is no thread but the callers'.
    """

    @carpool.batch(max_batch_size=32)
    def double(xs: list[int]) -> list[int]:
        return [2 * x for x in xs]

    wrong: list[int] = []
    found: set[str] = set()

    def caller(k: int) -> None:
        for i in range(k * 500, k * 500 + 500):
            if double(i) != 2 * i:
                wrong.append(i)
            if i % 100 == 0:
                found.update(thread.name for thread in threading.enumerate())

    before = {thread.name for thread in threading.enumerate()}
    threads = [threading.Thread(target=caller, args=(k,), name=f"caller-{k}") for k in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert {name for name in found - before if not name.startswith("caller-")} == set()


def test_several_batches_at_a_time(pool: ThreadPoolExecutor) -> None:
    """As many batches run at a time as `max_in_flight_batches` says, and not one more."""
    function = Gated()
    f = carpool.batch(max_batch_size=1, max_in_flight_batches=2)(function)
    calls = [pool.submit(f, x) for x in range(3)]
    function.entered.acquire()
    function.entered.acquire()
    wait_until(lambda: waiting(f) == 1)
    assert not function.entered.acquire(timeout=0.05)
    function.let(3)

    assert [call.result() for call in calls] == [(0, 1), (1, 1), (2, 1)]


# -- errors


def test_an_exception_reaches_every_caller_of_the_batch(pool: ThreadPoolExecutor) -> None:
    """Of an exception of a function that may not be called again the first caller of the batch gets
    the original, and each other a copy with that as its cause.
    """
    function = Gated()
    f = carpool.batch(idempotent=False)(function)
    first = pool.submit(f, 0)
    function.entered.acquire()
    others = [pool.submit(f, x) for x in (1, "raise", 2)]
    wait_until(lambda: waiting(f) == 3)
    function.let(2)
    errors = [other.exception() for other in others]

    assert first.result() == (0, 1)
    assert [str(error) for error in errors] == ["no such thing"] * 3
    assert [type(error) for error in errors] == [LookupError] * 3
    assert len(set(map(id, errors))) == 3
    assert sorted(error.__cause__ is None for error in errors if error) == [False, False, True]


def test_an_exception_that_cannot_be_copied_is_shared(pool: ThreadPoolExecutor) -> None:
    """If an exception cannot be copied all callers get the same object, rather than another error."""

    class Odd(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__("odd")

    @carpool.batch
    def odd(xs: list[int]) -> list[int]:
        raise Odd(1, 2)

    with pytest.raises(Odd):
        odd.many([1, 2, 3])


def test_isolated_errors_reach_only_the_guilty() -> None:
    """A batch that raises is run again in parts, and only the guilty callers get the error: by
    default, as in a service.
    """

    @carpool.batch
    def reciprocal(xs: list[int]) -> list[float]:
        return [1 / x for x in xs]

    tickets = [reciprocal.submit(x) for x in (1, 2, 0, 4)]

    assert [tickets[i].result() for i in (0, 1, 3)] == [1, 0.5, 0.25]
    with pytest.raises(ZeroDivisionError):
        tickets[2].result()


@pytest.mark.parametrize("settings", [{"idempotent": False}, {"isolate_errors": False}])
def test_a_batch_that_may_not_be_run_again_fails_as_a_whole(settings: Any) -> None:
    """Where the function may not be called again with the same items, it is called once."""
    calls: list[list[int]] = []

    @carpool.batch(**settings)
    def reciprocal(xs: list[int]) -> list[float]:
        calls.append(xs)
        return [1 / x for x in xs]

    tickets = [reciprocal.submit(x) for x in (1, 0)]
    for ticket in tickets:
        with pytest.raises(ZeroDivisionError):
            ticket.result()
    assert calls == [[1, 0]]


@pytest.mark.parametrize(("settings", "calls"), [({"idempotent": False}, 1), ({}, 3)])
def test_only_what_may_be_run_again_is_run_again_in_smaller_calls(settings: Any, calls: int) -> None:
    """A batch that runs out of memory is run again only where that is allowed."""
    sizes: list[int] = []

    @carpool.batch(**settings)
    def narrow(xs: list[int]) -> list[int]:
        sizes.append(len(xs))
        if len(xs) > 1:
            raise MemoryError
        return xs

    ticket, _ = narrow.submit(1), narrow.submit(2)
    if calls == 1:
        with pytest.raises(MemoryError):
            ticket.result()
    else:
        assert ticket.result() == 1
    assert len(sizes) == calls


def test_an_error_in_the_place_of_a_result_is_raised() -> None:
    """An exception in the place of a result is raised for that caller alone."""

    @carpool.batch
    def positive(xs: list[int]) -> list[Any]:
        return [x if x > 0 else ValueError(f"{x} is not positive") for x in xs]

    good, bad = positive.submit(1), positive.submit(-1)

    assert good.result() == 1
    with pytest.raises(ValueError, match="-1 is not positive"):
        bad.result()


def test_a_wrong_number_of_results_is_an_error() -> None:
    """A wrong number of results is an error that names both numbers."""

    @carpool.batch
    def short(xs: list[int]) -> list[int]:
        return xs[1:]

    with pytest.raises(carpool.ModelError, match="a call with 1 item must return 1 result, but the model returned 0"):
        short(1)


@pytest.mark.parametrize("idempotent", [True, False])
def test_a_function_written_for_one_item_does_not_answer_as_many_as_it_returns(idempotent: bool) -> None:
    """Once a function has returned five results for one item, and so is an error that asks whether a list of lists
    was meant, a batch of five gets that error, too, and not one entry of its list each.
    """

    @carpool.batch(max_batch_size=8, idempotent=idempotent)
    def top_five(xs: list[int]) -> list[int]:
        return [5, 4, 3, 2, 1]

    with pytest.raises(carpool.ModelError, match=r"returned 5: did you mean `\[\[…\]\]`\?"):
        top_five(1)
    for _ in range(3):
        with pytest.raises(carpool.ModelError, match="result") as caught:
            top_five.many([1, 2, 3, 4, 5])
        assert caught.value.code == "bad_result"


def test_a_call_from_inside_is_an_error_at_once() -> None:
    """A call of a function from inside itself would wait for the batch that makes it, and is an
    error at once.
    """

    @carpool.batch
    def again(xs: list[int]) -> list[int]:
        return [again(x) for x in xs]

    with pytest.raises(RuntimeError, match="again was called from inside itself"):
        again(1)


# -- leaving


def test_a_follower_that_times_out_leaves_the_others_unharmed(pool: ThreadPoolExecutor) -> None:
    """If a follower's time-out comes while it waits its item is not run any more, and the other
    callers are served.
    """
    function = Gated()
    f = carpool.batch(function)
    first = pool.submit(f, 0)
    function.entered.acquire()
    late, other = f.submit("late"), pool.submit(f, 1)
    wait_until(lambda: waiting(f) == 2)
    with pytest.raises(carpool.DeadlineExceeded):
        late.result(timeout_s=0.02)
    assert late.cancel()
    function.let(2)

    assert first.result() == (0, 1)
    assert other.result() == (1, 1)
    assert function.batches == [[0], [1]]


def test_the_functions_own_time_out(pool: ThreadPoolExecutor) -> None:
    """A caller hears at the function's time-out although the batch before it still runs; a leader
    waits for its own batch.
    """
    function = Gated()
    f = carpool.batch(timeout_s=0.5)(function)
    first = pool.submit(f, 0)
    function.entered.acquire()
    with pytest.raises(carpool.DeadlineExceeded, match="no answer within"):
        f(1)
    function.let()

    assert first.result() == (0, 1)
    assert function.batches == [[0]]


def test_an_interrupted_leader_leaves_its_batch_to_the_next(pool: ThreadPoolExecutor) -> None:
    """If a leader is interrupted its caller gets the KeyboardInterrupt, and the others of its batch
    get their answers from the next one.
    """
    function = Gated()
    f = carpool.batch(function)
    tickets = [f.submit(1), f.submit(2)]
    leader = pool.submit(f, "interrupt")
    function.entered.acquire()
    others = [pool.submit(ticket.result) for ticket in tickets]
    function.let(2)

    assert isinstance(leader.exception(), KeyboardInterrupt)
    assert [other.result() for other in others] == [(1, 2), (2, 2)]
    assert function.batches == [[1, 2, "interrupt"], [1, 2]]


# -- tickets


def test_a_ticket_is_run_when_somebody_waits() -> None:
    """A ticket is run when somebody waits for it, or for another call behind it."""
    function = Gated()
    function.let(9)
    f = carpool.batch(function)
    one, two = f.submit(1), f.submit(2)

    assert function.batches == []
    assert not one.done()
    assert f(3) == (3, 3)
    assert one.done()
    assert two.result() == (2, 3)
    assert repr(two) == "<Ticket of Gated, done>"


def test_a_cancelled_ticket_is_not_run() -> None:
    """Whoever waits for a cancelled ticket hears that it was, and it is not run; one that was
    answered stays answered.
    """
    function = Gated()
    function.let(9)
    f = carpool.batch(function)
    one, two = f.submit(1), f.submit(2)

    assert one.cancel()
    assert two.result() == (2, 1)
    assert not two.cancel()
    assert two.result() == (2, 1)
    with pytest.raises(carpool.Unavailable, match="the ticket was cancelled"):
        one.result()


def test_cancelling_wakes_a_thread_that_waits(pool: ThreadPoolExecutor) -> None:
    """A thread that waits for a ticket wakes up when that is cancelled."""
    function = Gated()
    f = carpool.batch(function)
    first = pool.submit(f, 0)
    function.entered.acquire()
    ticket = f.submit(1)
    waits = pool.submit(ticket.result)
    wait_until(lambda: ticket._waiter.sleepers)
    ticket.cancel()

    assert isinstance(waits.exception(timeout=10), carpool.Unavailable)
    function.let()
    assert first.result() == (0, 1)


def test_a_ticket_that_nobody_waits_for_any_more_holds_nobody_up(pool: ThreadPoolExecutor) -> None:
    """If the waiter for a ticket gave up while it slept in the line, the next leader is one that
    still waits.
    """
    function = Gated()
    f = carpool.batch(max_batch_size=1)(function)
    first = pool.submit(f, 0)
    function.entered.acquire()
    ticket = f.submit(1)
    with pytest.raises(TimeoutError):
        ticket.result(timeout_s=0.01)
    other = pool.submit(f, 2)
    wait_until(lambda: waiting(f) == 2)
    time.sleep(0.02)  # it goes to sleep
    function.let(3)

    assert first.result(5) == (0, 1)
    assert other.result(5) == (2, 1)
    assert ticket.done()


def test_all_who_wait_for_a_ticket_get_its_result(pool: ThreadPoolExecutor) -> None:
    """All who wait for a ticket get its result, also when one of them has run it while another one
    slept.
    """
    function = Gated()
    function.let(9)
    f = carpool.batch(max_batch_size=2, policy="static", max_queue_delay_s=60)(function)
    ticket = f.submit(1)
    asleep = pool.submit(ticket.result)
    wait_until(lambda: f._driver._line.next_leader is not None)  # until the policy's delay is over
    f.submit(2)

    assert ticket.result() == (1, 2)
    assert asleep.result(5) == (1, 2)


def test_a_ticket_whose_waiter_failed_says_so_again() -> None:
    """A ticket whose waiter failed has left the line; whoever asks it later gets the same error,
    and not nothing.
    """
    lock = threading.Lock()
    f = carpool.batch(execution_lock=lock, timeout_s=0.05)(Gated())
    ticket = f.submit(1)
    with lock, pytest.raises(carpool.DeadlineExceeded, match="the execution lock was not free"):
        ticket.result()

    with pytest.raises(carpool.DeadlineExceeded):
        ticket.result()


@pytest.mark.fault("F52")
def test_close_runs_what_is_in_the_line() -> None:
    """`close` runs tickets that nobody waited for, and refuses later callers."""
    function = Gated()
    function.let(9)
    f = carpool.batch(function)
    ticket = f.submit(1)
    f.close()

    assert ticket.done()
    assert ticket.result() == (1, 1)
    with pytest.raises(carpool.Unavailable, match="Gated is closed"):
        f(2)


class Plain:
    """A model of a class that is no `Model`."""

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    def preprocess(self, x: str) -> float:
        return float(x)

    def predict(self, xs: list[float]) -> list[float]:
        return [self.factor * x for x in xs]


class PlainLater:
    """Likewise, for tasks."""

    async def predict(self, xs: list[float]) -> list[float]:
        return [2 * x for x in xs]


def test_an_instance_of_any_class_is_taken_as_it_is() -> None:
    """An object with `predict` is a model like one of a `Model`, hooks, hints and all; a callable
    object is a function.
    """
    f = carpool.batch(max_batch_size=4)(Plain(3.0))
    assert (f("1"), f.many(["1", "2"])) == (3.0, [3.0, 6.0])
    assert str(inspect.signature(f)) == "(x: str) -> float"
    in_thread: Any = carpool.batch(Plain(), run_in="thread")
    assert asyncio.run(in_thread("2")) == 4.0
    later: Any = carpool.batch(PlainLater())
    assert asyncio.run(later(2.0)) == 4.0
    with pytest.raises(TypeError, match="merge is for functions"):
        carpool.batch(Plain(), merge=True)
    with pytest.raises(TypeError, match=r"a model is a class with predict or a callable, not 5"):
        carpool.batch(5)  # type: ignore[call-overload]


def test_close_tears_a_model_down_that_was_set_up_here() -> None:
    """`close` tears down, once, a model that was set up here; an instance that the user made stays
    the user's.
    """
    events: list[str] = []

    class Held(carpool.Model):
        def setup(self) -> None:
            events.append("setup")

        def predict(self, xs: list[int]) -> list[int]:
            return xs

        def teardown(self) -> None:
            events.append("teardown")

    f = carpool.batch(Held)
    assert f(1) == 1
    f.close()
    f.close()
    carpool.batch(Held()).close()

    assert events == ["setup", "teardown"]


# -- many, limits, policies


def test_many_items_of_one_caller_keep_their_order() -> None:
    """Many items of one caller keep their order in as many batches as it takes, also where the
    queue is smaller than that.
    """
    sizes = []

    @carpool.batch(max_batch_size=10, max_queue_size=20)
    def double(xs: list[int]) -> list[int]:
        sizes.append(len(xs))
        return [2 * x for x in xs]

    assert double.many(range(95)) == [2 * x for x in range(95)]
    assert max(sizes) == 10
    assert sum(sizes) == 95
    assert double.many([]) == []


def test_a_full_queue_makes_callers_wait(pool: ThreadPoolExecutor) -> None:
    """When the queue is full callers wait, and none is refused."""
    function = Gated()
    f = carpool.batch(max_batch_size=2, max_queue_size=2)(function)
    calls = [pool.submit(f, x) for x in range(9)]
    wait_until(lambda: waiting(f) == 8)
    function.let(9)

    assert sorted(call.result()[0] for call in calls) == list(range(9))


def test_a_delay_fills_batches(pool: ThreadPoolExecutor) -> None:
    """With the policy `Static` the first two callers wait for a third, which makes the batch full;
    a lone one goes when its time has come.
    """
    function = Gated()
    function.let(9)
    f = carpool.batch(max_batch_size=3, policy="static", max_queue_delay_s=5.0)(function)
    calls = [pool.submit(f, x) for x in range(2)]
    wait_until(lambda: waiting(f) == 2)
    assert f(2) == (2, 3)
    assert [call.result() for call in calls] == [(0, 3), (1, 3)]

    lone = carpool.batch(max_batch_size=3, policy="static", max_queue_delay_s=0.01)(function)
    assert lone("lone") == ("lone", 1)


def test_items_may_count_for_more_than_one(pool: ThreadPoolExecutor) -> None:
    """`size` says how much of a batch an item takes up, and an item that is too large goes alone."""
    function = Gated()
    function.let(99)
    f = carpool.batch(max_batch_size=10, size=len)(function)
    tickets = [f.submit("x" * n) for n in (4, 4, 4, 25, 1, 9, 1)]
    f.close()

    assert [ticket.done() for ticket in tickets] == [True] * 7
    assert [[len(x) for x in batch] for batch in function.batches] == [[4, 4], [4], [25], [1, 9], [1]]


# -- execution locks


@pytest.mark.parametrize("lock", [carpool.Lock, threading.Lock, threading.RLock])
def test_a_shared_lock_lets_one_function_run_at_a_time(pool: ThreadPoolExecutor, lock: Callable[[], Any]) -> None:
    """Two functions that share a lock never run at the same time."""
    shared = lock()
    inside: list[str] = []
    overlaps: list[list[str]] = []

    def function(name: str) -> Callable[[list[int]], list[int]]:
        def run(xs: list[int]) -> list[int]:
            inside.append(name)
            time.sleep(0.001)
            if len(inside) > 1:
                overlaps.append(list(inside))
            inside.remove(name)
            return xs

        return run

    f, g = (carpool.batch(execution_lock=shared)(function(name)) for name in "fg")
    calls = [pool.submit((f, g)[x % 2], x) for x in range(60)]

    assert [call.result() for call in calls] == list(range(60))
    assert overlaps == []


@pytest.mark.parametrize("lock", [carpool.Lock, threading.RLock])
def test_a_lock_that_the_caller_holds_is_an_error_at_once(lock: Callable[[], Any]) -> None:
    """A caller that already holds the `carpool.Lock` of the function gets an error at once, since
    it would wait for itself.
    """
    held = lock()
    f = carpool.batch(execution_lock=held)(lambda xs: xs)
    with held, pytest.raises(RuntimeError, match="already holds the execution lock"):
        f(1)
    assert f(1) == 1


def test_a_plain_lock_that_the_caller_holds_times_out() -> None:
    """A plain lock cannot tell who holds it, so a caller that holds it times out; the error names
    the likely reason, and the next call is served.
    """
    held = threading.Lock()
    f: Any = carpool.batch(execution_lock=held, timeout_s=0.02)(lambda xs: xs)
    with held, pytest.raises(carpool.DeadlineExceeded, match="does this thread hold it already"):
        f(1)
    f._timeout_s = None
    assert f(2) == 2


def test_while_the_lock_is_taken_the_line_grows(pool: ThreadPoolExecutor) -> None:
    """Callers that come while the leader waits for the execution lock share its batch."""
    held = threading.Lock()
    function = Gated()
    function.let(9)
    f = carpool.batch(execution_lock=held)(function)
    with held:
        calls = [pool.submit(f, x) for x in range(5)]
        wait_until(lambda: waiting(f) == 5)

    assert sorted(call.result() for call in calls) == [(x, 5) for x in range(5)]


class Entering:
    """A lock for the `with` statement only, which may raise, and may take its time."""

    def __init__(self, *, bad: str = "", takes_s: float = 0.0) -> None:
        self.lock, self.bad, self.takes_s = threading.Lock(), bad, takes_s

    def __enter__(self) -> bool:
        if self.bad == "enter":
            raise LookupError("enter")
        self.lock.acquire()
        time.sleep(self.takes_s)
        return False  # what it returns means nothing

    def __exit__(self, *exc: object) -> None:
        self.lock.release()
        if self.bad == "exit":
            raise LookupError("exit")


class Untimed:
    """`acquire` and `release`, and no more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def acquire(self) -> None:
        self._lock.acquire()

    def release(self) -> None:
        self._lock.release()


class Shy(Untimed):
    """One whose `acquire` may refuse at once."""

    def acquire(self) -> bool:  # type: ignore[override]
        return False


class Filelike(Untimed):
    """As locks of files: `acquire` takes a time-out, returns a guard, and raises when it is over."""

    def acquire(self, timeout: float | None = None) -> Any:  # type: ignore[override]
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise TimeoutError("the file is locked")
        return self


LOCKS = [
    Entering,
    Filelike,
    Untimed,
    multiprocessing.Lock,
    threading.Semaphore,
    threading.BoundedSemaphore,
    threading.Condition,
]


@pytest.mark.parametrize("kind", LOCKS)
def test_anything_that_can_be_held_is_an_execution_lock(pool: ThreadPoolExecutor, kind: Callable[[], Any]) -> None:
    """Any context manager can be an execution lock: two functions share it and never run at the
    same time, and a caller for whom another thread holds it waits.
    """
    lock = kind()
    inside: list[int] = []
    most: list[int] = []

    def run(xs: list[int]) -> list[int]:
        inside.append(1)
        time.sleep(0.0005)
        most.append(len(inside))
        inside.pop()
        return xs

    f, g = (carpool.batch(execution_lock=lock)(run) for _ in "fg")
    calls = [pool.submit((f, g)[x % 2], x) for x in range(60)]
    assert [call.result(10) for call in calls] == list(range(60))
    assert max(most) == 1
    assert [f(x) for x in range(20)] == list(range(20))


def test_a_lock_that_comes_late_is_given_back() -> None:
    """If an execution lock with no time-out of its own comes too late for the leader, it is given
    back.
    """
    lock = Entering(takes_s=0.05)
    f: Any = carpool.batch(execution_lock=lock, timeout_s=0.02)(lambda xs: xs)
    with pytest.raises(carpool.DeadlineExceeded, match="execution lock was not free within"):
        f(1)
    assert not lock.lock.locked()
    lock.takes_s, f._timeout_s = 0.0, None
    assert f(2) == 2
    ticket = carpool.batch(execution_lock=lock)(lambda xs: xs).submit(3)
    lock.takes_s = 0.05
    with pytest.raises(TimeoutError):
        ticket.result(timeout_s=0.01)
    assert ticket.result() == 3


@pytest.mark.parametrize("bad", ["enter", "exit"])
def test_a_lock_that_raises_when_entered_or_left(bad: str) -> None:
    """If an execution lock raises when it is taken or given back, that leader's call ends, the next
    one tries, and what has been run is not run again.
    """
    lock = Entering(bad=bad)
    runs: list[int] = []
    f = carpool.batch(execution_lock=lock, policy="greedy")(lambda xs: runs.extend(xs) or xs)
    for x in (1, 2):
        with pytest.raises(LookupError, match=bad):
            f(x)
    lock.bad = ""
    assert f(3) == 3
    assert runs == ([3] if bad == "enter" else [1, 2, 3])
    with pytest.raises(carpool.DeadlineExceeded, match="execution lock was not free"):
        carpool.batch(execution_lock=Shy())(lambda xs: xs)(1)


@contextlib.contextmanager
def once() -> Iterator[None]:
    yield


@pytest.mark.parametrize("lock", [3, "lock", object(), threading.Lock, carpool.Lock, asyncio.Lock(), once(), open])
def test_what_cannot_be_held_is_refused_where_it_is_declared(lock: Any) -> None:
    """What cannot be held as a lock is refused by the name of the function before any call: a class
    is no lock yet, and a generator is held but once.
    """

    def halve(xs: list[int]) -> list[float]:
        return [x / 2 for x in xs]

    async def halve_soon(xs: list[int]) -> list[float]:
        return [x / 2 for x in xs]

    if lock is threading.Lock:
        lock = type(threading.Lock())
    with pytest.raises(TypeError, match="the execution_lock of halve must be"):
        carpool.batch(execution_lock=lock)(halve)
    if not isinstance(lock, asyncio.Lock):
        with pytest.raises(TypeError, match=r"lock of halve_soon, which is async, must be an asyncio.Lock"):
            carpool.batch(execution_lock=lock)(halve_soon)


# -- batches without a limit


@slow_where(lambda policy: policy not in ("greedy", "adaptive"))
@pytest.mark.parametrize("policy", BY_NAME)
def test_a_batch_without_a_limit_holds_all_who_wait(policy: str) -> None:
    """Without a limit three hundred tickets are one call, whatever the policy, as soon as that has
    seen what calls take.
    """
    batches: list[int] = []

    def count(xs: list[int]) -> list[int]:
        batches.append(len(xs))
        return xs

    f = carpool.batch(max_batch_size=None, policy=policy)(count)
    for _ in range(80):
        tickets = [f.submit(x) for x in range(300)]
        assert [ticket.result() for ticket in tickets] == list(range(300))
    assert batches[-1] == 300 or policy == "aimd"  # whose cap grows with each batch
    assert max(batches) == 300 or policy == "aimd"
    assert f.many(range(1024)) == list(range(1024))
    assert f.many(range(3000)) == list(range(3000))  # more than can wait at a time


@pytest.mark.parametrize("policy", BY_NAME)
@pytest.mark.parametrize("timeout_s", [None, 30.0])
def test_rows_without_a_limit(policy: str, timeout_s: float | None) -> None:
    """Without a limit no chunk is cut up, and chunks of any size share a call."""
    batches: list[int] = []

    def count(rows: list[int]) -> list[int]:
        batches.append(len(rows))
        return rows

    f = carpool.batch(max_batch_size=None, merge=True, policy=policy, timeout_s=timeout_s)(count)
    for _ in range(80):
        tickets = [f.submit([n] * n) for n in (1, 5000, 70)]
        assert [ticket.result() for ticket in tickets] == [[n] * n for n in (1, 5000, 70)]
    assert max(batches) == 5071 or policy == "aimd"


def test_a_policys_own_limit_stands() -> None:
    """A policy that has a limit keeps it where the function has none."""
    batches: list[int] = []
    f = carpool.batch(max_batch_size=None, policy=Static(max_batch_size=8))(lambda xs: batches.append(len(xs)) or xs)
    assert f.many(range(20)) == list(range(20))
    assert batches == [8, 8, 4]


# -- tickets that are run there and then


def test_a_ticket_may_be_run_there_and_then() -> None:
    """A ticket may be run at once by who submits it, for itself and all who wait; what the function
    raises is raised by its `result`.
    """
    batches: list[list[Any]] = []

    def run(xs: list[Any]) -> list[Any]:
        batches.append(xs)
        if "raise" in xs:
            raise LookupError("no such thing")
        return xs

    f = carpool.batch(max_batch_size=4)(run)
    early = [f.submit(x) for x in range(5)]
    assert batches == []
    ticket = f.submit(5, lead=True)
    assert ticket.done()
    assert (ticket.result(), [each.done() for each in early]) == (5, [True] * 5)
    assert batches == [[0, 1, 2, 3], [4, 5]]
    failed = f.submit("raise", lead=True)
    assert failed.done()
    with pytest.raises(LookupError):
        failed.result()
    with pytest.raises(TypeError, match="lead must be True or False, not 'yes'"):
        f.submit(1, lead="yes")  # type: ignore[arg-type]
    inner = carpool.batch(lambda xs: [inner.submit(x, lead=True) for x in xs])
    with pytest.raises(RuntimeError, match="called from inside itself"):
        inner(1)
    f.close()
    with pytest.raises(carpool.Unavailable):
        f.submit(1, lead=True).result()


def test_who_submits_waits_for_no_other_leader(pool: ThreadPoolExecutor) -> None:
    """If somebody else leads, a ticket that might be run at once is one like any other, which the
    next leader runs.
    """
    function = Gated()
    f = carpool.batch(function)
    first = pool.submit(f, 1)
    assert function.entered.acquire(timeout=10)
    ticket = f.submit(2, lead=True)
    assert not ticket.done()
    function.let(2)
    assert first.result(10) == (1, 1)
    assert ticket.result(10) == (2, 1)


def test_a_ticket_that_the_policy_holds_back_is_not_waited_for() -> None:
    """If the policy holds a ticket back for company, submitting it does not wait, and it keeps its
    place.
    """
    f = carpool.batch(max_batch_size=2, max_queue_delay_s=5.0, policy="static")(lambda xs: [len(xs)] * len(xs))
    ticket = f.submit(1, lead=True)
    assert not ticket.done()
    assert f.submit(2, lead=True).result() == 2
    assert ticket.done()


def test_who_leads_at_once_waits_for_the_execution_lock(pool: ThreadPoolExecutor) -> None:
    """Who leads on submitting waits for the execution lock as any leader does, and no longer than
    the function's time-out.
    """
    held = threading.Lock()
    f = carpool.batch(execution_lock=held, timeout_s=0.05)(lambda xs: xs)
    with held, pytest.raises(carpool.DeadlineExceeded, match="execution lock was not free"):
        f.submit(1, lead=True)
    g = carpool.batch(execution_lock=held)(lambda xs: xs)
    with held:
        call = pool.submit(g.submit, 2, lead=True)
        time.sleep(0.02)
        assert not call.done()
    assert call.result(10).done()


def test_an_interrupted_leader_has_no_ticket() -> None:
    """If submitting is interrupted while it leads, its place is given up and the next leader runs
    the others.
    """
    runs: list[list[Any]] = []

    def run(xs: list[Any]) -> list[Any]:
        runs.append(xs)
        if "interrupt" in xs:
            raise KeyboardInterrupt
        return xs

    f = carpool.batch(run)
    early = f.submit(1)
    with pytest.raises(KeyboardInterrupt):
        f.submit("interrupt", lead=True)
    assert early.result() == 1
    assert runs == [[1, "interrupt"], [1]]


def test_our_lock_says_when_it_is_taken_twice() -> None:
    """A thread that takes a `carpool.Lock` twice gets a RuntimeError instead of a deadlock; another
    thread simply waits.
    """
    lock = carpool.Lock()
    with lock:
        assert lock.locked()
        with pytest.raises(RuntimeError, match="this thread holds the lock already"):
            lock.acquire()
        with ThreadPoolExecutor(1) as other:
            assert other.submit(lock.acquire, timeout=0.01).result() is False
    assert not lock.locked()


# -- methods, models, forks


class Scaled:
    def __init__(self, factor: int) -> None:
        self.factor = factor
        self.batches: list[list[int]] = []

    @carpool.batch(max_batch_size=8)
    def scale(self, xs: list[int]) -> list[int]:
        self.batches.append(xs)
        return [self.factor * x for x in xs]


def test_a_method_has_a_line_for_each_instance() -> None:
    """A batched method has a line for each instance, so that instances never share a batch."""
    two, three = Scaled(2), Scaled(3)
    tickets = [two.scale.submit(1), three.scale.submit(1), two.scale.submit(5)]

    assert two.scale(7) == 14
    assert three.scale.many([7]) == [21]
    assert [ticket.result() for ticket in tickets] == [2, 3, 10]
    assert two.batches == [[1, 5, 7]]
    assert three.batches == [[1, 7]]


def test_the_line_of_a_method_dies_with_its_instance() -> None:
    """The line of a batched method dies with its instance, which nothing keeps alive."""
    scaled = Scaled(2)
    scaled.scale(1)
    gone = weakref.ref(scaled)
    assert len(Scaled.scale._bound) == 1
    del scaled
    gc.collect()

    assert gone() is None
    assert Scaled.scale._bound == {}


def test_an_instance_without_weak_references_is_explained() -> None:
    """An instance that cannot be referred to weakly is refused with a text that says what to add."""

    class Slotted:
        __slots__ = ()

        @carpool.batch
        def f(self, xs: list[int]) -> list[int]:
            return xs

    with pytest.raises(TypeError, match="add '__weakref__' to the __slots__ of Slotted"):
        Slotted().f(1)


class Polite(carpool.Model):
    def __init__(self, greeting: str = "hello") -> None:
        self.greeting = greeting
        self.ready = False

    def setup(self) -> None:
        self.ready = True

    def preprocess(self, name: str) -> str:
        return name.strip()

    def predict(self, names: list[str]) -> list[str]:
        assert self.ready
        return [f"{self.greeting} {name}" for name in names]

    def postprocess(self, text: str, name: str) -> str:
        return f"{text} ({len(name)})"


def test_a_model_class_is_set_up_and_its_hooks_are_used() -> None:
    """A model class is set up, and its hooks are used; an instance is taken as it is."""
    ready = Polite("hi")
    ready.setup()

    assert carpool.batch(Polite)(" Ann ") == "hello Ann (3)"
    assert carpool.batch(ready)("Bo") == "hi Bo (2)"


@pytest.mark.fault("F53")
@pytest.mark.filterwarnings("ignore:this process was forked after:RuntimeWarning")
def test_a_forked_child_starts_with_an_empty_line() -> None:
    """A forked child starts with an empty line: who was in the line or led it stayed in the parent."""
    function = Gated()
    f = carpool.batch(function)
    ticket = f.submit("parent's")
    leader = threading.Thread(target=f, args=("leader",))
    leader.start()
    function.entered.acquire()
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        function.let(9)
        answer = f("child's")
        os.write(writer, repr((answer, function.batches[1:])).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    function.let(9)
    leader.join()

    assert os.read(reader, 1000) == b'(("child\'s", 1), [["child\'s"]])'
    assert ticket.result() == ("parent's", 2)


# -- whole arrays


def test_merged_arrays_of_different_length(pool: ThreadPoolExecutor) -> None:
    """Callers bring arrays of different length, the function sees one array, and each caller gets
    its own rows back.
    """
    shapes = []

    @carpool.batch(merge=True)
    def halve(xs: np.ndarray) -> np.ndarray:
        shapes.append(xs.shape)
        return xs / 2

    chunks = [np.arange(2.0 * n).reshape(n, 2) for n in (1, 3, 2)]
    tickets = [halve.submit(chunk) for chunk in chunks]
    halve.close()

    assert shapes == [(6, 2)]
    for ticket, chunk in zip(tickets, chunks, strict=True):
        assert np.array_equal(ticket.result(), chunk / 2)


def test_limits_count_rows() -> None:
    """A merged batch has at most `max_batch_size` rows; a caller with more is split, and gets one
    answer in its order.
    """
    rows = []

    @carpool.batch(merge=True, max_batch_size=4)
    def double(xs: list[int]) -> list[int]:
        rows.append(len(xs))
        return [2 * x for x in xs]

    tickets = [double.submit([1, 2, 3]), double.submit([4, 5])]

    assert double(list(range(10))) == [2 * x for x in range(10)]
    assert [ticket.result() for ticket in tickets] == [[2, 4, 6], [8, 10]]
    assert max(rows) == 4
    assert sum(rows) == 15


def test_merged_dicts() -> None:
    """Of merged dicts each part is joined by itself, and the parts of a chunk must have equally
    many rows.
    """

    @carpool.batch(merge=True)
    def total(table: dict[str, Any]) -> dict[str, Any]:
        return {"sum": table["a"] + table["b"]}

    one = total.submit({"a": np.array([1, 2]), "b": np.array([10, 20])})
    two = total({"a": np.array([3]), "b": np.array([30])})

    assert two["sum"].tolist() == [33]
    assert one.result()["sum"].tolist() == [11, 22]
    with pytest.raises(ValueError, match="all parts of a chunk must have the same number of rows"):
        total({"a": np.array([1]), "b": np.array([1, 2])})


def test_merge_functions_of_ones_own() -> None:
    """For what we do not know how to join there are merge functions of one's own, with `size` to
    count rows.
    """
    batched = carpool.batch(
        merge=" ".join, split=lambda text, counts: [f"{text}:{n}" for n in counts], size=lambda s: len(s.split())
    )(str.upper)
    ticket = batched.submit("a b")

    assert batched("c") == "A B C:1"
    assert ticket.result() == "A B C:2"


def test_an_output_with_other_rows_is_an_error() -> None:
    """If the function returns another number of rows, the error says how many there should have
    been.
    """
    f = carpool.batch(merge=True)(lambda xs: xs[:1])

    with pytest.raises(ValueError, match="had 2 rows, but the output has 1"):
        f([1, 2])


@pytest.mark.parametrize("size", [-1, 1.5, None])
def test_a_size_that_is_none_is_told(size: Any) -> None:
    """If `size` returns what is no size, the caller of that item hears of it before it joins the
    line.
    """
    f = carpool.batch(size=lambda x: size)(lambda xs: xs)

    with pytest.raises(carpool.ModelError, match=r"size= of @carpool.batch returned .* a whole number"):
        f(1)


# -- planning


def test_slo_s_is_what_a_policy_may_plan_for() -> None:
    """Without `slo_s` calls are never due for a policy; a call that the policy refuses raises
    `Overloaded`.
    """
    told: list[str] = []
    policy = models.RefusesWhatIsDue(4)

    assert carpool.batch(policy=policy)(lambda xs: xs)(1) == 1
    with pytest.raises(carpool.Overloaded, match="would not be answered within"):
        carpool.batch(policy=policy, slo_s=60.0)(told.extend)("x")  # type: ignore[type-var]
    assert told == []


# -- mistakes


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_batch_size": 0}, "max_batch_size must be a whole number of at least 1, not 0"),
        ({"max_queue_size": 1.5}, "max_queue_size must be a whole number"),
        ({"max_in_flight_batches": True}, "max_in_flight_batches must be a whole number"),
        ({"slo_s": 0}, "slo_s must be a positive number of seconds, not 0"),
        ({"timeout_s": 0}, "timeout_s must be a positive number of seconds, not 0"),
        ({"max_queue_delay_s": -1}, "max_queue_delay_s must be 0 or more seconds"),
        ({"policy": "best"}, "there is no policy 'best'; choose one of .*greedy, static"),
        ({"merge": " ".join}, "a merge function needs a split function"),
        ({"max_bacth_size": 3}, "batch has no setting 'max_bacth_size'; there are"),
    ],
)
def test_wrong_settings_are_explained(settings: dict[str, Any], told: str) -> None:
    """A wrong setting is refused when the function is declared, by its name and with what would do."""
    with pytest.raises((ValueError, TypeError), match=told):
        carpool.batch(**settings)


def test_the_wrong_kind_of_lock_is_explained() -> None:
    """An asyncio lock for a function in threads, and a thread's lock for an `async` one, are
    refused with the reason.
    """
    import asyncio

    async def slow(xs: list[int]) -> list[int]:
        return xs

    with pytest.raises(TypeError, match=r"must be a carpool.Lock, a threading.Lock or an RLock"):
        carpool.batch(execution_lock=asyncio.Lock())(lambda xs: xs)
    with pytest.raises(TypeError, match=r"must be an asyncio.Lock or another object"):
        carpool.batch(execution_lock=threading.Lock())(slow)


def test_what_is_no_function_is_explained() -> None:
    """What is no function, such as a number, and decorators in the wrong order are refused with the
    reason.
    """
    with pytest.raises(TypeError, match="a model is a class with predict or a callable"):
        carpool.batch(3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="write @staticmethod above"):
        carpool.batch(staticmethod(len))


def test_threads_that_look_up_while_they_are_being_woken_leave_nobody_asleep() -> None:
    """When waiters look up each millisecond, so that many time-outs fall into a chain of wake-ups,
    nobody is left asleep.
    """

    @carpool.batch(max_batch_size=32)
    def double(xs: list[int]) -> list[int]:
        time.sleep(0.001)
        return [2 * x for x in xs]

    def caller(start: int) -> list[int]:
        answers = []
        for x in range(start, start + 50):
            ticket = double.submit(x)
            while True:
                try:
                    answers.append(ticket.result(timeout_s=0.0002 + 0.001 * (x % 3)))
                    break
                except TimeoutError:
                    continue
        return answers

    with ThreadPoolExecutor(64) as pool:
        answered = list(pool.map(caller, range(0, 6400, 100)))

    assert answered == [[2 * x for x in range(start, start + 50)] for start in range(0, 6400, 100)]


class Raising(carpool.Policy):
    """A policy that raises in one of its calls."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _maybe(self, where: str) -> None:
        if where == self.where:
            raise ValueError("a bug")

    def decide(self, view: View) -> Decision:
        self._maybe("decide")
        if self.where == "left":
            return Decision(wake_at=view.now + 5.0)
        return Decision(take=view.queue.size, reason="free") if view.free and view.queue.size else Decision()

    def arrived(self, now: float, requests: Any) -> None:
        self._maybe("arrived")

    def left(self, now: float, request: Any) -> None:
        self._maybe("left")

    def learn(self, now: float, done: DoneBatch) -> None:
        self._maybe("learn")


@pytest.mark.fault("F73")
@pytest.mark.parametrize("where", ["decide", "arrived", "left", "learn"])
def test_a_policy_that_raises_fails_its_line_loudly(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """When a policy raises, everybody inside its line and whoever comes hears of it, and closing
    returns.
    """
    batched = carpool.batch(max_batch_size=4, policy=Raising(where), timeout_s=20)(lambda xs: xs)
    heard: list[object] = []

    def call(x: int) -> None:
        try:
            heard.append(batched(x))
        except Exception as error:
            heard.append(error)

    threads = [threading.Thread(target=call, args=(x,), daemon=True) for x in range(6)]
    for thread in threads:
        thread.start()
    if where == "left":
        assert batched.submit(7).cancel()
    for thread in threads:
        thread.join(15)
    assert len(heard) == 6
    with pytest.raises(carpool.Unavailable, match="has failed: its policy raised ValueError") as caught:
        batched(8)
    assert caught.value.code == "stage_failed"
    assert all(isinstance(each, carpool.Unavailable) or where == "learn" for each in heard)
    assert "its policy raised ValueError: a bug" in caplog.text
    batched.close()
