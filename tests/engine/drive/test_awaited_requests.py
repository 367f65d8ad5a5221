"""A request that a task awaits is to the task what a future would be."""

from __future__ import annotations

import asyncio
from asyncio.tasks import _PyTask as PyTask  # type: ignore[attr-defined]
from collections.abc import Callable, Generator, Sequence
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

import carpool
from carpool.batch_function import tasks
from carpool.engine.drive.aio import Driver
from carpool.engine.drive.task_pool import AwaitedRequest
from carpool.engine.request import DONE, Request
from tests.support.properties import PROPERTY

Kind = Callable[..., asyncio.Task[Any]]
KINDS: dict[str, Kind] = {"in C": asyncio.Task, "in Python": PyTask}
BATCH_TURNS = 3  # that the function waits, by its smallest item, plus one


class FutureRequest(AwaitedRequest):
    """The slow path: its answer comes by a future of its own."""

    __slots__ = ("future",)

    future: asyncio.Future[None]

    def __await__(self) -> Generator[Any, None, None]:
        if self.state != DONE:
            assert self._loop is not None
            self.future = self._loop.create_future()
            yield from self.future


class FutureDriver(Driver):
    """The slow path: the futures are told one by one."""

    def _deliver(self, requests: Sequence[Request]) -> None:
        for request in requests:
            future = getattr(request, "future", None)
            if future is not None and not future.done():
                future.set_result(None)


class Played:
    """What became of some callers, in which turn of the loop, and in which order."""

    def __init__(self, kind: Kind, max_batch_size: int, slots: int) -> None:
        self.ends: list[tuple[int, int, str]] = []
        self.batches: list[list[int]] = []
        self._kind = kind
        self._turn = 0
        self._f: Any = carpool.batch(max_batch_size=max_batch_size, max_in_flight_batches=slots)(self._run)

    async def _run(self, xs: list[int]) -> list[Any]:
        self.batches.append(xs)
        for _ in range(min(xs) % BATCH_TURNS):
            await asyncio.sleep(0)
        if 13 in xs:
            raise LookupError("no such thing")
        return [ValueError(f"{x} is odd") if x % 2 else 2 * x for x in xs]

    async def _call(self, number: int, xs: list[int]) -> None:
        try:
            end = repr(await self._f(xs[0]) if len(xs) == 1 else await self._f.many(xs))
        except BaseException as error:
            end = repr(error)
        self.ends.append((number, self._turn, end))

    async def play(self, script: list[tuple[str, Any]]) -> None:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(lambda loop, coroutine, **settings: self._kind(coroutine, loop=loop, **settings))
        callers: list[asyncio.Task[None]] = []
        for step, argument in [*script, *[("turn", None)] * 200]:
            if step == "call":
                callers.append(loop.create_task(self._call(len(callers), argument)))
            elif step == "cancel" and callers:
                callers[argument % len(callers)].cancel(f"in turn {self._turn}")
            elif step == "turn":
                await asyncio.sleep(0)
                self._turn += 1
        assert len(self.ends) + sum(caller.cancelled() for caller in callers) == len(callers)
        await self._f.close()


STEPS = st.one_of(
    st.just(("turn", None)),
    st.tuples(st.just("call"), st.lists(st.integers(0, 14), min_size=1, max_size=4)),
    st.tuples(st.just("call"), st.lists(st.integers(0, 14), min_size=1, max_size=1)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
)


@pytest.mark.parametrize("kind", KINDS)
@PROPERTY
@given(script=st.lists(STEPS, max_size=20), max_batch_size=st.integers(1, 4), slots=st.integers(1, 2))
def test_an_awaited_request_is_like_a_future(
    kind: str, script: list[tuple[str, Any]], max_batch_size: int, slots: int
) -> None:
    """Whatever callers do, and are cancelled when, they end as with futures: in the same turns, in the same order."""
    quick = Played(KINDS[kind], max_batch_size, slots)
    asyncio.run(quick.play(script))
    slow = Played(KINDS[kind], max_batch_size, slots)
    with patch.multiple(tasks, AwaitedRequest=FutureRequest, TaskDriver=FutureDriver):
        asyncio.run(slow.play(script))

    assert (quick.ends, quick.batches) == (slow.ends, slow.batches)


def test_a_task_that_ends_the_run_of_the_loop_leaves_the_others_to_the_next_run() -> None:
    """A task of a batch that raises KeyboardInterrupt keeps no other one from its answer."""

    async def double(xs: list[int]) -> list[int]:
        return [2 * x for x in xs]

    f = carpool.batch(double)

    async def call(x: int) -> int:
        y: int = await f(x)
        if x == 1:
            raise KeyboardInterrupt
        return y

    loop = asyncio.new_event_loop()
    callers = [loop.create_task(call(x)) for x in range(3)]
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(asyncio.wait(callers))
    assert [caller.done() for caller in callers] == [True, True, False]
    assert loop.run_until_complete(callers[2]) == 4
    with pytest.raises(KeyboardInterrupt):
        callers[1].result()
    loop.run_until_complete(f.close())
    loop.close()
