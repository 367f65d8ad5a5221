"""Paced: newcomers may use the time by which every running part is early, and no more.

Letting a request in stops all that run, for as long as its start takes. Every stream that has had a
part has a time at which the next one is due: one pace after the first, and one pace more for each
further part. A set that steps faster than its pace gains spare time at every step, and that is what
newcomers may use.

    spare = the earliest of these times - now - the step under way; one pace at most if that step
            makes a first part, whose stream is due one pace later
    join    the longest head of the queue, k = 1, 2, …, for which n + k = 1, or
            step(n + k) <= 0.9 pace  and  start(of the k lengths) + step(n + k) <= spare,
            and k = 1, or the first parts of all k still come in time

No request starves. Only the head may join; while it waits, each step leaves at least a tenth of the
pace over (0.9 is what sees to it), so the set gains as much per step. The head, which once fitted
by the pace of the set, waits no longer than (start(head) + step) / (0.1 pace) steps, unless the set
is so full that its step would break the pace; then it waits until a stream ends.

Decisions are made while a step is under way, too, so what is on its way counts: requests that have
joined and have not been started yet are part of `start`. The parts that this step makes do not:
until they have come `spare` is a pace less, and those who wait for them are started together. Where
starts take next to nothing, nothing is gained by that, and a place would stay empty for a step. So
for a start that takes no more than a twentieth of a step these parts count already. Those of which
one is the first are not made late by it, as 1.05 · 0.9 pace is less than a pace. Without a goal
between parts, who would be late is counted from anew, here as in `core/stepper.py`.

Costs are learned with forgetting (`policy/cost_line.py`). There is no other number to choose: a
fixed chunk of a prompt per step, as elsewhere, is right for one load and wrong for the next one.

Sources: Yu et al., "Orca", OSDI 2022 (requests join and leave at each step); Agrawal et al.,
"Sarathi-Serve", OSDI 2024 (starting stalls those who run, and how much of it a goal allows for);
Zhong et al., "DistServe", OSDI 2024 (goodput by a goal to the first part and one between parts).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Final

from carpool.engine.policy.steps import SetView, StepPolicy
from carpool.engine.request import Request

_FULL_PACE: Final = 0.9  # share of the pace that a step may take, so that spare time grows while others wait
_QUICK_START: Final = 0.05  # share of a step; nobody need wait to be started together with others if it takes no more


class Paced(StepPolicy):
    """Let newcomers use the time by which every running part is early, and no more."""

    def __init__(self, rows: int | None = None, part_slo_s: float | None = None) -> None:
        super().__init__(rows, part_slo_s)
        self._rule = ""
        self._spare_s = inf
        self._joined = 0

    def join(self, now: float, heads: Sequence[Request], running: SetView) -> int:
        n = running.active
        start, step = self.start, self.step
        pace_s = self.pace_s
        longest_step_s = _FULL_PACE * pace_s
        spare_s = quick_spare_s = running.spare_s(now)
        began = now
        if running.is_stepping:
            under_way_s = step.seconds(n)
            began += under_way_s
            spare_s -= under_way_s
            quick_spare_s = pace_s + (spare_s if self.part_slo_s else max(0.0, spare_s))
            if spare_s > pace_s and running.has_newcomers:
                spare_s = pace_s
        self._rule = "all"
        self._spare_s = spare_s
        joined, length, due = 0, running.starting, inf
        for request in heads:
            stream = request.stream
            length += stream.length + stream.parts if stream else 1
            step_s = step.seconds(n + joined + 1)
            if n + joined and step_s > longest_step_s:
                self._rule = "pace"
                break
            start_s = start.seconds(length)
            first_part_s = start_s + step_s
            if n + joined and first_part_s > (quick_spare_s if start_s <= _QUICK_START * step_s else spare_s):
                self._rule = "spare"
                break
            if stream is None or not stream.parts:
                due = min(due, request.due)
            if joined and began + first_part_s > due:
                self._rule = "due"
                break
            joined += 1
        self._joined = joined
        return joined

    def explain(self, now: float) -> dict[str, Any]:
        """Return why it decides as it does, and what its last decision was made with.

        `rule` is what kept the next request out, or "all"; `spare_s` is the time that all who ran
        could stand still then, infinity if none was due, and `joined` how many were let in.
        """
        last = {"rule": self._rule, "spare_s": self._spare_s, "joined": self._joined}
        return {**super().explain(now), **last}
