"""The graph of a service for its core and its workers: where results go from each place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Final

from carpool.engine.core.graph import JOIN, After, Declared, Each, Fork, Graph, Node, Switch
from carpool.engine.wire.payload import CUSTOM
from carpool.engine.worker.own import SPOTS, Goes, Spot, Ways
from carpool.model import Traits
from carpool.service.graph import Block, Line, Parallel, Route, branches_of, stages_in
from carpool.service.stage import Stage

_MOST_SPOTS_OF_STEPS: Final = 4  # an order has two bits for them


def declared(line: Line, crews: Mapping[int, Any]) -> Declared:
    """Return a line in the form that the core takes.

    Args:
        crews: The batchers and steppers of its stages, by the ids of these.
    """
    return [_declared(each, crews) for each in line]


def _declared(element: Stage | Block, crews: Mapping[int, Any]) -> Declared:
    if isinstance(element, Stage):
        return crews[id(element)]  # type: ignore[no-any-return]
    inner = [declared(branch, crews) for branch in branches_of(element)]
    if isinstance(element, Parallel):
        return Fork(inner, element.names, keeps_errors=element.errors == "values")
    if isinstance(element, Route):
        ways = dict(zip(element.branches, inner, strict=True))
        return Switch(ways, element.choose, refuses=element.when_full == "refuse")
    return Each(inner[0], element.max_items)


def outline(line: Line) -> Graph:
    """Return the graph of a line without crews that run it: each node's crew has its `stage`."""
    crews = {
        id(stage): SimpleNamespace(name=stage.name, stage=stage, queue=SimpleNamespace(max_size=stage.max_queue_size))
        for stage in stages_in(line)
    }
    return Graph(declared(line, crews), None)


def spots_of(line: Line, last: Traits) -> tuple[list[tuple[Spot, ...]], list[int]]:
    """Return for each stage of a service where its results go, and for each node of its
    graph the number of its spot.

    Those where results are answers come first.

    Raises:
        ValueError: A stage has too many spots.
    """
    graph = outline(line)
    by_stage: dict[int, dict[Any, Spot]] = {id(stage): {} for stage in stages_in(line)}
    keys: list[tuple[int, Any]] = []
    for node in sorted(graph.nodes, key=lambda node: node.after is not None):
        goes = tuple([_goes(way.after, node) for way in node.ways] or [_goes(node.after, node)])
        key: Any = goes if not node.ways else id(node)
        no_early = ""
        if goes != (Goes.ANSWER,) and last.produces:
            no_early = (
                f"stage {node.name} returned Done, which would go past encode of {last.name}: let the last stage give"
                " this answer, too"
            )
        ways = _ways(node.after, iter(range(len(goes)))) if isinstance(node.after, Switch) else None
        by_stage[id(node.crew.stage)].setdefault(key, Spot(goes, ways, last.output_type, no_early))
    for node in graph.nodes:
        goes = tuple([_goes(way.after, node) for way in node.ways] or [_goes(node.after, node)])
        keys.append((id(node.crew.stage), goes if not node.ways else id(node)))
    for stage in stages_in(line):
        most = _MOST_SPOTS_OF_STEPS if stage.traits.in_parts else SPOTS
        if len(by_stage[id(stage)]) > most:
            raise ValueError(
                f"stage {stage.name} is before {len(by_stage[id(stage)])} different Routes or ends: at most {most} are"
                " possible. Give some of its places a stage of their own"
            )
        if len(by_stage[id(stage)]) > 1 and len(stage.traits.produces) > SPOTS - CUSTOM:
            raise ValueError(
                f"stage {stage.name} is both before others and at the end, and produces {len(stage.traits.produces)}"
                f" content types: at most {SPOTS - CUSTOM} are possible there"
            )
    numbers = {stage: {key: i for i, key in enumerate(spots)} for stage, spots in by_stage.items()}
    return [tuple(spots.values()) for spots in by_stage.values()], [numbers[stage][key] for stage, key in keys]


def _goes(after: After, node: Node) -> Goes:
    """Return where a result of a node goes that takes a way."""
    if after is None:
        return Goes.ANSWER
    if after is JOIN:
        return Goes.PART if node.block is not None and node.block.ends else Goes.ON
    return Goes.LIST if isinstance(after, Each) else Goes.ON


def _ways(switch: Switch, numbers: Iterator[int]) -> Ways:
    by_name = {
        name: _ways(after, numbers) if isinstance(after, Switch) else next(numbers)
        for name, after in switch.ways.items()
    }
    return Ways(switch.choose, by_name)
