"""Document 2's design: a row of components in processes, with queues around and between them.

After "Service Batching from Scratch, Again" (`ModelService`, `Modelet`), written anew: single items
travel with the number of their future; each worker takes one, or fills a batch, from the queue that
all workers of a component share. The waits between two looks at the queues of the coordinator are
its own, and so is a wait of 0 for a batch. CPU pinning is left out on both sides.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import queue
from collections.abc import Callable
from typing import Any

Make = Callable[[], Callable[[Any], Any]]
QUEUE_FULL_S = 0.0078  # how long it waits before it looks again,
NO_RESULT_S = 0.0089  # and here


def work_on_single_items(make: Make, inbox: Any, outbox: Any, errors: Any) -> None:
    predict = make()
    while True:
        uid, x = inbox.get()
        try:
            outbox.put((uid, predict(x)))
        except Exception as error:
            errors.put((uid, error))


def work_on_batches(make: Make, inbox: Any, outbox: Any, errors: Any, batch_size: int) -> None:
    predict = make()
    while True:
        batch = [inbox.get()]
        try:
            while len(batch) < batch_size:
                batch.append(inbox.get_nowait())
        except queue.Empty:
            pass
        try:
            results = predict([x for _, x in batch])
        except Exception as error:
            for uid, _ in batch:
                errors.put((uid, error))
        else:
            for (uid, _), y in zip(batch, results, strict=False):
                outbox.put((uid, y))


class ModelService:
    def __init__(self, max_queue_size: int = 1024) -> None:
        self._max_queue_size = max_queue_size
        self._queues: list[Any] = [multiprocessing.Queue(max_queue_size)]
        self._errors: Any = multiprocessing.Queue(max_queue_size)
        self._workers: list[multiprocessing.Process] = []
        self._futures: dict[int, asyncio.Future[Any]] = {}

    def add(self, make: Make, *, workers: int = 1, batch_size: int = 0) -> None:
        """One more component; `make` gives its function, in the worker."""
        inbox = self._queues[-1]
        outbox: Any = multiprocessing.Queue(self._max_queue_size)
        self._queues.append(outbox)
        arguments = (make, inbox, outbox, self._errors)
        for _ in range(workers):
            if batch_size > 1:
                worker = multiprocessing.Process(target=work_on_batches, args=(*arguments, batch_size), daemon=True)
            else:
                worker = multiprocessing.Process(target=work_on_single_items, args=arguments, daemon=True)
            self._workers.append(worker)

    def start(self) -> None:
        """On the running loop."""
        for worker in self._workers:
            worker.start()
        self._gathering = asyncio.get_running_loop().create_task(self._gather())

    def stop(self) -> None:
        self._gathering.cancel()
        for worker in self._workers:
            worker.terminate()
            worker.join()

    async def predict(self, x: Any) -> Any:
        future = asyncio.get_running_loop().create_future()
        uid = id(future)
        self._futures[uid] = future
        first = self._queues[0]
        while True:
            try:
                first.put_nowait((uid, x))
                break
            except queue.Full:
                await asyncio.sleep(QUEUE_FULL_S)
        return await future

    async def _gather(self) -> None:
        last, errors = self._queues[-1], self._errors
        while True:
            if not last.empty():
                uid, y = last.get()
                self._futures.pop(uid).set_result(y)
                await asyncio.sleep(0)
            elif not errors.empty():
                uid, error = errors.get()
                self._futures.pop(uid).set_exception(error)
                await asyncio.sleep(0)
            else:
                await asyncio.sleep(NO_RESULT_S)
