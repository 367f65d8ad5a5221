"""Ten thousand callers of `@carpool.batch` leave at random moments, tasks and threads: nobody else notices, nothing
stays behind, nobody waits for ever. (The same in virtual time: `tests/engine/core/test_cancel_storm.py`.)"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from typing import Any

import pytest

import carpool
from carpool.engine.core.core import Core

CANCELS = 10_000
PATIENCE_S = 100.0


def check_empty(core: Core) -> None:
    """Nobody is inside, and the counts add up."""
    (stage,) = core.crews
    assert core.unanswered == core.waiting == stage.running == 0
    assert core.flow.admitted == core.flow.answered + core.flow.cancelled
    assert (stage.queue.count, stage.queue.size, stage.in_flight) == (0, 0, {})


async def storm_of_tasks(seed: int) -> tuple[int, int]:
    """Tasks that are cancelled before they run, while they wait, while their batch runs, or too late."""
    dice = random.Random(seed)

    @carpool.batch(max_batch_size=16, max_queue_size=64)
    async def double(xs: list[int]) -> list[int]:
        await asyncio.sleep(dice.choice((0, 0, 0.0005)))
        return [2 * x for x in xs]

    cancelled = served = x = 0
    while cancelled < CANCELS:
        tasks = {}
        for _ in range(200):
            x += 1
            tasks[x] = asyncio.create_task(double(x))  # type: ignore[arg-type]
        for _ in range(8):
            for task in dice.sample(list(tasks.values()), 20):
                task.cancel()
            for _ in range(dice.randrange(4)):
                await asyncio.sleep(0)
            await asyncio.sleep(dice.choice((0, 0, 0.0003)))
        _, stuck = await asyncio.wait(tasks.values(), timeout=PATIENCE_S)
        assert not stuck
        for number, task in tasks.items():
            if task.cancelled():
                cancelled += 1
            else:
                assert task.result() == 2 * number
                served += 1
    assert await asyncio.wait_for(double(-1), PATIENCE_S) == -2
    (driver,) = double._drivers.by_loop.values()
    check_empty(driver.core)
    assert (
        driver.core.flow.cancelled > CANCELS // 4
    )  # the others left before they were seen, or with their answer there
    await double.close()
    return cancelled, served


@pytest.mark.fault("F34")
def test_tasks_that_are_cancelled() -> None:
    """When tasks are cancelled at random moments, those that stay get their own answers."""
    cancelled, served = asyncio.run(storm_of_tasks(seed=1))

    assert cancelled >= CANCELS
    assert served > 1_000


class Crowd:
    """Threads that take tickets, of which some are cancelled, by another thread, while others wait for them."""

    def __init__(self) -> None:
        self.cancelled = self.served = 0
        self.wrong: list[Any] = []
        self._lock = threading.Lock()

        @carpool.batch(max_batch_size=8, max_queue_size=32)
        def double(xs: list[int]) -> list[int]:
            time.sleep(0.0002)
            return [2 * x for x in xs]

        self.double = double

    def caller(self, first: int) -> None:
        """Until enough have left: a few tickets at a time, most of which do not last."""
        dice = random.Random(first)
        x = first
        while self.cancelled < CANCELS:
            tickets = {}
            for _ in range(10):
                x += 8
                tickets[x] = self.double.submit(x)
            going = threading.Thread(target=self.leave, args=(dice.sample(list(tickets.values()), 8),))
            going.start()
            for number, ticket in tickets.items():
                try:
                    result = ticket.result(timeout_s=dice.choice((None, None, 1e-6, 0.001)))
                except carpool.Unavailable:
                    continue  # cancelled
                except TimeoutError:
                    self.leave([ticket])
                    continue
                with self._lock:
                    self.served += 1
                    if result != 2 * number:
                        self.wrong.append((number, result))
            going.join()

    def leave(self, tickets: list[Any]) -> None:
        """Cancel these tickets, and count those that could be."""
        for ticket in tickets:
            gone = ticket.cancel()
            with self._lock:
                self.cancelled += gone


@pytest.mark.fault("F34")
def test_tickets_that_are_cancelled() -> None:
    """When tickets are cancelled at random, while threads wait for them, lead batches of others or
    time out, no thread is left waiting.
    """
    crowd = Crowd()
    threads = [threading.Thread(target=crowd.caller, args=(i,), daemon=True) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)

    assert not any(thread.is_alive() for thread in threads)
    assert crowd.wrong == []
    assert crowd.cancelled >= CANCELS
    assert crowd.served > 500
    assert crowd.double(-1) == -2
    crowd.double.close()
    line = crowd.double._driver._line
    check_empty(line.core)
    assert line.wake == []
