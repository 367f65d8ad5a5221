"""Sharing every step beside a generator for each batch: tokens/s, and the time to the first one.

A small decoder with a KV cache (3.4 million weights, torch, one thread) in a worker process, asked
by 1 to 32 tasks in a closed loop. Prompts have 4 to 24 tokens; the lengths of the answers are
exponential with a mean of 32, of 160 at most, and the same for all sides. All sides are carpool:

* `steps`: a model of steps;
* `padded`: a generator for batches of up to 32 that steps all rows until the longest has ended, as
  `generate()` of Hugging Face does, and those who batch generators for it;
* `shrinking`: a generator that leaves out rows that have ended.

Ratios are steps / the side of the line. The end of a turn cuts a batch off that has made most of
its tokens in the first half of its time, which flatters batches by about a quarter of one: a turn
should hold ten of them at least (`--seconds 15`).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import count
from random import Random
from statistics import median
from typing import Any

import uvloop

import carpool
from bench.tools import options
from bench.tools.comparison import Comparison, compare, one_table, say
from bench.tools.figures import Facts, Spread, median_ratio, short

MEAN, MOST, ROWS = 32, 160, 32


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens per second, and seconds to the first token and between two of them."""

    tokens_per_s: float
    first_p50_s: float
    first_p99_s: float
    gap_p50_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """All turns of steps and of another side; those of a round have the same index."""

    clients: int
    other: str
    steps: list[Turn]
    batches: list[Turn]

    def ratio(self, quantity: str) -> float:
        """Steps over the other side."""
        return median_ratio(*([getattr(turn, quantity) for turn in side] for side in (self.steps, self.batches)))


def items(seed: int) -> Any:
    """Prompts without end, and how many tokens are wanted of each."""
    chance = Random(seed)
    for _ in count():
        n = min(MOST, 1 + int(chance.expovariate(1 / MEAN)))
        yield {"ids": [chance.randrange(256) for _ in range(chance.randint(4, 24))], "n": n}


async def turn(s: Any, clients: int, seconds: float, seed: int) -> Turn:
    """Ask for so many seconds; what comes later is not counted, but awaited."""
    given, firsts, gaps = items(seed), [], []
    tokens = 0
    began = time.perf_counter()
    until = began + seconds

    async def client() -> None:
        nonlocal tokens
        while (asked := time.perf_counter()) < until:
            item = next(given)
            n, first = 0, 0.0
            async with s.predict_stream(item) as parts:
                async for _ in parts:
                    now = time.perf_counter()
                    first = first or now
                    n += 1
                    tokens += now < until
            assert n == item["n"], f"{n} tokens instead of {item['n']}"
            firsts.append(first - asked)
            if n > 1:
                gaps.append((now - first) / (n - 1))

    await asyncio.gather(*[client() for _ in range(clients)])
    firsts.sort()
    return Turn(tokens / seconds, median(firsts), firsts[int(0.99 * len(firsts))], median(gaps))


async def rows(clients: list[int], rounds: int, seconds: float, policy: str) -> AsyncIterator[Row]:
    """Both services are up all the time, and take turns."""
    from bench.steps.decoder_model import Batches, Padded, Steps

    async with AsyncExitStack() as stack:
        sides: dict[str, Any] = {}
        for name, model in (("steps", Steps), ("padded", Padded), ("shrinking", Batches)):
            stage = carpool.Stage(model, max_batch_size=ROWS, policy=policy if model is Steps else None)
            service = carpool.Service(stage, timeout_s=120)
            sides[name] = await stack.enter_async_context(service.run_async())
            await turn(sides[name], 8, min(1.0, seconds), 0)
        for n in clients:
            turns: dict[str, list[Turn]] = {name: [] for name in sides}
            for number in range(rounds):
                for name, s in sides.items():
                    turns[name].append(await turn(s, n, seconds, number))
                rates = " / ".join(f"{name} {of[-1].tokens_per_s:,.0f}" for name, of in turns.items())
                say(f"  {n} clients, round {number + 1} of {rounds}: {rates} tokens/s")
            for other in ("padded", "shrinking"):
                yield Row(n, other, turns["steps"], turns[other])


HEADER = (
    "clients", "beside", "steps, tokens/s", "its tokens/s", "ratio",
    "first p50 ms", "ratio", "first p99 ms", "ratio", "between p50 ms", "ratio",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    def rate(side: list[Turn]) -> str:
        return Spread.of([turn.tokens_per_s for turn in side]).text(lambda rate: f"{rate:,.0f}")

    def both(quantity: str) -> tuple[str, str]:
        sides = (median(getattr(turn, quantity) for turn in side) for side in (row.steps, row.batches))
        return " / ".join(f"{seconds * 1e3:.1f}" for seconds in sides), short(row.ratio(quantity))

    return [
        str(row.clients),
        row.other,
        rate(row.steps),
        rate(row.batches),
        short(row.ratio("tokens_per_s")),
        *both("first_p50_s"),
        *both("first_p99_s"),
        *both("gap_p50_s"),
    ]


def entry(row: Row) -> Facts:
    quantities = ("tokens_per_s", "first_p50_s", "first_p99_s", "gap_p50_s")
    return {**asdict(row), "ratios": {quantity: row.ratio(quantity) for quantity in quantities}}


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__)
    parser.add_argument("--clients", default="1,8,16,32", help="separated by commas; default: %(default)s")
    parser.add_argument("--policy", default="paced", help="of the steps; default: %(default)s")
    options.add_measuring(parser, rounds=3, seconds=5)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    clients = [int(number) for number in given.clients.split(",")]

    async def measured() -> list[Row]:
        return [row async for row in rows(clients, given.rounds, given.seconds, given.policy)]

    found: Comparison[Row] = compare([clients], lambda _: uvloop.run(measured()), {}, given.seconds)
    title = "a small decoder: steps beside generators for whole batches; ratios are steps / the other side"
    return found.report(given, title, one_table(HEADER, cells), entry)


if __name__ == "__main__":
    sys.exit(main())
