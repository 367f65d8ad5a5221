"""What holds for every policy in every situation, those of the future included: they only have to be in `BY_NAME`.

Each policy drives a stage in virtual time, through random arrivals, sizes, SLOs, cancellations, lost workers and batch
times that nothing can be learned from. While it does, everything that it says is checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.drive.virtual import VirtualDriver
from carpool.errors import Overloaded
from carpool.policy import BY_NAME, Cork, Deadline, Decision, OneByOne, Policy, QueueView, Static
from carpool.request import DEFAULT_LANE, DONE, Lane, Request
from tests.core.stub import PROPERTY, pipeline, stage

INFINITY = float("inf")


@dataclass(frozen=True)
class Arrival:
    """A request: so long after the one before it."""

    after_s: float
    slo_s: float
    timeout_s: float
    size: int
    priority: int
    key: str | None
    cancelled_after_s: float | None
    worker_dies: bool


@dataclass(frozen=True)
class Scenario:
    """A stage and what happens to it."""

    arrivals: Sequence[Arrival]
    limit: int
    workers: int
    max_queue_delay_s: float | None
    fixed_s: float
    item_s: float
    factors: Sequence[float]  # one batch after the other takes so many times as long


seconds = st.sampled_from([0.0, 0.0005, 0.001, 0.003, 0.01, 0.04, 0.2])
budgets = st.sampled_from([0.001, 0.02, 0.06, 0.5, 5.0, INFINITY])
arrivals = st.builds(
    Arrival,
    after_s=st.one_of(st.just(0.0), seconds, st.floats(0, 0.01), st.just(20.0)),
    slo_s=budgets,
    timeout_s=budgets,
    size=st.sampled_from([1, 1, 1, 2, 5]),
    priority=st.sampled_from([0, 0, 0, 1]),
    key=st.sampled_from([None, None, None, "a", "b"]),
    cancelled_after_s=st.one_of(st.none(), st.none(), seconds),
    worker_dies=st.sampled_from([False] * 9 + [True]),
)
scenarios = st.builds(
    Scenario,
    arrivals=st.integers(0, 50).flatmap(lambda n: st.lists(arrivals, min_size=n, max_size=n)),
    limit=st.integers(1, 9),
    workers=st.integers(1, 3),
    max_queue_delay_s=st.one_of(st.none(), seconds),
    fixed_s=seconds,
    item_s=seconds,
    factors=st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.0, 3.0, 100.0]), min_size=1, max_size=5),
)


def checked(kind: type[Policy]) -> type[Policy]:
    """The same policy, but whatever it decides is looked at."""

    def decide(self: Policy, now: float, queue: QueueView, free: int, busy: int) -> Decision:
        self.asked += 1  # type: ignore[attr-defined]
        assert self.asked < 20_000, "asked again and again"  # type: ignore[attr-defined]
        before = list(queue)
        decision = kind.decide(self, now, queue, free, busy)
        assert kind.decide(self, now, queue, free, busy) == decision, "asked twice, it says something else"
        assert list(queue) == before, "it changed the queue"
        check(decision, now, queue, free, self.limit)
        return decision

    return type(f"Checked{kind.__name__}", (kind,), {"decide": decide, "asked": 0})


def check(decision: Decision, now: float, queue: QueueView, free: int, limit: int) -> None:
    """Whether this decision can be carried out and leaves nobody waiting for nothing."""
    assert len(set(decision.drop)) == len(decision.drop), "one request is dropped twice"
    assert set(decision.drop) <= set(queue), "what is dropped is not queued"
    left = queue.size - sum(request.size for request in decision.drop)
    assert 0 <= decision.take <= min(left, limit), "more is taken than waits or than may"
    assert free or not decision.take, "a batch without a worker"
    assert (decision.reason != "") == (decision.take > 0), "a batch needs a reason, nothing needs none"
    if free and left and not decision.take and not decision.drop:
        assert decision.wake_at is not None, "held back for ever"
    if decision.wake_at is not None and not decision.take:
        assert decision.wake_at > now, "to be asked again at once"


def play(kind: type[Policy], scenario: Scenario) -> tuple[VirtualDriver, Policy, list[Request]]:
    """All that happens in this scenario, until nothing is left to happen."""
    policy = kind(scenario.limit, scenario.max_queue_delay_s)
    line = pipeline(stage(policy=policy), workers=0)
    batches = count()

    def cost(n: int) -> float:
        factor = scenario.factors[next(batches) % len(scenario.factors)]
        return (scenario.fixed_s + scenario.item_s * n) * factor

    run = VirtualDriver(line, [cost], [scenario.workers])
    requests = []
    now = 0.0
    for i, arrival in enumerate(scenario.arrivals):
        now += arrival.after_s
        lane: Lane = (arrival.priority, arrival.key, DEFAULT_LANE[2])
        due = now + min(arrival.slo_s, arrival.timeout_s)
        request = run.arrive(now, i, arrival.timeout_s, size=arrival.size, lane=lane, due=due)
        requests.append(request)
        if arrival.cancelled_after_s is not None:
            run.at(now + arrival.cancelled_after_s, lambda it=request: line.cancel(run.clock.now, it))  # type: ignore[misc]
        if arrival.worker_dies:
            run.at(now, lambda: run.lose(0, 0) if 0 in line.stages[0].in_flight else None)
    run.run()
    return run, policy, requests


@pytest.mark.parametrize("kind", [*BY_NAME.values(), OneByOne])
@PROPERTY
@given(scenarios)
def test_whatever_happens(kind: type[Policy], scenario: Scenario) -> None:
    """Every decision is possible, repeatable and leads on; and in the end everybody was served or refused."""
    run, _, requests = play(checked(kind), scenario)

    assert all(request.state == DONE for request in requests)
    assert run.pipeline.waiting == 0
    assert run.pipeline.stages[0].in_flight == {}


@dataclass(frozen=True)
class Variant:
    """A policy with settings of its own, made as policies of a name are."""

    kind: type[Policy]
    settings: dict[str, object]


VARIANTS = [
    Variant(Static, {"max_queued_batches": 1}),
    Variant(Static, {"allowed_batch_sizes": (2, 4), "padding": "down"}),
    Variant(Static, {"allowed_batch_sizes": (3, 8), "max_queued_batches": 2}),
    Variant(Cork, {"slo_s": 0.06}),
    Variant(Cork, {"slo_s": 0.5}),
    Variant(Deadline, {"cost_s": lambda n: 0.008 + 0.001 * n}),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: f"{variant.kind.__name__} {[*variant.settings]}")
@PROPERTY
@given(scenarios)
def test_whatever_happens_with_settings(variant: Variant, scenario: Scenario) -> None:
    """The same for settings that a name alone does not reach."""

    def init(self: Policy, max_batch_size: int, max_queue_delay_s: float | None) -> None:
        variant.kind.__init__(self, max_batch_size, max_queue_delay_s, **variant.settings)

    kind = checked(variant.kind)
    run, _, requests = play(type(kind.__name__, (kind,), {"__init__": init}), scenario)

    assert all(request.state == DONE for request in requests)
    assert run.pipeline.waiting == 0


@pytest.mark.parametrize("kind", [*BY_NAME.values(), OneByOne])
@PROPERTY
@given(st.integers(1, 9), st.integers(1, 3), st.floats(0.0001, 0.01), st.floats(0, 0.002))
def test_light_load_is_served(kind: type[Policy], limit: int, workers: int, fixed_s: float, item_s: float) -> None:
    """Requests that come one at a time and have a lot of time are never refused, whatever the batches cost."""
    quiet = [Arrival(0.5, 0.4, 0.45, 1, 0, None, None, worker_dies=False)] * 30
    scenario = Scenario(quiet, limit, workers, None, fixed_s, item_s, [1.0])
    _, _, requests = play(checked(kind), scenario)

    assert not any(isinstance(request.error, Overloaded) for request in requests)
    assert all(request.error is None for request in requests)
