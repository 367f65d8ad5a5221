"""What every driver promises its callers, whichever way the model is run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import carpool
from tests.contract.drivers import DRIVERS, Driven, Start


@pytest.fixture(params=DRIVERS)
def start(request: pytest.FixtureRequest) -> Start:
    return DRIVERS[request.param]


def run(start: Start, scenario: Callable[[Driven], Awaitable[Any]], **settings: Any) -> Any:
    async def main() -> Any:
        async with start(**settings) as service:
            return await scenario(service)

    return asyncio.run(main())


def test_each_caller_gets_its_own_answer(start: Start) -> None:
    """300 concurrent callers: every answer belongs to its question, and calls were shared."""

    async def scenario(service: Driven) -> Any:
        return await asyncio.gather(*[service.predict(i) for i in range(300)])

    answers = run(start, scenario)

    assert [value for value, _ in answers] == [2 * i for i in range(300)]
    assert max(n for _, n in answers) > 1


def test_a_batch_is_never_above_its_maximum(start: Start) -> None:
    """However many wait, `predict` never sees more than `max_batch_size` items."""

    async def scenario(service: Driven) -> Any:
        return await asyncio.gather(*[service.predict(i) for i in range(100)])

    sizes = {n for _, n in run(start, scenario, max_batch_size=7, cost_s=0.005)}

    assert max(sizes) == 7


def test_a_lone_call_is_a_batch_of_one(start: Start) -> None:
    """Nobody waits for company."""

    async def scenario(service: Driven) -> Any:
        return [await service.predict(i) for i in range(3)]

    assert run(start, scenario) == [[0, 1], [2, 1], [4, 1]]


def test_a_stream_keeps_order(start: Start) -> None:
    """Answers of a stream come in the order of its items, from several workers too."""

    async def scenario(service: Driven) -> Any:
        return [value async for value, _ in service.stream(range(500))]

    assert run(start, scenario, workers=2) == [2 * i for i in range(500)]


def test_an_item_that_raises_fails_alone(start: Start) -> None:
    """Its batch-mates get their answers."""

    async def scenario(service: Driven) -> Any:
        calls = [service.predict(x) for x in [0, 1, 2, "raise", 4, 5, 6, 7]]
        return await asyncio.gather(*calls, return_exceptions=True)

    answers = run(start, scenario, cost_s=0.01)

    assert isinstance(answers[3], carpool.ModelError)
    assert [answer[0] for i, answer in enumerate(answers) if i != 3] == [0, 2, 4, 8, 10, 12, 14]


def test_an_error_returned_for_an_item_reaches_its_caller(start: Start) -> None:
    """A model may return an exception in the place of a result."""

    async def scenario(service: Driven) -> Any:
        return await asyncio.gather(service.predict("refuse"), service.predict(1), return_exceptions=True)

    refused, answer = run(start, scenario)

    assert isinstance(refused, carpool.ValidationError)
    assert answer[0] == 2


def test_a_deadline_is_kept(start: Start) -> None:
    """A caller hears at its deadline, not when the model is done, and the next call is served."""
    if start is DRIVERS["batched threads"]:
        pytest.skip("a caller who leads is in the middle of the function")

    async def scenario(service: Driven) -> Any:
        started = time.monotonic()
        with pytest.raises(carpool.DeadlineExceeded):
            await service.predict(1, timeout_s=0.1)
        return time.monotonic() - started, await service.predict(2)

    took_s, answer = run(start, scenario, cost_s=0.8)

    assert took_s < 0.6
    assert answer == [4, 1]


def test_who_expires_in_the_queue_never_reaches_the_model(start: Start) -> None:
    """Deadlines are checked at dispatch."""

    async def scenario(service: Driven) -> Any:
        first = asyncio.ensure_future(service.predict(1))
        await service.pause(0.1)  # it is at work now
        with pytest.raises(carpool.DeadlineExceeded):
            await service.predict(2, timeout_s=0.05)
        await first
        return await service.predict("seen")

    assert run(start, scenario, cost_s=0.3) == [1]


def test_a_caller_who_leaves_harms_nobody(start: Start) -> None:
    """Cancelled while queued: never run; its neighbours are answered."""
    if start is DRIVERS["threads over processes"]:
        pytest.skip("a thread cannot be cancelled")

    async def scenario(service: Driven) -> Any:
        first = asyncio.ensure_future(service.predict(0))
        await service.pause(0.1)
        calls = [asyncio.ensure_future(service.predict(i)) for i in range(1, 9)]
        await service.pause(0.1)
        for call in calls[::2]:
            call.cancel()
        await asyncio.gather(first, *calls, return_exceptions=True)
        assert [call.result()[0] for call in calls[1::2]] == [4, 8, 12, 16]
        return sorted(await service.predict("seen"))

    assert run(start, scenario, cost_s=0.5) == [0, 2, 4, 6, 8]


def test_no_worker_is_idle_while_work_waits(start: Start) -> None:
    """40 items of 50 ms in batches of 4 on two workers take five rounds, not more."""

    async def scenario(service: Driven) -> Any:
        started = time.monotonic()
        answers = await asyncio.gather(*[service.predict(i) for i in range(40)])
        return time.monotonic() - started, answers

    took_s, answers = run(start, scenario, cost_s=0.05, max_batch_size=4, workers=2)

    assert sorted({n for _, n in answers}, reverse=True)[0] == 4
    assert took_s < 0.05 * 5 * 2
