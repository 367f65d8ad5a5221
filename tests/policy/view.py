"""A queue as a policy sees it, said in numbers."""

from __future__ import annotations

from collections.abc import Sequence

from carpool.core.queue import Queue
from carpool.request import Request

FAR = 1000.0


def waiting(*arrivals: float, deadlines: Sequence[float] = ()) -> Queue:
    """A queue of one request per arrival time."""
    queue = Queue()
    for i, arrived in enumerate(arrivals):
        request = Request(i, deadlines[i] if deadlines else FAR)
        request.arrived = arrived
        queue.push([request])
    return queue
