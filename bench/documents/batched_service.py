"""Document 1's design: batches gathered on asyncio, for one worker process behind two queues.

After "Service Batching from Scratch" (`BatchedService`, `VectorTransformer`), written anew: a
buffer that goes when it is full or its timer has run out, a queue of batches, one task that hands
them to the worker and one that looks for results. The waits between two looks are its own. Left out
are the hooks that do nothing.
"""
# ruff: noqa: ASYNC110 (that it looks again and again is the design)

from __future__ import annotations

import asyncio
import multiprocessing
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

Transform = Callable[[list[Any]], Sequence[Any]]
INBOX_FULL_S = 0.0015  # how long it waits before it looks again,
NO_RESULT_S = 0.0018  # and here


def work(make: Callable[[], Transform], inbox: Any, outbox: Any) -> None:
    """The worker process: one batch after the other."""
    transform = make()
    outbox.put(None)  # ready
    while True:
        outbox.put(transform(inbox.get()))


class BatchedService:
    def __init__(self, max_batch_size: int, timeout_s: float = 0.1, max_queue_size: int = 32) -> None:
        self._max_batch_size = max_batch_size
        self._timeout_s = timeout_s
        self._items: list[Any] = []
        self._futures: list[asyncio.Future[Any]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._batches: asyncio.Queue[tuple[list[Any], list[asyncio.Future[Any]]]] = asyncio.Queue(max_queue_size)
        self._sent: deque[list[asyncio.Future[Any]]] = deque()
        self._inbox: Any = multiprocessing.Queue(max_queue_size)
        self._outbox: Any = multiprocessing.Queue(max_queue_size)

    def start(self, make: Callable[[], Transform]) -> None:
        """On the running loop; it stands still until the worker is ready."""
        self._loop = asyncio.get_running_loop()
        self._worker = multiprocessing.Process(target=work, args=(make, self._inbox, self._outbox), daemon=True)
        self._worker.start()
        self._outbox.get()
        self._tasks = [self._loop.create_task(self._feed()), self._loop.create_task(self._deliver())]

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._worker.terminate()
        self._worker.join()

    async def do_one(self, x: Any) -> Any:
        while len(self._items) >= self._max_batch_size:
            await asyncio.sleep(self._timeout_s * 0.02)
        future = self._loop.create_future()
        self._items.append(x)
        self._futures.append(future)
        if len(self._items) == self._max_batch_size:
            self._submit()
        elif len(self._items) == 1:
            self._timer = self._loop.call_later(self._timeout_s, self._submit)
        return await future

    def _submit(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._batches.full():
            self._timer = self._loop.call_later(self._timeout_s * 0.1, self._submit)
            return
        self._batches.put_nowait((self._items, self._futures))
        self._items, self._futures = [], []

    async def _feed(self) -> None:
        while True:
            items, futures = await self._batches.get()
            while self._inbox.full():
                await asyncio.sleep(INBOX_FULL_S)
            self._inbox.put(items)
            self._sent.append(futures)

    async def _deliver(self) -> None:
        while True:
            while self._outbox.empty():
                await asyncio.sleep(NO_RESULT_S)
            results = self._outbox.get()
            await asyncio.sleep(0)
            for future, result in zip(self._sent.popleft(), results, strict=False):
                future.set_result(result)
