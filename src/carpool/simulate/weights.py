"""How much requests weigh, where they do not all weigh the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Protocol, cast

from carpool.simulate import specs

EXAMPLE = "pareto:shape=1.7,cap=50"


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


KINDS: dict[str, Callable[..., Weights]] = {"pareto": Pareto}


def weights_of(weights: object) -> Weights | None:
    """Return a distribution, which may be given as a spec or a list of weights; None for None.

    Raises:
        ValueError: A spec or a weight is wrong; the text says what to change.
        TypeError: `weights` is none of these.
    """
    if weights is None:
        return None
    if isinstance(weights, str):
        return specs.build(weights, KINDS, "distribution of weights", EXAMPLE)
    if isinstance(weights, list | tuple):
        if not weights or not all(weight > 0 for weight in weights):
            raise ValueError("weights must be positive numbers, at least one")
        return Sample(weights)
    if hasattr(weights, "draw") and hasattr(weights, "mean"):
        return cast(Weights, weights)
    raise TypeError(f"weights must be a spec such as {EXAMPLE!r}, Pareto(...) or a list of weights, not {weights!r}")
