"""How one side of `bench.peers.process` is timed, the same way for both.

A side brings a pipeline that is already up: `call(x)` and `stream(xs)`. Every answer is checked.
This runs under each side's own Python, so it needs the standard library only, and numpy for arrays.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any, Literal, Protocol

Case = Literal["stream_batched", "stream_single", "call_batched", "call_single", "arrays_stream", "arrays_call"]
ARRAY_ITEMS = 750_000  # of 8 bytes: 6 MB
WARM_UP_S = 0.5


class Pipeline(Protocol):
    """What both sides offer."""

    def call(self, x: Any) -> Any: ...

    def stream(self, xs: Iterable[Any]) -> Iterable[Any]: ...


def seconds_per_item(case: Case, core: Pipeline, seconds: float) -> float:
    """A stream: the whole time over the number of items. Lone calls: the median."""
    give, check = arrays() if case.startswith("arrays") else numbers()
    measure = stream if "stream" in case else calls
    measure(core, give, check, WARM_UP_S)
    return measure(core, give, check, seconds)


def stream(core: Pipeline, give: Callable[[int], Any], check: Callable[[int, Any], None], seconds: float) -> float:
    begin = time.perf_counter()

    def items() -> Iterator[Any]:
        for i in itertools.count():
            if time.perf_counter() - begin > seconds:
                return
            yield give(i)

    count = 0
    for y in core.stream(items()):
        check(count, y)
        count += 1
    return (time.perf_counter() - begin) / count


def calls(core: Pipeline, give: Callable[[int], Any], check: Callable[[int, Any], None], seconds: float) -> float:
    taken = []
    end = time.perf_counter() + seconds
    for i in itertools.count():
        x = give(i)
        begin = time.perf_counter()
        y = core.call(x)
        now = time.perf_counter()
        check(i, y)
        taken.append(now - begin)
        if now > end:
            return median(taken)
    raise AssertionError("count() does not end")


def numbers() -> tuple[Callable[[int], Any], Callable[[int, Any], None]]:
    """Item number i, and the check of its answer."""

    def check(i: int, y: Any) -> None:
        if y != 2 * i:
            raise AssertionError(f"item {i} was answered {y!r}")

    return lambda i: i, check


def arrays() -> tuple[Callable[[int], Any], Callable[[int, Any], None]]:
    """Always the same array: making a new one each time would be measured too."""
    import numpy as np

    array = np.zeros(ARRAY_ITEMS)

    def check(i: int, y: Any) -> None:
        if y.shape != array.shape or y[0] != 2 or y[-1] != 0:
            raise AssertionError(f"array {i} came back wrong")

    return lambda i: array, check
