"""Too much work, in virtual time: who has a higher priority does not notice, nobody starves, most of it is in time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from carpool.engine.core.batch import Batch
from carpool.engine.drive.virtual import VirtualDriver
from carpool.engine.policy import Adaptive, Greedy, Policy
from carpool.engine.request import Lane, Request
from tests.effort import slow_where
from tests.support.pipelines import asks, items, pipeline_of, stage

MOST = 64


def batch_s(n: int) -> float:
    return 0.008 + 0.00025 * n


class Watch:
    """Notes when each request had its answer."""

    def __init__(self) -> None:
        self.answers: list[tuple[float, Request]] = []

    def started(self, now: float, batch: Batch, busy_s: float) -> None: ...

    def answered(self, now: float, requests: Sequence[Request]) -> None:
        self.answers += [(now, request) for request in requests]

    def latencies(self, priority: int) -> list[float]:
        """Of those who were served, rising."""
        return sorted(now - r.admitted for now, r in self.answers if r.lane.priority == priority and r.error is None)


def poisson(
    rate: float, seconds: float, priority: int, patient: bool, timeout_s: float, seed: int
) -> Iterator[Request]:
    dice = random.Random(seed)
    now = dice.expovariate(rate)
    while now < seconds:
        request = Request(priority, now + timeout_s)
        request.admitted = now
        request.lane = Lane(priority, None, 0)
        request.patient = patient
        yield request
        now += dice.expovariate(rate)


def serve(policy: Policy, requests: Sequence[Request], slo_s: float | None = None) -> Watch:
    watch = Watch()
    core = pipeline_of(stage(policy=policy, max_size=1024), workers=0, slo_s=slo_s)
    run = VirtualDriver(core, [batch_s], [1], watcher=watch)
    run.feed((request.admitted, request) for request in sorted(requests, key=lambda request: request.admitted))
    run.run()
    assert len(watch.answers) == len(requests)
    assert core.unanswered == core.waiting == 0
    return watch


@slow_where(lambda rate: rate != 8_000)  # three times of what can be served
@slow_where(lambda policy, patient: patient is (policy is Greedy))
@pytest.mark.parametrize("policy", [Adaptive, Greedy])
@pytest.mark.parametrize("rate", [2_000, 8_000, 40_000])
@pytest.mark.parametrize("patient", [False, True])
def test_a_flood_of_low_priority_delays_a_higher_one_by_two_batches(
    policy: type[Policy], rate: int, patient: bool
) -> None:
    """Under a flood of low priority, requests of a higher one wait at most for the running batch
    and their own, and none of them is refused, also where the queue is full; the flood goes on
    being served at full speed.
    """
    high = list(poisson(20, 2, 1, patient, 30, seed=1))
    low = list(poisson(rate, 2, 0, patient, 4, seed=2))
    watch = serve(policy(MOST), high + low)
    latencies = watch.latencies(1)

    assert len(latencies) == len(high)
    assert latencies[int(0.99 * len(latencies))] <= 2 * batch_s(MOST) + 0.005
    capacity = MOST / batch_s(MOST)
    assert len(watch.latencies(0)) > 0.85 * min(rate * 2, capacity * 2)


def test_low_priority_is_not_starved() -> None:
    """Requests of low priority are served now and then, although more of the higher priority comes
    than can be served.
    """
    high = list(poisson(8_000, 8, 1, False, 30, seed=1))
    low = list(poisson(20, 8, 0, True, 60, seed=2))
    watch = serve(Greedy(MOST), high + low)
    served = [now for now, request in watch.answers if request.lane.priority == 0 and request.error is None]

    assert len(served) == len(low)
    assert len([now for now in served if now < 8]) > len(low) / 4


@pytest.mark.fault("F29")
@slow_where(lambda timeout_s: timeout_s == 0.06)  # then the deadlines help to refuse
@pytest.mark.parametrize("timeout_s", [30.0, 0.06])
def test_goodput_at_three_times_the_load(timeout_s: float) -> None:
    """At three times the load `Adaptive` with a goal of 60 ms serves nine tenths of the best
    goodput of any load, and refuses the rest.
    """
    slo_s = 0.06
    capacity = MOST / batch_s(MOST)

    def goodput(load: float) -> float:
        watch = serve(Adaptive(MOST), list(poisson(load * capacity, 6, 0, False, timeout_s, seed=3)), slo_s)
        late = [latency for latency in watch.latencies(0) if latency > slo_s]
        return (len(watch.latencies(0)) - len(late)) / 6

    peak = max(goodput(load) for load in (0.6, 0.8, 0.9, 1.0))
    assert peak > 0.6 * capacity
    assert goodput(3.0) >= 0.9 * peak


def test_the_model_sees_exactly_those_who_stayed() -> None:
    """When sixty of a hundred waiting callers leave at random, the model runs exactly the other
    forty requests, each once.
    """
    for seed in range(20):
        watch = Watch()
        core = pipeline_of(stage(16), workers=0)
        run = VirtualDriver(core, [batch_s], [1])
        requests = asks(range(100))
        gone = random.Random(seed).sample(requests, 60)
        run.at(0, lambda: [run.enter(request) for request in requests])  # noqa: B023 - run before the next turn
        core.worker_lost(0, 0, 0)
        run.run(until=1)
        assert core.waiting == 100
        for request in gone:
            core.cancel(1, request)
        core.worker_ready(0, 0)
        run.at(2, lambda: None)
        run.run()

        seen = [item for batch in run.batches for item in items(batch.requests)]
        assert sorted(seen) == sorted(set(range(100)) - {request.item for request in gone})
        assert (len(run.answers), core.flow.cancelled, core.unanswered) == (40, 60, 0)
        assert not watch.answers
