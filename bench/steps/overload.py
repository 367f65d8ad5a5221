"""A small decoder at overload, in an open loop: who joins when, as its readers see it.

The decoder of `bench.steps.decoder` in a worker process. Requests come at random times (Poisson),
whatever became of earlier ones, and the same ones at the same times to each policy. A closed loop
of 32 tasks, with `greedy`, finds out first how many requests a full set answers, of which loads are
multiples, and how far apart its tokens are, of which goals are multiples.

A request is *good* if its first token came within 4.5 of these distances, counted from when it
should have left, and the others were 0.9 of one apart at most in the mean: a set that is always
full, and that all may join at once, just misses it. It is *smooth* if, besides, every token was
there when a reader at that pace wanted it. All policies refuse what they cannot begin in time.
Shares are those of all requests, those that were refused among them.

Ratios are those of the first policy by the line's, the median over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from random import Random
from statistics import fmean, median
from typing import Any

import uvloop

import carpool
from bench.steps.decoder import ROWS, items, turn
from bench.tools import options
from bench.tools.comparison import Comparison, compare, one_table, say
from bench.tools.figures import Facts, Spread, median_ratio, short
from carpool.engine.clock import VirtualClock
from carpool.simulate.steps import Reading, StepReport, report_on

POLICIES = ("paced", "greedy", "static")
TIMEOUT_S = 60
CLOSED_S = 4.0


FIRST, BETWEEN = 4.5, 0.9  # goals, in distances of the tokens of a full set


@dataclass(frozen=True, slots=True)
class Found:
    """How many requests a second a full set answers, and how far apart the tokens of each are."""

    rate: float
    distance_s: float

    @property
    def slo_s(self) -> float:
        return FIRST * self.distance_s

    @property
    def part_slo_s(self) -> float:
        return BETWEEN * self.distance_s


@dataclass(frozen=True, slots=True)
class Row:
    """All turns of a policy at one load, and of the first one; a round has one index in both."""

    found: Found
    load: float
    policy: str
    turns: list[StepReport]
    ours: list[StepReport]

    def ratio(self, quantity: str) -> float:
        """The first policy's share over this one's."""
        return median_ratio(*([getattr(turn, quantity) for turn in of] for of in (self.ours, self.turns)))


async def open_loop(s: Any, policy: str, rate: float, seconds: float, seed: int, found: Found) -> StepReport:
    """Ask at random times for so many seconds, and wait for all answers."""
    chance, given, clock = Random(f"{seed}/arrivals"), items(seed), VirtualClock()
    readings: list[Reading] = []
    tasks = []
    steps = -s.stats().stages[0].batches
    began, at = time.perf_counter(), chance.expovariate(rate)
    while at < seconds:
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        item = next(given)
        readings.append(Reading(clock, at, item["n"]))
        tasks.append(asyncio.ensure_future(read(s, item, readings[-1], began)))
        at += chance.expovariate(rate)
    await asyncio.gather(*tasks)
    steps += s.stats().stages[0].batches
    tokens = sum(len(reading.times) for reading in readings)
    return report_on(policy, readings, found.slo_s, found.part_slo_s, tokens / max(1, steps))


async def read(s: Any, item: Any, reading: Reading, began: float) -> None:
    """Ask once, and note when each token comes, in seconds since the turn began."""
    try:
        async with s.predict_stream(item) as parts:
            async for _ in parts:
                reading.times.append(time.perf_counter() - began)
    except (carpool.Overloaded, carpool.DeadlineExceeded):
        reading.is_refused = True


async def full_set() -> Found:
    """Ask as many tasks as a set has rows, all the time."""
    from bench.steps.decoder_model import Steps

    service = carpool.Service(carpool.Stage(Steps, max_batch_size=ROWS, policy="greedy"), timeout_s=TIMEOUT_S)
    async with service.run_async() as s:
        await turn(s, ROWS, 1.0, 0)
        closed = await turn(s, ROWS, CLOSED_S, 0)
    drawn = items(0)
    return Found(closed.tokens_per_s / fmean(next(drawn)["n"] for _ in range(10_000)), closed.gap_p50_s)


async def rows(policies: list[str], loads: list[float], rounds: int, seconds: float) -> AsyncIterator[Row]:
    """All services are up all the time, and take turns."""
    from bench.steps.decoder_model import Steps

    found = await full_set()
    say(f"  a full set answers {found.rate:.1f} requests/s, with tokens {found.distance_s * 1e3:.2f} ms apart")
    async with AsyncExitStack() as stack:
        sides: dict[str, Any] = {}
        for policy in policies:
            stage = carpool.Stage(Steps, max_batch_size=ROWS, policy=policy)
            goals = {"slo_s": found.slo_s, "part_slo_s": found.part_slo_s}
            service = carpool.Service(stage, name=policy, timeout_s=TIMEOUT_S, **goals)
            sides[policy] = await stack.enter_async_context(service.run_async())
            await open_loop(sides[policy], policy, found.rate / 3, 1.0, 0, found)
        for load in loads:
            turns: dict[str, list[StepReport]] = {policy: [] for policy in policies}
            for number in range(rounds):
                for policy, of in turns.items():
                    of.append(await open_loop(sides[policy], policy, load * found.rate, seconds, number, found))
                shares = ", ".join(f"{name} {of[-1].good:.0%}/{of[-1].smooth:.0%}" for name, of in turns.items())
                say(f"  {load:g} of that, round {number + 1} of {rounds}, good/smooth: {shares}")
            for policy, of in turns.items():
                yield Row(found, load, policy, of, turns[policies[0]])


HEADER = (
    "policy", "load", "requests/s", "goals, ms", "good, %", "ratio", "smooth, %", "ratio", "refused, %",
    "first p50 ms", "first p99 ms", "longest gap p99 ms", "tokens/s", "rows",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    def share(quantity: str) -> str:
        return Spread.of([getattr(turn, quantity) for turn in row.turns]).text(lambda of: f"{100 * of:.0f}")

    def middle(quantity: str) -> float:
        return median(getattr(turn, quantity) for turn in row.turns)

    return [
        row.policy,
        f"{row.load:g}",
        f"{row.load * row.found.rate:.0f}",
        f"{row.found.slo_s * 1e3:.0f} / {row.found.part_slo_s * 1e3:.1f}",
        share("good"),
        short(row.ratio("good")),
        share("smooth"),
        short(row.ratio("smooth")),
        share("refused"),
        f"{1e3 * middle('first_p50_s'):.1f}",
        f"{1e3 * middle('first_p99_s'):.1f}",
        f"{1e3 * middle('gap_p99_s'):.1f}",
        f"{middle('parts_per_s'):,.0f}",
        f"{middle('rows'):.1f}",
    ]


def entry(row: Row) -> Facts:
    return {**asdict(row), "ratios": {quantity: row.ratio(quantity) for quantity in ("good", "smooth")}}


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__)
    options.add_names(parser, "--policies", POLICIES, "what is compared", "paced,greedy")
    parser.add_argument("--loads", default="1.25", help="separated by commas; default: %(default)s")
    options.add_measuring(parser, rounds=3, seconds=8)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    loads = [float(load) for load in given.loads.split(",")]

    async def measured() -> list[Row]:
        return [row async for row in rows(given.policies, loads, given.rounds, given.seconds)]

    found: Comparison[Row] = compare([loads], lambda _: uvloop.run(measured()), {}, given.seconds)
    title = "a small decoder in an open loop: good and smooth answers; ratios are the first policy / the line's"
    return found.report(given, title, one_table(HEADER, cells), entry)


if __name__ == "__main__":
    sys.exit(main())
