"""The core under everything that can happen to it, in any order: a state machine driven by hypothesis.

What can happen, and what must hold, is in `world.py`; hypothesis looks for a short story in which it does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from carpool.request import Lane
from tests.core.world import POLICIES, AskSpec, StageSpec, World
from tests.effort import examples


def or_endless(least: int, most: int) -> st.SearchStrategy[float]:
    return st.one_of(st.just(inf), st.integers(least, most).map(float))


stage_specs = st.builds(
    StageSpec,
    policy=st.sampled_from(["greedy", "static", "one by one", *POLICIES]),
    limit=st.integers(1, 4),
    delay_s=st.integers(0, 6),
    max_size=or_endless(1, 6),
    max_bytes=or_endless(4, 12),
    max_batch_time_s=or_endless(2, 9),
    patience_s=or_endless(1, 6),
    idempotent=st.booleans(),
    workers=st.integers(1, 3),
    sized=st.booleans(),
    ahead=st.booleans(),
)
lanes = st.builds(
    Lane, st.sampled_from([0, 0, 1, -1]), st.sampled_from([None, None, "key"]), st.sampled_from([0, 0, 0, 1]), st.none()
)
ask_specs = st.builds(
    AskSpec,
    timeout=or_endless(0, 12),
    nbytes=st.integers(0, 6),
    lane=lanes,
    patient=st.booleans(),
    cancelled=st.sampled_from([False] * 7 + [True]),
    size=st.sampled_from([1, 1, 1, 1, 2, 3]),
    bulk=st.booleans(),
)
picks = st.integers(0, 10_000)
times_s = st.sampled_from([2**-14, 2**-20, 1.0])
few = st.sets(st.integers(0, 3), max_size=2)


class CoreMachine(RuleBasedStateMachine):
    """A pipeline of one to three stages and all who have to do with it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    @initialize(
        specs=st.lists(stage_specs, min_size=1, max_size=3),
        journal=st.booleans(),
        slo_s=st.one_of(st.none(), st.integers(1, 9).map(float)),
    )
    def start(self, specs: list[StageSpec], journal: bool, slo_s: float | None) -> None:
        self.world = World(specs, journal, slo_s)

    @rule(specs=st.lists(ask_specs, min_size=1, max_size=5))
    def submit(self, specs: list[AskSpec]) -> None:
        self.world.submit(specs)

    @precondition(lambda self: self.world.asks)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        self.world.cancel(pick)

    @rule(pick=picks)
    def worker_ready(self, pick: int) -> None:
        self.world.worker_ready(pick)

    @rule(pick=picks)
    def worker_lost(self, pick: int) -> None:
        self.world.worker_lost(pick)

    @precondition(lambda self: self.world.sent)
    @rule(pick=picks)
    def worker_left(self, pick: int) -> None:
        self.world.worker_left(pick)

    @rule(pick=picks)
    def drain(self, pick: int) -> None:
        self.world.drain(pick)

    @rule(pick=picks)
    def hold(self, pick: int) -> None:
        self.world.hold(pick)

    @precondition(lambda self: self.world.sent)
    @rule(pick=picks, busy_s=times_s, fail=few)
    def reply(self, pick: int, busy_s: float, fail: set[int]) -> None:
        self.world.reply(pick, busy_s, fail)

    @precondition(lambda self: self.world.sent)
    @rule(
        pick=picks,
        busy_s=times_s,
        fail=few,
        order=st.permutations(range(6)),
        foreign=st.lists(picks, max_size=2),
        n=st.integers(1, 6),
    )
    def reply_oddly(
        self, pick: int, busy_s: float, fail: set[int], order: Sequence[int], foreign: list[int], n: int
    ) -> None:
        self.world.reply_oddly(pick, busy_s, fail, order, foreign, n)

    @precondition(lambda self: self.world.past)
    @rule(pick=picks, worker=picks)
    def stray_reply(self, pick: int, worker: int) -> None:
        self.world.stray_reply(pick, worker)

    @precondition(lambda self: self.world.sent)
    @rule(pick=picks)
    def call_started(self, pick: int) -> None:
        self.world.call_started(pick)

    @precondition(lambda self: self.world.sent)
    @rule(pick=picks)
    def spare(self, pick: int) -> None:
        self.world.spare(pick)

    @precondition(lambda self: self.world.sent)
    @rule(pick=picks, positions=st.sets(st.integers(0, 5), min_size=1))
    def ran_out(self, pick: int, positions: set[int]) -> None:
        self.world.ran_out(pick, positions)

    @precondition(lambda self: self.steps > 25)
    @rule()
    def close(self) -> None:
        self.world.close()

    @precondition(lambda self: self.steps > 35)
    @rule()
    def abort(self) -> None:
        self.world.abort()

    @rule(pick=picks)
    def mistake(self, pick: int) -> None:
        self.world.mistake(pick)

    @rule()
    def poll(self) -> None:
        self.world.poll()

    @rule(seconds=st.integers(1, 8))
    def wait(self, seconds: int) -> None:
        self.world.wait(seconds)

    @rule(seconds=st.integers(1, 8))
    def jump(self, seconds: int) -> None:
        self.world.jump(seconds)

    @invariant()
    def check(self) -> None:
        self.steps += 1
        if hasattr(self, "world"):
            self.world.check_always()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


TestCore = CoreMachine.TestCase
TestCore.settings = examples(150, stateful_step_count=50, derandomize=True)
