"""What a batch costs, in seconds of one worker's time: curves over its size, and what disturbs them.

A curve is called with the batch's size, which is a sum of weights where requests have some, and need not be whole.
`over` gives what a run takes its seconds from: the curve, with noise or drift if there is any.
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
"""Seconds of a batch of a size, at a time of the run, with a source of chance."""

EXAMPLE = "affine:a=8ms,b=0.25ms"
_SAMPLES = 64  # of a cost that is all chance, for its mean


class Cost(ABC):
    """A cost: what it is on the mean, and what it is in a run."""

    @abstractmethod
    def __call__(self, n: float) -> float:
        """Seconds of a batch of size `n`, undisturbed."""

    def over(self, duration_s: float) -> Seconds:
        """What batches take in a run of so many seconds."""
        return lambda n, now, dice: self(n)


@dataclass(frozen=True)
class Affine(Cost):
    """A fixed part and one per item: a + b·n."""

    a_s: float
    b_s: float

    def __call__(self, n: float) -> float:
        return self.a_s + self.b_s * n


@dataclass(frozen=True)
class Tile(Cost):
    """Hardware that works in tiles: a + step·ceil(n / width)."""

    a_s: float
    step_s: float
    width: int

    def __call__(self, n: float) -> float:
        return self.a_s + self.step_s * math.ceil(n / self.width)


@dataclass(frozen=True)
class Sqrt(Cost):
    """c·√n: the more, the cheaper each."""

    c_s: float

    def __call__(self, n: float) -> float:
        return self.c_s * math.sqrt(n)


@dataclass(frozen=True)
class Knee(Cost):
    """Affine up to a size, and `extra_s` more per item beyond it, as where a cache or a memory is full."""

    a_s: float
    b_s: float
    knee: int
    extra_s: float

    def __call__(self, n: float) -> float:
        return self.a_s + self.b_s * n + self.extra_s * max(0.0, n - self.knee)


class Table(Cost):
    """Measured seconds by batch size: straight lines between the sizes, and on from the last two.

    Args:
        seconds: by size; below the smallest size its own seconds count.
        path: of a CSV file to read them from instead, with two columns: size and seconds.
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
    """Log-normal noise of mean 1 over another cost, and now and then a stall.

    Args:
        cost: the undisturbed one.
        sigma: of the logarithm.
        stall_share: of the batches, which take `stall_factor` times as long on top of the noise.
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
    """Another cost times one factor after the other, each for an equal part of the run (the last one goes on)."""

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
    """A function of the user's: `n -> seconds`, or `(n, now, rng) -> seconds`.

    Of the second kind the undisturbed cost is the mean of some tries at time 0.
    """

    def __init__(self, function: Callable[..., float]) -> None:
        self._function = function
        self._is_random = _required(function) >= 3
        self._mean = functools.lru_cache(maxsize=None)(self._tried)

    def __call__(self, n: float) -> float:
        return self._mean(n) if self._is_random else self._function(n)

    def over(self, duration_s: float) -> Seconds:
        return self._function if self._is_random else super().over(duration_s)

    def __repr__(self) -> str:
        return getattr(self._function, "__name__", repr(self._function))

    def _tried(self, n: float) -> float:
        dice = Random(0)
        return sum(self._function(n, 0.0, dice) for _ in range(_SAMPLES)) / _SAMPLES


CURVES: dict[str, Callable[..., Cost]] = {"affine": Affine, "tile": Tile, "sqrt": Sqrt, "knee": Knee, "table": Table}
DISTURBANCES: dict[str, Callable[..., Cost]] = {"noisy": Noisy, "drifting": Drifting}


def cost_of(cost: object) -> Cost:
    """A cost from itself, a spec, a table or a function. Raises ValueError or TypeError."""
    if isinstance(cost, Cost):
        return cost
    if isinstance(cost, str):
        return _from_spec(cost)
    if isinstance(cost, Mapping):
        return Table(cost)
    if callable(cost):
        return GivenSeconds(cost)
    raise TypeError(f"cost must be a spec such as {EXAMPLE!r}, a Cost or a function of the batch size, not {cost!r}")


def _from_spec(text: str) -> Cost:
    parts = specs.split(text, "+", [*CURVES, *DISTURBANCES])
    is_table = parts[0].startswith("table:")
    cost = _table(parts[0]) if is_table else specs.build(parts[0], CURVES, "cost", EXAMPLE)
    for part in parts[1:]:
        cost = specs.build(part, DISTURBANCES, "disturbance of a cost", f"{EXAMPLE}+noisy:sigma=0.25", cost=cost)
    return cost


def _table(text: str) -> Table:
    """`table:1=8ms,8=10ms,64=24ms`, or `table:costs.csv`."""
    content = text.partition(":")[2].strip()
    if "=" not in content:
        return Table(path=content)
    try:
        entries = [entry.split("=") for entry in content.split(",")]
        return Table({int(n): specs.duration(seconds) for n, seconds in entries})
    except ValueError as error:
        raise ValueError(f"cost {text!r}: {error}; for example table:1=8ms,8=10ms,64=24ms") from None


def _read_table(path: str) -> dict[int, float]:
    try:
        with Path(path).open(newline="") as file:
            rows = [row for row in csv.reader(file) if row]
        if rows and not rows[0][0].strip().isdigit():
            rows = rows[1:]  # names of the columns
        return {int(row[0]): float(row[1]) for row in rows}
    except OSError as error:
        raise ValueError(f"cannot read the cost table {path}: {error.strerror}") from None
    except (ValueError, IndexError):
        raise ValueError(f"{path} is no cost table: its rows should be sizes and seconds, such as 8,0.010") from None


def _required(function: Callable[..., Any]) -> int:
    """How many arguments a function must be given."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions do not tell
        return 1
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
