"""How far the rules are from the best: every way to serve a few requests, tried out.

Six requests meet one idle worker. The oracle knows when they come, tries every order and every
choice of those that wait, and waits for the next one where that pays. It bounds what a rule can do
that does not know the future.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import combinations
from math import inf
from random import Random
from typing import NamedTuple

from bench.shapes.rules import OURS, PLAIN, RULES
from bench.shapes.workloads import Workload
from bench.tools.figures import table
from carpool.simulate import run
from carpool.simulate.costs import Cost, cost_of
from carpool.simulate.features import Length

REQUESTS = 6
COST = "padded:a=2ms,b=20us"
LENGTHS = "lognormal:input=14,input_sigma=0.8326,most_input=512"
SETTINGS = ((0.0, None), (0.02, None), (0.0, 0.012), (0.01, 0.012))
"""Seconds within which the requests come, and their SLO."""
SHOWN = (OURS, PLAIN)


class Item(NamedTuple):
    """One request."""

    when: float
    length: int


class InOrder(NamedTuple):
    """Lengths that are given."""

    lengths: Sequence[int]

    def draw(self, dice: Random) -> Iterator[Length]:
        return map(Length, self.lengths)


class Gap(NamedTuple):
    """A rule's loss and the least one: seconds of latency, or requests that are not in time."""

    lost: float
    least: float


def table_of(pool: ProcessPoolExecutor, cases: int) -> str:
    """Each rule beside the best, for requests at once and spread, without and with an SLO."""
    lines = []
    for spread_s, slo_s in SETTINGS:
        found = list(pool.map(partial(gaps, spread_s, slo_s), range(cases), chunksize=5))
        total = REQUESTS * cases
        cells = []
        for i in range(len(SHOWN)):
            lost, least = (sum(values) for values in zip(*(case[i] for case in found), strict=True))
            cells.append(f"{lost / least:.3f}" if slo_s is None else f"{(total - lost) / (total - least):.3f}")
        come = "at once" if not spread_s else f"within {1e3 * spread_s:.0f} ms"
        what = "mean latency" if slo_s is None else f"in time, SLO {1e3 * slo_s:.0f} ms"
        lines.append([f"{REQUESTS} {come}, {what}", *cells])
    return table(["of the best", *SHOWN], lines, markdown=True)


def gaps(spread_s: float, slo_s: float | None, seed: int) -> list[Gap]:
    """What each of the rules loses in one case."""
    dice = Random(f"oracle/{spread_s}/{slo_s}/{seed}")
    lengths = [max(1, min(512, int(14 * dice.lognormvariate(0.0, 0.8326)))) for _ in range(REQUESTS)]
    items = sorted(Item(dice.random() * spread_s, length) for length in lengths)
    best = least_loss(items, cost_of(COST), inf if slo_s is None else slo_s)
    return [Gap(loss(rule, items, slo_s), best) for rule in SHOWN]


def loss(rule: str, items: Sequence[Item], slo_s: float | None) -> float:
    """What a rule loses."""
    given = {"cost": COST, "lengths": LENGTHS, "max_batch_size": 32, "slo_s": slo_s}
    policy = RULES[rule].policy(Workload("", "closed", given))
    played = {**given, "lengths": InOrder([item.length for item in items]), "duration_s": 1.0}
    report = run(policy, arrivals=[item.when for item in items], **played)
    return report.mean_s * REQUESTS if slo_s is None else REQUESTS * (1 - report.attainment)


def least_loss(items: Sequence[Item], cost: Cost, slo_s: float) -> float:
    """The least seconds of latency; with an SLO the fewest requests that are not in time."""
    best = inf

    def least_to_come(left: Sequence[Item], now: float) -> float:
        """What the requests that are left lose at least."""
        if slo_s != inf:
            return 0.0
        return sum(max(0.0, now - item.when) + cost(1, item.length) for item in left)

    def serve(left: tuple[Item, ...], now: float, lost: float) -> None:
        """Try all that can be done next."""
        nonlocal best
        if lost + least_to_come(left, now) >= best - 1e-12:
            return
        if not left:
            best = lost
            return
        here = [i for i, item in enumerate(left) if item.when <= now]
        for n in range(len(here), 0, -1):
            for chosen in combinations(here, n):
                end = now + cost(n, max(left[i].length for i in chosen))
                loses = sum(end - left[i].when if slo_s == inf else end > left[i].when + slo_s + 1e-12 for i in chosen)
                serve(tuple(item for i, item in enumerate(left) if i not in chosen), end, lost + loses)
        if len(here) < len(left):
            serve(left, min(item.when for item in left if item.when > now), lost)

    serve(tuple(items), 0.0, 0.0)
    return best
