"""Which nodes of a cluster fell silent, and which have not. Sans-IO, and without Ray.

Ray takes a minute to notice that a node is gone, and would place the successor of a lost worker on
the same node until then. So for a while no worker is placed there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from math import inf
from typing import Final

SUSPECT_S: Final = 90.0
"""How long a node is a suspect: longer than Ray takes to find that it is dead."""


class Suspects:
    """The nodes that fell silent, and those that are well, by their ids."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._workers: Counter[str] = Counter()  # that are connected
        self._last_seen: dict[str, float] = {}  # when the last connection of a node ended

    def add(self, now: float, node: str) -> None:
        if node:
            self._until[node] = now + SUSPECT_S

    def connected(self, node: str) -> None:
        self._workers[node] += 1

    def disconnected(self, now: float, node: str) -> None:
        """Note that the connection of a worker has ended; after a silence `add` is called as
        well."""
        self._workers[node] -= 1
        self._last_seen[node] = now

    def well(self, now: float, alive: Collection[str]) -> list[str]:
        """Return the nodes that have workers, or had some lately, and are no suspects.

        Args:
            now: The time.
            alive: The nodes that Ray believes to be alive.
        """
        seen = [node for node in alive if self._workers[node] or now - self._last_seen.get(node, -inf) < SUSPECT_S]
        return sorted(node for node in seen if self._until.get(node, -inf) <= now)

    def avoided(self, now: float, alive: Collection[str]) -> list[str]:
        """Return the nodes at which no worker is to be placed; none if no other node is left.

        Args:
            now: The time.
            alive: The nodes that Ray believes to be alive.
        """
        self._until = {node: until for node, until in self._until.items() if until > now}
        return sorted(self._until) if any(node not in self._until for node in alive) else []
