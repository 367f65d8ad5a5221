"""A service before it runs: its stages in a row and the settings that they share, checked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

from carpool.engine.observe.shown import Row, as_html
from carpool.engine.worker.place import Cores, parse_cores
from carpool.model import Adapter, Traits
from carpool.service.checks import (
    at_least,
    check_lone_wait,
    check_overload,
    lone_wait_s,
    optional_finite_seconds,
    optional_text,
    positive,
    seconds,
)
from carpool.service.graph import (
    Element,
    Line,
    check_graph,
    in_short,
    is_line,
    line_of,
    stages_in,
    traits_of_first,
    traits_of_last,
)
from carpool.service.routes import HttpRoute, routes_of
from carpool.service.stage import Stage

_NAME = "service"
"""The name of a service that ends in branches, if it is given none."""


@dataclass(frozen=True, slots=True, init=False, repr=False, eq=False, weakref_slot=True)
class Declaration:
    """The stages and settings of a service, which `Service` describes and can start.

    It is apart from `Service` so that handles need not import the class that makes them.

    Attributes:
        graph: The elements of which it consists, first to last.
        stages: The stages in them, each once, in the order in which they are written.
        takes: The traits of what gets the items: the first stage, or what branches agree on.
        gives: The traits of what returns the answers: the last stage, or what branches come to.
        name: The model's name over HTTP and in metrics.
        timeout_s: The longest time from a request's arrival to its answer, in seconds; infinity for
            no limit.
        slo_s: The latency that requests should be answered within, in seconds; None for no goal. Of
            answers in parts it counts to the first part.
        part_slo_s: How far apart the parts of an answer should be, in seconds; None for no goal.
        max_stream_s: The longest time of an answer in parts, in seconds; infinity for no limit.
        overload: What a policy that plans pursues while more requests come than can be served:
            "goodput" or "latency".
        share: What is guaranteed to it of a server that it shares with others, in proportion to
            their shares.
        cpus: The cores that the coordinator is tied to; None for no tie.
        max_parallel_starts: How many workers may load at the same time; None for the default.
        routes: The addresses that it has over HTTP besides the usual ones.
    """

    graph: Line
    stages: tuple[Stage, ...]
    takes: Traits
    gives: Traits
    name: str
    timeout_s: float
    slo_s: float | None
    part_slo_s: float | None
    max_stream_s: float
    overload: str
    share: float
    cpus: Cores | None
    max_parallel_starts: int | None
    routes: tuple[HttpRoute, ...]

    def __init__(
        self,
        *stages: Element,
        name: str | None = None,
        timeout_s: float | None = 30.0,
        slo_s: float | None = None,
        part_slo_s: float | None = None,
        max_stream_s: float | None = None,
        overload: Literal["goodput", "latency"] = "goodput",
        share: float = 1.0,
        cpus: int | Collection[int] | None = None,
        max_parallel_starts: int | None = None,
        routes: Mapping[str, Adapter | None] | None = None,
    ) -> None:
        graph = line_of(stages)
        check_graph(graph)
        declared, first, last = stages_in(graph), graph[0], graph[-1]
        name = optional_text("name", name) or (last.name if isinstance(last, Stage) else _NAME)
        gives = traits_of_last(graph, name)
        if not gives.in_parts:
            for setting, limit_s in (("part_slo_s", part_slo_s), ("max_stream_s", max_stream_s)):
                if limit_s is not None:
                    whose = last.name if isinstance(last, Stage) else name
                    text = f"is for models that answer in parts, and {whose} returns whole answers"
                    raise ValueError(f"{setting} {text}: leave it out")
        check_overload(overload)
        if max_parallel_starts is not None:
            max_parallel_starts = at_least("max_parallel_starts", max_parallel_starts, 1)
        values = {
            "graph": graph,
            "stages": declared,
            "takes": traits_of_first(graph),
            "gives": gives,
            "name": name,
            "timeout_s": inf if timeout_s is None else seconds("timeout_s", timeout_s),
            "slo_s": optional_finite_seconds("slo_s", slo_s),
            "part_slo_s": optional_finite_seconds("part_slo_s", part_slo_s),
            "max_stream_s": inf if max_stream_s is None else seconds("max_stream_s", max_stream_s),
            "overload": overload,
            "share": positive("share", share),
            "cpus": None if cpus is None else parse_cores(cpus),
            "max_parallel_starts": max_parallel_starts,
            "routes": routes_of(routes, first if isinstance(first, Stage) else None),
        }
        for field, value in values.items():
            object.__setattr__(self, field, value)
        waits_s = [lone_wait_s(stage.new_policy()) for stage in declared if not stage.traits.in_parts]
        check_lone_wait(sum(waits_s), self.timeout_s)

    def __repr__(self) -> str:
        return f"<Service {self.name}: {in_short(self.graph)}>"

    @property
    def first(self) -> Stage | None:
        """The stage that gets the items; None if branches or a list get them."""
        return self.graph[0] if isinstance(self.graph[0], Stage) else None

    @property
    def is_line(self) -> bool:
        """Whether it is stages in a row, without branches, and each at one place."""
        return is_line(self.graph)

    def _repr_html_(self) -> str:
        return self.as_html(f"Service {self.name}")

    def as_html(self, title: str) -> str:
        """Return a table of the stages, for notebooks.

        Args:
            title: The line above it.
        """
        rows: list[Row] = [("stage", "batches up to", "workers", "run in", "policy")]
        for stage in self.stages:
            batches, policy = (
                ("single items", "") if stage.max_batch_size is None else (str(stage.max_batch_size), stage.policy_name)
            )
            workers = stage.workers_in_short.replace(" workers", "").replace(" worker", "")
            rows.append((stage.name, batches, workers, stage.run_in, policy))
        return as_html(title, rows)
