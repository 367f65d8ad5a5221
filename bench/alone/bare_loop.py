"""The least that batching can be: a list, and a callback that empties it.

It needs nothing of carpool, so that it runs beside any revision.
"""

from __future__ import annotations

import asyncio
from typing import Any

MAX_BATCH_SIZE = 64


def double(numbers: list[Any]) -> list[Any]:
    return [2 * number for number in numbers]


class BareLoop:
    """The least that batching can be."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[int, asyncio.Future[int]]] = []

    def ask(self, number: int) -> asyncio.Future[int]:
        future = self._loop.create_future()
        if not self._waiting:
            self._loop.call_soon(self._run)
        self._waiting.append((number, future))
        return future

    def _run(self) -> None:
        while self._waiting:
            batch = self._waiting[:MAX_BATCH_SIZE]
            del self._waiting[:MAX_BATCH_SIZE]
            for (_, future), answer in zip(batch, double([number for number, _ in batch]), strict=True):
                future.set_result(answer)
