"""`carpool top`: the figures of the dashboard in a terminal, for a server by its URL."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from carpool.cli.sources import NoAnswer, send

_EVERY_S = 1.0
_TIMEOUT_S = 5.0
_OK = 200
_STYLES = {"bad": "bold red", "warn": "yellow"}


class NoFigures(Exception):
    """The server gives no figures; the text has the reason and the remedy."""


def run(url: str, key: str, console: Console, times: int | None = None) -> None:
    """Show the figures of a server again and again, until Ctrl-C, or some `times`. Raises NoFigures
    if it gave none the first time.
    """
    before = latest = fetched(url, key)
    with Live(shown(latest, before), console=console, auto_refresh=False) as live:
        while times is None or (times := times - 1) > 0:
            time.sleep(_EVERY_S)
            try:
                before, latest = latest, fetched(url, key)
                live.update(shown(latest, before), refresh=True)
            except NoFigures as error:
                live.update(Text(str(error), style="bold red"), refresh=True)


def fetched(url: str, key: str) -> dict[str, Any]:
    """Return the present figures and problems of a server. Raises NoFigures."""
    try:
        answer = send(url, "GET", "/dashboard/data", key=key, timeout_s=_TIMEOUT_S)
        if answer.status == _OK:
            found: dict[str, Any] = answer.json
            return found
    except NoAnswer as error:
        raise NoFigures(f"no carpool server answers at {url} ({error}): say where it listens with --url") from None
    except ValueError as error:
        raise NoFigures(f"{url} answers what is no JSON: {error}") from None
    why = {
        401: "it needs a key: set CARPOOL_KEY, or give --key-file",
        404: "its figures are not there: give its --admin-address, if it has one",
        421: "it does not answer to this name: use one that its --allow-host has",
    }.get(answer.status, f"it answers {answer.status}")
    raise NoFigures(f"{url}: {why}")


def shown(latest: Mapping[str, Any], before: Mapping[str, Any]) -> RenderableType:
    parts: list[RenderableType] = []
    problems = latest["problems"]
    if not problems:
        parts.append(Text("All is well", style="bold green"))
    for problem in problems:
        parts.append(Text(problem["text"], style=_STYLES[problem["level"]]))
        parts.append(Text(f"  {problem['step']}", style="dim"))
    seconds = max(latest["figures"]["time"] - before["figures"]["time"], 1e-9)
    bounds = latest["figures"]["bounds_s"]
    earlier = {service["run"]: service for service in before["figures"]["services"]}
    for service in latest["figures"]["services"]:
        old = earlier.get(service["run"], service)
        parts += [_of_service(service, old, seconds, bounds), _of_stages(service, old, bounds)]
    return Group(*parts)


def _of_service(now: Mapping[str, Any], before: Mapping[str, Any], seconds: float, bounds: Sequence[float]) -> Table:
    change = {name: n - before["outcomes"].get(name, 0) for name, n in now["outcomes"].items()}
    lost = sum(change.values()) - change["ok"] - change["cancelled"]
    latency = _between(now["latency"], before["latency"])
    table = Table("service", "requests/s", "failed/s", "p50", "p99", "in flight", "answered", box=None)
    table.add_row(
        now["name"],
        f"{sum(change.values()) / seconds:.0f}",
        f"{lost / seconds:.0f}",
        _ms(quantile(latency, bounds, 0.5)),
        _ms(quantile(latency, bounds, 0.99)),
        str(now["in_flight"]),
        str(now["outcomes"]["ok"]),
    )
    return table


def _of_stages(now: Mapping[str, Any], before: Mapping[str, Any], bounds: Sequence[float]) -> Table:
    table = Table("  stage", "waiting", "queue p95", "batch", "batch p95", "workers", "restarts", "", box=None)
    for stage, old in zip(now["stages"], before["stages"], strict=True):
        sizes = {int(n): count - old["batch_sizes"].get(n, 0) for n, count in stage["batch_sizes"].items()}
        batches = sum(sizes.values())
        ready = sum(worker["state"] == "ready" for worker in stage["workers"])
        table.add_row(
            f"  {stage['name']}",
            str(stage["queued"]),
            _ms(quantile(_between(stage["queue"], old["queue"]), bounds, 0.95)),
            f"{sum(n * count for n, count in sizes.items()) / batches:.1f}" if batches else "–",
            _ms(quantile(_between(stage["compute"], old["compute"]), bounds, 0.95)),
            f"{ready} of {len(stage['workers'])}",
            str(stage["restarts"]),
            stage["decision"],
        )
    return table


def _between(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[int]:
    return [n - m for n, m in zip(now["counts"], before["counts"], strict=True)]


def quantile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float | None:
    """Return the quantile of a histogram, as Prometheus would; None if it is empty."""
    rest = share * sum(counts)
    if not rest:
        return None
    low = 0.0
    for count, high in zip(counts, bounds, strict=False):
        if count and rest <= count:
            return low + (high - low) * rest / count
        rest -= count
        low = high
    return bounds[-1]


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1000 * seconds:.3g} ms"
