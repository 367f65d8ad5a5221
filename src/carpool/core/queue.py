"""The waiting room of one stage: lanes in order of priority, earliest due first within a lane.

Priorities age, so that nobody starves: a lane rises by one level for each `ageing_s` that it waits and nothing is taken
from it, and is back at its own level once something was. It is not the age of single requests that counts: those of a
lane that is served, however long its line, have no reason to go before others. So a crowd of low priority delays a
newcomer of higher priority by one batch at most for each lower priority in use, and a crowd of high priority holds up a
lower one by no more than `ageing_s` a level. All lanes age alike, so their order changes only when one is served or
opened, and can be kept instead of worked out for each question. (Ageing is that of operating systems' schedulers, see
Silberschatz et al., "Operating System Concepts", on priority scheduling.)

A lane is a list with a moving head. What is due later mostly arrives later, so a push is an append; a request that
leaves early (cancelled, expired) is only marked and skipped later, so leaving is O(1). What has left is cut off as soon
as it outnumbers what waits, so that a lane does not keep alive what nobody needs. Nothing here knows policies, workers
or clocks.
"""

from __future__ import annotations

from bisect import bisect_right, insort, insort_left
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter, itemgetter
from typing import cast

from carpool.request import DONE, QUEUED, RUNNING, Lane, Request

AGEING_S = 1.0
"""Seconds in which a lane that is passed over rises by one level. Well below the usual time-outs of many seconds, so
that a low priority is late and not lost; well above the usual batch, so that one batch does not blur two priorities."""

_due = attrgetter("due")
_due_and_arrival = attrgetter("due", "arrived")
_priority = itemgetter(0)


@dataclass(frozen=True, slots=True)
class Alone:
    """A key of requests that share a batch with nobody, not even with each other; `key` is the one they had before."""

    key: Hashable


class _Lane:
    """Requests of one lane, sorted by when they are due; equals keep their order of arrival. Empty if none is live."""

    __slots__ = ("dead", "head", "in_order", "in_step", "items", "last_deadline", "live", "since")

    def __init__(self, since: float) -> None:
        self.since = since  # when something was last taken from it; before that, when its first request came
        self.items: list[Request] = []
        self.head = 0  # everything before it has left
        self.live = 0
        self.dead = 0  # entries behind the head that have left early
        self.in_order = True  # arrivals came with rising dues: the head is also the oldest
        self.in_step = True  # deadlines rise along the lane as dues do: the head also expires first
        self.last_deadline = -inf  # the latest of those that are due before their deadline

    def reset(self) -> None:
        """Forget what has left; the lane is empty."""
        self.items.clear()
        self.head = self.dead = 0
        self.in_order = self.in_step = True
        self.last_deadline = -inf

    def insert(self, request: Request) -> None:
        """Put in a request that is due earlier than the last one."""
        insort(self.items, request, lo=self.head, key=_due)
        self.in_order = False
        if request.due < request.deadline:
            self.in_step = False

    def watch_deadline(self, deadline: float) -> None:
        """Notice when a request expires before one that is due before it."""
        if deadline < self.last_deadline:
            self.in_step = False
        else:
            self.last_deadline = deadline

    def put_back(self, request: Request) -> None:
        """Put in a request that was taken before: ahead of those that came after it or with it."""
        insort_left(self.items, request, lo=self.head, key=_due_and_arrival)
        self.live += 1
        self.in_order = False
        if request.due < request.deadline or self.last_deadline > -inf:
            self.in_step = False

    def peek(self, n: int) -> list[Request]:
        if not self.dead:
            return self.items[self.head : self.head + n]
        found: list[Request] = []
        for request in self:
            if len(found) == n:
                break
            found.append(request)
        return found

    def take(self, n: int) -> list[Request]:
        if not self.dead:
            taken = self.items[self.head : self.head + n]
            self.head += len(taken)
        else:
            taken = self.peek(n)
            last = taken[-1] if taken else None
            while last is not None:
                request = self.items[self.head]
                self.head += 1
                if request.state != QUEUED:
                    self.dead -= 1
                if request is last:
                    break
        self.live -= len(taken)
        self._compact()
        return taken

    def skip_dead(self) -> None:
        """Move the head to the first live request."""
        while self.dead and self.items[self.head].state != QUEUED:
            self.head += 1
            self.dead -= 1

    def expired(self, now: float) -> list[Request]:
        """Those whose deadline has passed."""
        if not self.in_step:
            return [request for request in self if request.deadline <= now]
        self.skip_dead()
        found = []
        for request in self:
            if request.deadline > now:
                break
            found.append(request)
        return found

    @property
    def earliest_deadline(self) -> float:
        """When the next of its requests expires; there is one."""
        if not self.in_step:
            return min(request.deadline for request in self)
        self.skip_dead()
        return self.items[self.head].deadline

    def mark_dead(self) -> None:
        """One request has left early; its entry stays until the head passes it or most entries are dead."""
        self.live -= 1
        self.dead += 1
        self._compact()

    def behind_the_first(self, n: int) -> Iterator[Request]:
        """All but the next `n`, the last one first."""
        left = self.live - n
        for i in range(len(self.items) - 1, self.head - 1, -1):
            if left <= 0:
                return
            if self.items[i].state == QUEUED:
                left -= 1
                yield self.items[i]

    def cut_out(self, request: Request) -> None:
        """One request, near the end, has left early and leaves no entry behind; another one is live."""
        place = len(self.items) - 1
        while self.items[place] is not request:
            place -= 1
        del self.items[place]
        self.live -= 1

    def _compact(self) -> None:
        if not self.live:
            self.reset()
        elif self.head + self.dead > self.live:
            self.items = list(self) if self.dead else self.items[self.head :]
            self.head = self.dead = 0

    def __iter__(self) -> Iterator[Request]:
        for i in range(self.head, len(self.items)):
            request = self.items[i]
            if request.state == QUEUED:
                yield request


class Queue:
    """Requests that wait for a worker of one stage, bounded by count and by bytes.

    The order: higher priority first, with ageing; within a lane the earliest due, equals in order of arrival. What is
    taken together shares key and bucket but may span priorities. A lane whose key is `Alone` stands just ahead of the
    one that its requests came from, ages with it, and is taken from one by one.

    Args:
        max_size: most requests that may wait.
        max_bytes: most bytes that they may hold.
        ageing_s: a lane that is passed over for so long rises by one level of priority.

    Attributes:
        count: how many requests wait, as `len` tells too; nbytes: how many bytes they hold.
        lone_lanes: how many lanes there are whose key is `Alone`; mostly none, which is quicker to see than `alone`.
        varied: whether there has ever been more than one priority, key or bucket.
    """

    def __init__(self, max_size: float = inf, max_bytes: float = inf, ageing_s: float = AGEING_S) -> None:
        self.max_size = max_size
        self.max_bytes = max_bytes
        self.ageing_s = ageing_s
        self.nbytes = 0
        self._size = 0
        self.count = 0
        self.lone_lanes = 0
        self.varied = False
        self._usual: Lane | None = None
        self._lanes: dict[Lane, _Lane] = {}
        self._order: list[Lane] = []  # by rank

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
    def alone(self) -> bool:
        """Whether the next request has to go alone."""
        order = self._order
        return len(order) > 0 and type(order[0][1]) is Alone

    def has_room(self, nbytes: int, requests: int = 1) -> bool:
        """Whether so many more requests, of `nbytes` in all, are within both bounds."""
        return self.count + requests <= self.max_size and self.nbytes + nbytes <= self.max_bytes

    def in_the_way(self, request: Request, spared: int) -> list[Request]:
        """Who must go for a new request to have room: the last ones of the lowest priority first, and only such as have
        a lower priority than it has. Empty if that makes no room. The next `spared` of each lane, at least 1, stay, so
        that no lane starves.
        """
        found: list[Request] = []
        nbytes = self.nbytes + request.nbytes
        for key in sorted([key for key in self._order if key[0] < request.lane[0]], key=_priority):
            if type(key[1]) is Alone:
                continue
            for last in self._lanes[key].behind_the_first(spared):
                found.append(last)
                nbytes -= last.nbytes
                if self.count - len(found) < self.max_size and nbytes <= self.max_bytes:
                    return found
        return []

    def push(self, requests: Sequence[Request]) -> None:
        """Put requests in their places. Whoever calls has asked `has_room`, or must not lose them."""
        key: Lane | None = None
        lane = cast(_Lane, None)  # like the key
        nbytes = size = joined = 0
        for request in requests:
            if request.lane is not key:
                if key is not None:
                    lane.live += joined
                    joined = 0
                key = request.lane
                lane = self._lanes.get(key) or self._open(key, request.arrived)
                append = lane.items.append
                if lane.items:
                    latest = lane.items[-1].due
                else:
                    latest = -inf
                    lane.since = request.arrived
            due = request.due
            deadline = request.deadline
            if due >= latest:
                append(request)
                latest = due
            else:
                lane.insert(request)
            if due != deadline or deadline < lane.last_deadline:
                lane.watch_deadline(deadline)
            joined += 1
            request.state = QUEUED
            nbytes += request.nbytes
            size += request.size
        if key is not None:
            lane.live += joined
        self.count += len(requests)
        self.nbytes += nbytes
        self._size += size

    def put_back(self, requests: Sequence[Request]) -> None:
        """Requests that were taken together wait again, in the places that their dues and arrivals give them."""
        for request in reversed(requests):  # each goes ahead of its equals, so the last comes first
            lane = self._lanes.get(request.lane) or self._open(request.lane, request.arrived)
            lane.put_back(request)
            request.state = QUEUED
            self.count += 1
            self.nbytes += request.nbytes
            self._size += request.size

    def peek(self, n: int) -> list[Request]:
        """The next `n` requests (fewer if fewer are compatible), in the order `take` would hand them out."""
        found: list[Request] = []
        if self.lone_lanes and self.alone and n > 1:
            n = 1
        for lane in self._next_lanes():
            found += self._lanes[lane].peek(n - len(found))
            if len(found) >= n:
                break
        return found

    def ahead_of(self, request: Request, now: float) -> int:
        """How many that wait would go before `request`, if it came now; where some have left early, a few less."""
        own = request.lane
        rank = self._rank(own) if own in self._lanes and self._lanes[own].live else now - own[0] * self.ageing_s
        n = 0
        for key in self._order:
            lane = self._lanes[key]
            if key == own:
                earlier = bisect_right(lane.items, request.due, lo=lane.head, key=_due)
                n += max(0, earlier - lane.head - lane.dead)
            elif self._rank(key) <= rank:
                n += lane.live
        return n

    def take(self, n: int, now: float = -inf) -> list[Request]:
        """Remove and return the next `n` requests; they are now running. The lanes they came from age from `now` on."""
        taken: list[Request] = []
        if self.lone_lanes and self.alone:
            n = 1
            self._age_origin(now)
        for key in self._next_lanes():
            lane = self._lanes[key]
            taken += lane.take(n - len(taken))
            if now > lane.since:
                lane.since = now
            if not lane.live:
                self._close(key)
            if len(taken) >= n:
                break
        if len(self._order) > 1:
            self._order.sort(key=self._rank)
        nbytes = size = 0
        for request in taken:
            request.state = RUNNING
            nbytes += request.nbytes
            size += request.size
        self.count -= len(taken)
        self.nbytes -= nbytes
        self._size -= size
        return taken

    def remove(self, request: Request) -> None:
        """A queued request leaves early; it is now done."""
        if request.state != QUEUED:
            raise ValueError(f"{request!r} is not queued")
        lane = self._lanes[request.lane]
        self._discount(request)
        lane.mark_dead()
        if not lane.live:
            self._close(request.lane)

    def evict(self, request: Request) -> None:
        """Like `remove`, for one that `in_the_way` has named; no entry stays behind, so it may wait elsewhere."""
        self._lanes[request.lane].cut_out(request)
        self._discount(request)

    def expired(self, now: float) -> list[Request]:
        """Every request whose deadline has passed; they are still there."""
        return [request for lane in self._lanes.values() if lane.live for request in lane.expired(now)]

    def expire(self, now: float) -> list[Request]:
        """Remove and return every request whose deadline has passed; they are now done."""
        expired = self.expired(now)
        for request in expired:
            self.remove(request)
        return expired

    @property
    def earliest_deadline(self) -> float:
        """When the next request expires; infinity when nobody waits."""
        return min([lane.earliest_deadline for lane in self._lanes.values() if lane.live], default=inf)

    @property
    def earliest_due(self) -> float:
        """When the next request should be answered; infinity when nobody waits."""
        earliest = inf
        for lane in self._lanes.values():
            if lane.live:
                if lane.dead:
                    lane.skip_dead()
                due = lane.items[lane.head].due
                if due < earliest:
                    earliest = due
        return earliest

    @property
    def oldest_arrival(self) -> float:
        """When the request that has waited longest arrived; infinity when nobody waits."""
        oldest = inf
        for lane in self._lanes.values():
            if lane.in_order and lane.live:
                lane.skip_dead()
                oldest = min(oldest, lane.items[lane.head].arrived)
            else:
                oldest = min(oldest, min((r.arrived for r in lane), default=oldest))
        return oldest

    def _next_lanes(self) -> list[Lane]:
        """The lanes that the next batch may draw from: those with the key and bucket of the first."""
        order = self._order
        if len(order) <= 1:
            return order[:]
        _, key, bucket = order[0]
        return [lane for lane in order if lane[1] == key and lane[2] == bucket]

    def _discount(self, request: Request) -> None:
        """It waits no more, and is done."""
        request.state = DONE
        self.count -= 1
        self.nbytes -= request.nbytes
        self._size -= request.size

    def _age_origin(self, now: float) -> None:
        """What is taken from a lane of lone requests is taken from the lane they came from, as far as ageing goes."""
        priority, key, bucket = self._order[0]
        assert isinstance(key, Alone)
        origin = self._lanes.get((priority, key.key, bucket))
        if origin is not None and now > origin.since:
            origin.since = now

    def _rank(self, key: Lane) -> float:
        """A lane's place in the order, the least first. Priority plus age is greatest where this is least, at any time:
        (now - since) / ageing_s + priority = (now - rank) / ageing_s."""
        return self._lanes[key].since - key[0] * self.ageing_s

    def _open(self, key: Lane, since: float) -> _Lane:
        if len(self._order) == 1 and not self._lanes[self._order[0]].live:
            self._forget(self._order[0])  # kept by `_close`; empty, it must not stand at the head
        lane = self._lanes[key] = _Lane(since)
        if type(key[1]) is Alone:
            self.lone_lanes += 1
            insort_left(self._order, key, key=self._rank)
        else:
            insort(self._order, key, key=self._rank)
            self.varied = self.varied or self._usual not in (None, key)
            self._usual = key
        return lane

    def _close(self, key: Lane) -> None:
        """Forget an empty lane, so that priorities and keys chosen by clients cannot pile up; the last may stay."""
        if len(self._order) > 1:
            self._forget(key)

    def _forget(self, key: Lane) -> None:
        del self._lanes[key]
        self._order.remove(key)
        if type(key[1]) is Alone:
            self.lone_lanes -= 1
