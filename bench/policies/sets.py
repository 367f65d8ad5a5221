"""The sets of workloads, by name.

usual            the 119 of workloads.json
busy             a dozen with a busy coordinator, likewise
rivals           kinds in which a rival has been ahead of the default, likewise
ahead            80 with batches that go ahead, behind ways that take time for each item
near:TEXT*40     40 random neighbours of the last three, drawn with TEXT
random:TEXT*60   60 of the random scenarios of scenarios.py
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.policies import neighbours, scenarios
from bench.policies.workloads import LISTS, Workload, load
from carpool.simulate import capacity

DRAWN = {"near": neighbours.draw, "random": scenarios.draw}
USUAL_COUNT = 40  # of what is drawn

AHEAD_COSTS = (("0.1ms", "0.02ms", 100), ("0.1ms", "0.5ms", 8), ("2ms", "0.2ms", 32), ("0.1ms", "0.01ms", 64),
               ("8ms", "0.25ms", 64))  # fmt: skip
AHEAD_WAYS = ((0.3, 0.0), (1.0, 0.0), (0.3, 0.2), (0.3, 5.0))  # ms for each batch, and for each item: 100 KB, 6 MB


def named(names: str, pattern: str = "") -> dict[str, list[Workload]]:
    """The workloads of sets, which are separated by commas, as far as their names match a pattern.

    Raises:
        argparse.ArgumentTypeError: There is no such set, or two workloads have one name.
    """
    wanted = re.compile(pattern)
    found = {name: [each for each in _set(name) if wanted.search(each.name)] for name in names.split(",")}
    found = {name: workloads for name, workloads in found.items() if workloads}
    counts = Counter(workload.name for workloads in found.values() for workload in workloads)
    if double := [name for name, count in counts.items() if count > 1]:
        raise argparse.ArgumentTypeError(f"two workloads have the name {double[0]}")
    return found


def ahead() -> list[Workload]:
    """Closed loops and Poisson traffic behind a hop, for small items and large ones."""
    found = []
    for a, b, limit in AHEAD_COSTS:
        cost = f"affine:a={a},b={b}"
        most = capacity(cost, limit)
        for hop_ms, item_ms in AHEAD_WAYS:
            is_large = item_ms >= 5
            rate = min(0.6 * most, 130.0) if is_large else 0.6 * most
            settings: dict[str, Any] = {
                "cost": cost,
                "max_batch_size": limit,
                "workers": 1,
                "hop_s": hop_ms * 1e-3,
                "hop_item_s": item_ms * 1e-3,
                "runs_ahead": True,
                "duration_s": 20.0 if is_large else max(2.0, min(4.0, 8000 / most)),
            }
            loops = (f"clients={limit + limit // 2},think=0s", f"clients={4 * limit},think=1ms,think=exponential")
            for loop in (*loops, "clients=16,think=0s"):
                found.append(_ahead(f"closed:{loop}", None, settings))
            found.append(_ahead(f"poisson:rate={rate:.4g}", 0.1, settings))
    return found


def _ahead(arrivals: str, slo_s: float | None, settings: dict[str, Any]) -> Workload:
    cost, limit = settings["cost"].partition(":")[2], settings["max_batch_size"]
    way = f"{settings['hop_s'] * 1e3:g}+{settings['hop_item_s'] * 1e3:g}ms"
    return Workload(f"A {cost} B{limit} way {way} {arrivals}", {**settings, "arrivals": arrivals, "slo_s": slo_s})


def _set(name: str) -> Sequence[Workload]:
    kind, _, rest = name.partition(":")
    if kind in DRAWN and rest:
        text, _, count = rest.partition("*")
        if not count or count.isdecimal():
            return DRAWN[kind](int(count or USUAL_COUNT), text)
    if name == "ahead":
        return ahead()
    if name in LISTS:
        return load(of=name)
    known = ", ".join((*LISTS, "ahead", *(f"{kind}:TEXT*40" for kind in DRAWN)))
    raise argparse.ArgumentTypeError(f"there is no set {name}; choose from {known}")
