"""What a batch costs, in seconds of a worker's time: curves over its size, and what disturbs them.

A curve is called with the size of a batch, which is the sum of the weights where requests have any,
and need not be a whole number. `over` returns the function from which a run takes its seconds: the
curve, with noise or drift if there is any.
"""

from __future__ import annotations

import csv
import functools
import inspect
import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from carpool.simulate import specs

Seconds = Callable[[float, float, Random], float]
"""The seconds of a batch, from its size, the time of the run in seconds, and a random source."""

USUAL_COST = "affine:a=8ms,b=0.25ms"
"""The cost of a simulation that is not told any, and the example in error texts."""

_SAMPLES = 64  # for the mean of a function that draws its seconds at random


class Cost(ABC):
    """What batches cost: undisturbed, and in a run."""

    @abstractmethod
    def __call__(self, n: float) -> float:
        """Return the seconds of a batch of size `n`, without noise and drift."""

    def over(self, duration_s: float) -> Seconds:
        """Return the function that says what batches take in a run of `duration_s` seconds."""
        return lambda n, now, dice: self(n)


@dataclass(frozen=True)
class Affine(Cost):
    """A fixed part, and a part for each item: a + b·n."""

    a_s: float
    b_s: float

    def __call__(self, n: float) -> float:
        return self.a_s + self.b_s * n


@dataclass(frozen=True)
class Tile(Cost):
    """The cost on hardware that works in tiles: a + step·ceil(n / width)."""

    a_s: float
    step_s: float
    width: int

    def __call__(self, n: float) -> float:
        return self.a_s + self.step_s * math.ceil(n / self.width)


@dataclass(frozen=True)
class Sqrt(Cost):
    """A cost of c·√n: the larger the batch, the cheaper each item."""

    c_s: float

    def __call__(self, n: float) -> float:
        return self.c_s * math.sqrt(n)


@dataclass(frozen=True)
class Knee(Cost):
    """An affine cost with `extra_s` more for each item above a size, as when a cache is full."""

    a_s: float
    b_s: float
    knee: int
    extra_s: float

    def __call__(self, n: float) -> float:
        return self.a_s + self.b_s * n + self.extra_s * max(0.0, n - self.knee)


class Table(Cost):
    """Measured seconds by batch size, joined by straight lines, of which the last one goes on.

    Args:
        seconds: The seconds by batch size; a smaller batch than all of these takes as long as the
            smallest one.
        path: A CSV file to read them from instead, with two columns: size and seconds.
    """

    def __init__(self, seconds: Mapping[int, float] | None = None, path: str | None = None) -> None:
        if path is not None:
            seconds = _read_table(path)
        if not seconds or min(seconds) < 1 or min(seconds.values()) < 0:
            raise ValueError("a cost table needs sizes of at least 1 and their seconds: Table({1: 0.008, 64: 0.024})")
        self._sizes = sorted(seconds)
        self._seconds = [seconds[n] for n in self._sizes]

    def __call__(self, n: float) -> float:
        sizes, seconds = self._sizes, self._seconds
        if n <= sizes[0] or len(sizes) == 1:
            return seconds[0]
        i = min(max(1, bisect_left(sizes, n)), len(sizes) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (sizes[i] - sizes[i - 1])
        return max(0.0, seconds[i - 1] + slope * (n - sizes[i - 1]))

    def __repr__(self) -> str:
        return f"Table({dict(zip(self._sizes, self._seconds, strict=True))})"


@dataclass(frozen=True)
class Noisy(Cost):
    """Another cost times log-normal noise with a mean of 1, and now and then a stall.

    Args:
        cost: The undisturbed cost.
        sigma: The standard deviation of the logarithm of the noise.
        stall_share: The share of the batches that stall, from 0 to 1.
        stall_factor: How many times longer a batch that stalls takes, on top of the noise.
    """

    cost: Cost
    sigma: float
    stall_share: float = 0.0
    stall_factor: float = 1.0

    def __call__(self, n: float) -> float:
        return self.cost(n)

    def over(self, duration_s: float) -> Seconds:
        inner = self.cost.over(duration_s)
        shift = -self.sigma * self.sigma / 2

        def seconds(n: float, now: float, dice: Random) -> float:
            noise = math.exp(shift + self.sigma * dice.gauss(0.0, 1.0))
            stall = self.stall_factor if dice.random() < self.stall_share else 1.0
            return inner(n, now, dice) * noise * stall

        return seconds


@dataclass(frozen=True)
class Drifting(Cost):
    """Another cost times a factor that changes during the run.

    Args:
        cost: The undisturbed cost.
        factors: The factors, one after the other, each for an equal part of the run. After its end
            the last one stays.
    """

    cost: Cost
    factors: tuple[float, ...]

    def __call__(self, n: float) -> float:
        return self.cost(n)

    def over(self, duration_s: float) -> Seconds:
        inner, factors = self.cost.over(duration_s), self.factors
        last = len(factors) - 1
        part_s = duration_s / len(factors)
        return lambda n, now, dice: inner(n, now, dice) * factors[min(last, int(now / part_s))]


class GivenSeconds(Cost):
    """The cost that a function of the user says: `n -> seconds`, or `(n, now, rng) -> seconds`.

    The undisturbed cost of a function of the second kind is the mean of some tries at time 0.
    """

    def __init__(self, function: Callable[..., float]) -> None:
        self._function = function
        self._is_random = _required_arguments(function) >= 3
        self._mean = functools.lru_cache(maxsize=None)(self._mean_of_samples)

    def __call__(self, n: float) -> float:
        return self._mean(n) if self._is_random else self._function(n)

    def over(self, duration_s: float) -> Seconds:
        return self._function if self._is_random else super().over(duration_s)

    def __repr__(self) -> str:
        return getattr(self._function, "__name__", repr(self._function))

    def _mean_of_samples(self, n: float) -> float:
        """Return the mean seconds of a batch of size `n`, over some calls of the function."""
        dice = Random(0)
        return sum(self._function(n, 0.0, dice) for _ in range(_SAMPLES)) / _SAMPLES


CURVES: dict[str, Callable[..., Cost]] = {"affine": Affine, "tile": Tile, "sqrt": Sqrt, "knee": Knee, "table": Table}
DISTURBANCES: dict[str, Callable[..., Cost]] = {"noisy": Noisy, "drifting": Drifting}


def cost_of(cost: object) -> Cost:
    """Return a cost, which may be given as a spec, a table or a function.

    Raises:
        ValueError: A spec or a table is wrong; the text says what to change.
        TypeError: `cost` is none of these.
    """
    if isinstance(cost, Cost):
        return cost
    if isinstance(cost, str):
        return _from_spec(cost)
    if isinstance(cost, Mapping):
        return Table(cost)
    if callable(cost):
        return GivenSeconds(cost)
    raise TypeError(f"cost must be a spec such as {USUAL_COST!r}, a Cost or a function of the batch size, not {cost!r}")


def _from_spec(text: str) -> Cost:
    """Make a cost from a curve and its disturbances, joined by `+`. Raises ValueError."""
    parts = specs.split(text, "+", [*CURVES, *DISTURBANCES])
    is_table = parts[0].startswith("table:")
    cost = _table(parts[0]) if is_table else specs.build(parts[0], CURVES, "cost", USUAL_COST)
    for part in parts[1:]:
        cost = specs.build(part, DISTURBANCES, "disturbance of a cost", f"{USUAL_COST}+noisy:sigma=0.25", cost=cost)
    return cost


def _table(text: str) -> Table:
    """Make a table from `table:1=8ms,8=10ms,64=24ms` or `table:costs.csv`. Raises ValueError."""
    content = text.partition(":")[2].strip()
    if "=" not in content:
        return Table(path=content)
    try:
        entries = [entry.split("=") for entry in content.split(",")]
        return Table({int(n): specs.duration(seconds) for n, seconds in entries})
    except ValueError as error:
        raise ValueError(f"cost {text!r}: {error}; for example table:1=8ms,8=10ms,64=24ms") from None


def _read_table(path: str) -> dict[int, float]:
    """Read seconds by batch size from a CSV file. Raises ValueError."""
    try:
        with Path(path).open(newline="") as file:
            rows = [row for row in csv.reader(file) if row]
        if rows and not rows[0][0].strip().isdigit():
            rows = rows[1:]  # the first line holds the names of the columns
        return {int(row[0]): float(row[1]) for row in rows}
    except OSError as error:
        raise ValueError(f"cannot read the cost table {path}: {error.strerror}") from None
    except (ValueError, IndexError):
        raise ValueError(f"{path} is not a cost table: its rows should be size and seconds, such as 8,0.010") from None


def _required_arguments(function: Callable[..., Any]) -> int:
    """Return how many arguments a function must be given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return 1
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
