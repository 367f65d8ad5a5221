"""How the requests of a run differ from each other: in weight, in length and by key."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, repeat
from random import Random
from typing import Any, NamedTuple, Protocol, cast

from carpool.simulate import specs
from carpool.simulate.lengths import Lengths, lengths_of


class Features(NamedTuple):
    """How requests differ.

    Attributes:
        weights: The weights of requests that bring none; None where these weigh 1.
        weights_known: Whether the core gets the weights, as sizes.
        lengths: The lengths of requests that bring none; None where these have none.
        lengths_known: Whether the core gets the lengths.
        keys: The keys of requests; None where all may share a batch.
    """

    weights: Weights | None = None
    weights_known: bool = False
    lengths: Lengths | None = None
    lengths_known: bool = True
    keys: Keys | None = None

    @classmethod
    def of(cls, settings: dict[str, Any]) -> Features:
        """Return the features among settings of a run, which may be given as specs.

        Raises:
            ValueError: A spec is wrong; the text says what to change.
            TypeError: A setting is of a wrong kind.
        """
        lengths = settings.get("lengths")
        return cls(
            weights=weights_of(settings.get("weights")),
            weights_known=settings.get("weights_known", False),
            lengths=None if lengths is None else lengths_of(lengths),
            lengths_known=settings.get("lengths_known", True),
            keys=keys_of(settings.get("keys")),
        )


ALIKE = Features()
"""Requests that do not differ."""

_KEY_EXAMPLE = "zipf:count=100,power=1"


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


_KEYS: dict[str, Callable[..., Keys]] = {"equal": Equal, "zipf": Zipf, "turn": InTurn}


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
        return specs.build(keys, _KEYS, "source of keys", _KEY_EXAMPLE)
    if hasattr(keys, "draw"):
        return cast(Keys, keys)
    raise TypeError(f"keys must be how many there are, a spec such as {_KEY_EXAMPLE!r} or Zipf(...), not {keys!r}")


def _check_count(kind: str, count: int) -> None:
    """Raise ValueError if there is no key."""
    if count < 1:
        raise ValueError(f"{kind}: there must be at least 1 key, not {count!r}")


_WEIGHT_EXAMPLE = "pareto:shape=1.7,cap=50"


class Weights(Protocol):
    """A distribution of weights."""

    @property
    def mean(self) -> float:
        """The mean weight."""

    def draw(self, dice: Random) -> float:
        """Draw the weight of one request."""


@dataclass(frozen=True)
class Pareto:
    """A distribution with a heavy tail and a mean of 1: P(weight > x) = (least / x) ^ shape.

    Args:
        shape: The smaller it is, the heavier is the tail; without a cap the variance would be
            infinite below 2.
        cap: The largest weight; larger ones count as this one.
    """

    shape: float = 1.7
    cap: float = 50.0

    def __post_init__(self) -> None:
        if not self.shape > 0 or not self.cap > 1:
            raise ValueError("pareto: shape must be positive, and cap above 1, which is the mean")

    @property
    def mean(self) -> float:
        return 1.0

    def draw(self, dice: Random) -> float:
        return min(self.cap, self._least * dice.paretovariate(self.shape))

    @cached_property
    def _least(self) -> float:
        """The least weight, chosen so that the mean is 1."""
        low, high = 1e-9, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean_with(middle) < 1 else (low, middle)
        return high

    def _mean_with(self, least: float) -> float:
        """Return the mean for a least weight: the integral of P(weight > x) from 0 to the cap."""
        k = self.shape - 1
        if not k:
            return least * (1 + math.log(self.cap / least))
        return least + (least - math.pow(least, self.shape) * math.pow(self.cap, -k)) / k


@dataclass(frozen=True)
class Sample:
    """A distribution in which each of the given weights is as likely as the others."""

    weights: Sequence[float]

    @property
    def mean(self) -> float:
        return sum(self.weights) / len(self.weights)

    def draw(self, dice: Random) -> float:
        return dice.choice(self.weights)


_WEIGHTS: dict[str, Callable[..., Weights]] = {"pareto": Pareto}


def weights_of(weights: object) -> Weights | None:
    """Return a distribution, which may be given as a spec or a list of weights; None for None.

    Raises:
        ValueError: A spec or a weight is wrong; the text says what to change.
        TypeError: `weights` is none of these.
    """
    if weights is None:
        return None
    if isinstance(weights, str):
        return specs.build(weights, _WEIGHTS, "distribution of weights", _WEIGHT_EXAMPLE)
    if isinstance(weights, list | tuple):
        if not weights or not all(weight > 0 for weight in weights):
            raise ValueError("weights must be positive numbers, at least one")
        return Sample(weights)
    if hasattr(weights, "draw") and hasattr(weights, "mean"):
        return cast(Weights, weights)
    raise TypeError(
        f"weights must be a spec such as {_WEIGHT_EXAMPLE!r}, Pareto(...) or a list of weights, not {weights!r}"
    )
