"""What every driver promises its callers, whichever way the model is run: `tests.support.promises` on all of ours."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from carpool.errors import DeadlineExceeded
from tests.contract.drivers import DRIVERS, batched_tasks, virtual
from tests.effort import slow_where
from tests.support.promises import PROMISES, Driven, DriverError, check_driver

CANNOT = {
    ("batched threads", "a_deadline_is_kept"): "a caller who leads is in the middle of the function",
    ("threads over processes", "a_caller_who_leaves_harms_nobody"): "a thread cannot be cancelled",
}

ALIKE = ("threads over processes", "joined workers", "http", "thread stage", "loop stage", "batched tasks")
"""Their loop and pipeline are those of "processes", which tries what takes time in the quick run, too."""

TAKES_TIME = (
    "a_deadline_is_kept",
    "who_expires_in_the_queue_never_reaches_the_model",
    "a_caller_who_leaves_harms_nobody",
)


FIRST = ("each_caller_gets_its_own_answer", "an_item_that_raises_fails_alone")
"""Promises that are tried in the quick run, too, of drivers of which each starts processes besides "processes"."""

STARTS_PROCESSES = ("threads over processes", "joined workers")


@slow_where(lambda driver, promise: driver in ALIKE and promise in TAKES_TIME)
@slow_where(lambda driver, promise: driver in STARTS_PROCESSES and promise not in FIRST)
@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("driver", DRIVERS)
def test_a_driver_keeps_its_promises(driver: str, promise: str) -> None:
    """Every driver keeps each promise, but for those that it cannot by its nature."""
    if why := CANNOT.get((driver, promise)):
        pytest.skip(why)
    asyncio.run(PROMISES[promise](DRIVERS[driver]))


@slow_where(lambda driver: driver in ALIKE)
@pytest.mark.parametrize("driver", [name for name in DRIVERS if not name.startswith(("batched", "joined"))])
def test_workers_come_and_go_without_loss(driver: str) -> None:
    """With every driver that starts workers, each caller gets its own answer while their number changes."""

    async def run() -> None:
        async with DRIVERS[driver](workers=1, max_batch_size=4, cost_s=0.002) as service:
            for n in (3, 1, 2):
                answers = asyncio.gather(*[service.predict(i) for i in range(100)])
                await asyncio.sleep(0)
                await service.scale(n)  # type: ignore[attr-defined]
                assert [value for value, _ in await answers] == [2 * i for i in range(100)]

    asyncio.run(run())


# -- the check itself: a driver that breaks a promise is found


class Spoilt:
    """A sound service with something between it and its callers."""

    def __init__(self, service: Driven) -> None:
        self.service = service
        self.pause = service.pause

    async def predict(self, x: Any, *, timeout_s: float | None = None) -> Any:
        return await self.service.predict(x, timeout_s=timeout_s)

    async def stream(self, xs: Any) -> AsyncIterator[Any]:
        async for answer in self.service.stream(xs):
            yield answer


class Swaps(Spoilt):
    async def predict(self, x: Any, *, timeout_s: float | None = None) -> Any:
        return await self.service.predict(301 - x if x in (150, 151) else x, timeout_s=timeout_s)


class Shuffles(Spoilt):
    async def stream(self, xs: Any) -> AsyncIterator[Any]:
        answers = [answer async for answer in self.service.stream(xs)]
        for answer in reversed(answers):
            yield answer


class ForgetsDeadlines(Spoilt):
    async def predict(self, x: Any, *, timeout_s: float | None = None) -> Any:
        return await self.service.predict(x)


class RunsTheExpired(Spoilt):
    async def predict(self, x: Any, *, timeout_s: float | None = None) -> Any:
        if timeout_s is None or timeout_s > 0.06:
            return await self.service.predict(x, timeout_s=timeout_s)
        self.running = asyncio.ensure_future(self.service.predict(x))
        raise DeadlineExceeded("but it runs on")


class RunsWhoHasLeft(Spoilt):
    async def predict(self, x: Any, *, timeout_s: float | None = None) -> Any:
        return await asyncio.shield(asyncio.ensure_future(self.service.predict(x, timeout_s=timeout_s)))


class OneAtATime(Spoilt):
    def __init__(self, service: Driven) -> None:
        super().__init__(service)
        self.lock = asyncio.Lock()

    async def predict(self, x: Any, *, timeout_s: float | None = None) -> Any:
        async with self.lock:
            return await self.service.predict(x, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (Swaps, "each caller gets its own answer: wrong"),
        (Shuffles, "a stream keeps order"),
        (ForgetsDeadlines, "a deadline is kept"),
        (RunsTheExpired, "who expires in the queue never reaches the model"),
        (RunsWhoHasLeft, "a caller who leaves harms nobody"),
        (OneAtATime, "each caller gets its own answer: no call of the model was shared"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_broken_driver_is_found(kind: type[Spoilt], promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that breaks a promise is found, and the error names the promise."""
    monkeypatch.setattr("tests.support.promises._SLOWER", (1,))

    @contextlib.asynccontextmanager
    async def start(**settings: Any) -> AsyncIterator[Driven]:
        async with virtual(**settings) as service:
            yield kind(service)

    with pytest.raises(DriverError, match=promise):
        asyncio.run(check_driver(start))


def test_a_driver_that_leaves_a_worker_idle_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that gives all batches to one of its two workers is late, so it is found."""
    monkeypatch.setattr("tests.support.promises._SLOWER", (1,))

    def start(*, workers: int, **settings: Any) -> contextlib.AbstractAsyncContextManager[Driven]:
        return batched_tasks(workers=1, **settings)

    with pytest.raises(DriverError, match=r"five rounds of 0\.05 s took"):
        asyncio.run(PROMISES["no_worker_is_idle_while_work_waits"](start))


def test_promises_may_be_left_out() -> None:
    """Promises may be left out by name, and a name that there is not is an error."""
    asyncio.run(check_driver(virtual, without=["a_deadline_is_kept"]))
    with pytest.raises(ValueError, match="there is no promise to_fly; choose from each_caller"):
        asyncio.run(check_driver(virtual, without=["to_fly"]))
