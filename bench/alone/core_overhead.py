"""What the core and the asyncio driver cost per request, beside a bare list-and-futures loop.

512 tasks call a function that doubles its number, batches of up to 64, all in one process and on
uvloop. The bare loop is the least that batching can be: a list, a future per call, one callback per
turn of the loop. The other side is what a service runs, Driver and Core with Greedy, deadlines,
bounds and statistics, with a stage that answers in place.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from bench.alone.bare_loop import MAX_BATCH_SIZE, BareLoop, double
from bench.tools import options
from carpool.engine.core.batch import Batch, Reply
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.queue import Queue
from carpool.engine.drive.aio import Driver
from carpool.engine.observe.stats import Stats
from carpool.engine.policy import Greedy
from carpool.engine.request import Request

CALLERS = 512
CALLS = 200_000

Ask = Callable[[int], Awaitable[int]]


class InPlace:
    """A stage that answers at once, in this process."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def start(self) -> None:
        self._driver.worker_ready(0, 0)

    def run(self, batch: Batch) -> None:
        answers = double([request.item for request in batch.requests])
        self._driver.completed(Reply(0, batch.place, batch.id, batch.ids, answers, None, 1e-5))

    def kill(self, worker: int) -> None:
        raise AssertionError("nothing hangs here")

    async def stop(self, grace_s: float) -> None:
        """There is nothing to stop."""


class Caller:
    """A task that awaits an answer."""

    __slots__ = ("future",)

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self.future = future

    def answered(self, request: Request) -> None:
        if not self.future.done():
            self.future.set_result(request.result)


class CoreAndDriver:
    """What a service runs."""

    def __init__(self) -> None:
        core = Core([Batcher("double", Greedy(MAX_BATCH_SIZE), Queue(1024, 2**28), max_batch_time_s=10.0)])
        self._loop = asyncio.get_running_loop()
        self._driver = Driver(core, Stats("bench", core, [None], [False]))

    async def start(self) -> None:
        await self._driver.start([InPlace(self._driver)], [1])

    def ask(self, number: int) -> asyncio.Future[int]:
        future = self._loop.create_future()
        self._driver.submit(Request(number, self._driver.clock() + 30.0, Caller(future)))
        return future


async def seconds_per_call(ask: Ask) -> float:
    numbers = iter(range(CALLS))

    async def caller() -> None:
        for number in numbers:
            assert await ask(number) == 2 * number

    began = time.perf_counter()
    await asyncio.gather(*[caller() for _ in range(CALLERS)])
    return (time.perf_counter() - began) / CALLS


async def bare() -> float:
    return await seconds_per_call(BareLoop().ask)


async def core() -> float:
    side = CoreAndDriver()
    await side.start()
    return await seconds_per_call(side.ask)


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="of turns of both sides; default: %(default)s")
    rounds = parser.parse_args().rounds
    taken = [(uvloop.run(bare()), uvloop.run(core())) for _ in range(rounds)]
    bare_us = statistics.median(b for b, _ in taken) * 1e6
    core_us = statistics.median(c for _, c in taken) * 1e6
    more_us = statistics.median(c - b for b, c in taken) * 1e6
    print(
        f"bare loop {bare_us:.2f} µs a call, core and driver {core_us:.2f} µs: {more_us:.2f} µs more ({rounds} rounds)"
    )


if __name__ == "__main__":
    main()
