"""What a policy of steps is: told what starting and stepping cost, asked who may join a set.

A policy of steps decides *when* the next requests of the queue join a running set, and with how
many; so it has `join` in the place of `decide`, and learns from steps. All else is as in
`policy/base.py`. The order is the queue's, and limits, deadlines and pauses are the stepper's
(`core/stepper.py`), whatever the policy says. As with all policies there is no clock and no IO, and
a question changes nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

from carpool.engine.policy.base import NOTHING, Decision, Policy, View
from carpool.engine.policy.cost_line import CostLine
from carpool.engine.request import Request


class SetView(Protocol):
    """What a policy may see of a running set. Reading changes nothing."""

    def __len__(self) -> int:
        """Return how many streams it holds, those that pause included."""

    @property
    def active(self) -> int:
        """How many streams its next step makes parts for."""

    @property
    def is_stepping(self) -> bool:
        """Whether a step is under way, or about to begin."""

    @property
    def has_newcomers(self) -> bool:
        """Whether the step under way may make the first part of a stream."""

    @property
    def starting(self) -> int:
        """Sum of the lengths of those that have joined and of which the worker has not reported."""

    @property
    def size(self) -> int:
        """Sum of the sizes of its streams."""

    def spare_s(self, now: float) -> float:
        """Return for how long all may stand still before a part is late.

        Infinity if none is due: before the first parts, and of streams that pause or whose parts
        are collected.
        """


class Stepped(NamedTuple):
    """What a worker, or its warm-up, says of its last step: for a policy to learn from.

    Attributes:
        rows: How many streams were stepped; 0 if none was.
        step_s: Seconds that the step took, with what lies between two steps.
        length: The sum of the lengths of the streams that were started before it; 0 if none was.
        start_s: Seconds that starting them took.
        is_first_step: Whether it was the first step of about so many streams on its worker. It may
            have been slow for that reason.
        is_first_start: The same of the start, by the sum of lengths.
    """

    rows: int
    step_s: float
    length: int
    start_s: float
    is_first_step: bool = False
    is_first_start: bool = False


_LEAST_PACE_S: Final = 0.01  # a hundred parts a second


class StepPolicy(Policy):
    """Base of all policies of steps; `join` is the policy.

    Args:
        rows: Most streams in a set; None means the stage's.
        part_slo_s: How far apart the parts of a stream should be; None means the service's.

    Attributes:
        rows: The same.
        part_slo_s: The same.
        start: Seconds of starting streams, by the sum of their lengths.
        step: Seconds of a step, by the number of streams stepped.
        active: How many streams the last step had.
    """

    def __init__(self, rows: int | None = None, part_slo_s: float | None = None) -> None:
        super().__init__(rows)
        self.part_slo_s = part_slo_s
        self.start = CostLine()
        self.step = CostLine()
        self.active = 0

    @property
    def rows(self) -> int:
        """Most streams in a set."""
        return self.limit

    @abstractmethod
    def join(self, now: float, heads: Sequence[Request], running: SetView) -> int:
        """Return how many of the next requests join a running set now, 0 to `len(heads)`.

        Args:
            now: The time.
            heads: The next requests of the queue, as many as there is room for in the set; at least
                one.
            running: The set.
        """

    def is_late(self, now: float, request: Request) -> bool:
        """Report whether the first part of a queued request cannot come in time any more.

        Such a request is refused. The stepper asks only about requests that have had no part, and
        are due sooner than in `first_part_s` of the longest request that it has seen.
        """
        return now + self.first_part_s(request.stream.length if request.stream else 1) > request.due

    def first_part_s(self, length: int) -> float:
        """Return the expected seconds until the first part of a request of `length` that joins."""
        return self.start.seconds(length) + self.step.seconds(min(self.active + 1, self.rows))

    @property
    def pace_s(self) -> float:
        """How far apart the parts of a stream are due.

        It is the service's goal, or without one twice a step of a full set, so that no stream falls
        below half the pace of a full set; no less than `_LEAST_PACE_S`, since what is around very
        quick steps takes longer than they do. What even a lone stream would miss is no goal: then
        it is twice a lone step.
        """
        alone_s = self.step.seconds(1)
        pace_s = self.part_slo_s or max(_LEAST_PACE_S, 2 * self.step.seconds(self.rows))
        return pace_s if pace_s > alone_s else 2 * alone_s

    def learn(self, now: float, done: Stepped) -> None:  # type: ignore[override]
        """Learn from a step, or from a step of a warm-up."""
        if done.length:
            self.start.learn(done.length, done.start_s, done.is_first_start)
        if done.rows:
            self.active = done.rows
            self.step.learn(done.rows, done.step_s, done.is_first_step)

    def decide(self, view: View) -> Decision:
        """Return nothing: a stepper calls `join` instead, but a `Policy` must have this."""
        return NOTHING

    def explain(self, now: float) -> dict[str, Any]:
        return {
            **super().explain(now),
            "cost_s": {n: self.step.seconds(n) for n in sorted({1, self.rows})},
            "first_part_s": self.first_part_s(1),
            "pace_s": self.pace_s,
            "start_s": {"setup": self.start.a, "per_unit": self.start.b},
            "step_s": {"setup": self.step.a, "per_stream": self.step.b},
        }


class GreedySteps(StepPolicy):
    """All that fits joins at the next boundary, as in Orca and in LitServe's continuous loop.

    Source: Yu et al., "Orca: A Distributed Serving System for Transformer-Based Generative Models",
    OSDI 2022 (iteration-level scheduling).
    """

    def join(self, now: float, heads: Sequence[Request], running: SetView) -> int:
        return len(heads)


class StaticSteps(StepPolicy):
    """Nothing joins a set that runs: it is a batch, as everywhere without step batching."""

    def join(self, now: float, heads: Sequence[Request], running: SetView) -> int:
        return 0 if len(running) else len(heads)
