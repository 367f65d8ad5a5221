"""How much requests weigh, where they do not weigh the same."""

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
        """The weight of one request."""


@dataclass(frozen=True)
class Pareto:
    """A heavy tail: P(weight > x) = (least / x) ^ shape, cut at `cap`, with the least weight such that the mean is 1.

    Args:
        shape: the smaller, the heavier; without a cap the variance is infinite below 2.
        cap: the largest weight.
    """

    shape: float = 1.7
    cap: float = 50.0

    def __post_init__(self) -> None:
        if not self.shape > 0 or not self.cap > 1:
            raise ValueError("pareto: shape must be positive and cap above 1, the mean")

    @property
    def mean(self) -> float:
        return 1.0

    def draw(self, dice: Random) -> float:
        return min(self.cap, self._least * dice.paretovariate(self.shape))

    @cached_property
    def _least(self) -> float:
        low, high = 1e-9, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean_with(middle) < 1 else (low, middle)
        return high

    def _mean_with(self, least: float) -> float:
        """The integral of P(weight > x) from 0 to the cap."""
        k = self.shape - 1
        if not k:
            return least * (1 + math.log(self.cap / least))
        return least + (least - math.pow(least, self.shape) * math.pow(self.cap, -k)) / k


@dataclass(frozen=True)
class Sample:
    """Weights drawn from those given, each as likely as the others."""

    weights: Sequence[float]

    @property
    def mean(self) -> float:
        return sum(self.weights) / len(self.weights)

    def draw(self, dice: Random) -> float:
        return dice.choice(self.weights)


KINDS: dict[str, Callable[..., Weights]] = {"pareto": Pareto}


def weights_of(weights: object) -> Weights | None:
    """A distribution from itself, a spec or a list of weights; None for None. Raises ValueError or TypeError."""
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
