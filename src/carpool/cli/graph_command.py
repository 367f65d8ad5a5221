"""`carpool graph`: draws the graph of a service, as Mermaid text or as SVG.

Things stand where `observe/picture.py` puts them, as on the dashboard. An early answer is no line,
as any stage may give one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from cyclopts import Parameter

from carpool.cli.sources import FAILED, NoAnswer, fail, find_service, send, server_key, server_url
from carpool.engine.observe.picture import Dot, Edge, Kind, Picture, picture
from carpool.service.declaration import Declaration
from carpool.service.graph import stages_in
from carpool.service.places import outline
from carpool.service.stage import Stage

_OK = 200
_DATA = "/dashboard/data"


def graph(
    target: str,
    /,
    *,
    format: Annotated[Literal["mermaid", "svg"] | None, Parameter(name="--format")] = None,
    out: Path | None = None,
    url: str | None = None,
    key_file: Path | None = None,
    watch_s: float = 2.0,
) -> None:
    """Draw the graph of a service: its stages, branches, routes and lists.

    It is printed as Mermaid text, which GitHub and many editors show as a picture, or written as
    SVG. The service is not started.

    Example: carpool graph program:service --out graph.svg

    Example: carpool graph program:service --url http://127.0.0.1:8000

    Parameters
    ----------
    target:
        The service, as module:attribute.
    format:
        mermaid or svg. By default it is svg where --out ends in .svg, and else mermaid.
    out:
        The file to write it to, in the place of standard output.
    url:
        A server on which the service runs, or its admin address: each stage is drawn with its rate
        and its times.
    key_file:
        A file with an API key, if the server needs one; CARPOOL_KEY may have it instead.
    watch_s:
        For how long the server is watched.
    """
    service = find_service(target)
    notes = None if url is None else _notes(server_url(url, admin=True), service.name, key_file, watch_s)
    is_svg = format == "svg" or (format is None and out is not None and out.suffix == ".svg")
    text = as_svg(service, notes) if is_svg else as_mermaid(service, notes)
    if out is None:
        print(text, end="")
    else:
        out.write_text(text)


def _notes(url: str, name: str, key_file: Path | None, watch_s: float) -> dict[str, str]:
    before = _figures(url, name, key_file)
    time.sleep(max(0.1, watch_s))
    after = _figures(url, name, key_file)
    took_s = after["time"] - before["time"]
    earlier = {stage["name"]: stage for stage in before["stages"]}
    return {stage["name"]: _note(earlier.get(stage["name"], stage), stage, took_s) for stage in after["stages"]}


def _note(before: dict[str, Any], after: dict[str, Any], took_s: float) -> str:
    """Return the rate of a stage, and the mean times of its requests and batches lately."""
    rate = (_items(after) - _items(before)) / took_s if took_s > 0 else 0.0
    waiting, running = (_mean_ms(before[kind], after[kind]) for kind in ("queue", "compute"))
    return f"{rate:.3g}/s, {waiting} waiting, {running} a batch"


def _items(stage: dict[str, Any]) -> int:
    return sum(int(size) * count for size, count in stage["batch_sizes"].items())


def _mean_ms(before: dict[str, Any], after: dict[str, Any]) -> str:
    n = sum(after["counts"]) - sum(before["counts"])
    return f"{1000 * (after['sum_s'] - before['sum_s']) / n:.3g} ms" if n > 0 else "-"


def _figures(url: str, name: str, key_file: Path | None) -> dict[str, Any]:
    try:
        answer = send(url, "GET", _DATA, key=server_key(key_file), timeout_s=8.0)
    except NoAnswer as error:
        fail(f"no carpool server answers at {url} ({error}): say where it listens with --url", FAILED)
    except OSError as error:
        fail(str(error), FAILED)
    if answer.status != _OK:
        fail(f"{url} answers {answer.status} to {_DATA}: give its admin address, and a key if it needs one", FAILED)
    found = answer.json["figures"]
    for service in found["services"]:
        if service["name"] == name:
            return {**service, "time": found["time"]}
    fail(f"{url} has no service {name!r}; it has {', '.join(each['name'] for each in found['services'])}", FAILED)


_COLUMN: Final = 224
_ROW: Final = 68
_MARGIN: Final = 20
_WIDTH: Final = 168
_NARROW: Final = 84  # of what is no stage
_HEIGHT: Final = 44
_SMALL: Final = 12
_BEND: Final = 22
_TEXTS: Final[Mapping[Kind, str]] = {
    "start": "request",
    "parallel": "all",
    "join": "join",
    "route": "one of",
    "merge": "",
    "list": "for each",
    "gather": "join",
    "end": "answer",
}
_MERMAID: Final[Mapping[Kind, str]] = {
    "start": '(["{}"])',
    "stage": '["{}"]',
    "parallel": '{{{{"{}"}}}}',
    "join": '(("{}"))',
    "route": '{{"{}"}}',
    "merge": '(("{} "))',
    "list": '{{{{"{}"}}}}',
    "gather": '(("{}"))',
    "end": '(["{}"])',
}
_OPENS: Final = ("start", "parallel", "route", "list")


def _in_short(stage: Stage) -> str:
    batches = "single items" if stage.max_batch_size is None else f"up to {stage.max_batch_size}"
    return f"{stage.workers_in_short}, {batches}"


def as_mermaid(service: Declaration, notes: Mapping[str, str] | None = None) -> str:
    """Return a flowchart of Mermaid; `notes` are lines about each stage, in the place of how it is
    declared.
    """
    drawn, notes = _drawn(service, notes)
    lines = ["flowchart LR"]
    for i, dot in enumerate(drawn.dots):
        text = "<br/>".join(each.replace('"', "#quot;") for each in _text_of(dot, notes))
        lines.append(f"    n{i}{_MERMAID[dot.kind].format(text)}")
    for edge in drawn.links:
        arrow = f'-->|"{edge.name.replace(chr(34), "#quot;")}"|' if edge.name else "-->"
        lines.append(f"    n{edge.begins} {arrow} n{edge.ends}")
    for i, stage in enumerate(stages_in(service.graph)):
        shared = [f"n{j}" for j, dot in enumerate(drawn.dots) if dot.kind == "stage" and dot.name == stage.name]
        if len(shared) > 1:  # one pool at several places
            lines += [f"    classDef shared{i} stroke-width:3px", f"    class {','.join(shared)} shared{i}"]
    return "\n".join(lines) + "\n"


def as_svg(service: Declaration, notes: Mapping[str, str] | None = None) -> str:
    """Return a picture; see `as_mermaid`."""
    drawn, notes = _drawn(service, notes)
    width, height = 2 * _MARGIN + _COLUMN * drawn.width, 2 * _MARGIN + _ROW * drawn.height
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
        f' height="{height:g}" font-family="system-ui, sans-serif" font-size="13" role="img">',
        f"<title>{escape(service.name)}</title>",
        '<defs><marker id="to" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#667"/></marker></defs>',
    ]
    for edge in drawn.links:
        lines += _line(edge, drawn)
    for dot in drawn.dots:
        lines += _shape(dot, notes)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _drawn(service: Declaration, notes: Mapping[str, str] | None) -> tuple[Picture, Mapping[str, str]]:
    return picture(outline(service.graph)), notes or {stage.name: _in_short(stage) for stage in service.stages}


def _text_of(dot: Dot, notes: Mapping[str, str]) -> list[str]:
    if dot.kind == "stage":
        return [dot.name, *filter(None, [notes.get(dot.name, "")])]
    return [f"{_TEXTS[dot.kind]}, errors as values" if dot.name else _TEXTS[dot.kind]]


def _line(edge: Edge, drawn: Picture) -> list[str]:
    begins, ends = drawn.dots[edge.begins], drawn.dots[edge.ends]
    (x, y), (right, low) = _at(begins), _at(ends)
    x, right = x + _width(begins) / 2, right - _width(ends) / 2
    row = low if begins.kind in _OPENS else y
    if edge.y is not None:
        row = _MARGIN + _ROW * edge.y
    path = f"M{x:g} {y:g}"
    if row != y:
        path += f"C{x + _BEND:g} {y:g} {x:g} {row:g} {x + _BEND:g} {row:g}"
    if row != low:
        path += f"L{right - _BEND:g} {row:g}C{right:g} {row:g} {right - _BEND:g} {low:g} {right:g} {low:g}"
    else:
        path += f"L{right:g} {low:g}"
    lines = [f'<path d="{path}" fill="none" stroke="#667" marker-end="url(#to)"/>']
    if edge.name:
        middle = (x + right) / 2 + (_BEND / 2 if row != y and row == low else 0)
        text = f'<text x="{middle:g}" y="{row - 5:g}" text-anchor="middle" font-size="11" fill="#445">'
        lines.append(f"{text}{escape(edge.name)}</text>")
    return lines


def _shape(dot: Dot, notes: Mapping[str, str]) -> list[str]:
    x, y = _at(dot)
    if dot.kind == "merge":
        return [f'<circle cx="{x:g}" cy="{y:g}" r="{_SMALL / 2:g}" fill="#667"/>']
    width, is_stage = _width(dot), dot.kind == "stage"
    fill, radius = ("#eef3ff", 6) if is_stage else ("#f6f6f6", 20)
    lines = [
        f'<rect x="{x - width / 2:g}" y="{y - _HEIGHT / 2:g}" width="{width}" height="{_HEIGHT}" rx="{radius}"'
        f' fill="{fill}" stroke="#667"/>'
    ]
    texts = _text_of(dot, notes) if is_stage else _text_of(dot, notes)[0].split(", ")
    for i, text in enumerate(texts):
        size = "" if i == 0 else ' font-size="11" fill="#445"'
        at = y + 5 + 15 * (i - (len(texts) - 1) / 2)
        lines.append(f'<text x="{x:g}" y="{at:g}" text-anchor="middle"{size}>{escape(text)}</text>')
    return lines


def _at(dot: Dot) -> tuple[float, float]:
    return _MARGIN + _COLUMN * dot.x, _MARGIN + _ROW * dot.y


def _width(dot: Dot) -> int:
    if dot.kind == "merge":
        return _SMALL
    return _WIDTH if dot.kind == "stage" else _NARROW
