"""The requests of one lane of a queue, in the order in which they are due.

They are a list with a moving head. What is due later mostly arrives later, so a push is an append;
a request that leaves early (cancelled, expired) is only marked and skipped later, so leaving is
O(1). What has left is cut off as soon as it outnumbers what waits, so that a lane does not keep
requests alive that are not needed any more.
"""

from __future__ import annotations

from bisect import bisect_right, insort, insort_left
from collections.abc import Iterator, Sequence
from math import inf
from operator import attrgetter

from carpool.engine.core.earliest import Earliest
from carpool.engine.core.levels import Levels
from carpool.engine.request import QUEUED, Lane, Request

Place = tuple[float, int, "LaneQueue"]
"""Where a lane stands among others: its rank, a number of its own among equals, and the lane."""

_due = attrgetter("due")
_due_and_arrival = attrgetter("due", "arrived")


class LaneQueue:
    """The requests of one lane, sorted by when they are due; equals keep their order of arrival.

    Attributes:
        place: Where it stands in its queue; the queue sets it.
        ages_from: When something was last taken from the lane; before that, when its first request
            arrived.
        entries: The requests, with some that have left already.
        head: How many entries at the front of the list have left.
        live: How many entries still wait; if none does, the list is empty.
        dead: How many entries behind the head have left early.
        head_is_oldest: Whether requests have arrived with rising dues so far, so that the first one
            that waits is also the oldest.
        head_expires_first: Whether deadlines rise along the lane as dues do so far, so that the
            first one that waits is also the first to expire.
        levels: The requests that wait by their lengths; None where lengths do not matter.
        more: The sum of the sizes of those that wait, less one for each.
        is_watched: Whether `note` must be called for each request that is put in.
        latest_deadline: The latest of the deadlines given to `watch_deadline`; of requests whose
            due and deadline are the same it gets only those that expire before that.
    """

    __slots__ = (
        "_earliest",
        "_node",
        "ages_from",
        "dead",
        "entries",
        "head",
        "head_expires_first",
        "head_is_oldest",
        "is_watched",
        "lane",
        "latest_deadline",
        "levels",
        "live",
        "more",
        "place",
    )

    def __init__(self, lane: Lane, ages_from: float, levels: Levels | None = None) -> None:
        self.lane = lane
        self.place: Place = (0.0, 0, self)
        self.ages_from = ages_from
        self.levels = levels
        self.entries: list[Request] = []
        self.head = self.live = self.dead = self.more = 0
        self.head_is_oldest = self.head_expires_first = True
        self.latest_deadline = -inf
        self.is_watched = False
        self._node: object = None  # of those that wait here, once they are watched
        self._earliest: tuple[Earliest[Request], ...] = ()  # by arrival, and by deadline, once they are watched

    def reset(self) -> None:
        self.entries.clear()
        self.head = self.dead = self.more = 0
        self.head_is_oldest = self.head_expires_first = True
        self.latest_deadline = -inf
        self.is_watched = False
        self._earliest = ()

    def note(self, request: Request) -> None:
        for earliest in self._earliest:
            earliest.note(request)

    def insert(self, request: Request) -> None:
        insort(self.entries, request, lo=self.head, key=_due)
        self.head_is_oldest = False
        if request.due < request.deadline:
            self.head_expires_first = False

    def watch_deadline(self, deadline: float) -> None:
        """Note the deadline of a new request: it may expire before one that is due earlier."""
        if deadline < self.latest_deadline:
            self.head_expires_first = False
        else:
            self.latest_deadline = deadline

    def put_back(self, request: Request) -> None:
        """Put in a request that was taken before: ahead of those that came after it or with it."""
        insort_left(self.entries, request, lo=self.head, key=_due_and_arrival)
        if self.levels is not None:
            self.levels.put_back(request)
        self.live += 1
        self.more += request.size - 1
        self.head_is_oldest = False
        if self.is_watched:
            self.note(request)
        if request.due < request.deadline or self.latest_deadline > -inf:
            self.head_expires_first = False
            self.latest_deadline = max(self.latest_deadline, request.deadline)

    def peek(self, n: int) -> list[Request]:
        head = self.head
        if not self.dead:
            return self.entries[head : head + n]
        found: list[Request] = []
        end = head
        while len(found) < min(n, self.live):
            if self.entries[end].state == QUEUED:
                found.append(self.entries[end])
            end += 1
        self.dead -= end - head - len(found)  # those in between go, so that none is passed over twice
        self.head = end - len(found)
        self.entries[self.head : end] = found
        return found

    def take(self, n: int) -> list[Request]:
        taken = self.peek(n)
        self.head += len(taken)
        self.live -= len(taken)
        if self.more:
            self.more -= sum([request.size for request in taken]) - len(taken)
        if self.levels is not None:
            self.levels.discard(taken)
        self._compact()
        return taken

    def skip_dead(self) -> None:
        while self.dead and self.entries[self.head].state != QUEUED:
            self.head += 1
            self.dead -= 1

    def expired(self, now: float) -> list[Request]:
        """Return the requests whose deadline has passed; they stay in the lane."""
        if not self.head_expires_first:
            return list(self._watch()[1].until(now, self.__iter__, self.live))
        self.skip_dead()
        found = []
        for request in self:
            if request.deadline > now:
                break
            found.append(request)
        return found

    @property
    def earliest_due(self) -> float:
        if not self.live:
            return inf
        if self.dead:
            self.skip_dead()
        return self.entries[self.head].due

    @property
    def oldest_arrival(self) -> float:
        if not self.live:
            return inf
        if self.head_is_oldest:
            self.skip_dead()
            return self.entries[self.head].arrived
        return self._watch()[0].least(self.__iter__, self.live)

    @property
    def earliest_deadline(self) -> float:
        if not self.live:
            return inf
        if self.head_expires_first:
            self.skip_dead()
            return self.entries[self.head].deadline
        return self._watch()[1].least(self.__iter__, self.live)

    def _watch(self) -> Sequence[Earliest[Request]]:
        """Return what has the earliest arrival, and the earliest deadline; some request waits."""
        if not self.is_watched:
            self.is_watched = True
            self._node = next(iter(self)).node
            self._earliest = Earliest(self._arrived), Earliest(self._expires)
        return self._earliest

    def _holds(self, request: Request) -> bool:
        """Report whether a request that has been put in waits here still, and nowhere else."""
        return request.state == QUEUED and request.node is self._node and request.lane == self.lane

    def _arrived(self, request: Request) -> float:
        """Return when a request arrived; infinity if it does not wait here any more.

        A method, since a function made here would not go along where a line is copied, as tests do.
        """
        return request.arrived if self._holds(request) else inf

    def _expires(self, request: Request) -> float:
        return request.deadline if self._holds(request) else inf

    def mark_dead(self, request: Request) -> None:
        """Count a request that has just left early.

        Its entry stays until the head passes it or most entries have left.
        """
        if self.levels is not None:
            self.levels.discard([request])
        self.live -= 1
        self.more -= request.size - 1
        self.dead += 1
        self._compact()

    def due_by(self, due: float) -> int:
        """Return how many that wait are due by `due`; where some have left early, a few less."""
        earlier = bisect_right(self.entries, due, lo=self.head, key=_due)
        return max(0, earlier - self.head - self.dead)

    def behind_the_first(self, n: int) -> Iterator[Request]:
        left = self.live - n
        for i in range(len(self.entries) - 1, self.head - 1, -1):
            if left <= 0:
                return
            if self.entries[i].state == QUEUED:
                left -= 1
                yield self.entries[i]

    def cut_out(self, request: Request) -> None:
        """Remove a request, near the end, together with its entry; at least one other must wait."""
        i = len(self.entries) - 1
        while self.entries[i] is not request:
            i -= 1
        del self.entries[i]
        if self.levels is not None:
            self.levels.discard([request])
        self.live -= 1
        self.more -= request.size - 1

    def cut_out_taken(self, taken: Sequence[Request]) -> None:
        """Remove the entries of requests, wherever they stand, that were taken just now.

        An entry that stayed behind would count again once its request waits in another stage.
        """
        self.entries = [request for request in self.entries[self.head :] if request.state == QUEUED]
        if self.levels is not None:
            self.levels.discard(taken)
        self.head = self.dead = 0
        self.live -= len(taken)
        if self.more:
            self.more -= sum([request.size for request in taken]) - len(taken)
        if not self.live:
            self.reset()

    def _compact(self) -> None:
        if not self.live:
            self.reset()
        elif self.head + self.dead > self.live:
            self.entries = list(self) if self.dead else self.entries[self.head :]
            self.head = self.dead = 0

    def __iter__(self) -> Iterator[Request]:
        for i in range(self.head, len(self.entries)):
            request = self.entries[i]
            if request.state == QUEUED:
                yield request
