"""The bench of the policies of steps: what others' rules do in cases that can be counted."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from bench.policies.step_rules import Counters, Padded, chunked, static
from bench.policies.steps import cell, loads
from carpool.engine.policy.steps import Stepped
from carpool.engine.request import Request, Stream
from carpool.simulate.steps import StepCost, run_steps

COST = StepCost(0.0, 0.1, 1.0, 0.0)
TWO: dict[str, Any] = {
    "arrivals": [0.0, 0.5],
    "cost": COST,
    "lengths": "fixed:input=3,output=3",
    "slo_s": 10.0,
    "part_slo_s": 1.25,
    "rows": 4,
    "duration_s": 10.0,
    "seed": 0,
}


def test_chunks_are_read_beside_those_who_run() -> None:
    """Three units at a time: the second request's input is read in pieces of what the first one leaves over."""
    report = chunked(3, **TWO)

    # the first is read until 1.3; of the second 2 units until 2.5, beside its second part, and 1 until 3.6
    assert report.requests == 2 and report.good == 1.0 and report.refused == 0.0
    assert report.gap_p99_s == pytest.approx(1.2)
    assert report.first_p99_s == pytest.approx(3.6 - 0.5)
    assert report.parts_per_s == pytest.approx(6 / 5.6)


def test_a_chunk_that_is_larger_than_all_inputs_is_greedy() -> None:
    """But for the start, which has no cost of its own."""
    report, greedy = chunked(100, **TWO), run_steps("greedy", **TWO)
    assert (report.gap_p99_s, report.first_p99_s) == pytest.approx((greedy.gap_p99_s, greedy.first_p99_s))


def test_static_batches_cost_what_they_cost_at_first() -> None:
    """A row that has ended is padded."""
    start, step = Padded(0.0, 0.0, 1.0, 1.0).seconds(Random(0))
    assert [start(1), step(3), step(2), start(1), step(1)] == [0.0, 4.0, 4.0, 0.0, 2.0]
    assert static(**TWO).first_p99_s == pytest.approx(3.3 + 1.3 - 0.5)


class SetStub:
    """A set of ten streams."""

    active = 10
    is_stepping = has_newcomers = False
    size = starting = 0

    def __len__(self) -> int:
        return 10

    def spare_s(self, now: float) -> float:
        return 0.0


def test_counters() -> None:
    """Three of ten are let in at once, fewer after 20 steps; 4096 units at once, or one request."""
    policy = Counters(64)
    heads = []
    for length in (4000, 90, 90):
        request = Request("x", 1.0)
        request.stream = Stream(length)
        heads.append(request)

    assert policy.join(0.0, heads, SetStub()) == 2
    assert policy.join(0.0, heads[:2], SetStub()) == 0
    for _ in range(20):
        policy.learn(0.0, Stepped(10, 0.1, 0, 0.0))
    assert policy.join(0.0, heads[:2], SetStub()) == 2
    policy.learn(0.0, Stepped(0, 0.0, 1, 0.1))
    assert policy.join(0.0, heads[:2], SetStub()) == 0


def test_loads_and_cells() -> None:
    """Without the trace its three rows are left out; a cell has three figures."""
    assert [load.name for load in loads(None)] == [
        "chat 8",
        "chat 10",
        "tiny 60",
        "tiny 100",
        "30 steps 0.6",
        "30 steps 1",
    ]
    assert cell(run_steps("greedy", **TWO)) == "100/50, 1300"
