"""carpool's services of `bench.steps.sse` and `bench.steps.leaving`.

    carpool serve bench.steps.servers.carpool_counts:steps

Without BENCH_PART_BYTES parts are numbers, else texts of that length that begin with the number.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from typing import Any

import carpool

STEP_S = float(os.environ.get("BENCH_STEP_S", "0"))
FILLING = "x" * int(os.environ.get("BENCH_PART_BYTES", "0"))
Item = dict[str, int]


def rest() -> None:
    """Take the time of a step."""
    if STEP_S:
        time.sleep(STEP_S)


def part_of(i: int, n: int) -> Any:
    """Part number i of n."""
    part = f"{i} {FILLING}" if FILLING else i
    return part if i < n else carpool.Last(part)


class Steps(carpool.Model):
    """A state is a list of how many parts there were, and how many there will be."""

    def start(self, items: list[Item]) -> list[list[int]]:
        return [[0, item["n"]] for item in items]

    def step(self, states: list[list[int]]) -> list[Any]:
        rest()
        for state in states:
            state[0] += 1
        return [part_of(i, n) for i, n in states]

    def stop(self, state: list[int]) -> None:
        """There is nothing to free."""


class Batches(carpool.Model):
    """Nobody joins a batch that runs."""

    def predict(self, items: list[Item]) -> Generator[list[Any], Any, None]:
        for i in range(1, max(item["n"] for item in items) + 1):
            rest()
            yield [part_of(i, item["n"]) if i <= item["n"] else carpool.END for item in items]


steps = carpool.Service(carpool.Stage(Steps, max_batch_size=64), name="steps")
batches = carpool.Service(carpool.Stage(Batches, max_batch_size=64), name="batches")
one = carpool.Service(carpool.Stage(Steps, max_batch_size=1), name="one")
