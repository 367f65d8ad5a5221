"""The workers of one stage as its batcher sees them: which are idle, and which are about to go.

A worker that is to go gets nothing more. It finishes what it has, a batch ahead included, and is
then reported once (`take_drained`), so that it can be ended without the loss of a request.
"""

from __future__ import annotations

from collections.abc import Collection


class Places:
    """Which workers of a stage could take a batch, and which are about to go.

    Attributes:
        idle: The places of those that could take a batch now; the one that was busy last comes
            last.
        leaving: The places of those that take no batch any more, until they are reported.
    """

    __slots__ = ("idle", "leaving")

    def __init__(self) -> None:
        self.idle: list[int] = []
        self.leaving: set[int] = set()

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

    def take_drained(self, busy: Collection[int]) -> list[int]:
        """Return, once, the places of workers that were to go and have nothing left to do.

        Args:
            busy: The places of the workers that have something to do.
        """
        drained = [place for place in self.leaving if place not in busy]
        self.leaving.difference_update(drained)
        return drained
