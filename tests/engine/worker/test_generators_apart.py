"""Asynchronous generators of one worker on a loop: each awaits for itself, and what it awaits ends with its caller."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator
from typing import Any

import pytest

import carpool
from carpool import ModelError, Service, Stage
from tests.support.loops import on_a_loop
from tests.support.waiting import PATIENCE_S

NAME: contextvars.ContextVar[str] = contextvars.ContextVar("NAME")


class Upstream(carpool.Model):
    """Asks something elsewhere, which answers when the test wants it.

    Args:
        answers: By item, what is awaited.
        log: What has become of it.
    """

    def __init__(self, answers: dict[str, asyncio.Event], log: list[Any]) -> None:
        self.answers = answers
        self.log = log

    async def predict(self, x: str) -> AsyncIterator[str]:
        task = asyncio.current_task()
        NAME.set(x)
        try:
            yield f"{x} is asked"
            self.log.append(("awaits", x))
            await self.answers[x].wait()
            if x == "breaks":
                raise ValueError(x)
            if x == "cancelled":
                raise asyncio.CancelledError
            assert NAME.get() == x and asyncio.current_task() is task, "each part has the same task and context"
            yield f"{x} is answered"
        except asyncio.CancelledError:
            self.log.append(("cancelled", x))
            raise
        finally:
            self.log.append(("ended", x))


class InBatches(Upstream):
    """The same, with a generator for each batch."""

    async def predict(self, xs: list[str]) -> AsyncIterator[list[str]]:  # type: ignore[override]
        try:
            yield [f"{x} is asked" for x in xs]
            self.log += [("awaits", x) for x in xs]
            for x in xs:
                await self.answers[x].wait()
            yield [f"{x} is answered" for x in xs]
        except asyncio.CancelledError:
            self.log += [("cancelled", x) for x in xs]
            raise
        finally:
            self.log += [("ended", x) for x in xs]


class World:
    """A running service, and what its callers have heard."""

    def __init__(self, handle: carpool.AsyncHandle, answers: dict[str, asyncio.Event], log: list[Any]) -> None:
        self.handle, self.answers, self.log = handle, answers, log
        self.heard: dict[str, list[str]] = {}

    def ask(self, x: str) -> asyncio.Task[None]:
        self.answers.setdefault(x, asyncio.Event())
        self.heard[x] = []
        return asyncio.create_task(self._asked(x))

    async def _asked(self, x: str) -> None:
        async with self.handle.predict_stream(x) as parts:
            async for part in parts:
                self.heard[x].append(part)

    async def until(self, *entry: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while entry not in self.log:  # noqa: ASYNC110 # user code writes it
                await asyncio.sleep(0)


def in_a_world(model: type[Upstream], **settings: Any) -> Any:
    """Runs a test with a service of one worker, on a loop."""

    def runs(test: Any) -> Any:
        @on_a_loop
        async def run() -> None:
            answers: dict[str, asyncio.Event] = {}
            log: list[Any] = []
            stage = Stage(model, run_in="loop", kwargs={"answers": answers, "log": log}, **settings)
            async with Service(stage, timeout_s=PATIENCE_S).run_async() as handle:
                await test(World(handle, answers, log))

        return run

    return runs


EACH: Any = {"max_rows": 8}
TOGETHER: Any = {"max_batch_size": 2}


def test_a_generator_does_not_wait_for_what_another_one_awaits() -> None:
    """All of them await at the same time, and who is answered first has its part first."""

    @in_a_world(Upstream, **EACH)
    async def run(world: World) -> None:
        slow = world.ask("slow")
        await world.until("awaits", "slow")
        quick = world.ask("quick")  # joins while the other one awaits
        await world.until("awaits", "quick")
        world.answers["quick"].set()
        async with asyncio.timeout(PATIENCE_S):
            await quick
            assert world.heard == {"slow": ["slow is asked"], "quick": ["quick is asked", "quick is answered"]}
            world.answers["slow"].set()
            await slow
        assert world.heard["slow"] == ["slow is asked", "slow is answered"]

    run()


@pytest.mark.parametrize(
    ("model", "settings"), [(Upstream, EACH), (Upstream, {}), (InBatches, TOGETHER), (InBatches, {"max_batch_size": 1})]
)
def test_what_a_generator_awaits_is_cancelled_when_its_caller_leaves(model: Any, settings: Any) -> None:
    """The place of one that has left is free at once, whatever it awaits, and the next caller has it."""

    @in_a_world(model, **settings)
    async def run(world: World) -> None:
        leaver = world.ask("never")
        await world.until("awaits", "never")
        leaver.cancel()
        await world.until("ended", "never")
        assert ("cancelled", "never") in world.log
        next_one = world.ask("next")
        world.answers["next"].set()
        async with asyncio.timeout(PATIENCE_S):
            await next_one
        assert world.heard["next"] == ["next is asked", "next is answered"]

    run()


@pytest.mark.parametrize("how", ["breaks", "cancelled"])
def test_a_generator_that_raises_fails_alone(how: str) -> None:
    """What one raises is its caller's, also a CancelledError, and the others go on."""

    @in_a_world(Upstream, **EACH)
    async def run(world: World) -> None:
        other, broken = world.ask("other"), world.ask(how)
        await world.until("awaits", how)
        world.answers[how].set()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(ModelError):
                await broken
            world.answers["other"].set()
            await other
        assert world.heard["other"] == ["other is asked", "other is answered"]

    run()


@pytest.mark.parametrize("model", [Upstream, InBatches])
def test_a_service_that_ends_cancels_what_generators_await(model: Any) -> None:
    """Nothing is left of a generator when its service has been left."""
    log: list[Any] = []

    @on_a_loop
    async def run() -> None:
        answers: dict[str, asyncio.Event] = {}
        settings = EACH if model is Upstream else TOGETHER
        stage = Stage(model, run_in="loop", kwargs={"answers": answers, "log": log}, **settings)
        before = asyncio.all_tasks()
        async with Service(stage, timeout_s=0.2).run_async() as handle:
            world = World(handle, answers, log)
            task = world.ask("never")
            await world.until("awaits", "never")
            with pytest.raises(carpool.DeadlineExceeded):
                await task
        async with asyncio.timeout(PATIENCE_S):
            while asyncio.all_tasks() != before:  # noqa: ASYNC110 # they end by themselves
                await asyncio.sleep(0)

    run()
    assert ("cancelled", "never") in log and ("ended", "never") in log


@in_a_world(Upstream, **EACH)
async def _world_of_many(world: World) -> None:
    names = [f"n{i}" for i in range(20)]
    tasks = [world.ask(name) for name in names]
    for name in names:
        world.answers[name].set()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*tasks)
    assert all(world.heard[name] == [f"{name} is asked", f"{name} is answered"] for name in names)


def test_more_generators_than_rows_take_turns() -> None:
    """Each of many has its own parts, in their order."""
    _world_of_many()
