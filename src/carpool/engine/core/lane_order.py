"""The lanes of a queue, in the order in which they are to be taken from.

Lanes are sorted by a rank that changes only when something is taken from a lane. So each lane has a
place in a sorted list, in that of the lanes of its priority, and in that of the lanes that it may
share a batch with. How many requests wait up to a rank is counted by a binary indexed tree
(Fenwick, "A new data structure for cumulative frequency tables", 1994) over ranks in microseconds,
of which only the nodes that are not 0 are kept. Like a heap of `Earliest`, it is made by the first
question about many lanes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from carpool.engine.core.earliest import FEW, Earliest
from carpool.engine.core.lane_queue import LaneQueue, Place
from carpool.engine.request import Lane

_PER_S: Final = 1e6  # nodes of the tree: two turns of a loop are further apart
_ZERO: Final = 2**43  # the node of the first rank; those of ranks 100 days from it count as one
_END: Final = 2**44
_NO_LANES: Final[dict[LaneQueue, None]] = {}


@dataclass(frozen=True, slots=True)
class Suspect:
    """The key of suspects, which share a batch with no other request, not even with each other."""

    former_key: Hashable


def key_of(lane: Lane) -> Hashable:
    return lane.key.former_key if isinstance(lane.key, Suspect) else lane.key


class LaneOrder:
    """Keeps the lanes of a queue in order. The cost of nothing here grows with their number.

    The lane with the least rank goes first: priority plus age is greatest where that is least, at
    any time, since (now - ages_from) / ageing_s + priority = (now - rank) / ageing_s. Of equals the
    one that was placed there first goes first, and a lane of suspects before all others. While
    `is_watched`, `note` must be called.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._places: list[Place] = []
        self._alike: dict[tuple[Hashable, int], list[Place]] = {}  # by key and bucket
        self._priorities: dict[int, list[Place]] = {}  # without those of suspects
        self._keys: dict[Hashable, dict[LaneQueue, None]] = {}  # by the key that suspects had before
        self._behind = self._ahead = 0  # numbers of places; negative for those ahead of their equals
        self.is_watched = False
        self._changed: dict[LaneQueue, None] = {}  # where others wait than was counted
        self._crowds: dict[int, Earliest[LaneQueue]] = {}  # by priority
        self._is_counted = False  # by the tree
        self._tree: dict[int, int] = {}
        self._counted: dict[LaneQueue, tuple[int, int]] = {}  # at which node, and how many
        self._first_rank = 0.0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[LaneQueue]:
        for place in self._places:
            yield place[2]

    # -- questions

    def first(self, but: Collection[LaneQueue] = ()) -> LaneQueue | None:
        """Return the lane that goes first, apart from some; None if there is no other."""
        for place in self._places:
            if place[2] not in but:
                return place[2]
        return None

    def alike(self, lane: Lane) -> Sequence[Place]:
        return self._alike[lane[1:3]]

    def of_priority(self, priority: int) -> Sequence[Place]:
        return self._priorities[priority]

    def of_keys(self, keys: Collection[Hashable]) -> set[LaneQueue]:
        return {lane_queue for key in keys for lane_queue in self._keys.get(key, _NO_LANES)}

    def below(self, priority: int) -> list[int]:
        """Return the priorities in use that are lower than one, the lowest first."""
        return sorted([each for each in self._priorities if each < priority])

    def crowded(self, priority: int, more_than: int) -> Iterator[LaneQueue]:
        """Yield the lanes of a priority in which more than some requests wait, the fullest first.

        Those of suspects are left out. None may change while this iterates.
        """
        self._settle()
        places = self._priorities[priority]
        crowd = self._crowds.get(priority)
        if crowd is None:
            crowd = self._crowds[priority] = Earliest(_fullness)
            self.is_watched = True
        return crowd.until(-more_than - 1, lambda: [place[2] for place in places], len(places))

    def waiting_by(self, rank: float) -> int:
        places = self._places
        if len(places) == 1:
            self._place_again(places[0][2])  # its place is not kept while it is the only one
        if len(places) <= FEW:
            self._unwatch()
            return sum([lane_queue.live for at, _, lane_queue in places if at <= rank])
        if not self._is_counted:
            self.is_watched = self._is_counted = True
            self._first_rank = places[0][0]
            self._changed.update(dict.fromkeys(self))
        self._settle()
        node, n = self._node(rank), 0
        while node:
            n += self._tree.get(node, 0)
            node &= node - 1
        return n

    def rank_of(self, lane: Lane, ages_from: float) -> float:
        return ages_from - lane.priority * self._ageing_s

    # -- changes

    def open(self, lane_queue: LaneQueue) -> None:
        """Put in a new lane, behind its equals; one of suspects goes ahead of them."""
        if len(self._places) == 1:
            self._place_again(self._places[0][2])  # as above
        self._keys.setdefault(key_of(lane_queue.lane), {})[lane_queue] = None
        self._insert(lane_queue, is_ahead=type(lane_queue.lane.key) is Suspect)

    def close(self, lane_queue: LaneQueue) -> None:
        self._remove(lane_queue)
        key = key_of(lane_queue.lane)
        del self._keys[key][lane_queue]
        if not self._keys[key]:
            del self._keys[key]
        if len(self._places) == 1:
            self._unwatch()

    def served(self, lane_queues: Sequence[LaneQueue], now: float) -> None:
        """Have lanes age from `now` on: something has been taken from them.

        They get places ahead of their new equals, and among each other keep their order.
        """
        for lane_queue in reversed(lane_queues):
            if now > lane_queue.ages_from:
                lane_queue.ages_from = now
                if len(self._places) > 1:
                    self._place_again(lane_queue)

    def note(self, lane_queue: LaneQueue) -> None:
        self._changed[lane_queue] = None

    def _place_again(self, lane_queue: LaneQueue) -> None:
        self._remove(lane_queue)
        self._insert(lane_queue, is_ahead=True)

    def _insert(self, lane_queue: LaneQueue, is_ahead: bool) -> None:
        if is_ahead:
            self._ahead -= 1
            number = self._ahead
        else:
            self._behind += 1
            number = self._behind
        lane = lane_queue.lane
        place = lane_queue.place = (self.rank_of(lane, lane_queue.ages_from), number, lane_queue)
        for places in self._lists_of(lane):
            insort(places, place)
        if self.is_watched:
            self.note(lane_queue)

    def _remove(self, lane_queue: LaneQueue) -> None:
        lane, place = lane_queue.lane, lane_queue.place
        for places in self._lists_of(lane):
            del places[bisect_left(places, place)]
        if not self._alike[lane[1:3]]:
            del self._alike[lane[1:3]]
        if lane.priority in self._priorities and not self._priorities[lane.priority]:
            del self._priorities[lane.priority]
            self._crowds.pop(lane.priority, None)
        if self.is_watched:
            self._changed.pop(lane_queue, None)
            node, n = self._counted.pop(lane_queue, (0, 0))
            self._add(node, -n)

    def _lists_of(self, lane: Lane) -> list[list[Place]]:
        found = [self._places, self._alike.setdefault(lane[1:3], [])]
        if type(lane.key) is not Suspect:
            found.append(self._priorities.setdefault(lane.priority, []))
        return found

    # -- counts

    def _settle(self) -> None:
        for lane_queue in self._changed:
            if self._is_counted:
                node, n = self._counted.get(lane_queue) or (self._node(lane_queue.place[0]), 0)
                self._add(node, lane_queue.live - n)
                self._counted[lane_queue] = node, lane_queue.live
            crowd = self._crowds.get(lane_queue.lane.priority)
            if crowd is not None and type(lane_queue.lane.key) is not Suspect:
                crowd.note(lane_queue)
        self._changed.clear()

    def _unwatch(self) -> None:
        """Drop all counts; the next question about many lanes makes them again."""
        if self.is_watched:
            self.is_watched = self._is_counted = False
            self._changed.clear()
            self._tree.clear()
            self._counted.clear()
            self._crowds.clear()

    def _node(self, rank: float) -> int:
        return max(1, min(_END, _ZERO + int((rank - self._first_rank) * _PER_S)))

    def _add(self, node: int, n: int) -> None:
        tree = self._tree
        while n and node <= _END:
            total = tree.get(node, 0) + n
            if total:
                tree[node] = total
            else:
                del tree[node]
            node += node & -node


def _fullness(lane_queue: LaneQueue) -> float:
    return -lane_queue.live if lane_queue.live else inf
