"""Which key each request has, where only requests with equal keys may share a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, repeat
from random import Random
from typing import Protocol, cast

from carpool.simulate import specs

EXAMPLE = "zipf:count=100,power=1"


class Keys(Protocol):
    """A source of keys."""

    def draw(self, dice: Random) -> Iterator[int]:
        """Yield the keys of one request after another."""


@dataclass(frozen=True)
class Equal:
    """Keys that are all as likely.

    Args:
        count: How many there are.
    """

    count: int

    def __post_init__(self) -> None:
        _check_count("equal", self.count)

    def draw(self, dice: Random) -> Iterator[int]:
        return (dice.randrange(self.count) for _ in repeat(None))


@dataclass(frozen=True)
class Zipf:
    """Keys of which few are asked for often: the n-th is 1 / n^power times as likely as the first.

    Args:
        count: How many there are.
        power: 0 makes all keys as likely, and a higher one the first keys more so.
    """

    count: int
    power: float = 1.0

    def __post_init__(self) -> None:
        _check_count("zipf", self.count)
        if self.power < 0:
            raise ValueError(f"zipf: power must be at least 0, not {self.power!r}")

    def draw(self, dice: Random) -> Iterator[int]:
        keys = range(self.count)
        shares = list(accumulate((n + 1) ** -self.power for n in keys))
        return (dice.choices(keys, cum_weights=shares)[0] for _ in repeat(None))


@dataclass(frozen=True)
class InTurn:
    """Keys that follow each other in a circle, so that each is asked for as seldom as can be.

    Args:
        count: How many there are.
    """

    count: int

    def __post_init__(self) -> None:
        _check_count("turn", self.count)

    def draw(self, dice: Random) -> Iterator[int]:
        while True:
            yield from range(self.count)


KINDS: dict[str, Callable[..., Keys]] = {"equal": Equal, "zipf": Zipf, "turn": InTurn}


def keys_of(keys: object) -> Keys | None:
    """Return a source of keys, which may be given as their number or as a spec; None for None.

    Raises:
        ValueError: The number or the spec is wrong; the text says what to change.
        TypeError: `keys` is none of these.
    """
    if keys is None:
        return None
    if isinstance(keys, str) and keys.strip().isdigit():
        keys = int(keys)
    if isinstance(keys, int):
        return Equal(keys)
    if isinstance(keys, str):
        return specs.build(keys, KINDS, "source of keys", EXAMPLE)
    if hasattr(keys, "draw"):
        return cast(Keys, keys)
    raise TypeError(f"keys must be how many there are, a spec such as {EXAMPLE!r} or Zipf(...), not {keys!r}")


def _check_count(kind: str, count: int) -> None:
    """Raise ValueError if there is no key."""
    if count < 1:
        raise ValueError(f"{kind}: there must be at least 1 key, not {count!r}")
