"""Which worker has served which key, where different keys never share a batch. Sans-IO.

To serve another key than before may cost a worker something: weights of an adapter to load, a
language's tables. So the worker that served a key last is preferred for it. And a key may be held
to a number of workers, so that a busy one leaves some for the others. What is kept is bounded by
the number of workers, however many keys come by.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from math import inf


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
        """The keys that run on as many workers as they may."""
        if self._most == inf or len(self._runs) < self._most:
            return ()
        running = list(self._runs.values())
        return {key for key in running if running.count(key) >= self._most}

    def warm(self, places: Sequence[int]) -> Collection[Hashable]:
        """Return the keys that these workers have served last."""
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
        """Note that a worker has answered its batch."""
        self._runs.pop(place, None)

    def lost(self, place: int) -> None:
        """Note that a worker is gone; its successor has served no key."""
        self._runs.pop(place, None)
        self._last.pop(place, None)
