"""The queue of one stage: lanes in order of priority, earliest due first within a lane.

Priorities age, so that no lane starves: a lane rises by one level for each `ageing_s` that it waits
and nothing is taken from it, and is back at its own level once something was. It is not the age of
single requests that counts: those of a lane that is served have no reason to go before others. So a
crowd of low priority delays a newcomer of higher priority by one batch at most for each lower
priority in use, and a crowd of high priority holds up a lower one by no more than `ageing_s` a
level. All lanes age alike, so their order changes only when one is served or opened. (Ageing is
that of operating systems' schedulers, see Silberschatz et al., "Operating System Concepts", on
priority scheduling.)
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import chain, islice
from math import inf
from operator import attrgetter

from carpool.engine.core.earliest import Earliest
from carpool.engine.core.lane_order import LaneOrder, Suspect, key_of
from carpool.engine.core.lane_queue import LaneQueue
from carpool.engine.core.levels import BY_KEY, Levels, LevelsOf
from carpool.engine.request import DONE, QUEUED, RUNNING, Lane, Request

AGEING_S = 1.0
"""Seconds in which a lane that is passed over rises by one level. Well below the usual time-outs of
many seconds, so that a low priority is late and not lost; well above the usual batch, so that one
batch does not blur two priorities."""

MOST_KEYS = 8
"""Keys whose batches are compared with one another: those that have waited longest for a batch."""

_NONE = (0, 0)


class Queue:
    """Requests that wait for a worker of one stage, bounded by count and by bytes.

    The order: higher priority first, with ageing; within a lane the earliest due, equals in order
    of arrival. What is taken together shares key and bucket but may span priorities. A lane whose
    key is `Suspect` stands just ahead of the one that its requests came from, ages with it, and is
    taken from one by one.

    Args:
        ageing_s: How long a lane is passed over before it rises by one level of priority.
        levels: How requests are sorted by length; None where neither lengths nor keys matter.

    Attributes:
        count: How many requests wait, the same as `len`; `nbytes` is what they hold.
        suspect_lanes: How many lanes there are whose key is `Suspect`; mostly none, which is
            quicker to see than `next_is_suspect`.
        varied: Whether there has ever been more than one priority, key or bucket.
        by_length: Whether requests have lengths, by which batches may be composed.
        has_lengths: Whether their lengths differ in general; false where only their keys matter.
        lengths_vary: Whether there have ever been two requests of different lengths.
        dues: When each lane's next request should be answered; see `least`.
        deadlines: When each lane's next request expires.
        arrivals: When the request arrived that has waited longest in each lane.
    """

    def __init__(
        self,
        max_size: float = inf,
        max_bytes: float = inf,
        ageing_s: float = AGEING_S,
        levels: LevelsOf | None = None,
    ) -> None:
        self.max_size = max_size
        self.max_bytes = max_bytes
        self.ageing_s = ageing_s
        self.nbytes = self._size = self.count = self.suspect_lanes = 0
        self.varied = False
        self.by_length = levels is not None
        self.has_lengths = levels is not None and levels is not BY_KEY
        self.lengths_vary = False
        self._levels_of = levels
        self._length = 0  # of the first request that ever came
        self._usual: Lane | None = None
        self._lanes: dict[Lane, LaneQueue] = {}
        self._only: LaneQueue | None = None  # where there is one lane, as mostly
        self._order = LaneOrder(ageing_s)
        self._of_source: dict[Hashable, list[int]] | None = None
        self.dues = Earliest[LaneQueue](attrgetter("earliest_due"))
        self.deadlines = Earliest[LaneQueue](attrgetter("earliest_deadline"))
        self.arrivals = Earliest[LaneQueue](attrgetter("oldest_arrival"))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Request]:
        for lane_queue in self._order:
            yield from lane_queue

    @property
    def lanes(self) -> int:
        return len(self._order)

    @property
    def size(self) -> int:
        return self._size

    @property
    def weighted(self) -> bool:
        return self._size != self.count

    @property
    def next_is_suspect(self) -> bool:
        """Whether a request waits and the next one is a suspect, which must not share a batch."""
        first = self._order.first()  # an empty lane of suspects may be left
        return self.count > 0 and first is not None and type(first.lane.key) is Suspect

    def has_room(self, nbytes: int, requests: int = 1) -> bool:
        return self.count + requests <= self.max_size and self.nbytes + nbytes <= self.max_bytes

    def in_the_way(self, request: Request, spared: int) -> list[Request]:
        """Return the requests to evict so that a new one fits: lowest priority first, newest first.

        Of several lanes of a priority those come first in which most requests wait. None of them
        has the priority of `request` or a higher one. Empty if that makes no room. The next
        `spared` requests of each lane, at least 1, stay, so that no lane starves.
        """
        found: list[Request] = []
        nbytes = self.nbytes + request.nbytes
        for priority in self._order.below(request.lane.priority):
            for lane_queue in self._order.crowded(priority, spared):
                for last in lane_queue.behind_the_first(spared):
                    found.append(last)
                    nbytes -= last.nbytes
                    if self.count - len(found) < self.max_size and nbytes <= self.max_bytes:
                        return found
        return []

    def push(self, requests: Sequence[Request]) -> None:
        """Put requests in their places.

        The bounds are not looked at: ask `has_room` before, where requests may be refused.
        """
        lane: Lane | None = None
        lane_queue: LaneQueue = None  # type: ignore[assignment] # set together with `lane`
        entries: list[Request] = []
        nbytes = size = before = size_before = 0
        is_watched = False
        for request in requests:
            if request.lane is not lane:
                if lane is not None:
                    self._has_more(lane_queue, len(entries) - before, size - size_before)
                lane = request.lane
                lane_queue = self._lanes.get(lane) or self._open(lane, request.arrived)
                entries = lane_queue.entries
                append, before, size_before = entries.append, len(entries), size
                latest_deadline = lane_queue.latest_deadline
                is_watched = is_watched or lane_queue.is_watched
                if entries:
                    latest = entries[-1].due
                else:
                    latest = -inf
                    lane_queue.ages_from = request.arrived
                    self._note_earlier(lane_queue)
            due = request.due
            deadline = request.deadline
            if due >= latest:
                append(request)
                latest = due
            else:
                lane_queue.insert(request)
                self._note_earlier(lane_queue)
            if due != deadline or deadline < latest_deadline:
                lane_queue.watch_deadline(deadline)
                self.deadlines.note(lane_queue)
                latest_deadline = lane_queue.latest_deadline
            request.state = QUEUED
            nbytes += request.nbytes
            size += request.size
        if lane is not None:
            self._has_more(lane_queue, len(entries) - before, size - size_before)
        if is_watched:
            for request in requests:
                self._lanes[request.lane].note(request)
        self.count += len(requests)
        self.nbytes += nbytes
        self._size += size
        if self._of_source is not None:
            self._count_sources(requests, 1)
        if self.by_length:
            self._sort_in(requests)

    def push_in_order(self, requests: Sequence[Request], nbytes: int, dues_differ: bool) -> None:
        """Put requests of one lane in their places, each of size 1, whose dues and deadlines rise.

        A part of the fast path `admit_at_once`: the same outcome as that of `push`, for a sixth of
        its bytecodes. `nbytes` is what they hold, and `dues_differ` says whether some are due
        before their deadlines.
        """
        one, n = requests[0], len(requests)
        lane_queue = self._lanes.get(one.lane) or self._open(one.lane, one.arrived)
        entries = lane_queue.entries
        if not entries:
            lane_queue.ages_from = one.arrived
            self._note_earlier(lane_queue)
        elif one.due < entries[-1].due:
            self.push(requests)
            return
        if dues_differ or one.deadline < lane_queue.latest_deadline:
            lane_queue.watch_deadline(one.deadline)
            lane_queue.watch_deadline(requests[-1].deadline)
            self.deadlines.note(lane_queue)
        entries += requests
        for request in requests:
            request.state = QUEUED
        if lane_queue.is_watched:
            for request in requests:
                lane_queue.note(request)
        lane_queue.live += n
        if self._order.is_watched:
            self._order.note(lane_queue)
        self.count += n
        self.nbytes += nbytes
        self._size += n
        if self.by_length:
            self._sort_in(requests)

    def put_back(self, requests: Sequence[Request]) -> None:
        """Let requests that were taken together wait again, placed by their dues and arrivals."""
        for request in reversed(requests):  # each goes ahead of its equals, so the last comes first
            lane_queue = self._lanes.get(request.lane) or self._open(request.lane, request.arrived)
            lane_queue.put_back(request)
            self._note_earlier(lane_queue)
            if self._order.is_watched:
                self._order.note(lane_queue)
            request.state = QUEUED
            self.count += 1
            self.nbytes += request.nbytes
            self._size += request.size
        if self._of_source is not None:
            self._count_sources(requests, 1)

    def peek(self, n: int) -> list[Request]:
        """Return what `take` would: the next `n` requests, or fewer if fewer may share a batch."""
        first = self._order.first()
        return [] if first is None else self.peek_from(first, n)

    def peek_from(self, first: LaneQueue, n: int, but: Collection[LaneQueue] = ()) -> list[Request]:
        """Return the next `n` requests of a lane, and of those with which it may share a batch, but
        some.
        """
        found: list[Request] = []
        if type(first.lane.key) is Suspect and n > 1:
            n = 1
        for _, _, lane_queue in self._order.alike(first.lane):
            if but and lane_queue in but:
                continue
            found += lane_queue.peek(n - len(found))
            if len(found) >= n:
                break
        return found

    # -- requests of several sources

    def count_by_source(self) -> None:
        """Count from now on how many requests wait of each source (`Lane.source`); none do yet."""
        self._of_source = {}

    def of_source(self, source: Hashable) -> Sequence[int]:
        assert self._of_source is not None
        return self._of_source.get(source, _NONE)

    def _count_sources(self, requests: Sequence[Request], sign: int) -> None:
        assert self._of_source is not None
        for request in requests:
            counts = self._of_source.setdefault(request.lane.source, [0, 0])
            counts[0] += sign
            counts[1] += sign * request.nbytes

    def ahead_of(self, request: Request, now: float) -> int:
        """Return how many that wait would go before `request` if it came now.

        Where some have left early, it may be a few less.
        """
        own = self._lanes.get(request.lane)
        if own is None or not own.live:
            return self._order.waiting_by(self._order.rank_of(request.lane, now))
        due_by = own.due_by(request.due)
        if len(self._order) == 1:
            return due_by
        return self._order.waiting_by(own.place[0]) - own.live + due_by

    def take(self, n: int, now: float = -inf) -> list[Request]:
        """Remove and return the next `n` requests; they are now running.

        The lanes that they came from age from `now` on.
        """
        only = self._only
        if only is not None and not self.suspect_lanes:
            taken = only.take(n)
            only.ages_from = max(only.ages_from, now)
            if self._order.is_watched:
                self._order.note(only)
            self._set_running(taken)
            return taken
        taken, served = [], []
        first = self._order.first()
        if first is None:
            return taken
        if self.suspect_lanes and self.next_is_suspect:
            n = 1
        for _, _, lane_queue in self._order.alike(first.lane):
            taken += lane_queue.take(n - len(taken))
            served.append(lane_queue)
            if len(taken) >= n:
                break
        self._served(served, now)
        self._set_running(taken)
        return taken

    def pick(self, requests: Sequence[Request], now: float) -> list[Request]:
        """Remove and return these requests, wherever they wait; they are now running.

        They must share a key and a bucket. Their lanes age from `now` on, as with `take`.
        """
        by_lane: dict[Lane, list[Request]] = {}
        for request in requests:
            request.state = RUNNING  # by which a lane finds the entries that are gone
            by_lane.setdefault(request.lane, []).append(request)
        for lane, of_lane in by_lane.items():
            self._lanes[lane].cut_out_taken(of_lane)
        self._served([self._lanes[lane] for lane in by_lane], now)
        self._set_running(requests)
        return list(requests)

    @property
    def levels(self) -> list[Levels]:
        """The levels of the lanes from which the next batch may come; empty without lengths.

        They are those of the lane at the head, and of the other lanes of its priority, of which
        only some are looked at if there are many: requests of one of them may share a batch with
        each other and with none of another one.
        """
        first = self._order.first()
        return [] if first is None else self.levels_from(first)

    def levels_from(self, first: LaneQueue, but: Collection[LaneQueue] = ()) -> list[Levels]:
        """Return the same as if a lane were at the head, without those of some other lanes."""
        if not self.by_length or type(first.lane.key) is Suspect:
            return []
        of_priority = (place[2] for place in self._order.of_priority(first.lane.priority) if place[2] not in but)
        found = (each.levels for each in of_priority if each.levels is not None and each.live)
        return list(islice(found, MOST_KEYS))

    @property
    def order(self) -> LaneOrder:
        return self._order

    def remove(self, request: Request) -> None:
        if request.state != QUEUED:
            raise ValueError(f"{request!r} is not queued")
        lane_queue = self._lanes[request.lane]
        self._discount(request)
        lane_queue.mark_dead(request)
        self._has_less(lane_queue)

    def evict(self, request: Request) -> None:
        """Remove a request that `in_the_way` has named; it is now done.

        Unlike after `remove` no entry stays behind, so the request may wait in another queue.
        """
        lane_queue = self._lanes[request.lane]
        lane_queue.cut_out(request)
        self._discount(request)
        self._has_less(lane_queue)

    def expired(self, now: float) -> list[Request]:
        late = self.deadlines.until(now, self._lanes.values, len(self._lanes))
        return [request for lane_queue in late for request in lane_queue.expired(now)]

    @property
    def earliest_deadline(self) -> float:
        """When the next request expires; infinity when none waits."""
        return self.least(self.deadlines)

    @property
    def earliest_due(self) -> float:
        """When the next request should be answered; infinity when none waits."""
        return self.least(self.dues) if self._only is None else self._only.earliest_due

    @property
    def oldest_arrival(self) -> float:
        """When the request that has waited longest arrived; infinity when none waits."""
        return self.least(self.arrivals)

    def least(self, times: Earliest[LaneQueue], but: Collection[LaneQueue] = ()) -> float:
        """Return the earliest of `dues`, `deadlines` or `arrivals`, without that of some lanes."""
        return times.least(self._lanes.values, len(self._lanes), but)

    def _note_earlier(self, lane_queue: LaneQueue) -> None:
        self.dues.note(lane_queue)
        self.deadlines.note(lane_queue)
        self.arrivals.note(lane_queue)

    def _sort_in(self, requests: Sequence[Request]) -> None:
        for request in requests:
            levels = self._lanes[request.lane].levels
            assert levels is not None
            levels.add(request)
            if request.length != self._length:
                self.lengths_vary = self.lengths_vary or self._length > 0
                self._length = request.length

    def _set_running(self, taken: Sequence[Request]) -> None:
        nbytes, size = 0, len(taken)
        if self._size != self.count:
            size = sum([request.size for request in taken])
        for request in taken:
            request.state = RUNNING
            nbytes += request.nbytes
        self.count -= len(taken)
        self.nbytes -= nbytes
        self._size -= size
        if self._of_source is not None:
            self._count_sources(taken, -1)

    def _discount(self, request: Request) -> None:
        request.state = DONE
        self.count -= 1
        self.nbytes -= request.nbytes
        self._size -= request.size
        if self._of_source is not None:
            self._count_sources([request], -1)

    def _served(self, lane_queues: Sequence[LaneQueue], now: float) -> None:
        """Note that requests were taken from lanes, which age from `now` on.

        What is taken from a lane of suspects counts as taken from the one they came from, too.
        """
        aged = lane_queues
        if self.suspect_lanes:
            formers = [self._former(each.lane) for each in lane_queues if type(each.lane.key) is Suspect]
            aged = [*aged, *[each for each in formers if each is not None and each not in aged]]
        self._order.served(aged, now)
        for lane_queue in lane_queues:
            self._has_less(lane_queue)

    def _former(self, lane: Lane) -> LaneQueue | None:
        return self._lanes.get(lane._replace(key=key_of(lane)))

    def _has_more(self, lane_queue: LaneQueue, n: int, size: int) -> None:
        lane_queue.live += n
        lane_queue.more += size - n
        if self._order.is_watched:
            self._order.note(lane_queue)

    def _has_less(self, lane_queue: LaneQueue) -> None:
        """Note that requests have left a lane, which is forgotten if it is empty.

        The last lane is kept. All others go, since lanes that clients choose must not pile up.
        """
        if lane_queue.live:
            if self._order.is_watched:
                self._order.note(lane_queue)
        elif len(self._order) > 1:
            self._forget(lane_queue)

    def _open(self, lane: Lane, arrived: float) -> LaneQueue:
        if len(self._order) == 1:
            last = self._order.first()
            if last is not None and not last.live:
                self._forget(last)  # kept by `_has_less`; empty, it must not stand at the head
        how = self._levels_of
        levels = None if how is None else Levels(how.level_of, lane.key, how.lengths)
        opened = self._lanes[lane] = LaneQueue(lane, arrived, levels)
        self._order.open(opened)
        self._note_only()
        if type(lane.key) is Suspect:
            self.suspect_lanes += 1
        else:
            self.varied = self.varied or self._usual not in (None, lane)
            self._usual = lane
        return opened

    def _note_only(self) -> None:
        self._only = self._order.first() if len(self._order) == 1 else None
        if self._only is not None and self.dues.is_kept:
            self.dues.forget()  # nothing is asked of it now, so that it would keep what has gone

    def _forget(self, lane_queue: LaneQueue) -> None:
        del self._lanes[lane_queue.lane]
        self._order.close(lane_queue)
        self._note_only()
        if type(lane_queue.lane.key) is Suspect:
            self.suspect_lanes -= 1


class WithoutLanes:
    """A queue as if the requests of some lanes, which are held back, did not wait in it.

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
        return self._queue.lanes - len(self._held)

    @property
    def size(self) -> int:
        return self._queue.size - sum([lane_queue.live + lane_queue.more for lane_queue in self._held])

    @property
    def weighted(self) -> bool:
        return self._queue.weighted

    @property
    def earliest_due(self) -> float:
        return self._queue.least(self._queue.dues, self._held)

    @property
    def earliest_deadline(self) -> float:
        return self._queue.least(self._queue.deadlines, self._held)

    @property
    def oldest_arrival(self) -> float:
        return self._queue.least(self._queue.arrivals, self._held)

    @property
    def levels(self) -> Sequence[Levels]:
        return [] if self._first is None else self._queue.levels_from(self._first, self._held)

    def peek(self, n: int) -> list[Request]:
        return [] if self._first is None else self._queue.peek_from(self._first, n, self._held)
