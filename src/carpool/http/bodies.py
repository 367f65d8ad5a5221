"""Limits the memory of bodies that are being received. Bytes count when they come, not before.

Each connection has a share that no other can take from it. What is left beyond the shares goes to
whichever connection needs it first. When the memory is full, one of the bodies over their share is
ended: the one of which the smallest part came lately. So clients that send heads and no bodies take
nothing from others, and a client that fills the memory and then pauses makes room as soon as others
need it.

Where there are several services, the shares of connections are half of the memory, and the other
half is guaranteed to the services: no body of a service is ended as long as those over their share
are not more than what is guaranteed to it (`shares.py`). So there is always one to end: if neither
rule left any, all bodies would fit.

The smallest part, with bytes that count half after a quarter of a second, distinguishes an upload
that stalls or trickles from one that is merely large or has just begun. Bytes are added up by
service only when the memory is full.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Protocol

from carpool.engine.clock import Clock
from carpool.errors import Overloaded
from carpool.http.shares import guaranteed_of

_HALF_LIFE_S = 0.25  # bytes that came this long ago count half as "lately"


class Body(Protocol):
    """A body that is being received.

    Attributes:
        held: How many bytes of it are in memory.
    """

    held: int

    @property
    def service(self) -> object:
        """The service that it is for; None where its head does not say."""

    def refuse_as_slow(self) -> None:
        """Refuse this body, which comes too slowly, and let go of its memory."""


class Bodies:
    """The bodies that one server is receiving, and the limit that they share.

    Args:
        limit: Bytes of all bodies together.
        connections: How many bodies there may be.
        clock: Monotonic seconds.

    Attributes:
        share: Bytes of one body that are always let in.
        guaranteed: Bytes of bodies over their share of which none is ended, by service.
        held: Bytes of all bodies together.
    """

    def __init__(self, limit: int, connections: int, clock: Clock) -> None:
        self.limit = limit
        self.share = limit // connections
        self.guaranteed: dict[object, int] = {}
        self.held = 0
        self._connections = connections
        self._clock = clock
        # bodies over their share: how many bytes came lately, and when that was worked out
        self._large: dict[Body, tuple[float, float]] = {}

    def divide(self, weights: Mapping[object, float]) -> None:
        """Guarantee each service its part from now on.

        Args:
            weights: The `share` of each service.
        """
        self.guaranteed = guaranteed_of(self.limit, weights)
        self.share = (self.limit - sum(self.guaranteed.values())) // self._connections

    def add(self, body: Body, nbytes: int) -> None:
        """Count more bytes of a body, and end the slowest bodies while all together are too large.

        Raises:
            Overloaded: The slowest is this one.
        """
        body.held += nbytes
        self.held += nbytes
        if body.held > self.share:
            before = self._lately(body) if body in self._large else body.held - nbytes
            self._large[body] = (before + nbytes, self._clock())
        while self.held > self.limit:
            slowest = min(self._may_end(), key=self._rank, default=body)
            if slowest is body:
                text = "too many bytes of bodies are being received"
                raise Overloaded(text, retry_after_s=1.0, reason="uploads")
            slowest.refuse_as_slow()
            self.remove(slowest)

    def hold(self, body: Body, nbytes: int) -> None:
        """Count so many bytes of a body, of which some may have gone since. Raises `Overloaded`."""
        if nbytes > body.held:
            self.add(body, nbytes - body.held)
            return
        self.held += nbytes - body.held
        body.held = nbytes
        if nbytes <= self.share:
            self._large.pop(body, None)

    def remove(self, body: Body) -> None:
        """Take a body off the account because it is complete or given up."""
        self.held -= body.held
        body.held = 0
        self._large.pop(body, None)

    def _may_end(self) -> Collection[Body]:
        """Return the bodies over their share of services that have more than is guaranteed."""
        if not self.guaranteed:
            return self._large
        held: Counter[object] = Counter()
        for body in self._large:
            held[body.service] += body.held
        return [body for body in self._large if held[body.service] > self.guaranteed.get(body.service, 0)]

    def _rank(self, body: Body) -> tuple[float, int]:
        """Return which part of a body came lately; of equal ones the largest ranks first."""
        return self._lately(body) / body.held, -body.held

    def _lately(self, body: Body) -> float:
        """Return how many bytes of a body came lately; older bytes count less."""
        nbytes, at = self._large[body]
        return nbytes * math.exp2((at - self._clock()) / _HALF_LIFE_S)
