"""A service's graph as a picture: Mermaid text, and SVG.

Places stand in columns by their distance from the caller. What goes on from one to the next is an
edge; an early answer is none, as any stage may give one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final

from carpool.service.declaration import Declaration
from carpool.service.graph import ForEach, Line, Parallel, Route, branches_of, stages_in
from carpool.service.stage import Stage

_WIDTH: Final = 168
_NARROW: Final = 92  # of what is no stage
_HEIGHT: Final = 44
_COLUMN: Final = 216
_ROW: Final = 68
_MARGIN: Final = 20
_MERMAID: Final = {
    "end": '(["{}"])',
    "stage": '["{}"]',
    "split": '{{{{"{}"}}}}',
    "route": '{{"{}"}}',
    "join": '(("{}"))',
}
_RADIUS: Final = {"end": 22, "stage": 6, "split": 16, "route": 16, "join": 22}


@dataclass(eq=False)
class Mark:
    """One thing that is drawn.

    Attributes:
        kind: "end" for the caller, "stage", "split" for a `Parallel` or a `ForEach`, "route", or
            "join".
        text: Its lines of text.
        stage: The stage's name, of a stage.
        column: How far it is from the caller.
        row: Its place in the column.
    """

    kind: str
    text: list[str]
    stage: str = ""
    column: int = 0
    row: float = 0.0


@dataclass
class Drawing:
    """What is drawn of a graph.

    Attributes:
        marks: Each before those that follow it.
        edges: From one to another, each with a label, which may be empty.
    """

    marks: list[Mark] = field(default_factory=list)
    edges: list[tuple[Mark, Mark, str]] = field(default_factory=list)

    def add(self, kind: str, text: list[str], before: Sequence[tuple[Mark, str]], stage: str = "") -> Mark:
        """Add a mark with edges from those before it, and return it."""
        mark = Mark(kind, text, stage, max([each.column + 1 for each, _ in before], default=0))
        self.marks.append(mark)
        self.edges += [(each, mark, label) for each, label in before]
        return mark


Ends = list[tuple[Mark, str]]
"""What the next mark follows, with the labels of the edges to it."""


def drawing_of(service: Declaration, notes: Mapping[str, str] | None = None) -> Drawing:
    """Return what is drawn of a service.

    Args:
        service: The service.
        notes: A line about each stage, by its name; without it, how the stages are declared.
    """
    drawing = Drawing()
    if notes is None:
        notes = {stage.name: in_short(stage) for stage in service.stages}
    start = drawing.add("end", ["request"], [])
    ends = _line(drawing, service.graph, [(start, "")], notes)
    drawing.add("end", ["answer"], ends)
    columns: dict[int, list[Mark]] = {}
    for mark in drawing.marks:
        columns.setdefault(mark.column, []).append(mark)
    most = max(map(len, columns.values()))
    for marks in columns.values():
        for i, mark in enumerate(marks):
            mark.row = i + (most - len(marks)) / 2
    return drawing


def in_short(stage: Stage) -> str:
    """Return how a stage is declared, in a few words."""
    batches = "single items" if stage.max_batch_size is None else f"up to {stage.max_batch_size}"
    return f"{stage.workers_in_short}, {batches}"


def _line(drawing: Drawing, line: Line, ends: Ends, notes: Mapping[str, str]) -> Ends:
    """Draw a line behind some marks, and return what follows it follows."""
    for element in line:
        if isinstance(element, Stage):
            text = [element.name, *filter(None, [notes.get(element.name, "")])]
            ends = [(drawing.add("stage", text, ends, element.name), "")]
            continue
        kind = "route" if isinstance(element, Route) else "split"
        head = drawing.add(kind, [_title(element)], ends)
        found: Ends = []
        for name, branch in zip(_names(element), branches_of(element), strict=True):
            found += _line(drawing, branch, [(head, name)], notes)
        ends = found if isinstance(element, Route) else [(drawing.add("join", ["join"], found), "")]
    return ends


def _title(element: Parallel | Route | ForEach) -> str:
    if isinstance(element, Parallel):
        return "all" if element.errors == "raise" else "all, errors as values"
    return "one of" if isinstance(element, Route) else "for each"


def _names(element: Parallel | Route | ForEach) -> Sequence[str]:
    if isinstance(element, Route):
        return [*element.branches]
    return (isinstance(element, Parallel) and element.names) or [""] * len(branches_of(element))


def as_mermaid(service: Declaration, notes: Mapping[str, str] | None = None) -> str:
    """Return a flowchart of Mermaid; see `drawing_of` for the arguments."""
    drawing = drawing_of(service, notes)
    ids = {mark: f"n{i}" for i, mark in enumerate(drawing.marks)}
    lines = ["flowchart LR"]
    for mark in drawing.marks:
        text = "<br/>".join(each.replace('"', "#quot;") for each in mark.text)
        lines.append(f"    {ids[mark]}{_MERMAID[mark.kind].format(text)}")
    for before, after, label in drawing.edges:
        arrow = f'-->|"{label.replace(chr(34), "#quot;")}"|' if label else "-->"
        lines.append(f"    {ids[before]} {arrow} {ids[after]}")
    places = [mark.stage for mark in drawing.marks]
    for i, stage in enumerate(stages_in(service.graph)):
        if places.count(stage.name) > 1:  # one pool at several places
            lines.append(f"    classDef shared{i} stroke-width:3px")
            shared = [ids[mark] for mark in drawing.marks if mark.stage == stage.name]
            lines.append(f"    class {','.join(shared)} shared{i}")
    return "\n".join(lines) + "\n"


def as_svg(service: Declaration, notes: Mapping[str, str] | None = None) -> str:
    """Return a picture; see `drawing_of` for the arguments."""
    drawing = drawing_of(service, notes)
    width = 2 * _MARGIN + _COLUMN * max(mark.column for mark in drawing.marks) + _WIDTH
    height = 3 * _MARGIN + int(_ROW * max(mark.row for mark in drawing.marks)) + _HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="system-ui, sans-serif" font-size="13" role="img">',
        f"<title>{escape(service.name)}</title>",
        '<defs><marker id="to" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#667"/></marker></defs>',
    ]
    for before, after, label in drawing.edges:
        x1, y1 = _at(before)[0] + _width(before), _at(before)[1] + _HEIGHT / 2
        x2, y2 = _at(after)[0], _at(after)[1] + _HEIGHT / 2
        bend = (x2 - x1) / 2
        lift = _HEIGHT if after.column - before.column > 1 else 0  # around what stands between
        path = f"M{x1:g} {y1:g}C{x1 + bend:g} {y1 - lift:g} {x2 - bend:g} {y2 - lift:g} {x2:g} {y2:g}"
        lines.append(f'<path d="{path}" fill="none" stroke="#667" marker-end="url(#to)"/>')
        if label:
            text = f'<text x="{x1 + bend:g}" y="{(y1 + y2) / 2 - 0.75 * lift - 4:g}" text-anchor="middle" fill="#445">'
            lines.append(f"{text}{escape(label)}</text>")
    for mark in drawing.marks:
        x, y = _at(mark)
        fill = "#eef3ff" if mark.kind == "stage" else "#f6f6f6"
        size = f'width="{_width(mark)}" height="{_HEIGHT}" rx="{_RADIUS[mark.kind]}"'
        lines.append(f'<rect x="{x:g}" y="{y:g}" {size} fill="{fill}" stroke="#667"/>')
        for i, text in enumerate(mark.text):
            font = "" if i == 0 else ' font-size="11" fill="#445"'
            line = y + _HEIGHT / 2 + 5 + 15 * (i - (len(mark.text) - 1) / 2)
            lines.append(
                f'<text x="{x + _width(mark) / 2:g}" y="{line:g}" text-anchor="middle"{font}>{escape(text)}</text>'
            )
    return "\n".join([*lines, "</svg>"]) + "\n"


def _at(mark: Mark) -> tuple[float, float]:
    """Return the left upper corner of a mark."""
    return _MARGIN + _COLUMN * mark.column + (_WIDTH - _width(mark)) / 2, 2 * _MARGIN + _ROW * mark.row


def _width(mark: Mark) -> int:
    return _WIDTH if mark.stage or len(mark.text[0]) > 12 else _NARROW
