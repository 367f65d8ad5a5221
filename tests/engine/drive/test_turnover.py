"""Newcomers, at the moments between two steps of their lives at which something else happens."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from carpool import Service, Stage, StartupError
from carpool.engine.core.roster import PlaceState
from carpool.engine.wire.frame import Frame, FrameKind
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


class _Gated:
    """Its successors load once `gate` is open."""

    gate = threading.Event()
    loaded = 0

    def setup(self) -> None:
        _Gated.loaded += 1
        if _Gated.loaded > 2:
            assert _Gated.gate.wait(20.0)

    def predict(self, xs: list[int]) -> list[int]:
        return xs


def test_a_worker_that_becomes_ready_as_it_is_to_go_gets_nothing() -> None:
    """It says that it is ready in the turn of the loop in which it is ended."""
    is_ready = threading.Event()

    def watch(call_soon: Any) -> Any:
        def call(callback: Any, *args: Any, **more: Any) -> Any:
            handle = call_soon(callback, *args, **more)
            for frame in args:
                if isinstance(frame, Frame) and frame.kind == FrameKind.STATE and frame.payloads[0] == b"ready":
                    is_ready.set()
            return handle

        return call

    async def run() -> None:
        _Gated.gate.clear()
        _Gated.loaded = 0
        async with Service(Stage(_Gated, run_in="thread", max_batch_size=1, workers=2)).run_async() as s:
            pool = s._running.pools[0]
            assert await asyncio.gather(*[s.predict(i) for i in range(4)]) == [0, 1, 2, 3]
            pool._workers[1].kill("it was killed by the test")
            while pool.roster.places[1].state != PlaceState.LOADING:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.001)
            loop = asyncio.get_running_loop()
            loop.call_soon_threadsafe = watch(loop.call_soon_threadsafe)  # type: ignore[method-assign]
            _Gated.gate.set()
            assert is_ready.wait(20.0)  # its message waits for the next turn of the loop, and so does its end
            pool.turnover.retire(1)
            assert await pool.turnover.until_gone([1], 20.0) == []
            assert pool.batcher.idle == 1
            assert await asyncio.gather(*[s.predict(i) for i in range(4)]) == [0, 1, 2, 3]

    asyncio.run(run())
