"""The workers of one stage as its batcher sees them: which are idle, and which are about to go.

A worker that is to go gets nothing more. It finishes what it has, a batch ahead included, and is
then reported once (`take_drained`), so that it can be ended without the loss of a request.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable


class Places:
    """Which workers of a stage could take a batch, and which are about to go.

    Attributes:
        idle: The places of those that could take a batch now; the one that was busy last comes
            last.
        leaving: The places of those that take no batch any more, until they are reported.
        are_slots: Whether they are slots of one function, so that all of them make its calls.
    """

    __slots__ = ("_made", "are_slots", "idle", "leaving")

    def __init__(self) -> None:
        self.idle: list[int] = []
        self.leaving: set[int] = set()
        self.are_slots = False
        self._made: dict[int, set[Hashable]] = {}  # by place, the kinds of calls that it has made

    def is_first(self, place: int, kind: Hashable) -> bool:
        """Note that a worker has made a call; report whether it was its first one of this kind."""
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
        """Let a worker get nothing more."""
        if place in self.idle:
            self.idle.remove(place)
        self.leaving.add(place)

    def gone(self, place: int) -> None:
        """Forget a worker that is gone, whether it was to go or not."""
        if place in self.idle:
            self.idle.remove(place)
        self.leaving.discard(place)
        if not self.are_slots:
            self._made.pop(place, None)

    def take_drained(self, busy: Collection[int]) -> list[int]:
        """Return, once, the places of workers that were to go and have nothing left to do.

        Args:
            busy: The places of the workers that have something to do.
        """
        drained = [place for place in self.leaving if place not in busy]
        self.leaving.difference_update(drained)
        for place in drained:
            self._made.pop(place, None)
        return drained
