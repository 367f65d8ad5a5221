"""Every order in which the actors of a small world can take their steps, explored to the end."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar


class World(Protocol):
    """Actors and what they use, at one moment."""

    def moves(self) -> Sequence[tuple[str, int]]:
        """All that can happen next."""

    def move(self, what: str, which: int) -> None:
        """Let one of the moves happen."""

    def state(self) -> str:
        """All that decides what can still happen."""


W = TypeVar("W", bound=World)


def explore(world: W) -> Iterator[W]:
    """Every world in which nobody can move any more, whatever the order of the moves."""
    seen: set[str] = set()
    open_ones = [world]
    while open_ones:
        here = open_ones.pop()
        moves = here.moves()
        if not moves:
            yield here
        last = len(moves) - 1
        for i, move in enumerate(moves):
            there = copy.deepcopy(here) if i < last else here  # nobody needs it any more; copies are most of the work
            there.move(*move)
            state = there.state()
            if state not in seen:
                seen.add(state)
                open_ones.append(there)
