"""A decoder of some 110 million weights in steps, beside the bare loop of the same steps.

    python -m bench.gpu.decoder SECONDS ROWS

Each answer is a number of tokens, exponential with a mean of 64, of 200 at most; the same ones on
both sides. The bare loop fills a row that has ended with the next request at once. carpool has a
quarter more clients than rows, in a closed loop. The rows are printed as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from random import Random
from typing import Any

import carpool
from bench.gpu.meter import FOLDER, Counts, Meter, read
from bench.gpu.tasks import device, is_small

Row = dict[str, Any]


def wanted(seed: int) -> Iterator[tuple[int, int]]:
    """Yield first tokens, and how many tokens are wanted behind each."""
    chance, most = Random(seed), 20 if is_small() else 200
    while True:
        yield chance.randrange(30_522), min(most, 1 + int(chance.expovariate(1 / 64)))


class Rows:
    """The state of all rows, on the device and on the host."""

    def __init__(self, rows: int) -> None:
        import torch

        from bench.gpu.networks import Decoder

        torch.manual_seed(7)
        self.torch = torch
        kind = torch.bfloat16 if device() == "cuda" else torch.float32
        small = {"layers": 1, "width": 96, "longest": 32} if is_small() else {}
        self.network = Decoder(rows, **small).eval().requires_grad_(False).to(device(), kind)
        self.last, self.at = [0] * rows, [0] * rows
        self.meter = Meter()

    def start(self, row: int, first: int) -> None:
        self.last[row], self.at[row] = first, 0

    def step(self, running: int) -> list[int]:
        """Give every row its next token; `running` of them are wanted."""
        torch, counts = self.torch, self.meter.counts
        self.meter.begin()
        began = time.perf_counter()
        with torch.inference_mode():
            last = torch.tensor(self.last).to(device())
            at = torch.tensor(self.at).to(device())
            tokens: list[int] = self.network(last, at).tolist()  # waits for the card
        counts.compute_s += time.perf_counter() - began
        self.last = tokens
        self.at = [place + 1 for place in self.at]
        limit = self.network.longest - 1
        self.at = [min(place, limit) for place in self.at]
        self.meter.end(running)
        return tokens


def bare(rows: int, seconds: float) -> Row:
    """The loop without carpool."""
    state, requests = Rows(rows), wanted(1)
    left = [0] * rows
    for _ in range(3):
        state.step(rows)
    tokens, began, before = 0, time.perf_counter(), Counts(**asdict(state.meter.counts))
    while (now := time.perf_counter()) < began + seconds:
        for row in range(rows):
            if not left[row]:
                first, left[row] = next(requests)
                state.start(row, first)
        state.step(rows)
        left = [n - 1 for n in left]
        tokens += rows
    counts = state.meter.counts - before
    return {
        "side": f"the bare loop, {rows} rows",
        "items_per_s": tokens / (now - began),
        "seconds": now - began,
        "counts": asdict(counts),
    }


class Steps(carpool.Model):
    """The same steps; a request takes any row that is free."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def setup(self) -> None:
        self.state = Rows(self.rows)
        self.free = list(range(self.rows))
        for _ in range(3):
            self.state.step(0)

    def start(self, items: list[list[int]]) -> list[dict[str, int]]:
        begun = []
        for first, n in items:
            row = self.free.pop()
            self.state.start(row, first)
            begun.append({"row": row, "left": n})
        return begun

    def step(self, states: list[dict[str, int]]) -> list[Any]:
        tokens = self.state.step(len(states))
        parts: list[Any] = []
        for each in states:
            each["left"] -= 1
            token = tokens[each["row"]]
            parts.append(token if each["left"] else carpool.Last(token))
        return parts

    def stop(self, state: dict[str, int]) -> None:
        self.free.append(state["row"])


async def served(rows: int, seconds: float, meters: Any) -> Row:
    """carpool with a quarter more clients than rows."""
    requests = wanted(1)
    tokens = 0
    firsts: list[float] = []
    service = carpool.Service(carpool.Stage(Steps, max_batch_size=rows, kwargs={"rows": rows}), timeout_s=120)
    async with service.run_async() as s:
        warm = time.perf_counter() + seconds / 3
        until = warm + seconds

        async def client() -> None:
            nonlocal tokens
            while (asked := time.perf_counter()) < until:
                waits = True
                async with s.predict_stream(list(next(requests))) as parts:
                    async for _ in parts:
                        now = time.perf_counter()
                        if waits and asked > warm:
                            firsts.append(now - asked)
                        waits = False
                        tokens += warm <= now < until

        async def counted() -> tuple[Counts, float, Counts, float]:
            await asyncio.sleep(warm - time.perf_counter())
            before, cpu_before = read(meters), time.process_time()
            await asyncio.sleep(until - time.perf_counter())
            return before, cpu_before, read(meters), time.process_time()

        clients = [client() for _ in range(rows + rows // 4)]
        (before, cpu_before, after, cpu_after), *_ = await asyncio.gather(counted(), *clients)
    firsts.sort()
    return {
        "side": f"carpool, steps, {rows} rows",
        "items_per_s": tokens / seconds,
        "seconds": seconds,
        "p50_s": firsts[len(firsts) // 2] if firsts else None,
        "p99_s": firsts[int(0.99 * len(firsts))] if firsts else None,
        "front_cpu_s": cpu_after - cpu_before,
        "counts": asdict(after - before),
    }


def main() -> None:
    import os
    from pathlib import Path

    seconds, rows = float(sys.argv[1]), int(sys.argv[2])
    alone = bare(rows, seconds)
    meters = Path(os.environ[FOLDER])
    for path in meters.iterdir():
        path.unlink()  # that of the bare loop
    shared = asyncio.run(served(rows, seconds, meters))
    print(json.dumps([{**each, "share": each["items_per_s"] / alone["items_per_s"]} for each in (alone, shared)]))


if __name__ == "__main__":
    main()
