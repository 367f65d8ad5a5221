"""What one would write for threads: a queue with a worker thread, a line without, a lock."""

from __future__ import annotations

import threading
from queue import SimpleQueue

from bench.tools.closed_loop import MAX_BATCH_SIZE, Function


class Call:
    """One call in the queue, and the lock that its thread sleeps on."""

    __slots__ = ("answer", "done", "error", "item")

    def __init__(self, item: int) -> None:
        self.item = item
        self.answer = 0
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()


class QueueAndWorker:
    """One thread runs the function, each time with whatever is queued.

    `SimpleQueue` is written in C, and a bare lock is the cheapest thing that a thread can sleep on.
    """

    def __init__(self, function: Function) -> None:
        self._function = function
        self._queue: SimpleQueue[Call] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def __call__(self, item: int) -> int:
        call = Call(item)
        self._queue.put(call)
        call.done.acquire()
        if call.error is not None:
            raise call.error
        return call.answer

    def _work(self) -> None:
        queue = self._queue
        while True:
            calls = [queue.get()]
            # Nobody else takes anything out, so as many as were counted are there.
            calls += [queue.get() for _ in range(min(queue.qsize(), MAX_BATCH_SIZE - 1))]
            try:
                answers = self._function([call.item for call in calls])
                for call, answer in zip(calls, answers, strict=True):
                    call.answer = answer
            except BaseException as error:
                for call in calls:
                    call.error = error
            for call in calls:
                call.done.release()


class Handle:
    """A place in one of `Cooperative`'s batches."""

    def __init__(self, batch: Gathered, index: int, leader: bool) -> None:
        self._index = index
        self._batch = batch
        self.leader = leader

    def retrieve(self) -> int:
        self._batch.signal.wait()
        return self._batch.results[self._index]


class Gathered:
    """What is run together."""

    def __init__(self) -> None:
        self.items: list[int] = []
        self.results: list[int] = []
        self.signal = threading.Event()

    def push(self, item: int) -> Handle:
        index = len(self.items)
        self.items.append(item)
        return Handle(self, index, index == 0)

    def finish(self, results: list[int]) -> None:
        self.results = results
        self.signal.set()


class Cooperative:
    """Whoever is first in line runs the batch for those behind it; there is no limit.

    Line by line the `CooperativeQueue` of the article "Cooperative batching" (2021-10-06). Where
    the function raises, those who follow wait for ever.
    """

    def __init__(self, function: Function) -> None:
        self._execution_lock = threading.Lock()
        self._batch_lock = threading.Lock()
        self._batch = Gathered()
        self._function = function

    def put(self, item: int) -> Handle:
        with self._batch_lock:
            handle = self._batch.push(item)
        if handle.leader:
            with self._execution_lock:
                with self._batch_lock:
                    batch, self._batch = self._batch, Gathered()
                batch.finish(self._function(batch.items))
        return handle

    def __call__(self, item: int) -> int:
        return self.put(item).retrieve()


class OneAtATime:
    """Each call runs the function alone, under a lock."""

    def __init__(self, function: Function) -> None:
        self._function = function
        self._lock = threading.Lock()

    def __call__(self, item: int) -> int:
        with self._lock:
            return self._function([item])[0]
