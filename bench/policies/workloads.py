"""The workloads by which policies are compared: workloads.json, as `carpool simulate` has it."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "workloads.json"
DURATION_S = 20
CLOSED, OVERLOAD, BURSTY, STEADY = "closed loop", "Poisson, overload", "bursty", "Poisson, below capacity"
GROUPS = (STEADY, OVERLOAD, BURSTY, CLOSED)
USUAL = "usual"
LISTS = (USUAL, "busy", "rivals")  # of the file


@dataclass(frozen=True, slots=True)
class Workload:
    """One traffic to serve.

    Attributes:
        name: Short and unique.
        settings: What `carpool.simulate.run` takes, as JSON has it.
    """

    name: str
    settings: dict[str, Any]

    @property
    def group(self) -> str:
        """What kind of traffic it is."""
        arrivals = self.settings["arrivals"]
        if "closed" in arrivals:
            return CLOSED
        if not arrivals.startswith("poisson"):
            return BURSTY
        is_overload = "rho" in arrivals and float(arrivals.rpartition("=")[2]) >= 1
        return OVERLOAD if is_overload else STEADY

    @property
    def slo_s(self) -> float | list[float] | None:
        slo_s: float | list[float] | None = self.settings["slo_s"]
        return slo_s

    def shortened(self, factor: float) -> Workload:
        """The same for a part of the time."""
        return Workload(self.name, {**self.settings, "duration_s": self.settings["duration_s"] * factor})


def load(pattern: str = "", of: str = USUAL) -> list[Workload]:
    """The workloads of a list whose names match a regular expression, in the order of the file."""
    wanted, content = re.compile(pattern), _content()
    listed = content if of == USUAL else content[of]
    entries = [{**listed.get("settings", {}), **entry} for entry in listed["workloads"]]
    return [workload_of(entry) for entry in entries if wanted.search(entry["name"])]


def workload_of(entry: dict[str, Any]) -> Workload:
    """An entry as the file has them: its cost is one of the file's by name."""
    cost = _content()["costs"][entry["cost"]]
    defaults = {"duration_s": DURATION_S, "workers": 1}
    settings = {**defaults, **entry, "cost": cost["cost"], "max_batch_size": cost["max_batch_size"]}
    return Workload(settings.pop("name"), settings)


def poisson(cost: str, load: float, *, slo_s: float | None = None, duration_s: float = DURATION_S) -> Workload:
    """Poisson arrivals at a load, for one of the costs of the file."""
    arrivals = f"poisson:rho={load:g}"
    name = f"{cost} {load:.2f}"
    return workload_of({"name": name, "cost": cost, "arrivals": arrivals, "slo_s": slo_s, "duration_s": duration_s})


@functools.cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text())
    return content
