"""What a policy sees and learns from, said in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from carpool.engine.core.batch import Batch, WarmUpBatch
from carpool.engine.core.queue import Queue
from carpool.engine.policy import QueueView, View
from carpool.engine.request import Request

FAR = 1000.0


def waiting(*arrivals: float, deadlines: Sequence[float] = ()) -> Queue:
    """A queue of one request per arrival time."""
    queue = Queue()
    for i, arrived in enumerate(arrivals):
        request = Request(i, deadlines[i] if deadlines else FAR)
        request.arrived = arrived
        queue.push([request])
    return queue


def view_of(now: float, queue: QueueView, free: int, busy: int, **shown: Any) -> View:
    """A view for the question about idle workers."""
    return View(queue, now, free, busy, **shown)


def ahead_of(now: float, queue: QueueView, free_in_s: float, **shown: Any) -> View:
    """A view for the question about the only worker, which is busy."""
    return View(queue, now, 0, 1, free_in_s, **shown)


def done(n: int, size: int, busy_s: float, ok: bool, **about: Any) -> Batch:
    """A batch that is done, with attributes as given."""
    batch = Batch(0, 0, 0, [], size, "free", 0.0)
    batch.n, batch.busy_s, batch.ok = n, busy_s, ok
    for name, value in about.items():
        setattr(batch, name, value)
    return batch


def warm_up(n: int, size: int, busy_s: float, longest: int = 0) -> Batch:
    """A call of a warm-up."""
    return WarmUpBatch(0.0, 0, n, size, longest, busy_s)
