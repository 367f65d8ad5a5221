"""A decoder of Hugging Face, every step shared, beside `generate()` of padded batches.

A Llama with random weights (8 layers of 512, one thread, float32) in a worker process, asked by
tasks in a closed loop. Prompts have 4 to 24 tokens; the lengths of the answers are exponential with
a mean of 32, of 160 at most, and the same for both sides. Both are carpool: `steps` is a model of
steps with `carpool.hf.Rows`, `padded` calls `generate()` for batches of up to 32, which ends with
the longest answer. An answer that ends later than the time counts by its share.

`python -m bench.steps.equality` checks what the steps say.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import uvloop

import carpool
from bench.steps.decoder import items
from bench.tools import options
from bench.tools.comparison import Comparison, compare, one_table, say
from bench.tools.figures import Facts, Spread, median_ratio, short


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens per second, and seconds to whole answers and to the first token, which padded batches
    have only with the answer.
    """

    tokens_per_s: float
    answer_s: float
    first_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """All turns of both sides; those of a round have the same index."""

    clients: int
    steps: list[Turn]
    padded: list[Turn]

    def ratio(self, quantity: str) -> float:
        """Steps over padded batches."""
        return median_ratio(*([getattr(turn, quantity) for turn in side] for side in (self.steps, self.padded)))


async def turn(s: Any, clients: int, seconds: float, seed: int, is_stream: bool) -> Turn:
    """Ask for so many seconds; answers that come later are awaited, and counted by their share."""
    given, answers, firsts = items(seed), [], []
    began = time.perf_counter()
    until = began + seconds
    tokens = 0.0

    async def client() -> None:
        nonlocal tokens
        while (asked := time.perf_counter()) < until:
            item = next(given)
            first, said = 0.0, []
            if is_stream:
                async with s.predict_stream(item) as parts:
                    async for part in parts:
                        first = first or time.perf_counter()
                        said.append(part)
            else:
                said = await s.predict(item)
            now = time.perf_counter()
            assert len(said) == item["n"], f"{len(said)} tokens instead of {item['n']}"
            tokens += len(said) * min(1.0, (until - asked) / (now - asked))
            answers.append(now - asked)
            firsts.append((first or now) - asked)

    await asyncio.gather(*[client() for _ in range(clients)])
    return Turn(tokens / seconds, median(answers), median(firsts))


async def rows(clients: list[int], rounds: int, seconds: float) -> AsyncIterator[Row]:
    """Both services are up all the time, and take turns."""
    from bench.steps.llama_model import ROWS, Padded, Steps

    async with AsyncExitStack() as stack:
        sides: dict[str, Any] = {}
        for name, model in (("steps", Steps), ("padded", Padded)):
            service = carpool.Service(carpool.Stage(model, max_batch_size=ROWS), timeout_s=300)
            sides[name] = await stack.enter_async_context(service.run_async())
            await turn(sides[name], 4, min(1.0, seconds), 0, name == "steps")
        for n in clients:
            turns: dict[str, list[Turn]] = {name: [] for name in sides}
            for number in range(rounds):
                for name, s in sides.items():
                    turns[name].append(await turn(s, n, seconds, number, name == "steps"))
                rates = " / ".join(f"{name} {of[-1].tokens_per_s:,.0f}" for name, of in turns.items())
                say(f"  {n} clients, round {number + 1} of {rounds}: {rates} tokens/s")
            yield Row(n, turns["steps"], turns["padded"])


HEADER = ("clients", "steps, tokens/s", "padded, tokens/s", "ratio", "answer p50 s", "ratio", "first p50 s", "ratio")


def cells(row: Row) -> list[str]:
    def both(quantity: str) -> tuple[str, str]:
        sides = (median(getattr(turn, quantity) for turn in side) for side in (row.steps, row.padded))
        return " / ".join(f"{seconds:.3f}" for seconds in sides), short(row.ratio(quantity))

    rates = (Spread.of([turn.tokens_per_s for turn in side]) for side in (row.steps, row.padded))
    return [
        str(row.clients),
        *(rate.text(lambda tokens: f"{tokens:,.0f}") for rate in rates),
        short(row.ratio("tokens_per_s")),
        *both("answer_s"),
        *both("first_s"),
    ]


def entry(row: Row) -> Facts:
    return {**asdict(row), "ratios": {each: row.ratio(each) for each in ("tokens_per_s", "answer_s", "first_s")}}


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__)
    parser.add_argument("--clients", default="8,16", help="separated by commas; default: %(default)s")
    options.add_measuring(parser, rounds=3, seconds=10)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    clients = [int(number) for number in given.clients.split(",")]

    async def measured() -> list[Row]:
        return [row async for row in rows(clients, given.rounds, given.seconds)]

    found: Comparison[Row] = compare([clients], lambda _: uvloop.run(measured()), {}, given.seconds)
    title = "a Llama of Hugging Face: steps beside padded generate(); ratios are steps / padded"
    return found.report(given, title, one_table(HEADER, cells), entry)


if __name__ == "__main__":
    sys.exit(main())
