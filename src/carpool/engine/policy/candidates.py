"""The requests that may share the next batch, less those that one decision refuses."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

from carpool.engine.policy.base import QueueView
from carpool.engine.request import Request


class Candidates:
    """What a policy may choose from while it decides.

    The requests are listed only when a rule must look at them one by one, since most decisions need
    no more than `size` and `due`.

    Args:
        queue: What waits; it is only read.

    Attributes:
        size: How much is left, in units of the requests' sizes.
        due: When the first of those left is due.
        dropped: The requests that are to be refused.
    """

    __slots__ = ("_queue", "_requests", "dropped", "due", "size")

    def __init__(self, queue: QueueView) -> None:
        self._queue = queue
        self._requests: Sequence[Request] | None = None
        self.dropped: list[Request] = []
        if queue.lanes == 1:
            self.size = queue.size
            self.due = queue.earliest_due
        else:
            self._requests = queue.peek(len(queue))
            self.size = sum([request.size for request in self._requests])
            self.due = min([request.due for request in self._requests])

    @property
    def requests(self) -> Sequence[Request]:
        """Those left, in the order in which they would be taken."""
        if self._requests is None:
            self._requests = self._queue.peek(len(self._queue))
        return self._requests

    @property
    def weighted(self) -> bool:
        """Whether some are left, and requests in the queue have sizes other than 1."""
        return self._queue.weighted and self.size > 0

    @property
    def last_due(self) -> float:
        """When the one left is due that is due last: of several lanes it need not be the last."""
        if self._queue.lanes == 1:
            return self.requests[-1].due
        return max([request.due for request in self.requests])

    def due_behind(self, units: int) -> float:
        """Return when the first request behind the first `units` is due; infinity if none is."""
        if units >= self.size:
            return inf
        if self.size == len(self.requests):
            return self.requests[units].due
        before = list(accumulate((request.size for request in self.requests), initial=0))
        behind = max(1, bisect_right(before, units) - 1)
        return self.requests[behind].due if behind < len(self.requests) else inf

    def drop(self, requests: list[Request]) -> None:
        """Refuse these requests."""
        gone = set(requests)
        self._requests = [request for request in self.requests if request not in gone]
        self.size -= sum([request.size for request in requests])
        self.due = min([request.due for request in self._requests], default=inf)
        self.dropped += requests

    def drop_due_before(self, when: float) -> None:
        """Refuse the requests that are due before `when`."""
        if self.due < when:
            self.drop([request for request in self.requests if request.due < when])

    def due_by(self, when: float) -> int:
        """Return how much of what is left is due by `when`, in units."""
        if self.size and self._queue.lanes == 1 and self.requests[-1].due <= when:
            return self.size
        return sum([request.size for request in self.requests if request.due <= when])

    def drop_first(self, units: int, due_by: float = inf) -> None:
        """Refuse `units`, or a little more, of the requests that are due by `due_by`.

        Those that are due first go first, the lowest priority ahead of the others.
        """
        if units <= 0 or self.due > due_by:
            return
        order = self.requests
        if self._queue.lanes > 1:
            order = sorted(order, key=lambda request: (request.lane.priority, request.due))
        refused = []
        for request in order:
            if units <= 0:
                break
            if request.due <= due_by:
                units -= request.size
                refused.append(request)
        self.drop(refused)

    def late_in_line(self, is_late: Callable[[float, int], bool], behind: int = 0) -> list[Request]:
        """Return those that are late before the first that is in time if a batch begins with it.

        The further back a request is, the later it is due and the smaller the batch can be, so this
        is a binary search. Across priorities some before it may be due later; these stay.

        Args:
            is_late: Reports whether a request that is due then is late, with so many units from it
                on.
            behind: How many units go before; who is among these is not late.
        """
        requests = self.requests
        before = list(accumulate((request.size for request in requests), initial=0))
        units = before[-1]
        first = low = max(1, bisect_right(before, behind) - 1) if behind else 0
        high = len(requests)
        while low < high:
            middle = (low + high) >> 1
            if is_late(requests[middle].due, units - before[middle]):
                low = middle + 1
            else:
                high = middle
        return [requests[i] for i in range(first, low) if is_late(requests[i].due, units - before[i])]
