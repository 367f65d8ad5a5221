"""Callers of a batch function may say whose items go first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import carpool


@pytest.mark.parametrize("settings", [{}, {"merge": True}, {"size": lambda x: 1}], ids=["items", "chunks", "sizes"])
def test_tickets_of_a_higher_priority_go_first_in_threads(settings: Any) -> None:
    """Of two that wait, the more urgent one is in the earlier batch, whichever came first."""
    seen: list[Any] = []

    def run(xs: Any) -> Any:
        seen.extend(xs)
        return xs

    f: Any = carpool.batch(max_batch_size=1, policy="greedy", **settings)(run)
    one, two = (["late"], ["soon"]) if "merge" in settings else ("late", "soon")
    f.submit(one)
    f.submit(two, priority=1)
    f.close()
    assert seen == ["soon", "late"]


def test_a_call_and_many_have_priorities_in_threads() -> None:
    """They overtake a ticket that came before."""
    seen: list[str] = []

    @carpool.batch(max_batch_size=1, policy="greedy")
    def f(xs: list[str]) -> list[str]:
        seen.extend(xs)
        return xs

    f.submit("late")
    f("sooner", priority=3)
    f.many(["soon"], priority=2)
    f.close()
    assert seen == ["sooner", "soon", "late"]


def test_calls_of_a_higher_priority_go_first_in_tasks() -> None:
    """In asyncio, too, one by one and several at once."""
    seen: list[int] = []

    @carpool.batch(max_batch_size=1, policy="greedy")
    async def f(xs: list[int]) -> list[int]:
        seen.extend(xs)
        return xs

    async def main() -> None:
        await asyncio.gather(f(0), f(1, priority=1), f.many([2, 3], priority=2))

    asyncio.run(main())
    assert seen == [2, 3, 1, 0]


@pytest.mark.parametrize("priority", [1.5, "high", 101, -101])
def test_a_priority_is_a_whole_number(priority: Any) -> None:
    """Anything else is refused, as by services."""

    async def run_later(xs: list[int]) -> list[int]:
        return xs

    with pytest.raises(ValueError, match="priority must be a whole number"):
        carpool.batch(lambda xs: xs)(1, priority=priority)
    with pytest.raises(ValueError, match="priority must be a whole number"):
        asyncio.run(carpool.batch(run_later)(1, priority=priority))
