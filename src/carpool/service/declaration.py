"""What a service is before it runs: its stages in a row and what holds for all of them, checked."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import inf
from typing import Literal

from carpool.model import AnyModel
from carpool.service.settings import at_least, check_held, check_overload, finite, held_s, seconds, text
from carpool.service.stage import Stage, as_stage, check_chain
from carpool.worker import affinity


@dataclass(frozen=True, slots=True, init=False, repr=False, eq=False, weakref_slot=True)
class Declaration:
    """The stages and settings of a service. `Service`, which can be started, says what each of them means.

    Attributes:
        stages: The stages, first to last.
        name: The model's name over HTTP and in metrics.
        timeout_s: The longest time from a request's arrival to its answer; infinity for no limit.
        slo_s: The latency that requests should be answered within, if there is a goal.
        overload: What a planning policy looks after while more comes than can be served.
        cpus: The cores that the coordinator is tied to, if any.
        max_parallel_starts: How many workers may load at the same time, if it was said.
    """

    stages: tuple[Stage, ...]
    name: str
    timeout_s: float
    slo_s: float | None
    overload: str
    cpus: affinity.Cores | None
    max_parallel_starts: int | None

    def __init__(
        self,
        *stages: Stage | AnyModel,
        name: str | None = None,
        timeout_s: float | None = 30.0,
        slo_s: float | None = None,
        overload: Literal["goodput", "latency"] = "goodput",
        cpus: int | Collection[int] | None = None,
        max_parallel_starts: int | None = None,
    ) -> None:
        declared = tuple(as_stage(stage) for stage in stages)
        check_chain(declared)
        check_overload(overload)
        if max_parallel_starts is not None:
            max_parallel_starts = at_least("max_parallel_starts", max_parallel_starts, 1)
        values = {
            "stages": declared,
            "name": text("name", name) or declared[-1].name,
            "timeout_s": inf if timeout_s is None else seconds("timeout_s", timeout_s),
            "slo_s": finite("slo_s", slo_s),
            "overload": overload,
            "cpus": None if cpus is None else affinity.parse(cpus),
            "max_parallel_starts": max_parallel_starts,
        }
        for field, value in values.items():
            object.__setattr__(self, field, value)
        check_held(sum(held_s(stage.new_policy()) for stage in declared), self.timeout_s)

    def __repr__(self) -> str:
        return f"<Service {self.name}: {' -> '.join(stage.name for stage in self.stages)}>"
