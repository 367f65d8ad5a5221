"""What every driver promises its callers, and the model with which the promises are checked.

To check a driver of your own, write a function that starts it:

    @contextlib.asynccontextmanager
    async def start(*, cost_s=0.0, max_batch_size=8, workers=1):
        # start it with the model `Contract`, or one that answers the same in `cost_s` per batch
        yield service  # with `predict`, `stream` and `pause`, see `Driven`

    await check_driver(start)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Protocol

from carpool.errors import DeadlineExceeded, ModelError, ValidationError
from tests.support.contract import AsyncContract as AsyncContract
from tests.support.contract import Contract as Contract


class Driven(Protocol):
    """A running service as its callers see it."""

    async def predict(self, x: Any, *, timeout_s: float | None = None) -> Any:
        """Return the answer, or raise what carpool raises. A caller that leaves cancels this."""

    def stream(self, xs: Iterable[Any]) -> AsyncIterator[Any]:
        """Yield the answers in the order of the items."""

    async def pause(self, seconds: float) -> None:
        """Let some time go by on the driver's own clock."""


Start = Callable[..., AbstractAsyncContextManager[Driven]]
"""Starts a service and ends it; called with `cost_s`, `max_batch_size` and `workers`."""


class DriverError(AssertionError):
    """A driver has broken a promise; the text says which one, and how."""


async def check_driver(start: Start, *, without: Collection[str] = ()) -> None:
    """Check that a driver keeps all promises.

    Args:
        start: Starts the driver, once for each promise.
        without: Names of promises (see `PROMISES`) that the driver cannot keep, for example because
            its callers cannot be cancelled.

    Raises:
        DriverError: The driver breaks a promise; the text names it.
        ValueError: A name in `without` is not the name of a promise.
    """
    if unknown := set(without) - PROMISES.keys():
        raise ValueError(f"there is no promise {', '.join(sorted(unknown))}; choose from {', '.join(PROMISES)}")
    for name, promise in PROMISES.items():
        if name not in without:
            try:
                await promise(start)
            except DriverError as error:
                raise DriverError(f"{name.replace('_', ' ')}: {error}") from None


# -- the promises


async def each_caller_gets_its_own_answer(start: Start) -> None:
    """300 concurrent callers get the answers to their own items, and share calls of the model."""
    async with start() as service:
        answers = await asyncio.gather(*[service.predict(i) for i in range(300)])
    _require([value for value, _ in answers] == [2 * i for i in range(300)], f"wrong answers: {answers}")
    _require(max(n for _, n in answers) > 1, "no call of the model was shared")


async def a_batch_is_never_above_its_maximum(start: Start) -> None:
    """However many requests wait, `predict` never gets more than `max_batch_size` items."""
    async with start(max_batch_size=7, cost_s=0.005) as service:
        answers = await asyncio.gather(*[service.predict(i) for i in range(100)])
    largest = max(n for _, n in answers)
    _require(largest == 7, f"100 callers, batches of up to 7: the largest has {largest}")


async def a_lone_call_is_a_batch_of_one(start: Start) -> None:
    """A request that comes alone is run alone, without waiting for others."""
    async with start() as service:
        answers = [await service.predict(i) for i in range(3)]
    _require(answers == [[0, 1], [2, 1], [4, 1]], f"lone calls were answered with {answers}")


async def a_stream_keeps_order(start: Start) -> None:
    """The answers of a stream come in the order of its items, even from several workers."""
    async with start(workers=2) as service:
        values = [value async for value, _ in service.stream(range(500))]
    _require(values == [2 * i for i in range(500)], f"the stream was answered with {values}")


async def an_item_that_raises_fails_alone(start: Start) -> None:
    """The other requests of its batch get their answers."""
    async with start(cost_s=0.01) as service:
        calls = [service.predict(x) for x in [0, 1, 2, "raise", 4, 5, 6, 7]]
        answers = await asyncio.gather(*calls, return_exceptions=True)
    _require(isinstance(answers[3], ModelError), f"the item that raises got {answers[3]!r}")
    mates = [answer for i, answer in enumerate(answers) if i != 3]
    values = [mate if isinstance(mate, BaseException) else mate[0] for mate in mates]
    _require(values == [0, 2, 4, 8, 10, 12, 14], f"the others of its batch got {values}")


async def an_error_returned_for_an_item_reaches_its_caller(start: Start) -> None:
    """A model may return an exception in place of a result."""
    async with start() as service:
        calls = [service.predict(x) for x in ("refuse", 1)]
        refused, answer = await asyncio.gather(*calls, return_exceptions=True)
    _require(isinstance(refused, ValidationError), f"instead of the error its caller got {refused!r}")
    _require(not isinstance(answer, BaseException) and answer[0] == 2, f"the other item of its batch got {answer!r}")


async def a_deadline_is_kept(start: Start) -> None:
    """A caller is answered at its deadline, not when the model is done, and the next is served."""

    async def attempt(cost_s: float) -> None:
        timeout_s, most_s = cost_s / 8, cost_s * 3 / 4
        async with start(cost_s=cost_s) as service:
            started = time.monotonic()
            _require(await _expires(service.predict(1, timeout_s=timeout_s)), "no DeadlineExceeded")
            took_s = time.monotonic() - started
            answer = await service.predict(2)
        late = f"after a deadline of {timeout_s:g} s, the caller got DeadlineExceeded after {took_s:.2f} s"
        _require(took_s < most_s, late)
        _require(answer == [4, 1], f"the next call got {answer}")

    await _on_any_machine(attempt, 0.8)


async def who_expires_in_the_queue_never_reaches_the_model(start: Start) -> None:
    """A request that expires in the queue is not run."""

    async def attempt(cost_s: float) -> None:
        async with start(cost_s=cost_s) as service:
            first = asyncio.ensure_future(service.predict(1))
            await service.pause(cost_s / 3)  # by now it is being run
            expired = await _expires(service.predict(2, timeout_s=cost_s / 6))
            await first
            seen = await service.predict("seen")
        _require(expired, "no DeadlineExceeded")
        _require(seen == [1], f"the model saw {seen}")

    await _on_any_machine(attempt, 0.3)


async def a_caller_who_leaves_harms_nobody(start: Start) -> None:
    """A request that is cancelled in the queue is never run, and the others are answered."""

    async def attempt(cost_s: float) -> None:
        async with start(cost_s=cost_s) as service:
            first = asyncio.ensure_future(service.predict(0))
            await service.pause(cost_s / 5)
            calls = [asyncio.ensure_future(service.predict(i)) for i in range(1, 9)]
            await service.pause(cost_s / 5)
            for call in calls[::2]:
                call.cancel()
            await asyncio.gather(first, *calls, return_exceptions=True)
            values = [call.result()[0] for call in calls[1::2]]
            seen = sorted(await service.predict("seen"))
        _require(values == [4, 8, 12, 16], f"the callers that stayed got {values}")
        _require(seen == [0, 2, 4, 6, 8], f"the model saw {seen}")

    await _on_any_machine(attempt, 0.5)


async def no_worker_is_idle_while_work_waits(start: Start) -> None:
    """40 items in batches of 4 take two workers five rounds and not more."""

    async def attempt(cost_s: float) -> None:
        async with start(cost_s=cost_s, max_batch_size=4, workers=2) as service:
            started = time.monotonic()
            answers = await asyncio.gather(*[service.predict(i) for i in range(40)])
            took_s = time.monotonic() - started
        _require(max(n for _, n in answers) == 4, "no batch was full")
        _require(took_s < cost_s * 5 * 2, f"five rounds of {cost_s:g} s took {took_s:.2f} s")

    await _on_any_machine(attempt, 0.05)


Promise = Callable[[Start], Awaitable[None]]

PROMISES: dict[str, Promise] = {
    promise.__name__: promise
    for promise in (
        each_caller_gets_its_own_answer,
        a_batch_is_never_above_its_maximum,
        a_lone_call_is_a_batch_of_one,
        a_stream_keeps_order,
        an_item_that_raises_fails_alone,
        an_error_returned_for_an_item_reaches_its_caller,
        a_deadline_is_kept,
        who_expires_in_the_queue_never_reaches_the_model,
        a_caller_who_leaves_harms_nobody,
        no_worker_is_idle_while_work_waits,
    )
}
"""All promises by name."""


_SLOWER = (1, 4, 16)


async def _on_any_machine(attempt: Callable[[float], Awaitable[None]], cost_s: float) -> None:
    """Make an attempt with calls of `cost_s`; if that fails make others with longer ones, and the
    last one counts.

    A machine with much else to do is late by some time, which is little against longer calls. A
    driver that breaks its promise breaks it with calls of any length.
    """
    for slower in _SLOWER[:-1]:
        with suppress(DriverError):
            return await attempt(slower * cost_s)
    await attempt(_SLOWER[-1] * cost_s)


async def _expires(call: Awaitable[Any]) -> bool:
    try:
        await call
    except DeadlineExceeded:
        return True
    return False


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise DriverError(text)
