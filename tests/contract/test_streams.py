"""What every driver promises callers that take answers in parts, whichever way the model is run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from carpool.errors import DeadlineExceeded, ModelError
from tests.contract.streams import STREAMING, Start, Streaming
from tests.effort import slow_where
from tests.support.parts import up_to

LONG_S = 30.0


async def heard(service: Streaming, item: object) -> list[int]:
    async with service.parts(item) as parts:
        return [part async for part in parts]


async def each_stream_has_its_own_parts_in_order(start: Start) -> None:
    async with start(4) as service:
        lengths = [7, 1, 12, 3, 5, 9, 2, 11, 4, 6, 8, 10]
        assert await asyncio.gather(*[heard(service, n) for n in lengths]) == [up_to(n) for n in lengths]


async def the_whole_answer_is_its_parts(start: Start) -> None:
    async with start(4) as service:
        whole, parts = await asyncio.gather(service.predict(6), heard(service, 6))
        assert whole == parts == up_to(6)


async def a_stream_that_fails_harms_no_other(start: Start) -> None:
    async def fails(item: object) -> list[int]:
        got = []
        with pytest.raises(ModelError):  # noqa: PT012
            async with service.parts(item) as parts:
                async for part in parts:
                    got.append(part)
        return got

    async with start(4) as service:
        bad = {"n": 9, "at": 3, "raise": "three"}
        others = await asyncio.gather(heard(service, 15), fails(bad), heard(service, 8))
        assert others == [up_to(15), up_to(3), up_to(8)]


async def a_stream_that_is_left_frees_its_place(start: Start) -> None:
    async with start(1) as service:
        async with service.parts(10**6) as parts:
            assert await anext(parts) == 1
        assert await heard(service, 3) == up_to(3)


async def time_bounds_the_whole_stream(start: Start) -> None:
    async with start(1) as service:
        with pytest.raises(DeadlineExceeded):  # noqa: PT012
            async with service.parts(10**6, timeout_s=0.1) as parts:
                async for _ in parts:
                    pass
        assert await heard(service, 2) == up_to(2)


PROMISES: dict[str, Callable[[Start], Awaitable[None]]] = {
    promise.__name__: promise
    for promise in (
        each_stream_has_its_own_parts_in_order,
        the_whole_answer_is_its_parts,
        a_stream_that_fails_harms_no_other,
        a_stream_that_is_left_frees_its_place,
        time_bounds_the_whole_stream,
    )
}


IN_PROCESSES = ("processes", "threads over processes", "http")
"""Their workers take a second to start: in the quick run each driver makes the first promise."""


@slow_where(lambda driver, promise: driver in IN_PROCESSES and promise != "each_stream_has_its_own_parts_in_order")
@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("driver", STREAMING)
def test_a_driver_keeps_its_promises_about_streams(driver: str, promise: str) -> None:
    """Every driver keeps each promise about answers in parts."""

    async def main() -> None:
        async with asyncio.timeout(LONG_S):
            await PROMISES[promise](STREAMING[driver])

    asyncio.run(main())
