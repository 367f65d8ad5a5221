"""How one side of `bench.peers.inprocess` is timed, the same way for all.

A side brings what its callers call, `ask(number)`, which gives twice the number. Every answer is
checked, and each caller asks again as soon as it has one. The figures are printed as JSON. This
runs under each side's own Python, so it needs the standard library only.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any, Literal, NoReturn

Case = Literal["tasks", "task_alone", "threads", "threads_greedy", "threads_free", "thread_alone"]
Ask = Callable[[int], int]
AskAsync = Callable[[int], Awaitable[int]]
Function = Callable[[list[int]], list[int]]

TASKS = 512
THREADS = 64
FEWER_THREADS = 20  # in `threads_free`
MAX_BATCH_SIZE = 64
WARM_UP_S = 0.5
CALL_S = 1e-3  # what the function of `threads` takes,
ITEM_S = 20e-6  # and what it takes more for each item


def double(numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]


async def double_async(numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]


def double_slowly(numbers: list[int]) -> list[int]:
    """As a GPU would: mostly a fixed cost, and the interpreter is free meanwhile."""
    time.sleep(CALL_S + ITEM_S * len(numbers))
    return [2 * number for number in numbers]


def main_of_tasks(start: Callable[[], AskAsync], case: str, seconds: float) -> None:
    """Measure a side for tasks, on plain asyncio. `start` is called with the loop running."""
    asyncio.run(_main_of_tasks(start, case, seconds))


async def _main_of_tasks(start: Callable[[], AskAsync], case: str, seconds: float) -> None:
    measure = {"tasks": tasks, "task_alone": task_alone}[case]
    ask = start()
    await measure(ask, WARM_UP_S)
    loop = type(asyncio.get_running_loop())
    report(await measure(ask, seconds), loop=f"{loop.__module__}.{loop.__qualname__}")


def main_of_threads(batched: Callable[[Function], Ask], case: str, seconds: float) -> None:
    """Measure a side for threads: what `batched` makes of a function."""
    if case == "thread_alone":
        ask = batched(double)
        thread_alone(ask, double, WARM_UP_S)
        report(thread_alone(ask, double, seconds))
    else:
        free = case == "threads_free"
        ask = batched(double if free else double_slowly)
        n = FEWER_THREADS if free else THREADS
        threads(ask, WARM_UP_S, n)
        report(threads(ask, seconds, n))


def report(seconds_per_item: float, **facts: str) -> None:
    """The figure, and what must be the same on both sides of a pair."""
    print(json.dumps({"seconds_per_item": seconds_per_item, "python": sys.version, **facts}))


async def tasks(ask: AskAsync, seconds: float) -> float:
    """Many callers: the whole time over the number of items."""
    numbers = itertools.count()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True

    async def caller() -> int:
        asked = 0
        while not stopped:
            number = next(numbers)
            answer = await ask(number)
            if answer != 2 * number:
                wrong(number, answer)
            asked += 1
        return asked

    asyncio.get_running_loop().call_later(seconds, stop)
    begin = time.perf_counter()
    asked = await asyncio.gather(*[caller() for _ in range(TASKS)])
    return (time.perf_counter() - begin) / sum(asked)


async def task_alone(ask: AskAsync, seconds: float) -> float:
    """One caller: the median of its times."""
    taken = []
    now = time.perf_counter()
    end = now + seconds
    for number in itertools.count():
        begin = time.perf_counter()
        answer = await ask(number)
        now = time.perf_counter()
        if answer != 2 * number:
            wrong(number, answer)
        taken.append(now - begin)
        if now > end:
            break
    return median(taken)


def threads(ask: Ask, seconds: float, n: int) -> float:
    """So many callers: the whole time over the number of items."""
    stopped = threading.Event()
    together = threading.Barrier(n + 1)

    def caller(first: int) -> int:
        together.wait()
        asked = 0
        for number in itertools.count(first, n):
            answer = ask(number)
            if answer != 2 * number:
                wrong(number, answer)
            asked += 1
            if stopped.is_set():
                break
        return asked

    with ThreadPoolExecutor(n) as pool:
        callers = [pool.submit(caller, first) for first in range(n)]
        together.wait()
        begin = time.perf_counter()
        time.sleep(seconds)
        stopped.set()
        asked = sum(each.result() for each in callers)
        return (time.perf_counter() - begin) / asked


def thread_alone(ask: Ask, function: Function, seconds: float) -> float:
    """One caller: the median of its times less that of the function itself, the two in turns."""
    taken, bare = [], []
    now = time.perf_counter()
    end = now + seconds
    for number in itertools.count():
        begin = time.perf_counter()
        answer = ask(number)
        between = time.perf_counter()
        function([number])
        now = time.perf_counter()
        if answer != 2 * number:
            wrong(number, answer)
        taken.append(between - begin)
        bare.append(now - between)
        if now > end:
            break
    return median(taken) - median(bare)


def wrong(number: int, answer: Any) -> NoReturn:
    raise AssertionError(f"{number} was answered {answer!r}")
