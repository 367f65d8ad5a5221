"""What a policy sees of a queue while some keys are held back: all but their requests."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import chain
from math import inf

from carpool.core.levels import Levels
from carpool.core.queue import Queue, Suspect, key_of
from carpool.request import Request


class WithoutKeys:
    """A queue as if the requests of some keys did not wait in it.

    Args:
        queue: All that waits.
        held: The keys.

    Attributes:
        lengths_vary: As of the whole queue.
        by_length: Likewise.
    """

    def __init__(self, queue: Queue, held: Collection[Hashable]) -> None:
        self._queue = queue
        self._lanes = [lane for lane in queue.order if key_of(lane) not in held]
        self.lengths_vary = queue.lengths_vary
        self.by_length = queue.by_length

    def __len__(self) -> int:
        return sum([self._queue.lane(lane).live for lane in self._lanes])

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable([self._queue.lane(lane) for lane in self._lanes])

    @property
    def lanes(self) -> int:
        """How many priorities and keys wait side by side."""
        return len(self._lanes)

    @property
    def size(self) -> int:
        """Sum of the sizes of the waiting requests."""
        return sum([request.size for request in self])

    @property
    def weighted(self) -> bool:
        """Whether some of the waiting requests have a size other than 1."""
        return self._queue.weighted

    @property
    def earliest_due(self) -> float:
        """When the next request should be answered; infinity when none waits."""
        return min([request.due for request in self], default=inf)

    @property
    def earliest_deadline(self) -> float:
        """When the next request expires; infinity when none waits."""
        return min([request.deadline for request in self], default=inf)

    @property
    def oldest_arrival(self) -> float:
        """When the request that has waited longest arrived; infinity when none waits."""
        return min([request.arrived for request in self], default=inf)

    @property
    def levels(self) -> Sequence[Levels]:
        """The levels of the lanes from which the next batch may come."""
        return self._queue.levels_of(self._lanes)

    def peek(self, n: int) -> list[Request]:
        """Return the next `n` requests, or fewer if fewer may share a batch."""
        found: list[Request] = []
        if n > 1 and self._lanes and isinstance(self._lanes[0].key, Suspect):
            n = 1
        for lane in self._queue.alike(self._lanes):
            found += self._queue.lane(lane).peek(n - len(found))
            if len(found) >= n:
                break
        return found
