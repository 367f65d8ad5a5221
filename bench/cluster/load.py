"""Load on one side for a while: callers in Python that never pause, or `wrk` over HTTP."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from bench.peers.contestants import Exchange, Launch
from bench.tools import wrk
from bench.tools.process_tree import ProcessTree
from bench.tools.server import Server

EXCHANGE = Exchange(body=b"1.5", answer=3.0)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn of one side showed; processor time is that of all processes, Ray's among them."""

    per_s: float
    p50_s: float
    p99_s: float
    cpu_s: float


def is_double(answer: float, x: float) -> bool:
    """Report whether an answer is twice as much as its item."""
    return answer == 2 * x


class Load:
    """Loads a side, and reads what that takes of the processor."""

    def __init__(self) -> None:
        self._tree = ProcessTree(os.getpid())

    async def callers(
        self,
        call: Callable[[Any], Awaitable[Any]],
        n: int,
        seconds: float,
        item_of: Callable[[int], Any] = float,
        is_answer: Callable[[Any, Any], bool] = is_double,
    ) -> Turn:
        """Have `n` tasks ask without a pause; each answer is checked.

        Args:
            call: Asks.
            n: How many callers there are.
            seconds: For how long.
            item_of: Returns what is asked for in the request of a number.
            is_answer: Reports whether an answer is right, of an answer and its item.
        """
        took: list[float] = []
        end = time.perf_counter() + seconds

        async def caller(number: int) -> None:
            while (began := time.perf_counter()) < end:
                item = item_of(number)
                answer = await call(item)
                took.append(time.perf_counter() - began)
                if not is_answer(answer, item):
                    raise AssertionError(f"a wrong answer to the request of number {number}")
                number += n

        before, began = self._cpu_s(), time.perf_counter()
        await asyncio.gather(*[caller(number) for number in range(n)])
        wall_s, cpu_s = time.perf_counter() - began, self._cpu_s() - before
        took.sort()
        return Turn(
            len(took) / wall_s, took[len(took) // 2], took[min(len(took) - 1, len(took) * 99 // 100)], cpu_s / len(took)
        )

    async def connections(self, port: int, n: int, seconds: float) -> Turn:
        """Have `wrk` ask over so many connections. Raises AssertionError if a request fails."""
        server = Server(Launch(name="", command=[], exchange=EXCHANGE), port, self._tree)
        before = self._cpu_s()
        run = await asyncio.to_thread(wrk.run, server, connections=n, seconds=max(1, round(seconds)))
        if run.failed:
            raise AssertionError(f"{run.failed} requests failed")
        return Turn(run.requests_per_s, run.p50_s, run.p99_s, (self._cpu_s() - before) / run.answers)

    def _cpu_s(self) -> float:
        """Processor time of all processes but the load, which this one has waited for."""
        waited_for = resource.getrusage(resource.RUSAGE_CHILDREN)
        return self._tree.cpu_s() - waited_for.ru_utime - waited_for.ru_stime
