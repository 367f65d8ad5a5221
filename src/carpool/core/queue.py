"""The waiting room of one stage: lanes in order of priority, earliest due first within a lane.

Priorities age, so that no lane starves: a lane rises by one level for each `ageing_s` that it waits
and nothing is taken from it, and is back at its own level once something was. It is not the age of
single requests that counts: those of a lane that is served, however many it holds, have no reason
to go before others. So a crowd of low priority delays a newcomer of higher priority by one batch at
most for each lower priority in use, and a crowd of high priority holds up a lower one by no more
than `ageing_s` a level. All lanes age alike, so their order changes only when one is served or
opened, and can be kept instead of worked out for each question. (Ageing is that of operating
systems' schedulers, see Silberschatz et al., "Operating System Concepts", on priority scheduling.)

The requests of one lane are in `core/lane_queue.py`. Nothing here knows policies, workers or
clocks.
"""

from __future__ import annotations

from bisect import insort, insort_left
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from operator import attrgetter

from carpool.core.lane_queue import LaneQueue
from carpool.core.levels import BY_KEY, Levels, LevelsOf
from carpool.request import DONE, QUEUED, RUNNING, Lane, Request

AGEING_S = 1.0
"""Seconds in which a lane that is passed over rises by one level. Well below the usual time-outs of
many seconds, so that a low priority is late and not lost; well above the usual batch, so that one
batch does not blur two priorities."""

MOST_KEYS = 8
"""Keys whose batches are compared with one another: those that have waited longest for a batch."""

_MANY_LANES = 16  # with more of them, those that were taken from are put in their places one by one

_priority = attrgetter("priority")


@dataclass(frozen=True, slots=True)
class Suspect:
    """The key of suspects, which share a batch with no other request, not even with each other.

    Attributes:
        former_key: The key that they had before.
    """

    former_key: Hashable


def key_of(lane: Lane) -> Hashable:
    """Return a lane's key, and for lanes of suspects the one that these had before."""
    return lane.key.former_key if isinstance(lane.key, Suspect) else lane.key


class _LeastOfLanes:
    """The least of some time over many lanes, without a look at each of them for each question.

    Each lane that waits has an entry that is no later than its time, and is corrected when it comes
    to the front. So what a question costs does not grow with the number of lanes.

    Args:
        time_of: Returns the time of a lane in which a request waits.
    """

    def __init__(self, time_of: Callable[[LaneQueue], float]) -> None:
        self._time_of = time_of
        self._heap: list[tuple[float, int, LaneQueue]] = []
        self._n = 0
        self._is_kept = False

    def note(self, lane_queue: LaneQueue) -> None:
        """Note that the time of a lane may have become earlier."""
        if self._is_kept:
            self._n += 1
            heappush(self._heap, (-inf, self._n, lane_queue))

    def least(self, lanes: dict[Lane, LaneQueue]) -> float:
        """Return the earliest time of all lanes; infinity if nothing waits."""
        if len(lanes) <= _MANY_LANES:
            if self._is_kept:
                self._is_kept = False
                self._heap.clear()
            times = [self._time_of(each) for each in lanes.values() if each.live]
            return min(times, default=inf)
        heap = self._heap
        if not self._is_kept or len(heap) > 4 * len(lanes):
            live = [each for each in lanes.values() if each.live]
            heap[:] = [(self._time_of(each), n, each) for n, each in enumerate(live)]
            heapify(heap)
            self._n, self._is_kept = len(heap), True
        while heap:
            noted, n, lane_queue = heap[0]
            if not lane_queue.live:
                heappop(heap)
                continue
            time = self._time_of(lane_queue)
            if time == noted:
                return time
            heapreplace(heap, (time, n, lane_queue))
        return inf

    def until(self, now: float, lanes: dict[Lane, LaneQueue]) -> list[LaneQueue]:
        """Return the lanes in which something waits and whose times are not later than `now`."""
        if self.least(lanes) > now:
            return []
        if not self._is_kept:
            return [each for each in lanes.values() if each.live and self._time_of(each) <= now]
        found: dict[LaneQueue, None] = {}
        while self._heap and self.least(lanes) <= now:
            found[heappop(self._heap)[2]] = None
        for lane_queue in found:
            self.note(lane_queue)
        return list(found)


class Queue:
    """Requests that wait for a worker of one stage, bounded by count and by bytes.

    The order: higher priority first, with ageing; within a lane the earliest due, equals in order
    of arrival. What is taken together shares key and bucket but may span priorities. A lane whose
    key is `Suspect` stands just ahead of the one that its requests came from, ages with it, and is
    taken from one by one.

    Args:
        max_size: The most requests that may wait.
        max_bytes: The most bytes that they may hold.
        ageing_s: How long a lane is passed over before it rises by one level of priority.
        levels: How requests are sorted by length; None where neither lengths nor keys matter.

    Attributes:
        count: How many requests wait, the same as `len`.
        nbytes: How many bytes they hold.
        suspect_lanes: How many lanes there are whose key is `Suspect`; mostly none, which is
            quicker to see than `next_is_suspect`.
        varied: Whether there has ever been more than one priority, key or bucket.
        by_length: Whether requests have lengths, by which batches may be composed.
        has_lengths: Whether their lengths differ in general; false where only their keys matter.
        lengths_vary: Whether there have ever been two requests of different lengths.
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
        self.nbytes = 0
        self._size = 0
        self.count = 0
        self.suspect_lanes = 0
        self.varied = False
        self.by_length = levels is not None
        self.has_lengths = levels is not None and levels is not BY_KEY
        self.lengths_vary = False
        self._levels_of = levels
        self._length = 0  # of the first request that ever came
        self._usual: Lane | None = None
        self._lanes: dict[Lane, LaneQueue] = {}
        self._order: list[Lane] = []  # by rank
        self._alike: dict[tuple[Hashable, int], int] = {}  # how many lanes have a key and a bucket
        self._dues = _LeastOfLanes(attrgetter("earliest_due"))
        self._deadlines = _LeastOfLanes(attrgetter("earliest_deadline"))
        self._arrivals = _LeastOfLanes(attrgetter("oldest_arrival"))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Request]:
        for lane in self._order:
            yield from self._lanes[lane]

    @property
    def lanes(self) -> int:
        """How many priorities, keys and buckets wait side by side."""
        return len(self._order)

    @property
    def size(self) -> int:
        """Sum of the sizes of the waiting requests."""
        return self._size

    @property
    def weighted(self) -> bool:
        """Whether some of the waiting requests have a size other than 1."""
        return self._size != self.count

    @property
    def next_is_suspect(self) -> bool:
        """Whether a request waits and the next one is a suspect, which must not share a batch."""
        order = self._order
        return self.count > 0 and type(order[0].key) is Suspect  # an empty lane of suspects may be left

    def has_room(self, nbytes: int, requests: int = 1) -> bool:
        """Report whether `requests` more, with `nbytes` in all, are within both bounds."""
        return self.count + requests <= self.max_size and self.nbytes + nbytes <= self.max_bytes

    def in_the_way(self, request: Request, spared: int) -> list[Request]:
        """Return the requests to evict so that a new one fits: lowest priority first, newest first.

        None of them has the priority of `request` or a higher one. Empty if that makes no room. The
        next `spared` requests of each lane, at least 1, stay, so that no lane starves.
        """
        found: list[Request] = []
        nbytes = self.nbytes + request.nbytes
        for lane in sorted([lane for lane in self._order if lane.priority < request.lane.priority], key=_priority):
            if type(lane.key) is Suspect:
                continue
            for last in self._lanes[lane].behind_the_first(spared):
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
        nbytes = size = before = 0
        for request in requests:
            if request.lane is not lane:
                if lane is not None:
                    lane_queue.live += len(entries) - before
                lane = request.lane
                lane_queue = self._lanes.get(lane) or self._open(lane, request.arrived)
                entries = lane_queue.entries
                append, before = entries.append, len(entries)
                latest_deadline = lane_queue.latest_deadline
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
                self._deadlines.note(lane_queue)
                latest_deadline = lane_queue.latest_deadline
            request.state = QUEUED
            nbytes += request.nbytes
            size += request.size
        if lane is not None:
            lane_queue.live += len(entries) - before
        self.count += len(requests)
        self.nbytes += nbytes
        self._size += size
        if self.by_length:
            self._sort_in(requests)

    def push_alike(self, requests: Sequence[Request], nbytes: int) -> None:
        """Put requests of one lane, one due and one deadline, each of size 1, in their places.

        Fast path of `push`: the same outcome, see tests/core/test_fast_paths.py.

        Args:
            requests: At least one.
            nbytes: How many bytes they hold.
        """
        alike, n = requests[0], len(requests)
        due, deadline = alike.due, alike.deadline
        lane_queue = self._lanes.get(alike.lane) or self._open(alike.lane, alike.arrived)
        entries = lane_queue.entries
        if not entries:
            lane_queue.ages_from = alike.arrived
            self._note_earlier(lane_queue)
        elif due < entries[-1].due:
            self.push(requests)
            return
        if due != deadline or deadline < lane_queue.latest_deadline:
            lane_queue.watch_deadline(deadline)
            self._deadlines.note(lane_queue)
        entries += requests
        for request in requests:
            request.state = QUEUED
        lane_queue.live += n
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
            if lane_queue.levels is not None:
                lane_queue.levels.put_back(request)
            request.state = QUEUED
            self.count += 1
            self.nbytes += request.nbytes
            self._size += request.size

    def peek(self, n: int) -> list[Request]:
        """Return what `take` would: the next `n` requests, or fewer if fewer may share a batch."""
        found: list[Request] = []
        if self.suspect_lanes and self.next_is_suspect and n > 1:
            n = 1
        for lane in self._next_lanes():
            found += self._lanes[lane].peek(n - len(found))
            if len(found) >= n:
                break
        return found

    def ahead_of(self, request: Request, now: float) -> int:
        """Return how many that wait would go before `request` if it came now.

        Where some have left early, it may be a few less.
        """
        own = request.lane
        rank = self._rank(own) if own in self._lanes and self._lanes[own].live else now - own.priority * self.ageing_s
        n = 0
        for lane in self._order:
            lane_queue = self._lanes[lane]
            if lane == own:
                n += lane_queue.due_by(request.due)
            elif self._rank(lane) <= rank:
                n += lane_queue.live
        return n

    def take(self, n: int, now: float = -inf) -> list[Request]:
        """Remove and return the next `n` requests; they are now running.

        The lanes that they came from age from `now` on.
        """
        taken: list[Request] = []
        served: list[Lane] = []
        if self.suspect_lanes and self.next_is_suspect:
            n = 1
            self._age_former_lane(self._order[0], now)
        for lane in self._next_lanes():
            lane_queue = self._lanes[lane]
            of_lane = lane_queue.take(n - len(taken))
            taken += of_lane
            if lane_queue.levels is not None:
                lane_queue.levels.discard(of_lane)
            if now > lane_queue.ages_from:
                lane_queue.ages_from = now
            served.append(lane)
            if not lane_queue.live:
                self._close(lane)
            if len(taken) >= n:
                break
        self._put_in_order(served)
        self._set_running(taken)
        return taken

    def pick(self, requests: Sequence[Request], now: float) -> list[Request]:
        """Remove and return these requests, wherever they wait; they are now running.

        They must share a key and a bucket. Their lanes age from `now` on, as with `take`.
        """
        by_lane: dict[Lane, list[Request]] = {}
        for request in requests:
            request.state = RUNNING  # a lane tells by it which of its entries are gone
            by_lane.setdefault(request.lane, []).append(request)
        for lane, of_lane in by_lane.items():
            lane_queue = self._lanes[lane]
            lane_queue.cut_out_taken(len(of_lane))
            if lane_queue.levels is not None:
                lane_queue.levels.discard(of_lane)
            if now > lane_queue.ages_from:
                lane_queue.ages_from = now
            if self.suspect_lanes:
                self._age_former_lane(lane, now)
            if not lane_queue.live:
                self._close(lane)
        self._put_in_order(list(by_lane))
        self._set_running(requests)
        return list(requests)

    @property
    def levels(self) -> list[Levels]:
        """The levels of the lanes from which the next batch may come; empty without lengths.

        They are those of the lane at the head, and of the other lanes of its priority, of which
        only some are looked at if there are many: requests of one of them may share a batch with
        each other and with none of another one.
        """
        return self.levels_of(self._order)

    def levels_of(self, order: Sequence[Lane]) -> list[Levels]:
        """Return the same of some lanes, in the order in which they are to be taken from."""
        if not self.by_length or not order or type(order[0].key) is Suspect:
            return []
        found: list[Levels] = []
        priority = order[0].priority
        for lane in order:
            if lane.priority == priority and type(lane.key) is not Suspect:
                lane_queue = self._lanes[lane]
                if lane_queue.levels is not None and lane_queue.live:
                    found.append(lane_queue.levels)
                    if len(found) == MOST_KEYS:
                        break
        return found

    @property
    def order(self) -> Sequence[Lane]:
        """The lanes, in the order in which they are to be taken from."""
        return self._order

    def lane(self, lane: Lane) -> LaneQueue:
        """Return what waits in a lane."""
        return self._lanes[lane]

    def alike(self, order: Sequence[Lane]) -> list[Lane]:
        """Return the first of some lanes, and those of them with which it may share a batch."""
        first = order[0] if order else None
        return [] if first is None else [lane for lane in order if lane[1:] == first[1:]]

    def remove(self, request: Request) -> None:
        """Remove a request that leaves early; it is now done."""
        if request.state != QUEUED:
            raise ValueError(f"{request!r} is not queued")
        lane_queue = self._lanes[request.lane]
        self._discount(request)
        if lane_queue.levels is not None:
            lane_queue.levels.discard([request])
        lane_queue.mark_dead()
        if not lane_queue.live:
            self._close(request.lane)

    def evict(self, request: Request) -> None:
        """Remove a request that `in_the_way` has named; it is now done.

        Unlike after `remove` no entry stays behind, so the request may wait in another queue.
        """
        lane_queue = self._lanes[request.lane]
        lane_queue.cut_out(request)
        if lane_queue.levels is not None:
            lane_queue.levels.discard([request])
        self._discount(request)

    def expired(self, now: float) -> list[Request]:
        """Return every request whose deadline has passed; they stay in the queue."""
        return [request for queue in self._deadlines.until(now, self._lanes) for request in queue.expired(now)]

    def expire(self, now: float) -> list[Request]:
        """Remove and return every request whose deadline has passed; they are now done."""
        expired = self.expired(now)
        for request in expired:
            self.remove(request)
        return expired

    @property
    def earliest_deadline(self) -> float:
        """When the next request expires; infinity when none waits."""
        return self._deadlines.least(self._lanes)

    @property
    def earliest_due(self) -> float:
        """When the next request should be answered; infinity when none waits."""
        return self._dues.least(self._lanes)

    @property
    def oldest_arrival(self) -> float:
        """When the request that has waited longest arrived; infinity when none waits."""
        return self._arrivals.least(self._lanes)

    def _note_earlier(self, lane_queue: LaneQueue) -> None:
        """Note that a lane has a request that may be the first of all by some time."""
        self._dues.note(lane_queue)
        self._deadlines.note(lane_queue)
        self._arrivals.note(lane_queue)

    def _next_lanes(self) -> list[Lane]:
        """Return the lanes that the next batch may draw from: the first, and those like it."""
        order = self._order
        if len(order) <= 1:
            return order[:]
        first = order[0]
        if self._alike[first[1:]] == 1:
            return [first]
        return [lane for lane in order if lane.key == first.key and lane.bucket == first.bucket]

    def _sort_in(self, requests: Sequence[Request]) -> None:
        """Put new requests into the levels of their lanes."""
        for request in requests:
            levels = self._lanes[request.lane].levels
            assert levels is not None
            levels.add(request)
            if request.length != self._length:
                self.lengths_vary = self.lengths_vary or self._length > 0
                self._length = request.length

    def _set_running(self, taken: Sequence[Request]) -> None:
        """Note that requests are now running, and take them off the sums."""
        nbytes, size = 0, len(taken)
        if self._size != self.count:
            size = sum([request.size for request in taken])
        for request in taken:
            request.state = RUNNING
            nbytes += request.nbytes
        self.count -= len(taken)
        self.nbytes -= nbytes
        self._size -= size

    def _discount(self, request: Request) -> None:
        """Take a request that is now done off the sums."""
        request.state = DONE
        self.count -= 1
        self.nbytes -= request.nbytes
        self._size -= request.size

    def _age_former_lane(self, lane: Lane, now: float) -> None:
        """Have the lane from which suspects came age from `now` on, if `lane` is one of suspects.

        What is taken from a lane of suspects counts as taken from the one they came from.
        """
        former = self._lanes.get(lane._replace(key=lane.key.former_key)) if isinstance(lane.key, Suspect) else None
        if former is not None and now > former.ages_from:
            former.ages_from = now

    def _rank(self, lane: Lane) -> float:
        """Return what lanes are sorted by: the one with the least rank goes first.

        Priority plus age is greatest where this is least, at any time:
        (now - ages_from) / ageing_s + priority = (now - rank) / ageing_s.
        """
        return self._lanes[lane].ages_from - lane.priority * self.ageing_s

    def _put_in_order(self, served: Sequence[Lane]) -> None:
        """Put lanes that have just been taken from in their new places; the others keep theirs."""
        order = self._order
        if len(order) <= _MANY_LANES or self.suspect_lanes:
            if len(order) > 1:
                order.sort(key=self._rank)
            return
        for lane in reversed(served):  # what was ahead stays ahead of its equals, as if all were sorted
            if lane in self._lanes:
                order.remove(lane)
                insort_left(order, lane, key=self._rank)

    def _open(self, lane: Lane, arrived: float) -> LaneQueue:
        """Make room for the requests of a new lane, of which the first arrived at `arrived`."""
        if len(self._order) == 1 and not self._lanes[self._order[0]].live:
            self._forget(self._order[0])  # kept by `_close`; empty, it must not stand at the head
        how = self._levels_of
        levels = None if how is None else Levels(how.level_of, lane.key, how.lengths)
        opened = self._lanes[lane] = LaneQueue(arrived, levels)
        self._alike[lane[1:]] = self._alike.get(lane[1:], 0) + 1
        if type(lane.key) is Suspect:
            self.suspect_lanes += 1
            insort_left(self._order, lane, key=self._rank)
        else:
            insort(self._order, lane, key=self._rank)
            self.varied = self.varied or self._usual not in (None, lane)
            self._usual = lane
        return opened

    def _close(self, lane: Lane) -> None:
        """Forget an empty lane, unless it is the last: lanes chosen by clients must not pile up."""
        if len(self._order) > 1:
            self._forget(lane)

    def _forget(self, lane: Lane) -> None:
        del self._lanes[lane]
        self._order.remove(lane)
        if self._alike[lane[1:]] == 1:
            del self._alike[lane[1:]]
        else:
            self._alike[lane[1:]] -= 1
        if type(lane.key) is Suspect:
            self.suspect_lanes -= 1
