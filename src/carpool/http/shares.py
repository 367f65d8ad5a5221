"""Divides the means of a server among its services, so that none of them can take everything.

Half of it is guaranteed, to each service in proportion to its `share=`. The other half goes to
whichever service needs it first, and what is guaranteed to others is left for them. A service that
is alone may have everything.

Connections count for the service that they asked last, not for the one whose answer they wait for.
So a request of a counted connection costs one comparison (`Connection.counted_for`), an answer
costs nothing, and idle connections count. Evicting waiting requests was rejected: anyone who opens
connections could throw out others' requests. Connections that end take no room
(`ServerState.ending`), or refused clients that come again would take the place of those for whom it
was kept.

`Bodies` limits the memory of bodies that are being received. Bytes count when they come, not
before. Each connection has a share that no other can take from it. What is left beyond the shares
goes to whichever connection needs it first. When the memory is full, one of the bodies over their
share is ended: the one of which the smallest part came lately.

Where there are several services, the shares of connections are half of the memory, and the other
half is guaranteed to the services: no body of a service is ended as long as those over their share
are not more than what is guaranteed to it. So there is always one to end: if neither rule left any,
all bodies would fit.

The smallest part, with bytes that count half after a quarter of a second, distinguishes an upload
that stalls or trickles from one that is merely large or has just begun. Bytes are added up by
service only when the memory is full.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Protocol, TypeVar

from carpool.engine.clock import Clock
from carpool.errors import Overloaded

M = TypeVar("M")


def guaranteed_of(total: int, weights: Mapping[M, float]) -> dict[M, int]:
    """Return how much of a total is guaranteed to each service; a lone one needs no guarantee.

    Args:
        total: How much there is.
        weights: The `share` of each service.
    """
    if len(weights) < 2:
        return {}
    least = 1 if total >= 2 * len(weights) else 0
    whole = 2 * sum(weights.values())
    return {service: max(least, int(total * (weight / whole))) for service, weight in weights.items()}


class ConnectionShares:
    """The connections of one server, each counted for the service that it asks.

    A connection of which no head has come counts for none, and neither does one that has asked for
    pages only.

    Attributes:
        held: How many each service has; those that have none are left out.
        guaranteed: How many are guaranteed to each.
    """

    def __init__(self, total: int) -> None:
        self.held: dict[object, int] = {}
        self.guaranteed: dict[object, int] = {}
        self.refused = 0
        self._total = total
        self._claimed = 0  # the sum of what each service has, or is guaranteed where that is more
        self._services: dict[object, object] = {}  # for which each connection counts

    def divide(self, weights: Mapping[object, float]) -> None:
        """Guarantee each service its part from now on.

        One that has more than is left by this keeps it, but gets nothing more until it has given
        enough back.

        Args:
            weights: The `share` of each service.
        """
        self.guaranteed = guaranteed_of(self._total, weights)
        services = self.held.keys() | self.guaranteed.keys()
        self._claimed = sum([max(self.held.get(each, 0), self.guaranteed.get(each, 0)) for each in services])

    def take(self, connection: object, service: object) -> bool:
        """Count a connection for a service, and no longer for another one.

        Returns:
            Whether there is room; if not, the connection counts for none.
        """
        self.give_back(connection)
        held = self.held.get(service, 0)
        if held >= self.guaranteed.get(service, 0):
            if self._claimed >= self._total:
                self.refused += 1
                return False
            self._claimed += 1
        self.held[service] = held + 1
        self._services[connection] = service
        return True

    def give_back(self, connection: object) -> None:
        """Count a connection for no service."""
        service = self._services.pop(connection, None)
        if service is None:
            return
        held = self.held[service] - 1
        if held >= self.guaranteed.get(service, 0):
            self._claimed -= 1
        if held:
            self.held[service] = held
        else:
            del self.held[service]


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
        return self._lately(body) / body.held, -body.held

    def _lately(self, body: Body) -> float:
        """Return how many bytes of a body came lately; older bytes count less."""
        nbytes, at = self._large[body]
        return nbytes * math.exp2((at - self._clock()) / _HALF_LIFE_S)
