"""What a batch function tells of itself: numbers and its policy's reasons."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import carpool
from tests.support.waiting import PATIENCE_S, wait_until


class Held:
    """A function that waits until it may go on."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.f = carpool.batch(self.run)

    def run(self, xs: list[int]) -> list[int]:
        assert self.may_go.wait(PATIENCE_S)
        return xs


def fails_for_zero(xs: list[int]) -> list[float]:
    return [1 / x for x in xs]


async def fails_for_zero_later(xs: list[int]) -> list[float]:
    return [1 / x for x in xs]


def test_lone_calls_and_batches_count_alike_in_threads() -> None:
    """Each call of the function is counted once, with its size, whichever way it went."""
    f = carpool.batch(idempotent=False)(fails_for_zero)
    assert f.stats().batches == f.stats().calls == 0
    for x in (1, 2, 4):
        f(x)
    f.many([1, 2])
    with pytest.raises(ZeroDivisionError):
        f(0)
    with pytest.raises(ZeroDivisionError):
        f.many([0, 1, 2])
    seen = f.stats()
    assert (seen.calls, seen.errors, seen.waiting, seen.running) == (9, 4, 0, 0)
    assert seen.batch_sizes == {1: 4, 2: 1, 3: 1}
    assert (seen.batches, seen.mean_batch_size) == (6, 1.5)
    assert seen.mean_compute_s > 0.0
    assert seen.mean_latency_s > 0.0
    assert seen.mean_queue_s >= 0.0


def test_tasks_count_the_same() -> None:
    """The numbers of an async function are those of all loops that have called it, closed ones included."""
    f = carpool.batch(fails_for_zero_later)

    async def calls() -> None:
        await asyncio.gather(f(1), f(2), f(4))
        with pytest.raises(ZeroDivisionError):
            await f(0)

    asyncio.run(calls())
    asyncio.run(calls())
    seen = f.stats()
    assert (seen.calls, seen.errors, seen.batch_sizes) == (8, 2, {1: 2, 3: 2})
    assert min(seen.mean_compute_s, seen.mean_latency_s) > 0.0


def test_a_call_that_runs_and_one_that_waits_are_seen() -> None:
    """What is inside is told while it is there: also a call that runs alone, of which no batch was made."""
    held = Held()
    threads = [threading.Thread(target=held.f, args=(1,))]
    threads[0].start()
    wait_until(lambda: held.f.stats().running == 1)
    assert held.f.stats().calls == 1
    threads.append(threading.Thread(target=held.f, args=(2,)))
    threads[1].start()
    wait_until(lambda: held.f.stats().waiting == 1)
    assert (held.f.stats().running, held.f.stats().calls) == (1, 2)
    held.may_go.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    seen = held.f.stats()
    assert (seen.calls, seen.waiting, seen.running, seen.batch_sizes) == (2, 0, 0, {1: 2})
    assert seen.mean_queue_s > 0.0


def test_a_cancelled_ticket_is_no_error() -> None:
    """What its caller has given up is counted by itself."""
    f = carpool.batch(fails_for_zero)
    assert f.submit(0).cancel()
    assert (f.stats().calls, f.stats().cancelled, f.stats().errors, f.stats().mean_latency_s) == (1, 1, 0, 0.0)


class Scale:
    @carpool.batch
    def times(self, xs: list[int]) -> list[int]:
        return [2 * x for x in xs]

    @carpool.batch
    async def times_later(self, xs: list[int]) -> list[int]:
        return [2 * x for x in xs]


def test_a_method_counts_for_its_instance() -> None:
    """Each instance has numbers of its own."""
    one, other = Scale(), Scale()
    one.times(1)
    assert asyncio.run(one.times_later(1)) == 2
    assert (one.times.stats().calls, other.times.stats().calls) == (1, 0)
    assert (one.times_later.stats().calls, other.times_later.stats().calls) == (1, 0)


@pytest.mark.parametrize("function", [fails_for_zero, fails_for_zero_later])
def test_a_function_explains_its_policy(function: Callable[..., Any]) -> None:
    """Before the first call, too, and by the policy that decides."""
    f: Any = carpool.batch(policy="static", max_batch_size=7)(function)
    assert f.explain()["policy"] == "static"
    g: Any = carpool.batch(function)
    called = g(1)
    if asyncio.iscoroutine(called):
        asyncio.run(called)
    assert g.explain()["policy"] == "adaptive"


def test_the_numbers_print_as_a_table() -> None:
    """One line each, with the name above."""
    f = carpool.batch(fails_for_zero)
    f.many([1, 2])
    head, *rows = str(f.stats()).splitlines()
    assert head == "fails_for_zero"
    assert [row.split("  ")[1] for row in rows][:4] == ["calls", "now", "batches", "batch sizes"]
    assert "2 (0 errors, 0 cancelled)" in rows[0]
