"""Faults amid many streams, made to happen for real: workers killed, stopped, hung and hostile.

Each part is a number that its caller can compute from its item and the parts before, so a part that
is missing, double or another caller's shows.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import carpool
from carpool import ModelError, Service, Stage, Unavailable
from tests.support.waiting import wait_until

LONG_S = 60.0
MULTIPLIER, MODULUS = 6364136223846793005, 2**61 - 1


def tokens(seed: int, n: int) -> list[int]:
    """What a stream must say: each token follows from the one before."""
    said, state = [], seed
    for _ in range(n):
        state = (state * MULTIPLIER + 1) % MODULUS
        said.append(state)
    return said


class Chain(carpool.Model):
    """Says tokens of which each follows from the one before; an item is a seed and how many.

    A third number is how many tokens it says before its step kills the worker.
    """

    def __init__(self, step_s: float = 0.002) -> None:
        self.step_s = step_s

    def start(self, xs: list[tuple[int, ...]]) -> list[list[int]]:
        return [[x[0], x[1], x[2] if len(x) > 2 else -1] for x in xs]

    def step(self, states: list[list[int]]) -> list[Any]:
        time.sleep(self.step_s)
        parts: list[Any] = []
        for state in states:
            if state[2] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            state[0] = (state[0] * MULTIPLIER + 1) % MODULUS
            state[1] -= 1
            state[2] -= 1
            parts.append(carpool.Last(state[0]) if not state[1] else state[0])
        return parts

    def stop(self, state: list[int]) -> None:
        state.clear()


class ChainOn(Chain):
    """The same, and it can go on from the last token."""

    def resume(self, xs: list[tuple[int, ...]], parts: list[list[int]]) -> list[list[int]]:
        states = self.start(xs)
        for state, said in zip(states, parts, strict=True):
            assert said
            state[0], state[1], state[2] = said[-1], state[1] - len(said), state[2] - len(said)
        return states


class Told:
    """What one caller was told.

    Attributes:
        parts: So far.
        error: That ended it, if one has.
        longest_s: The longest silence.
    """

    def __init__(self) -> None:
        self.parts: list[Any] = []
        self.error: carpool.CarpoolError | None = None
        self.longest_s = 0.0


def ask(s: Any, items: list[Any], during: Callable[[list[Told]], None] = lambda told: None) -> list[Told]:
    """Ask for all items at once, do something amid the answers, and return what was told."""
    told = [Told() for _ in items]

    def hear(item: Any, mine: Told) -> None:
        heard = time.monotonic()
        try:
            with s.predict_stream(item) as parts:
                for part in parts:
                    now = time.monotonic()
                    mine.longest_s = max(mine.longest_s, now - heard)
                    heard = now
                    mine.parts.append(part)
        except carpool.CarpoolError as error:
            mine.error = error

    threads = [threading.Thread(target=hear, args=each) for each in zip(items, told, strict=True)]
    for thread in threads:
        thread.start()
    during(told)
    for thread in threads:
        thread.join(LONG_S)
    assert not any(thread.is_alive() for thread in threads), "a stream hangs"
    return told


def when_all_have_begun(then: Callable[[], None], least: int = 1) -> Callable[[list[Told]], None]:
    def wait(told: list[Told]) -> None:
        wait_until(lambda: all(len(each.parts) >= least or each.error for each in told))
        then()

    return wait


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


# -- a worker that is lost under many streams


def test_thirty_two_streams_survive_their_worker() -> None:
    """Under 32 streams of a model with `resume`, `kill -9` of the worker fails none: every token is
    right, and the silence is that of one start of a worker.
    """
    items = [(seed, 150 + seed) for seed in range(1, 33)]
    with Service(Stage(ChainOn, max_batch_size=32)).run() as s:
        told = ask(s, items, when_all_have_begun(lambda: kill(s.pids[0])))
        assert [each.error for each in told] == [None] * 32
        assert [each.parts for each in told] == [tokens(*item) for item in items]
        stage = s.stats().stages[0]
        assert stage.restarts == 1
    assert max(each.longest_s for each in told) < LONG_S / 4


@pytest.mark.slow
def test_without_resume_those_that_have_said_nothing_begin_again() -> None:
    """Under 32 streams without `resume`, `kill -9` ends those that have had parts with `worker_lost`
    and every part that they had is right; those that wait, or collect, are answered all the same.
    """
    items = [(seed, 10**6) for seed in range(1, 25)]
    later = [(seed, 5) for seed in range(25, 33)]
    with Service(Stage(Chain, max_batch_size=25)).run() as s:
        collected: list[Any] = []
        asker = threading.Thread(target=lambda: collected.append(s.predict((99, 300))))
        waiting: list[Told] = []

        def disturb() -> None:
            asker.start()
            wait_until(lambda: s.stats().stages[0].running == 25)
            others = threading.Thread(target=lambda: waiting.extend(ask(s, later)))
            others.start()
            time.sleep(0.05)
            kill(s.pids[0])
            others.join(LONG_S)

        told = ask(s, items, when_all_have_begun(disturb))
        asker.join(LONG_S)
        for (seed, _), each in zip(items, told, strict=True):
            assert type(each.error) is Unavailable and each.error.code == "worker_lost"
            assert each.parts == tokens(seed, len(each.parts))
        assert [each.parts for each in waiting] == [tokens(*item) for item in later]
        assert collected == [tokens(99, 300)]


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 5, 20])
def test_a_killer_among_many_is_convicted_alone(at: int) -> None:
    """A stream whose step kills its worker costs two workers and is convicted; its 31 mates get
    every token.
    """
    items: list[Any] = [(seed, 60 + seed) for seed in range(1, 32)]
    with Service(Stage(ChainOn, max_batch_size=32)).run() as s:
        *mates, guilty = ask(s, [*items, (77, 99, at)])
        assert [each.error for each in mates] == [None] * 31
        assert [each.parts for each in mates] == [tokens(*item) for item in items]
        assert guilty.parts == tokens(77, at)
        assert isinstance(guilty.error, ModelError) and guilty.error.code == "request_crashed_worker"
        assert s.stats().stages[0].restarts == 2


@pytest.mark.parametrize("model", [pytest.param(Chain, marks=pytest.mark.slow), ChainOn])
def test_a_killer_that_collects_is_convicted(model: type[Chain]) -> None:
    """A stream of which no part tells how far it was comes to the step that kills only after some
    others: it costs three workers, is convicted alone, and its mates are answered.
    """
    items: list[Any] = [(seed, 20 + seed) for seed in range(1, 5)]
    answers: dict[Any, Any] = {}

    def collect(item: Any) -> None:
        try:
            answers[item] = s.predict(item)
        except carpool.CarpoolError as error:
            answers[item] = error.code

    with Service(Stage(model, max_batch_size=8)).run() as s:
        threads = [threading.Thread(target=collect, args=(item,)) for item in [*items, (77, 99, 5)]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
        assert s.stats().stages[0].restarts <= 3
    assert answers == {**{item: tokens(*item) for item in items}, (77, 99, 5): "request_crashed_worker"}


@pytest.mark.slow
def test_workers_that_are_killed_again_and_again() -> None:
    """Whoever kills the workers from outside, and however often: every token that a caller was told
    is right, and a stream that fails says so.
    """
    items = [(seed, 400) for seed in range(1, 17)]

    def kill_often(told: list[Told]) -> None:
        for _ in range(4):
            wait_until(lambda: bool(s.pids))
            time.sleep(0.4)
            kill(s.pids[0])

    with Service(Stage(ChainOn, max_batch_size=8, workers=2)).run() as s:
        told = ask(s, items, kill_often)
    for (seed, n), each in zip(items, told, strict=True):
        assert each.parts == tokens(seed, len(each.parts))
        assert (len(each.parts) == n) == (each.error is None)
    assert sum(each.error is not None for each in told) <= 4


# -- a worker that stands still


@pytest.mark.slow
@pytest.mark.parametrize("model", [ChainOn, Chain])
def test_a_worker_that_is_stopped_is_given_up(model: type[Chain]) -> None:
    """A worker that gets SIGSTOP says nothing more: after `max_batch_time_s` it is replaced, and its
    streams go on as after any loss.
    """
    items = [(seed, 100) for seed in range(1, 9)]
    with Service(Stage(model, max_batch_size=8, max_batch_time_s=0.5)).run() as s:
        told = ask(s, items, when_all_have_begun(lambda: os.kill(s.pids[0], signal.SIGSTOP)))
        after = s.predict((5, 3))
    assert after == tokens(5, 3)
    for (seed, n), each in zip(items, told, strict=True):
        assert each.parts == tokens(seed, len(each.parts))
        if model is ChainOn:
            assert each.error is None and len(each.parts) == n
        else:
            assert type(each.error) is Unavailable and each.error.code == "worker_lost"


@pytest.mark.slow
def test_a_worker_that_is_stopped_for_a_moment_goes_on() -> None:
    """SIGSTOP and SIGCONT within the time that a call may take cost nothing but the time."""
    items = [(seed, 100) for seed in range(1, 9)]

    def stop_and_go() -> None:
        os.kill(s.pids[0], signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(s.pids[0], signal.SIGCONT)

    with Service(Stage(Chain, max_batch_size=8, max_batch_time_s=10.0)).run() as s:
        told = ask(s, items, when_all_have_begun(stop_and_go))
        assert s.stats().stages[0].restarts == 0
    assert [each.parts for each in told] == [tokens(*item) for item in items]


@pytest.mark.slow
def test_a_stream_that_falls_silent_ends_by_the_services_time_out() -> None:
    """Without `max_batch_time_s`, callers of a worker that stands still are told by the time-out of
    the service if ten of its steps take longer than that, and later ones are answered.
    """
    with Service(Stage(Chain, kwargs={"step_s": 0.1}, max_batch_size=8), timeout_s=0.6).run() as s:
        began = time.monotonic()
        told = ask(
            s,
            [(seed, 10**6) for seed in range(1, 5)],
            when_all_have_begun(lambda: os.kill(s.pids[0], signal.SIGSTOP)),
        )
        assert all(type(each.error) is carpool.DeadlineExceeded for each in told)
        assert time.monotonic() - began < LONG_S / 4

        def is_answered() -> bool:
            try:
                return s.predict((5, 3)) == tokens(5, 3)  # type: ignore[no-any-return]
            except carpool.CarpoolError:
                return False

        wait_until(is_answered)


@pytest.mark.slow
def test_a_worker_that_is_stopped_amid_quick_steps_is_given_up_before_the_time_out() -> None:
    """Without `max_batch_time_s`, a worker that has made steps enough to know what they take is
    replaced after a third of the service's time-out, and its streams go on.
    """
    items = [(seed, 100) for seed in range(1, 9)]
    with Service(Stage(ChainOn, max_batch_size=8), timeout_s=9.0).run() as s:
        told = ask(s, items, when_all_have_begun(lambda: os.kill(s.pids[0], signal.SIGSTOP), least=20))
        assert s.stats().stages[0].restarts == 1
    assert [each.error for each in told] == [None] * 8
    assert [each.parts for each in told] == [tokens(*item) for item in items]
