"""The virtual driver: the same pipeline under a clock that jumps, with stub workers that cost what they are told.

A heap of events instead of a loop, so a minute of traffic takes as long as its decisions do. Events of one moment are
all delivered before anything is decided, as one turn of a real loop would.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from carpool.clock import VirtualClock
from carpool.core.batcher import INFINITY, Batch
from carpool.core.pipeline import Pipeline
from carpool.request import Request

Cost = Callable[[int], float]
"""Seconds that a batch of n requests takes."""

Compute = Callable[[list[Any]], Sequence[Any]]
"""What a stub worker answers to the items of a batch; an exception in the place of a result fails its item."""


class VirtualDriver:
    """Drives a pipeline in virtual time.

    Args:
        pipeline: decides.
        costs: per stage the seconds of a batch.
        workers: per stage how many there are; all are ready at once.
        computes: per stage what they answer; the items themselves if not given.

    Attributes:
        clock: the virtual time.
        batches: every batch that was run, in order.
        answers: every request that was answered, in order.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        costs: Sequence[Cost],
        workers: Sequence[int] | None = None,
        computes: Sequence[Compute] | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.clock = VirtualClock()
        self.batches: list[Batch] = []
        self.answers: list[Request] = []
        self._costs = costs
        self._computes = computes or [lambda items: items] * len(costs)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._wake_at = 0.0
        self._busy: dict[tuple[int, int], tuple[Batch, float]] = {}
        for stage, n in enumerate(workers or [1] * len(costs)):
            for worker in range(n):
                pipeline.worker_ready(stage, worker)

    def at(self, when: float, event: Callable[[], None]) -> None:
        """Have something happen at `when`; what happens at one moment happens in the order of the calls."""
        heapq.heappush(self._events, (when, next(self._order), event))

    def submit(self, item: Any, timeout_s: float = INFINITY, **attributes: Any) -> Request:
        """A request that arrives now; `attributes` are set on it (`lane`, `patient`, `nbytes`, `caller`)."""
        request = Request(item, self.clock.now + timeout_s)
        for name, value in attributes.items():
            setattr(request, name, value)
        self._submit(request)
        return request

    def arrive(self, when: float, item: Any, timeout_s: float = INFINITY, **attributes: Any) -> Request:
        """A request that arrives at `when`."""
        request = Request(item, when + timeout_s)
        for name, value in attributes.items():
            setattr(request, name, value)
        self.at(when, lambda: self._submit(request))
        return request

    def lose(self, stage: int, worker: int, back_after_s: float = 0.0) -> None:
        """A worker dies now, with whatever it is doing, and its successor is ready `back_after_s` later."""
        self._busy.pop((stage, worker), None)
        self.pipeline.worker_lost(self.clock.now, stage, worker)
        self._wake_at = self.clock.now
        self.at(self.clock.now + back_after_s, lambda: self.pipeline.worker_ready(stage, worker))

    def run(self, until: float = INFINITY) -> None:
        """Go on until nothing is left to happen, or up to `until`."""
        while True:
            when = min(self._events[0][0] if self._events else INFINITY, self._wake_at)
            if when > until or when == INFINITY:
                break
            self.clock.advance_to(when)
            while self._events and self._events[0][0] <= when:
                heapq.heappop(self._events)[2]()
            self._poll()
        if until != INFINITY:
            self.clock.advance_to(until)

    def _submit(self, request: Request) -> None:
        self.pipeline.submit(self.clock.now, [request])
        self._wake_at = self.clock.now

    def _poll(self) -> None:
        todo = self.pipeline.poll(self.clock.now)
        self._wake_at = todo.wake_at
        for batch in todo.run:
            self._run(batch)
        for stage, worker in todo.kill:
            self.lose(stage, worker)
        for request in todo.answer:
            self.answers.append(request)
            request.tell()

    def _run(self, batch: Batch) -> None:
        self.batches.append(batch)
        cost_s = self._costs[batch.stage](len(batch))
        self._busy[batch.stage, batch.worker] = (batch, cost_s)
        self.at(self.clock.now + cost_s, lambda: self._complete(batch, cost_s))

    def _complete(self, batch: Batch, cost_s: float) -> None:
        if self._busy.get((batch.stage, batch.worker)) != (batch, cost_s):
            return  # the worker was lost meanwhile
        del self._busy[batch.stage, batch.worker]
        results = self._computes[batch.stage]([request.item for request in batch.requests])
        errors = {i: y for i, y in enumerate(results) if isinstance(y, Exception)} or None
        self.pipeline.completed(self.clock.now, batch.stage, batch.worker, batch.id, batch.ids, results, errors, cost_s)
