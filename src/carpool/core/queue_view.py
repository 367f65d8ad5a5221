"""What a policy sees of a queue while some lanes are held back: all but their requests."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from carpool.core.lane_queue import LaneQueue
from carpool.core.levels import Levels
from carpool.core.queue import Queue
from carpool.request import Request


class WithoutLanes:
    """A queue as if the requests of some lanes did not wait in it.

    The cost of a question grows with these lanes, not with all that there are.

    Args:
        queue: All that waits.
        held: The lanes.

    Attributes:
        lengths_vary: As of the whole queue.
        by_length: Likewise.
    """

    def __init__(self, queue: Queue, held: Collection[LaneQueue]) -> None:
        self._queue = queue
        self._held = held
        self._first = queue.order.first(self._held)
        self.lengths_vary = queue.lengths_vary
        self.by_length = queue.by_length

    def __len__(self) -> int:
        return self._queue.count - sum([lane_queue.live for lane_queue in self._held])

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable([lane_queue for lane_queue in self._queue.order if lane_queue not in self._held])

    @property
    def lanes(self) -> int:
        """How many priorities and keys wait side by side."""
        return self._queue.lanes - len(self._held)

    @property
    def size(self) -> int:
        """Sum of the sizes of the waiting requests."""
        return self._queue.size - sum([lane_queue.live + lane_queue.more for lane_queue in self._held])

    @property
    def weighted(self) -> bool:
        """Whether some of the waiting requests have a size other than 1."""
        return self._queue.weighted

    @property
    def earliest_due(self) -> float:
        """When the next request should be answered; infinity when none waits."""
        return self._queue.least(self._queue.dues, self._held)

    @property
    def earliest_deadline(self) -> float:
        """When the next request expires; infinity when none waits."""
        return self._queue.least(self._queue.deadlines, self._held)

    @property
    def oldest_arrival(self) -> float:
        """When the request that has waited longest arrived; infinity when none waits."""
        return self._queue.least(self._queue.arrivals, self._held)

    @property
    def levels(self) -> Sequence[Levels]:
        """The levels of the lanes from which the next batch may come."""
        return [] if self._first is None else self._queue.levels_from(self._first, self._held)

    def peek(self, n: int) -> list[Request]:
        """Return the next `n` requests, or fewer if fewer may share a batch."""
        return [] if self._first is None else self._queue.peek_from(self._first, n, self._held)
