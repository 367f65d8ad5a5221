"""The nodes of a cluster that fell silent: for a while no worker is placed there. Sans-IO.

Ray takes a minute to notice that a node is gone, and would place the successor of a lost worker on
the same node until then.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

SUSPECT_S: Final = 90.0
"""How long a node is a suspect: longer than Ray takes to find that it is dead."""


class Suspects:
    """The nodes that fell silent, by their ids."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def add(self, now: float, node: str) -> None:
        """Note that a node has fallen silent."""
        if node:
            self._until[node] = now + SUSPECT_S

    def avoided(self, now: float, alive: Collection[str]) -> list[str]:
        """Return the nodes at which no worker is to be placed; none if no other node is left.

        Args:
            now: the time.
            alive: the nodes that Ray believes to be alive.
        """
        self._until = {node: until for node, until in self._until.items() if until > now}
        return sorted(self._until) if any(node not in self._until for node in alive) else []
