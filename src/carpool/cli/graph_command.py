"""`carpool graph`: draws the graph of a service, as Mermaid text or as SVG."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from carpool.cli.sources import FAILED, NoAnswer, fail, find_service, send, server_key, server_url
from carpool.service.drawing import as_mermaid, as_svg

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
    """Return what each stage of a running service does now, by the stage's name."""
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
    """Return how many items a stage has been given."""
    return sum(int(size) * count for size, count in stage["batch_sizes"].items())


def _mean_ms(before: dict[str, Any], after: dict[str, Any]) -> str:
    n = sum(after["counts"]) - sum(before["counts"])
    return f"{1000 * (after['sum_s'] - before['sum_s']) / n:.3g} ms" if n > 0 else "-"


def _figures(url: str, name: str, key_file: Path | None) -> dict[str, Any]:
    """Return the figures of a service of a server, and when they were taken."""
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
