"""The first call of a size on a worker may be slow for that reason alone, and is then not learned from."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import ceil, inf
from typing import Any

import pytest

from carpool.engine.core.batch import Batch
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.levels import BY_LENGTH
from carpool.engine.core.queue import Queue
from carpool.engine.core.running_set import NOTHING, SetReport
from carpool.engine.drive.virtual import VirtualDriver
from carpool.engine.policy import Adaptive, Decision, DoneBatch, Policy, View
from carpool.engine.policy.cost_line import CostLine
from carpool.engine.policy.steps import GreedySteps
from carpool.engine.request import Request, Stream
from tests.effort import slow_where
from tests.support.steps import stepper

SLOW_UNTIL_S, SETTLED_S, RUN_S = 6.0, 10.0, 14.0

Slow = Callable[[int], bool]
"""Whether the first call of a size is slow."""


class Compiled:
    """What batches take of which the first one of each size on each worker takes so many times as long, for some
    seconds: what is first run after that was compiled before.
    """

    def __init__(self, cost: Callable[[int], float], factor: float, is_slow: Slow) -> None:
        self.cost, self.factor, self.is_slow = cost, factor, is_slow
        self.seen: set[tuple[int, int]] = set()

    def __call__(self, batch: Batch, now: float) -> float:
        key = batch.place, batch.n
        is_first = key not in self.seen and self.is_slow(batch.n) and now < SLOW_UNTIL_S
        self.seen.add(key)
        return self.cost(batch.n) * (self.factor if is_first else 1.0)


def rate(cost: Compiled, limit: int, workers: int, clients: int, slo_s: float = inf) -> float:
    """The answers in time of a closed loop, in a second, once it has settled."""
    driver = VirtualDriver(Core([Batcher("stage", Adaptive(limit), Queue())]), cost, [workers])
    dice, good = random.Random(1), 0

    class Client:
        def answered(self, request: Request) -> None:
            nonlocal good
            now = driver.clock.now
            good += now > SETTLED_S and request.error is None and now <= request.admitted + slo_s
            if now < RUN_S:
                driver.at(now + dice.expovariate(1e3) + 0.02 * (request.error is not None), self.ask)

        def ask(self) -> None:
            driver.submit("x", caller=self, due=driver.clock.now + slo_s)

    for _ in range(clients):
        driver.at(1e-3 * dice.random(), Client().ask)
    driver.run(RUN_S)
    return good / (RUN_S - SETTLED_S)


LOOPS: dict[str, tuple[Any, ...]] = {
    "small": (lambda n: 8e-3 + 0.25e-3 * n, 8, 2, 8),
    "several workers": (lambda n: 8e-3 + 0.25e-3 * n, 64, 4, 16),
    "more clients": (lambda n: 8e-3 + 0.25e-3 * n, 64, 2, 64),
    "tiles": (lambda n: 4e-3 + 6e-3 * ceil(n / 16), 64, 2, 48),
    "an SLO": (lambda n: 0.02 * n**0.5, 8, 2, 8, 0.143),
}
KINDS: dict[str, tuple[float, Slow]] = {
    "three times": (3.0, lambda n: True),
    "five times": (5.0, lambda n: True),
    "twenty times": (20.0, lambda n: True),
    "but for lone items": (20.0, lambda n: n > 1),
    "of odd sizes": (20.0, lambda n: n % 2 == 1),
}


@slow_where(lambda loop, kind: (loop, kind) != ("small", "twenty times"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loop", LOOPS)
def test_sizes_that_are_slow_once_on_each_worker_do_not_stay_so(loop: str, kind: str) -> None:
    """However many workers have a slow first call of each size, batches soon are as good as without."""
    cost, *settings = LOOPS[loop]
    usual = rate(Compiled(cost, 1.0, lambda n: False), *settings)
    assert rate(Compiled(cost, *KINDS[kind]), *settings) >= 0.9 * usual


class Noting(Policy):
    """Takes all, and notes which batches were reported as first calls."""

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.firsts: list[bool] = []

    def decide(self, view: View) -> Decision:
        n = min(len(view.queue), self.limit) if view.free else 0
        return Decision(take=n, reason="free" if n else "")

    def learn(self, now: float, done: DoneBatch) -> None:
        self.firsts.append(done.is_first)


def noting(limit: int = 8, workers: int = 1) -> tuple[VirtualDriver, Noting]:
    policy = Noting(limit)
    return VirtualDriver(Core([Batcher("stage", policy, Queue())]), [lambda n: 0.001], [workers]), policy


def run_batch(driver: VirtualDriver, n: int, times: int = 1) -> None:
    """Have batches of `n` run, as many at a time as is said."""
    for _ in range(times):
        for _ in range(n):
            driver.submit("x")
        driver.run(driver.clock.now)
    driver.run()


def test_a_batch_is_the_first_one_of_its_size_once_on_each_worker() -> None:
    """A policy is told of each worker's first batch of a size, and of no other."""
    driver, policy = noting(workers=2)
    run_batch(driver, 1, times=2)
    run_batch(driver, 1, times=2)
    run_batch(driver, 3, times=2)
    run_batch(driver, 1, times=2)
    assert policy.firsts == [True, True, False, False, True, True, False, False]


def test_of_a_large_limit_sizes_are_taken_together() -> None:
    """A batch is a first one only if none was of about its size: of a large limit that are few."""
    driver, policy = noting(limit=4096)
    for n in range(1, 400):
        run_batch(driver, n)
    assert sum(policy.firsts) < 64
    assert policy.firsts[:32] == [True] * 32


def test_what_a_worker_has_run_is_forgotten_with_it() -> None:
    """The successor of a dead worker has first calls of its own, and so has one that was added."""
    driver, policy = noting()
    run_batch(driver, 2)
    run_batch(driver, 2)
    driver.lose(0, 0)
    run_batch(driver, 2)
    place = driver.add(0)
    driver.drain(0, 0)
    driver.run()
    run_batch(driver, 2)
    run_batch(driver, 2)
    assert policy.firsts == [True, False, True, True, False]
    assert set(driver.core.batchers[0].places._made) == {place}


def test_where_each_batch_is_a_first_one_it_is_better_than_nothing() -> None:
    """Of workers that run one batch each, what batches take is learned all the same."""
    policy = Adaptive(4)
    driver = VirtualDriver(Core([Batcher("stage", policy, Queue())]), [lambda n: 0.004])
    for _ in range(20):
        run_batch(driver, 1)
        driver.lose(0, 0)
    assert policy.cost.samples == 20
    assert policy.cost.seconds(1) == pytest.approx(0.004, rel=0.1)


def test_starts_and_steps_that_are_slow_once_on_each_worker_are_not_believed() -> None:
    """Of streams, too, each worker's first start of about a length, and its first step of so many, teach nothing."""
    policy = GreedySteps(1)
    core = Core([stepper(rows=1, policy=policy)])
    workers = range(4)
    for place in workers:
        core.worker_ready(0, place)
    requests = [Request(i, inf) for i in workers]
    for request in requests:
        request.stream = Stream()
    core.flow.submit(0.0, requests)
    core.poll(0.0)
    for place in workers:
        for i, factor in enumerate((20.0, 1.0)):
            start = {"length": 6 + i, "start_s": 0.01 * factor}
            core.reported(1.0, SetReport(0, place, 1, False, NOTHING, 1, 0.002 * factor, **start))
    assert policy.step.seconds(1) == pytest.approx(0.002)
    assert policy.start.seconds(7) == pytest.approx(0.01)


def learned_of_lengths(factor: float) -> list[float]:
    """What is learned of a few shapes, where the first batch of each count and length takes so many times as long."""
    policy, dice = Adaptive(8), random.Random(3)
    seen: set[Any] = set()

    def cost(batch: Batch, now: float) -> float:
        key = batch.place, batch.n, batch.longest
        is_first = key not in seen
        seen.add(key)
        return (4e-3 + 1e-5 * batch.n * batch.longest) * (factor if is_first else 1.0)

    driver = VirtualDriver(Core([Batcher("stage", policy, Queue(levels=BY_LENGTH))]), cost, [3])
    for i in range(1200):
        driver.arrive(0.02 * (i // 8), "x", length=dice.choice([4, 30, 200]))
    driver.run()
    assert policy._by_length is not None
    learned = policy._by_length.cost
    return [learned.seconds(n, length) for n, length in ((1, 4), (1, 200), (8, 30), (8, 200))]


def test_batches_by_length_that_are_slow_once_on_each_worker_are_not_believed() -> None:
    """Where requests have lengths, what the first batch of about a shape took on a worker is not learned."""
    assert learned_of_lengths(20.0) == pytest.approx(learned_of_lengths(1.0), rel=0.1)


def test_a_line_forgets_what_first_calls_have_taught_and_not_what_was_known_before() -> None:
    """Where a second call shows that the first one was slow, a line is again what it was before that."""
    line = CostLine(0.5, 0.25)
    line.learn(4, 100.0, is_first=True)
    line.learn(40, 1000.0, is_first=True)
    assert line.seconds(4) > 50.0
    line.learn(4, 1.5)
    assert (line.samples, line.b) == (1, 0.25)
    line.learn(8, 2.5)
    assert line.seconds(40) == pytest.approx(10.5)
