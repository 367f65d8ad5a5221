"""The graph of a service in a simulation: its parts, and the events at its joints.

Models are not run, so it must be said how often an item takes each branch of a `Route`, how often a
stage answers early (`Done`), and how long lists are. Everything that happens to a request is drawn
by its number and the place where it happens, so all policies meet the same requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias

from carpool.engine.core.batch import DONE_EARLY, Batch
from carpool.engine.core.core import Core
from carpool.engine.core.graph import Declared, Each, Fork, Switch
from carpool.service.checks import at_least
from carpool.service.declaration import Declaration
from carpool.service.graph import Line, Parallel, Route, branches_of, stages_in
from carpool.service.stage import Stage

USUAL_ITEMS = (4,)
"""How long lists are if it is not said."""


class _Block(NamedTuple):
    """Branches, by the number of the block."""

    number: int
    kind: str
    branches: tuple[_Parts, ...]
    names: tuple[str, ...] = ()
    keeps_errors: bool = False
    refuses: bool = False
    shares: tuple[float, ...] = ()


_Parts: TypeAlias = "tuple[int | _Block, ...]"
"""Numbers of stages, and blocks, one after the other."""


class _Item(int):
    """The number of a request, as one of the items that it has become.

    Attributes:
        key: Which one: the positions in all lists around it.
        before: The item of which the list was made.
    """

    key: tuple[int, ...]
    before: int


@dataclass(frozen=True)
class SimulatedGraph:
    """A service's graph for `run`, which can be sent to other processes.

    Attributes:
        early: The share of the items for which each answers early.
        items: How long lists are; each list has one of these lengths, all with equal chance.
    """

    stages: tuple[str, ...]
    limits: tuple[int, ...]
    workers: tuple[int | str, ...]
    queues: tuple[float, ...]
    early: tuple[float, ...]
    items: tuple[int, ...]
    parts: _Parts

    @property
    def visits(self) -> tuple[float, ...]:
        """How often a request comes to each stage, on average.

        Of a list one of whose items is answered early it is the most.
        """
        found = [0.0] * len(self.stages)
        self._visit(self.parts, 1.0, found)
        return tuple(found)

    def _visit(self, parts: _Parts, share: float, found: list[float]) -> float:
        """Add the visits of a line to which so many items of a request come; return how many leave
        it.
        """
        for part in parts:
            if isinstance(part, int):
                found[part] += share
                share *= 1.0 - self.early[part]
            elif part.kind == "each":
                n = sum(self.items) / len(self.items)
                share = self._visit(part.branches[0], share * n, found) / n
            else:
                shares = part.shares or (1.0,) * len(part.branches)
                left = [
                    self._visit(branch, share * each, found) for branch, each in zip(part.branches, shares, strict=True)
                ]
                share = sum(left) if part.shares else min(left)
        return share

    def costs(self, cost: Any) -> list[Any]:
        """Return the cost of each stage.

        Args:
            cost: One for all stages, or a dict of them by name.

        Raises:
            ValueError: The dict lacks a stage, or has one that there is not.
        """
        if not isinstance(cost, Mapping) or not all(isinstance(name, str) for name in cost):
            return [cost] * len(self.stages)
        unknown = sorted({*cost} - {*self.stages})
        lacking = [name for name in self.stages if name not in cost]
        if unknown or lacking:
            what = f"has no stage {unknown[0]!r}" if unknown else f"has a stage {lacking[0]!r} without a cost"
            raise ValueError(f"the graph {what}: cost= needs one for each of {', '.join(self.stages)}")
        return [cost[name] for name in self.stages]

    def declared(self, crews: Sequence[Any], seed: int) -> Declared:
        """Return it in the form that the core takes."""

        def line(parts: _Parts) -> list[Declared]:
            return [crews[part] if isinstance(part, int) else block(part) for part in parts]

        def block(part: _Block) -> Declared:
            branches: list[Declared] = [line(branch) for branch in part.branches]
            if part.kind == "parallel":
                return Fork(branches, keeps_errors=part.keeps_errors)
            if part.kind == "each":
                return Each(branches[0])
            ways = dict(zip(part.names, branches, strict=True))
            return Switch(ways, _Chooser(seed, part), refuses=part.refuses)

        return line(self.parts)

    def content(self, seed: int) -> _Content:
        """Return the maker of lists."""
        return _Content(seed, self.items)

    def early_of(self, core: Core, seed: int) -> _EarlyAnswers:
        """Return the function that picks the early answers among the results of a batch."""
        return _EarlyAnswers(seed, self.early, core)


class _Chooser:
    def __init__(self, seed: int, block: _Block) -> None:
        self._seed = seed
        self._block = block

    def __call__(self, item: int) -> str:
        left = _drawn(self._seed, self._block.number, item)
        for name, share in zip(self._block.names, self._block.shares, strict=True):
            left -= share
            if left < 0:
                return name
        return next(name for name, share in zip(self._block.names, self._block.shares, strict=True) if share)


class _Content:
    """The content of a simulation, whose items are numbers of requests.

    All lists of one item have the same length.
    """

    def __init__(self, seed: int, lengths: Sequence[int]) -> None:
        self._seed = seed
        self._lengths = lengths

    def measure(self, result: Any) -> int:
        """Return 0: nothing holds any bytes."""
        return 0

    def choose(self, choose: Callable[[Any], str], item: Any, format: int, known: str) -> str:
        return choose(item)

    def handed_on(self, item: Any, format: int, accept: int) -> Any:
        return item

    def as_value(self, error: Exception, accept: int) -> Any:
        return error

    def items(self, item: Any, format: int, most: float) -> list[Any]:
        n = self._lengths[int(_drawn(self._seed, "items", item) * len(self._lengths))]
        found = []
        for i in range(n):
            made = _Item(item)
            made.key, made.before = (*getattr(item, "key", ()), i), item
            found.append(made)
        return found

    def joined(self, block: Any, results: Sequence[Any], accept: int) -> Any:
        """Return the item that went into the block."""
        return results[0] if block.is_tuple else results[0].before


class _EarlyAnswers:
    def __init__(self, seed: int, shares: Sequence[float], core: Core) -> None:
        self._seed = seed
        self._shares = shares
        self._numbers = {node: i for i, node in enumerate(core.flow.graph.nodes)}

    def __call__(self, batch: Batch) -> dict[int, object] | None:
        share = self._shares[batch.stage]
        if not share:
            return None
        found: dict[int, object] = {}
        for i, request in enumerate(batch.requests):
            number = self._numbers.get(request.node)
            if number is not None and _drawn(self._seed, f"early {number}", request.item) < share:
                found[i] = DONE_EARLY
        return found or None


def _drawn(seed: int, where: object, item: Any) -> float:
    """Return a number from 0 to 1 that depends on nothing but this."""
    text = f"{seed}/{where}/{int(item)}/{getattr(item, 'key', ())}"
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest()) / 2**56


def graph_of(
    graph: Any,
    ways: Mapping[str, float] | None = None,
    early: Mapping[str, float] | None = None,
    items: int | Sequence[int] | None = None,
) -> SimulatedGraph:
    """Return the graph of a service for `run`.

    Args:
        graph: A service, or what one is made of; or a graph for `run`, which is returned as it is.
        ways: The share of the items that take each branch of a `Route`, by its name, from 0 to 1.
            Branches that are not named share the rest evenly.
        early: The share of the items for which a stage answers early, by the stage's name.
        items: How long lists for `ForEach` are: a number, or several, of which each list has one.

    Raises:
        ValueError: A share makes no sense, or names no branch or stage; or a stage is one that
            answers in parts.
        TypeError: It is no graph.
    """
    if isinstance(graph, SimulatedGraph):
        if ways or early or items:
            raise ValueError("ways, early and items are in the graph already: leave them out")
        return graph
    line = graph.graph if isinstance(graph, Declaration) else Declaration(graph).graph
    stages = stages_in(line)
    for stage in stages:
        if stage.traits.in_parts:
            raise ValueError(f"stage {stage.name} answers in parts, and a graph of such stages cannot be simulated yet")
    names = [stage.name for stage in stages]
    _check_shares("early", early, names, "stage")
    made = _Maker(names, dict(ways or {}))
    parts = made.line(line)
    _check_shares("ways", ways, made.known, "branch")
    lengths = USUAL_ITEMS if items is None else tuple(items) if isinstance(items, Sequence) else (items,)
    if not lengths:
        raise ValueError("items must be a number or several, not an empty list")
    return SimulatedGraph(
        tuple(names),
        tuple(stage.max_batch_size or 1 for stage in stages),
        tuple(_workers_of(stage) for stage in stages),
        tuple(stage.max_queue_size for stage in stages),
        tuple((early or {}).get(name, 0.0) for name in names),
        tuple(at_least("items", n, 1) for n in lengths),
        parts,
    )


def graph_from(settings: Mapping[str, Any]) -> SimulatedGraph | None:
    """Return the graph that some settings of `run` give; None for stages in a row."""
    graph, *more = [settings.get(name) for name in ("graph", "ways", "early", "items")]
    return None if graph is None else graph_of(graph, *more)


def _workers_of(stage: Stage) -> int | str:
    """Return how many workers a stage has; one that waits for some to join has one."""
    least, most = max(1, stage.least_workers), max(1, stage.most_workers)
    return most if least == most else f"{least}-{most}"


def _check_shares(setting: str, shares: Mapping[str, float] | None, known: Sequence[str], what: str) -> None:
    for name, share in (shares or {}).items():
        if name not in known:
            raise ValueError(f"{setting} names a {what} {name!r}; there are {', '.join(known) or 'none'}")
        if not 0 <= share <= 1:
            raise ValueError(f"{setting} must be shares from 0 to 1, and has {share!r} for {name!r}")


class _Maker:
    """Makes the parts of a graph.

    Attributes:
        known: The names of all branches of routes.
    """

    def __init__(self, stages: Sequence[str], ways: Mapping[str, float]) -> None:
        self._stages = stages
        self._ways = ways
        self._blocks = 0
        self.known: list[str] = []

    def line(self, line: Line) -> _Parts:
        return tuple(self._stages.index(each.name) if isinstance(each, Stage) else self._block(each) for each in line)

    def _block(self, element: Any) -> _Block:
        self._blocks += 1
        number = self._blocks
        branches = tuple(self.line(branch) for branch in branches_of(element))
        if isinstance(element, Parallel):
            return _Block(number, "parallel", branches, keeps_errors=element.errors == "values")
        if not isinstance(element, Route):
            return _Block(number, "each", branches)
        names = tuple(element.branches)
        self.known += names
        given = [self._ways.get(name) for name in names]
        rest = 1.0 - sum(share for share in given if share is not None)
        others = given.count(None)
        if rest < -1e-9 or (not others and rest > 1e-9):
            raise ValueError(f"ways of {', '.join(names)} add up to {1.0 - rest:g}, and must add up to 1")
        shares = tuple(max(0.0, rest) / others if share is None else share for share in given)
        return _Block(number, "route", branches, names, refuses=element.when_full == "refuse", shares=shares)
