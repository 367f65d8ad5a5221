"""Divides what a server has among its services, so that none of them can take everything.

Half of it is guaranteed, to each service in proportion to its `share=`. The other half goes to
whichever service needs it first, and what is guaranteed to others is left for them. A service that
is alone may have everything.

`ConnectionShares` counts connections in this way. Bytes of bodies are counted in `bodies.py`.

Connections count for the service that they asked last, not for the one whose answer they wait for.
So a request of a counted connection costs one comparison (`Connection.counted_for`), an answer
costs nothing, and idle connections count. A service whose count is full is refused at the head of
the request. Evicting waiting requests was rejected: anyone who opens connections could throw out
others' requests. Connections that end take no room (`ServerState.ending`), or refused clients that
come again would take the place of those for whom it was kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

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

    Args:
        total: How many connections there may be.

    Attributes:
        held: How many each service has; those that have none are left out.
        guaranteed: How many are guaranteed to each.
        refused: How many connections have been refused, since there was no room for them.
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
