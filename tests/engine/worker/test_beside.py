"""Asynchronous generators that run beside each other in a worker on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from carpool.engine.worker.generators import Beside
from tests.support.loops import on_a_loop
from tests.support.waiting import PATIENCE_S


@on_a_loop
async def test_the_end_of_a_worker_ends_generators_that_nobody_asks_to_go_on() -> None:
    """A generator that waits at its `yield` when its worker ends is closed, and its task is over."""
    ended = asyncio.Event()

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            ended.set()

    async def no_news() -> None:
        await asyncio.Event().wait()

    before = asyncio.all_tasks()
    beside = Beside(no_news)
    generator = beside.apart(numbers(), lambda part: part)
    await beside.first_of([(generator, None)])
    assert generator.take() == 1

    beside.end()

    await asyncio.wait_for(ended.wait(), PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        while asyncio.all_tasks() != before:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
