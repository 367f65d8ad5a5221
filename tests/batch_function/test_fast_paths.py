"""A call of a batch function takes a fast path, whose outcome is that of the slow one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import carpool
from carpool.batch_function.tasks import AsyncBatch
from tests.effort import examples
from tests.support.waiting import PATIENCE_S, wait_until

ITEMS = st.lists(st.integers(-3, 9), min_size=1, max_size=6)


def odd_ones_fail(x: int) -> int | Exception:
    """Return the double of an even number, and for an odd one an exception, which fails it alone."""
    return ValueError(f"{x} is odd") if x % 2 else 2 * x


class Played:
    """What a batch function was called with by some rounds of callers, and what each of these got."""

    def __init__(self, ask: Callable[[AsyncBatch[int, int], int], Any], **settings: Any) -> None:
        self.batches: list[tuple[int, list[int]]] = []
        self.answers: list[tuple[int, object]] = []
        self._ask = ask
        self._f = carpool.batch(**settings)(self._run)
        self._loops: list[asyncio.AbstractEventLoop] = []

    async def _run(self, xs: list[int]) -> list[Any]:
        self.batches.append((self._loops.index(asyncio.get_running_loop()), list(xs)))
        await asyncio.sleep(0)
        return [odd_ones_fail(x) for x in xs]

    def play(self, rounds: list[tuple[int, list[int]]]) -> Played:
        """Let callers of one of three loops, all of this thread, bring their items at the same time."""
        self._loops = [asyncio.new_event_loop() for _ in range(3)]
        try:
            for i, xs in rounds:
                self._loops[i].run_until_complete(self._round(i, xs))
        finally:
            for loop in self._loops:
                loop.run_until_complete(self._f.close())
                loop.close()
        return self

    async def _round(self, i: int, xs: list[int]) -> None:
        got = await asyncio.gather(*[self._ask(self._f, x) for x in xs], return_exceptions=True)
        self.answers += [(i, repr(each)) for each in got]


async def call(f: AsyncBatch[int, int], x: int) -> int:
    """Take the fast path, if the last call came from this loop."""
    return await f(x)


async def call_without_memory(f: AsyncBatch[int, int], x: int) -> int:
    """Ask for the loop's driver in each call."""
    f._drivers.latest = None
    return await f(x)


async def many(f: AsyncBatch[int, int], x: int) -> int:
    """Take the slow path."""
    return (await f.many([x]))[0]


@pytest.mark.parametrize("slow", [call_without_memory, many])
@given(
    rounds=st.lists(st.tuples(st.integers(0, 2), ITEMS), max_size=6),
    max_batch_size=st.integers(1, 4),
    is_weighed=st.booleans(),
)
def test_a_call_is_many_with_one_item(
    slow: Callable[..., Any], rounds: list[tuple[int, list[int]]], max_batch_size: int, is_weighed: bool
) -> None:
    """Whichever loops the calls come from, both paths make the same batches and give the same answers."""
    size = (lambda x: abs(x)) if is_weighed else None
    settings: dict[str, Any] = {"max_batch_size": max_batch_size, "size": size, "policy": "greedy"}
    quick = Played(call, **settings).play(rounds)
    expected = Played(slow, **settings).play(rounds)

    assert (quick.batches, quick.answers) == (expected.batches, expected.answers)
    assert len(quick.answers) == sum(len(xs) for _, xs in rounds)


class Line:
    """A batch function of threads that holds its first call back, so that all others wait in its line."""

    def __init__(self, ask: Callable[[Any, int], Any], max_batch_size: int) -> None:
        self.begun, self.may_go = threading.Event(), threading.Event()
        self._ask = ask
        self._f: Any = carpool.batch(max_batch_size=max_batch_size, policy="greedy")(self._run)

    def _run(self, xs: list[int]) -> list[Any]:
        self.begun.set()
        self.may_go.wait(PATIENCE_S)
        return [odd_ones_fail(x) for x in xs]

    def answers(self, xs: list[int]) -> list[str]:
        """Return what callers in as many threads are given or raised."""
        with ThreadPoolExecutor(len(xs) + 1) as pool:
            first = pool.submit(self._f, 0)
            assert self.begun.wait(PATIENCE_S)
            callers = [pool.submit(self._ask, self._f, x) for x in xs]
            wait_until(lambda: self._f.stats().waiting == len(xs))
            self.may_go.set()
            assert first.result(PATIENCE_S) == 0
            return [repr(caller.exception(PATIENCE_S) or caller.result()) for caller in callers]


@examples(20)
@given(xs=ITEMS, max_batch_size=st.integers(1, 4))
def test_a_call_of_a_thread_that_waits_in_the_line_is_many_with_one_item(xs: list[int], max_batch_size: int) -> None:
    """Whoever comes while another thread is inside the function is given or raised the same both ways."""
    quick = Line(lambda f, x: f(x), max_batch_size).answers(xs)

    assert quick == Line(lambda f, x: f.many([x])[0], max_batch_size).answers(xs)
    assert [each.startswith("ValueError") for each in quick] == [x % 2 == 1 for x in xs]
