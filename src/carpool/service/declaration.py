"""A service before it runs, checked: its stages, the settings that they share, and its addresses.

An `HttpRoute` is an address of the service's own, with an adapter that makes an item of what is
sent there.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from carpool.engine.call.invoke import is_async
from carpool.engine.hints import schema
from carpool.engine.http_request import HTTPRequest
from carpool.engine.observe.shown import Row, as_html
from carpool.engine.type_hints import signature_of
from carpool.engine.wire.payload import MOST_ADAPTERS
from carpool.engine.worker.place import Cores
from carpool.model import Adapter, Traits, types_of
from carpool.service.checks import (
    check_lone_wait,
    header_of,
    keep,
    keep_checked,
    lone_wait_s,
    mapping,
    optional_cores,
    optional_count,
    optional_finite_seconds,
    optional_text,
    overload_goal,
    positive,
    seconds_or_endless,
    setting,
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
from carpool.service.stage import Stage

_NAME = "service"
"""The name of a service that ends in branches, if it is given none."""


@dataclass(frozen=True, slots=True, init=False, repr=False, eq=False, weakref_slot=True)
class Declaration:
    """The stages and settings of a service, which `Service` describes and can start.

    It is apart from `Service` so that handles need not import the class that makes them.

    Attributes:
        graph: The elements of which it consists, first to last.
        takes: The traits of what gets the items: the first stage, or what branches agree on.
        gives: The traits of what returns the answers: the last stage, or what branches come to.

    `Service` explains the settings. They are here in the form in which they are kept: infinity
    stands for no limit.
    """

    graph: Line
    stages: tuple[Stage, ...]
    takes: Traits
    gives: Traits
    name: str
    routes: tuple[HttpRoute, ...]
    timeout_s: float = setting(check=seconds_or_endless, from_outside=True)
    slo_s: float | None = setting(check=optional_finite_seconds, from_outside=True)
    part_slo_s: float | None = setting(check=optional_finite_seconds, from_outside=True)
    max_stream_s: float = setting(check=seconds_or_endless, from_outside=True)
    overload: str = setting(check=overload_goal, from_outside=True)
    share: float = setting(check=positive, from_outside=True)
    cpus: Cores | None = setting(check=optional_cores)
    max_parallel_starts: int | None = setting(check=optional_count, from_outside=True)

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
        given = {**locals()}  # all arguments by their names
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
        made = {
            "graph": graph,
            "stages": declared,
            "takes": traits_of_first(graph),
            "gives": gives,
            "name": name,
            "routes": routes_of(routes, first if isinstance(first, Stage) else None),
        }
        for each in fields(self):
            keep(self, each.name, made[each.name] if each.name in made else given[each.name])
        keep_checked(self)
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
        """Return a table of the stages, for notebooks."""
        rows: list[Row] = [("stage", "batches up to", "workers", "run in", "policy")]
        for stage in self.stages:
            batches, policy = (
                ("single items", "") if stage.max_batch_size is None else (str(stage.max_batch_size), stage.policy_name)
            )
            workers = stage.workers_in_short.replace(" workers", "").replace(" worker", "")
            rows.append((stage.name, batches, workers, stage.run_in, policy))
        return as_html(title, rows)


_PATH = re.compile(r"(?:/[A-Za-z0-9._~!$&'()*+,;=:@-]+)+")
_OF_THE_APP = re.compile(r"/(?:livez|readyz|metrics|openapi\.json|docs|dashboard|predict(?:/many)?|models/.*)")


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """One address of a service.

    Attributes:
        path: Where it is.
        adapter: Makes an item of what is sent there; None if that is the item.
        takes: The type of what is sent, by the adapter's hint; `Any` without one.
    """

    path: str
    adapter: Adapter | None
    takes: Any


def routes_of(routes: Any, first: Stage | None) -> tuple[HttpRoute, ...]:
    """Return the routes that a service declares.

    Args:
        routes: As the user gives them: adapters by path, or None.

    Raises:
        ValueError: There are several branches, a path is none or belongs to every app, or there are
            too many routes.
        TypeError: An adapter cannot be called with what is sent, or cannot run in the stage.
    """
    if first is None:
        if routes:
            raise ValueError("routes are for services that begin with a stage, which makes the items: put one first")
        return ()
    declared = tuple(_route(path, adapter, first) for path, adapter in mapping("routes", routes).items())
    if len(declared) > MOST_ADAPTERS:
        raise ValueError(f"routes names {len(declared)} addresses: at most {MOST_ADAPTERS} are possible")
    for what, value in (("size", first.size), ("length", first.length), ("key", first.key)):
        if value is not None and header_of(value) is None and adapters_of(declared):
            raise ValueError(
                f"{what}= of {first.name} weighs items on arrival, but those of routes are made in the workers:"
                f" leave out {what}=, or give None for each address instead of a function"
            )
    return declared


def adapters_of(routes: Sequence[HttpRoute]) -> tuple[Adapter, ...]:
    return tuple(route.adapter for route in routes if route.adapter is not None)


def _route(path: str, adapter: Any, first: Stage) -> HttpRoute:
    if not _PATH.fullmatch(path) or {".", ".."} & set(path.split("/")):
        raise ValueError(
            f"routes has {path!r}, which is no path: begin it with a slash and use letters, digits and"
            " -._~!$&'()*+,;=:@ only, such as '/classify_url'"
        )
    if _OF_THE_APP.fullmatch(path):
        raise ValueError(f"routes has {path!r}, an address that every app has: choose another one")
    if adapter is None:
        return HttpRoute(path, None, first.traits.input_type)
    if not callable(adapter):
        raise TypeError(
            f"routes gives {adapter!r} for {path}: give a function that makes an item of what is sent there, or None"
            " if that is the item"
        )
    _check_adapter(path, adapter, first)
    takes, _ = types_of(adapter)
    if takes is HTTPRequest:
        raise TypeError(
            f"the function for {path} in routes takes an HTTPRequest, but it gets what is in the body: hint that, or"
            " let a model's `decode` take requests"
        )
    problem = schema.why_unreadable(takes)
    if problem is not None:
        raise TypeError(
            f"the function for {path} in routes takes {schema.type_name(takes)} by its hint, which cannot be checked"
            f" over HTTP: {problem}. Give a hint that can be, or leave it out"
        )
    return HttpRoute(path, adapter, takes)


def _check_adapter(path: str, adapter: Adapter, first: Stage) -> None:
    """Raise TypeError unless an adapter can be called with one value, where the stage runs."""
    function: Any = adapter if inspect.isroutine(adapter) else type(adapter).__call__
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"the function for {path} in routes is a generator: return one item")
    try:
        signature_of(adapter).bind(None)
    except ValueError:  # a builtin without a signature
        pass
    except TypeError as error:
        raise TypeError(
            f"the function for {path} in routes is called with one value, what is in the body: {error}"
        ) from None
    if is_async(adapter) and first.run_in != "loop":
        raise TypeError(
            f'the function for {path} in routes is async, but {first.name} runs with run_in="{first.run_in}": write it'
            " with plain def"
        )
    if not is_async(adapter) and first.run_in == "loop":
        raise TypeError(
            f"the function for {path} in routes is a plain function and would block the loop on which {first.name}"
            " runs: write it with async def"
        )
