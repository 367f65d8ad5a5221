"""Callers in a closed loop; while they ask, answers, processor time and workers' clocks count.

Everybody asks again as soon as the answer is there, and every answer is checked. What counts is a
window in the middle, so that neither the start nor the last batch of an end that nobody fills is in
it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from bench.documents import clocks
from bench.tools.figures import Facts
from bench.tools.process_tree import ProcessTree

WARM_UP_S = 0.5
Same = Callable[[Any, Any], bool]


class Ask(NamedTuple):
    """What one caller asks, again and again, and the right answer."""

    x: Any
    right: Any


class Window:
    """What happens between `open` and `close`, in this process and all that it has started."""

    def __init__(self, counts: list[int]) -> None:
        self._counts = counts
        self._tree = ProcessTree(os.getpid())

    def _now(self) -> tuple[float, int, float, clocks.Times]:
        times = clocks.read_all()
        cpu_s = self._tree.cpu_s()
        return time.perf_counter(), sum(self._counts), cpu_s, times

    def open(self) -> None:
        self._opened = self._now()

    def close(self) -> Facts:
        began, answers_before, cpu_before, times_before = self._opened
        ended, answers, cpu_s, times = self._now()
        answers -= answers_before
        facts: Facts = {
            "seconds_per_item": (ended - began) / answers if answers else float("nan"),
            "cpu_s_per_item": (cpu_s - cpu_before) / answers if answers else float("nan"),
        }
        batches, items, call_s, between_s, between_cpu_s = (
            after - before for after, before in zip(times, times_before, strict=True)
        )
        if batches:
            facts |= {"items_per_batch": items / batches, "call_s": call_s / batches, "between_s": between_s / batches}
            facts["idle_s"] = (between_s - between_cpu_s) / batches
        return facts


async def in_tasks(
    ask: Callable[[Any], Awaitable[Any]], asks: Sequence[Ask], same: Same, warm_up_s: float, seconds: float
) -> Facts:
    """One task for each of `asks`."""
    counts = [0] * len(asks)
    stopped = False

    async def caller(place: int, x: Any, right: Any) -> None:
        while not stopped:
            answer = await ask(x)
            if not same(answer, right):
                wrong(x, answer)
            counts[place] += 1

    callers = asyncio.gather(*[caller(place, *asked) for place, asked in enumerate(asks)])
    window = Window(counts)
    await _while_they_run(callers, warm_up_s)
    window.open()
    await _while_they_run(callers, seconds)
    facts = window.close()
    stopped = True
    await callers
    return facts


async def _while_they_run(callers: asyncio.Future[Any], seconds: float) -> None:
    done, _ = await asyncio.wait([callers], timeout=seconds)
    for failed in done:
        failed.result()


def in_threads(ask: Callable[[Any], Any], asks: Sequence[Ask], same: Same, warm_up_s: float, seconds: float) -> Facts:
    """One thread for each of `asks`."""
    counts = [0] * len(asks)
    stopped = False
    wrongs: list[Any] = []

    def caller(place: int, x: Any, right: Any) -> None:
        while not stopped:
            answer = ask(x)
            if not same(answer, right):
                wrongs.append((x, answer))
                return
            counts[place] += 1

    threads = [threading.Thread(target=caller, args=(place, *asked)) for place, asked in enumerate(asks)]
    for thread in threads:
        thread.start()
    window = Window(counts)
    time.sleep(warm_up_s)
    window.open()
    time.sleep(seconds)
    facts = window.close()
    stopped = True
    for thread in threads:
        thread.join()
    if wrongs:
        wrong(*wrongs[0])
    return facts


def wrong(x: Any, answer: Any) -> NoReturn:
    raise AssertionError(f"{str(x)[:100]} was answered {str(answer)[:100]}")
