"""Newcomers, at the moments between two steps of their lives at which something else happens."""

from __future__ import annotations

import asyncio

import pytest

from carpool import Service, Stage, StartupError
from carpool.service.handle import AsyncHandle


class _Echo:
    async def predict(self, xs: list[int]) -> list[int]:
        return xs


def service() -> AsyncHandle:
    return Service(Stage(_Echo, run_in="loop", max_batch_size=2)).run_async()


def test_a_newcomer_that_is_ready_and_taken_back_is_not_admitted() -> None:
    """If it is taken back, or dies, after it was ready and before it was admitted, it counts as dead."""

    async def run() -> None:
        async with service() as s:
            assert s.driver is not None
            turnover = s._running.pools[0].turnover
            newcomer = turnover.add()
            await newcomer.ready
            assert turnover.is_ready(newcomer.place)
            turnover.take_all_back()
            assert not turnover.is_ready(newcomer.place)
            assert await turnover.until_gone([newcomer.place], 20.0) == []
            assert s._running.pools[0].roster.established == [0]
            assert await s.predict(1) == 1

    asyncio.run(run())


def test_who_waits_for_a_newcomer_that_is_taken_back_is_told() -> None:
    """A change that gives way to another one ends with an error, and not never."""

    async def run() -> None:
        async with service() as s:
            turnover = s._running.pools[0].turnover
            newcomer = turnover.add()
            turnover.take_all_back()
            with pytest.raises(StartupError, match="was not wanted any more"):
                await newcomer.ready

    asyncio.run(run())


def test_the_user_comes_before_the_upkeep() -> None:
    """A number given by the user ends what is being added by the load, and is what there is afterwards."""

    async def run() -> None:
        async with service() as s:
            s._running.pools[0].turnover.add()
            await s.scale("_Echo", 3)
            roster = s._running.pools[0].roster
            assert len(roster.established) == 3
            assert len([record for record in roster.places.values() if not record.is_leaving]) == 3

    asyncio.run(run())


def test_a_worker_that_dies_while_it_drains_harms_nobody() -> None:
    """Its requests run elsewhere, and its place is removed all the same."""

    async def run() -> None:
        gate = asyncio.Event()

        async def gated(xs: list[int]) -> list[int]:
            await gate.wait()
            return xs

        async with Service(Stage(gated, run_in="loop", max_batch_size=1, workers=2)).run_async() as s:
            pool = s._running.pools[0]
            asking = [asyncio.ensure_future(s.predict(i)) for i in range(2)]
            await asyncio.sleep(0.01)
            scaling = asyncio.ensure_future(s.scale("gated", 1))
            await asyncio.sleep(0.01)
            pool._workers[1].kill("it was killed by the test")
            gate.set()
            assert await asyncio.gather(*asking) == [0, 1]
            await scaling
            assert list(pool.roster.places) == [0]
            assert not pool.roster.failed

    asyncio.run(run())
