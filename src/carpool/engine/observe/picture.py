"""A graph as a picture: what is drawn of it, where that stands, and which branch it is in.

Graphs are lines in lines, so a picture needs no search for a good order: the elements of a line
stand beside each other, branches below each other, and each block has a dot where it opens and one
where it closes. So exactly one line comes to each stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, NamedTuple, TypeAlias

from carpool.engine.core.graph import JOIN, After, Each, Fork, Graph, Node, Switch

Kind: TypeAlias = Literal["start", "stage", "parallel", "join", "route", "merge", "list", "gather", "end"]

_SIGN_WIDTH = 0.6  # of the dots where blocks open and close; a stage has 1
_LIST = "each"  # the name of the body of a list among names of branches


class Branch(NamedTuple):
    """A branch of the block with this number in its graph."""

    block: int
    name: str


class PlaceInGraph(NamedTuple):
    """Where a stage stands in a graph.

    Attributes:
        name: The names of the branches around it, and then that of the stage, with slashes between
            them; a second place of the same name has a number.
        branches: In which branches it is, the outermost first.
    """

    name: str
    branches: tuple[Branch, ...]


class Dot(NamedTuple):
    """A thing in a picture.

    Attributes:
        kind: What it is; "join", "merge" and "gather" close a "parallel", a "route" and a "list".
        name: Of a stage, its name; of a "parallel" that keeps errors, "values"; else empty.
        x: Of its middle, in widths of a stage.
        y: Of its middle, in heights of a stage.
        node: The place of the stage; None if it is none.
    """

    kind: Kind
    name: str
    x: float
    y: float
    node: Node | None = None


class Edge(NamedTuple):
    """A line of a picture.

    Attributes:
        begins: The number of the dot where it begins.
        ends: The number of the dot where it ends.
        name: The name of the branch that begins with it; empty if none does.
        y: The height at which it runs if it is a branch without stages; else None.
    """

    begins: int
    ends: int
    name: str = ""
    y: float | None = None


_End: TypeAlias = tuple[int, str, float | None]
"""Where a link begins that leads on, its name, and its height, as for `Edge`."""


@dataclass(slots=True)
class Picture:
    width: float = 0.0
    height: float = 0.0
    dots: list[Dot] = field(default_factory=list)
    links: list[Edge] = field(default_factory=list)


def picture(graph: Graph) -> Picture:
    found = Picture()
    line = _line(graph.start)
    found.height = _height(line)
    middle = found.height / 2
    found.dots.append(Dot("start", "", _SIGN_WIDTH / 2, middle))
    width, ends = _draw(found, line, _SIGN_WIDTH, 0.0, found.height, [(0, "", None)])
    found.dots.append(Dot("end", "", width + _SIGN_WIDTH / 2, middle))
    _link(found, ends)
    found.width = width + _SIGN_WIDTH
    return found


def places(graph: Graph) -> dict[Node, PlaceInGraph]:
    found: dict[Node, PlaceInGraph] = {}
    counts: dict[str, int] = {}
    for node, inside in _walk(_line(graph.start), (), count()):
        name = "/".join([*[branch.name for branch in inside], node.name])
        counts[name] = counts.get(name, 0) + 1
        found[node] = PlaceInGraph(name if counts[name] == 1 else f"{name} {counts[name]}", inside)
    return found


# -- lines in lines

_Line: TypeAlias = Sequence[Node | Fork | Each | Switch]


def _line(after: After, stop: After = None) -> _Line:
    """Return what stands beside each other from `after` on, up to a join, the end, or `stop`."""
    found: list[Node | Fork | Each | Switch] = []
    while after is not None and after is not stop and isinstance(after, Node | Fork | Each | Switch):
        found.append(after)
        after = after.after if isinstance(after, Node) else after.then
    return found


def _branches(block: Fork | Each | Switch) -> list[tuple[str, _Line]]:
    if isinstance(block, Fork):
        names = block.names or [str(i) for i in range(len(block.branches))]
        return [(name, _line(branch, JOIN)) for name, branch in zip(names, block.branches, strict=True)]
    if isinstance(block, Each):
        return [(_LIST, _line(block.body, JOIN))]
    return [(name, _line(way, block.then)) for name, way in block.ways.items()]


def _walk(line: _Line, inside: tuple[Branch, ...], numbers: Iterator[int]) -> Iterator[tuple[Node, tuple[Branch, ...]]]:
    for each in line:
        if isinstance(each, Node):
            yield each, inside
        else:
            block = next(numbers)
            for name, branch in _branches(each):
                yield from _walk(branch, (*inside, Branch(block, name)), numbers)


# -- where things stand


def _height(line: _Line) -> float:
    return max([_height_of(each) for each in line], default=1.0)


def _height_of(element: Node | Fork | Each | Switch) -> float:
    return 1.0 if isinstance(element, Node) else sum(_height(branch) for _, branch in _branches(element))


_SIGNS: dict[type, tuple[Kind, Kind]] = {
    Fork: ("parallel", "join"),
    Switch: ("route", "merge"),
    Each: ("list", "gather"),
}


def _draw(
    found: Picture, line: _Line, x: float, top: float, height: float, ends: list[_End]
) -> tuple[float, list[_End]]:
    """Draw a line into the room of a `height` below `top`, and return where it ends, and the dots
    at which lines begin that lead on.
    """
    middle = top + height / 2
    for each in line:
        if isinstance(each, Node):
            found.dots.append(Dot("stage", each.name, x + 0.5, middle, each))
            x += 1
        else:
            x, ends = _draw_block(found, each, x, middle, ends)
            continue
        ends = _link(found, ends)
    return x, ends


def _draw_block(
    found: Picture, block: Fork | Each | Switch, x: float, middle: float, ends: list[_End]
) -> tuple[float, list[_End]]:
    opens, closes = _SIGNS[type(block)]
    kept = "values" if isinstance(block, Fork) and block.keeps_errors else ""
    found.dots.append(Dot(opens, kept, x + _SIGN_WIDTH / 2, middle))
    ((opening, *_),) = _link(found, ends)
    inside, right, leave = x + _SIGN_WIDTH, x + _SIGN_WIDTH, []
    top = middle - _height_of(block) / 2
    for name, branch in _branches(block):
        height = _height(branch)
        label = "" if isinstance(block, Each) or (isinstance(block, Fork) and block.names is None) else name
        row = None if branch else top + height / 2
        end, lines = _draw(found, branch, inside, top, height, [(opening, label, row)])
        right, top = max(right, end), top + height
        leave += lines
    found.dots.append(Dot(closes, "", right + _SIGN_WIDTH / 2, middle))
    return right + _SIGN_WIDTH, _link(found, leave)


def _link(found: Picture, ends: list[_End]) -> list[_End]:
    latest = len(found.dots) - 1
    found.links += [Edge(begins, latest, name, y) for begins, name, y in ends]
    return [(latest, "", None)]
