"""The items of a bulk request in bunches: of what is there, so that many go together and none waits
for another one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from contextlib import aclosing, suppress
from typing import Any, Final

from carpool.client.waits import end
from carpool.engine.clock import monotonic

_MOST: Final = 256
"""How many items are in a bunch, and how many are read ahead."""

_LONGEST_S: Final = 0.01


class InputFailed(Exception):
    """Carries an error that an input has raised to the caller.

    In between nothing may take it for an error of its own: a connection's `OSError`, the end of a
    wait, or `SystemExit`, which would end the loop.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class ThreadInput:
    """An input that is read in a thread of its own, which may wait for items.

    Args:
        xs: The items.
    """

    def __init__(self, xs: Iterable[Any]) -> None:
        self._xs = xs
        self._news = asyncio.Event()
        self._changed = threading.Condition()
        self._items: list[Any] = []
        self._has_ended = self._is_unwanted = False
        self._error: BaseException | None = None

    async def bunches(self) -> AsyncGenerator[list[Any], None]:
        """Yield the items that are there. Raises `InputFailed`."""
        loop = asyncio.get_running_loop()
        reading = threading.Thread(target=self._read, args=(loop,), name="carpool client input", daemon=True)
        reading.start()
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                with self._changed:
                    items, self._items = self._items, []
                    has_ended = self._has_ended
                    self._changed.notify()
                if items:
                    yield items
                if has_ended:
                    if self._error is not None:
                        raise InputFailed(self._error)
                    return
        finally:
            with self._changed:
                self._is_unwanted = True
                self._changed.notify()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            for x in self._xs:
                with self._changed:
                    self._items.append(x)
                    if len(self._items) == 1:
                        self._tell(loop)
                    while len(self._items) >= _MOST and not self._is_unwanted:
                        self._changed.wait()
                    if self._is_unwanted:
                        return
        except BaseException as error:  # an input is the user's
            self._error = error
        with self._changed:
            self._has_ended = True
            self._tell(loop)

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_unwanted:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._news.set)


async def in_bunches(xs: Iterable[Any] | AsyncIterable[Any] | ThreadInput) -> AsyncGenerator[list[Any], None]:
    """Yield items in bunches of what is there. Raises what the input raises."""
    if isinstance(xs, (ThreadInput, AsyncIterable)):
        async with aclosing(xs.bunches() if isinstance(xs, ThreadInput) else _gathered(xs)) as bunches:
            async for bunch in bunches:
                yield bunch
    else:
        bunch, since = [], monotonic()
        for x in xs:
            bunch.append(x)
            if len(bunch) >= _MOST or monotonic() - since > _LONGEST_S:
                yield bunch
                await asyncio.sleep(0)
                bunch, since = [], monotonic()
        if bunch:
            yield bunch


async def _gathered(xs: AsyncIterable[Any]) -> AsyncGenerator[list[Any], None]:
    """Yield what another task has taken from an input meanwhile."""
    items: list[Any] = []
    news, room = asyncio.Event(), asyncio.Event()

    async def read() -> None:
        try:
            async for x in xs:
                items.append(x)
                news.set()
                if len(items) >= _MOST:
                    room.clear()
                    await room.wait()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit would end the loop
            raise InputFailed(error) from error
        finally:
            news.set()

    reading = asyncio.ensure_future(read())
    try:
        while not (reading.done() and not items):
            await news.wait()
            news.clear()
            if items:
                bunch = items.copy()
                items.clear()
                room.set()
                yield bunch
            if reading.done():
                news.set()
        reading.result()
    finally:
        await end(reading)
