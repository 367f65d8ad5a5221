"""A function that is batched for threads, awaited from tasks: `await f.submit(x)`."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import carpool
from tests.support.waiting import PATIENCE_S, wait_until


class Gate:
    """A function that waits until it may go on, and notes its batches and threads."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.batches: list[list[int]] = []
        self.threads: set[int] = set()

    def __call__(self, xs: list[int]) -> list[int]:
        self.batches.append(xs)
        self.threads.add(threading.get_ident())
        assert self.may_go.wait(PATIENCE_S)
        return [10 * x for x in xs]


async def turns(done: Any) -> None:
    """Let the loop run until something holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not done():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def test_tasks_and_threads_share_batches() -> None:
    """What tasks and threads bring while a batch runs goes together in the next one; the loop stays free."""
    gate = Gate()
    f = carpool.batch(gate)

    async def main() -> list[int]:
        first = threading.Thread(target=f, args=(0,))
        first.start()
        await turns(lambda: gate.batches)
        second = threading.Thread(target=f, args=(1,))
        second.start()
        wait_until(lambda: f.stats().waiting == 1)
        tasks = [asyncio.ensure_future(_awaited(f, x)) for x in (2, 3)]
        await turns(lambda: f.stats().waiting == 3)
        gate.may_go.set()
        results = await asyncio.gather(*tasks)
        for thread in (first, second):
            thread.join(PATIENCE_S)
        return results

    assert asyncio.run(main()) == [20, 30]
    assert gate.batches == [[0], [1, 2, 3]]


async def _awaited(f: Any, x: Any) -> Any:
    return await f.submit(x)


def test_one_thread_waits_for_many_tickets() -> None:
    """However many tasks await, no more threads are taken than batches may run."""
    gate = Gate()
    gate.may_go.set()
    f = carpool.batch(max_batch_size=8)(gate)

    async def main() -> list[int]:
        return await asyncio.gather(*[_awaited(f, x) for x in range(100)])

    assert asyncio.run(main()) == [10 * x for x in range(100)]
    assert threading.get_ident() not in gate.threads
    assert max(map(len, gate.batches)) == 8


def test_a_task_that_is_cancelled_takes_its_item_out() -> None:
    """What has not begun is not run, and the others get their answers."""
    gate = Gate()
    f = carpool.batch(gate)

    async def main() -> list[Any]:
        first = asyncio.ensure_future(_awaited(f, 0))
        await turns(lambda: gate.batches)
        others = [asyncio.ensure_future(_awaited(f, x)) for x in (1, 2)]
        await turns(lambda: f.stats().waiting == 2)
        others[0].cancel()
        await asyncio.wait([others[0]])
        gate.may_go.set()
        return await asyncio.gather(first, *others, return_exceptions=True)

    zero, one, two = asyncio.run(main())
    assert (zero, type(one), two) == (0, asyncio.CancelledError, 20)
    assert gate.batches == [[0], [2]]


@pytest.mark.parametrize(
    ("kind", "seen"),
    [(ValueError, ValueError), (StopIteration, RuntimeError), (KeyboardInterrupt, carpool.ModelError)],
)
def test_errors_reach_the_task(kind: type[BaseException], seen: type[BaseException]) -> None:
    """As they would reach a thread; KeyboardInterrupt of the function's own ends no loop."""

    def raises(xs: list[int]) -> list[int]:
        raise kind

    f = carpool.batch(raises)

    async def main() -> None:
        with pytest.raises(seen):
            await f.submit(1)

    asyncio.run(main())


def test_a_ticket_that_is_done_and_one_of_several_loops() -> None:
    """A ticket may be awaited again, and on any loop."""
    f = carpool.batch(lambda xs: [x + 1 for x in xs])
    done = f.submit(1, lead=True)

    async def main() -> list[int]:
        return [await done, await done, await f.submit(2)]

    for _ in range(2):
        assert asyncio.run(main()) == [2, 2, 3]
