"""The workers of one stage as its batcher sees them: which are idle, which are about to go, and
which has served which key. Sans-IO.

A worker that is to go gets nothing more. It finishes what it has, a batch ahead included, and is
then reported once (`take_drained`).

To serve another key than before may cost a worker something: weights of an adapter to load, a
language's tables. So the worker that served a key last is preferred for it. And a key may be held
to a number of workers, so that a busy one leaves some for the others. What is kept is bounded by
the number of workers, however many keys come by.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from math import inf


class Places:
    """Which workers of a stage could take a batch, and which are about to go.

    Attributes:
        idle: The places of those that could take a batch now. The one that was busy last comes
            last, and is used first: its caches are warm.
        leaving: The places of those that take no batch any more, until they are reported.
        are_slots: Whether they are slots of one function, so that all of them make its calls.
    """

    def __init__(self) -> None:
        self.idle: list[int] = []
        self.leaving: set[int] = set()
        self.lent: set[int] = set()
        self.are_slots = False
        self._made: dict[int, set[Hashable]] = {}  # by place, the kinds of calls that it has made

    def is_first(self, place: int, kind: Hashable) -> bool:
        if self.are_slots:
            place = 0
        made = self._made.get(place)
        if made is None:
            made = self._made[place] = set()
        if kind in made:
            return False
        made.add(kind)
        return True

    def drain(self, place: int) -> None:
        if place in self.idle:
            self.idle.remove(place)
        self.leaving.add(place)

    def gone(self, place: int) -> None:
        if place in self.idle:
            self.idle.remove(place)
        self.leaving.discard(place)
        self.lent.discard(place)
        if not self.are_slots:
            self._made.pop(place, None)

    def take_drained(self, busy: Collection[int]) -> list[int]:
        drained = [place for place in self.leaving if place not in busy]
        self.leaving.difference_update(drained)
        for place in drained:
            self._made.pop(place, None)
        return drained


class KeyedWorkers:
    """The keys of one stage's workers.

    Args:
        most: How many workers may run one key at a time; infinity for any number.
    """

    def __init__(self, most: float = inf) -> None:
        self._most = most
        self._last: dict[int, Hashable] = {}  # by place, the key that was served last
        self._runs: dict[int, Hashable] = {}  # by place, the key that is served now

    @property
    def held(self) -> Collection[Hashable]:
        if self._most == inf or len(self._runs) < self._most:
            return ()
        running = list(self._runs.values())
        return {key for key in running if running.count(key) >= self._most}

    def warm(self, places: Sequence[int]) -> Collection[Hashable]:
        return {self._last[place] for place in places if place in self._last}

    def choose(self, places: Sequence[int], key: Hashable) -> int:
        """Return the best of some places for a batch of `key`.

        That is the one which served it last, else one that has served none yet, else the last one.
        """
        for place in reversed(places):
            if place in self._last and self._last[place] == key:
                return place
        for place in reversed(places):
            if place not in self._last:
                return place
        return places[-1]

    def started(self, place: int, key: Hashable) -> bool:
        """Note that a worker begins a batch of `key`; report whether its last one was another's."""
        is_switch = place not in self._last or self._last[place] != key
        self._last[place] = self._runs[place] = key
        return is_switch

    def ended(self, place: int) -> None:
        self._runs.pop(place, None)

    def lost(self, place: int) -> None:
        self._runs.pop(place, None)
        self._last.pop(place, None)
