"""The memory of bodies that are being received: on the account as their bytes come, not as they are promised.

Every connection has a share of its own, which nobody can take from it. What is left beyond the shares goes to whoever
comes. When the account is full, one of those who hold more than their share is ended: the one of which the smallest
part has come lately. So whoever sends heads and no bodies takes nothing from others, and whoever fills the memory and
then stands still makes room as soon as others need it.
"""

from __future__ import annotations

import math
from typing import Protocol

from carpool.clock import Clock
from carpool.errors import Overloaded

_LATELY_S = 0.25  # what came so long ago counts half


class Body(Protocol):
    """A body that is being received.

    Attributes:
        held: its bytes so far.
    """

    held: int

    def end(self) -> None:
        """It comes too slowly: refuse it, and let go of it."""


class Bodies:
    """The account of one server.

    Args:
        limit: bytes of all bodies together.
        share: bytes of one body that are always let in.
        clock: monotonic seconds.

    Attributes:
        held: bytes of all bodies together.
    """

    def __init__(self, limit: int, share: int, clock: Clock) -> None:
        self.limit = limit
        self.share = share
        self.held = 0
        self._clock = clock
        self._large: dict[Body, tuple[float, float]] = {}  # how much has come lately, and when that was said

    def add(self, body: Body, nbytes: int) -> None:
        """More of a body has come. Where that is too much, the slowest one is ended.

        Raises:
            Overloaded: it is this one.
        """
        body.held += nbytes
        self.held += nbytes
        if body.held > self.share:
            before = self._lately(body) if body in self._large else body.held - nbytes
            self._large[body] = (before + nbytes, self._clock())
        while self.held > self.limit:
            slowest = min(self._large, key=self._rank, default=body)
            if slowest is body:
                raise Overloaded("too many bytes of bodies are being received", retry_after_s=1.0)
            slowest.end()
            self.remove(slowest)

    def remove(self, body: Body) -> None:
        """A body is complete, or nobody waits for it any more."""
        self.held -= body.held
        body.held = 0
        self._large.pop(body, None)

    def _rank(self, body: Body) -> tuple[float, int]:
        """Which part of a body has come lately; of equal ones the largest is first."""
        return self._lately(body) / body.held, -body.held

    def _lately(self, body: Body) -> float:
        nbytes, at = self._large[body]
        return nbytes * math.exp2((at - self._clock()) / _LATELY_S)
