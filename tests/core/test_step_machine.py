"""The stepper under everything that can happen to it, in any order, with a policy that means ill: a state machine.

What can happen, and what must hold, is in `step_world.py`.
"""

from __future__ import annotations

from math import inf
from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from carpool.request import Lane
from tests.core.step_world import StepSpec, StepWorld, StreamSpec
from tests.effort import examples


def or_endless(least: int, most: int) -> st.SearchStrategy[float]:
    return st.one_of(st.just(inf), st.integers(least, most).map(float))


step_specs = st.builds(
    StepSpec,
    rows=st.integers(1, 4),
    limit=or_endless(2, 6),
    resumable=st.booleans(),
    idempotent=st.sampled_from([True, True, False]),
    silence_s=or_endless(3, 12),
    max_stream_s=or_endless(4, 20),
    max_batch_time_s=or_endless(4, 12),
    patience_s=or_endless(2, 8),
    max_size=or_endless(2, 8),
    slo_s=st.one_of(st.none(), st.integers(2, 9).map(float)),
    journal=st.booleans(),
    seed=st.integers(0, 1000),
)
stream_specs = st.builds(
    StreamSpec,
    timeout=or_endless(1, 15),
    own=st.booleans(),
    size=st.sampled_from([1, 1, 1, 2, 7]),
    collected=st.sampled_from([False, False, True]),
    lane=st.builds(Lane, st.sampled_from([0, 0, 1]), st.sampled_from([None, None, None, "key"]), st.just(0), st.none()),
    patient=st.booleans(),
)
picks = st.integers(0, 10_000)


class Steps(RuleBasedStateMachine):
    """A stage of steps, up to three workers, and callers."""

    def __init__(self) -> None:
        super().__init__()
        self.done = 0

    @initialize(spec=step_specs, workers=st.integers(0, 2))
    def start(self, spec: StepSpec, workers: int) -> None:
        self.world = StepWorld(spec)
        for place in range(workers):
            self.world.worker_ready(place)

    @rule(specs=st.lists(stream_specs, min_size=1, max_size=5))
    def submit(self, specs: list[StreamSpec]) -> None:
        self.world.submit(specs)

    @precondition(lambda self: self.world.listeners)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        self.world.cancel(pick)

    @precondition(lambda self: self.world.listeners)
    @rule(pick=picks, is_paused=st.booleans())
    def pause(self, pick: int, is_paused: bool) -> None:
        self.world.pause(pick, is_paused)

    @rule(pick=picks)
    def worker_ready(self, pick: int) -> None:
        self.world.worker_ready(pick)

    @rule(pick=picks, unsent=st.booleans())
    def worker_lost(self, pick: int, unsent: bool) -> None:
        self.world.worker_lost(pick, unsent)

    @rule(pick=picks)
    def worker_left(self, pick: int) -> None:
        self.world.worker_left(pick)

    @rule(pick=picks)
    def drain(self, pick: int) -> None:
        self.world.drain(pick)

    @rule(pick=picks, seed=picks, most=st.sampled_from([1000, 1000, 1]), returned=st.sampled_from([0] * 7 + [1, 2]))
    def boundary(self, pick: int, seed: int, most: int, returned: int) -> None:
        self.world.boundary(pick, Random(seed), most, returned)

    @rule(pick=picks)
    def deliver(self, pick: int) -> None:
        self.world.deliver(pick)

    @rule(seed=picks)
    def go_on(self, seed: int) -> None:
        """All workers step once, with reports and orders as quick as they can be."""
        dice = Random(seed)
        self.world.poll()
        for pick in range(len(self.world.workers)):
            self.world.boundary(pick, dice, 1000, 0)
        while self.world.post:
            self.world.deliver(0)
        self.world.poll()

    @rule(pick=picks)
    def misreport(self, pick: int) -> None:
        self.world.misreport(pick)

    @precondition(lambda self: self.done > 30)
    @rule()
    def close(self) -> None:
        self.world.close()

    @precondition(lambda self: self.done > 35)
    @rule()
    def abort(self) -> None:
        self.world.abort()

    @rule()
    def poll(self) -> None:
        self.world.poll()

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds: int) -> None:
        self.world.wait(seconds)

    @rule(seconds=st.integers(1, 6))
    def jump(self, seconds: int) -> None:
        self.world.jump(seconds)

    @invariant()
    def check(self) -> None:
        self.done += 1
        if hasattr(self, "world"):
            self.world.check_always()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


TestSteps = Steps.TestCase
TestSteps.settings = examples(150, stateful_step_count=50, derandomize=True)
