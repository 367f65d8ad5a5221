"""Arrival times that are given instead of drawn: those of a recorded trace, or any numbers."""

from __future__ import annotations

import csv
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf
from pathlib import Path
from random import Random
from typing import NamedTuple, Self

from carpool.simulate.arrival_processes import Open, Scene


@dataclass(frozen=True)
class Trace(Open):
    """The replay of a CSV file with a header line; its first request arrives at 0.

    Args:
        path: The file.
        column: The column of the times, which are seconds or of the form `2023-11-16 18:17:03.97`;
            the first column if not given.
        size: The columns that add up to the weight of a request, joined by `+`; all requests
            weigh the same if not given.
        mean_size: Scale the weights to this mean; they are as in the file if not given.
        speed: How many times faster than recorded the trace is replayed.
        rho: Choose the speed so that the mean rate is this share of capacity; `speed` is ignored.
        length: The columns that add up to the length of a request, joined by `+`; if not given,
            the trace has no lengths.
    """

    path: str
    column: str | None = None
    size: str | None = None
    mean_size: float | None = None
    speed: float = 1.0
    rho: float | None = None
    length: str | None = None

    def __post_init__(self) -> None:
        if not self.speed > 0 or (self.rho is not None and not self.rho > 0):
            raise ValueError("trace: speed and rho must be positive")
        _read_trace(self.path, self.column, self.size, self.length)

    def times(self, dice: Random, scene: Scene) -> Iterator[float]:
        speed = self._speed(scene)
        for when in self._recorded.times:
            if when / speed >= scene.duration_s:
                break
            yield when / speed

    def weights(self) -> Sequence[float] | None:
        """Return the weights of the requests, in step with `times`; None if all weigh the same."""
        weights = self._recorded.weights
        if weights is None or self.mean_size is None:
            return weights
        factor = self.mean_size * len(weights) / sum(weights)
        return [weight * factor for weight in weights]

    def lengths(self) -> Sequence[int] | None:
        """Return the lengths of the requests, in step with `times`; None if it has none."""
        return self._recorded.lengths

    def mean_rate(self, scene: Scene) -> float:
        return self._recorded.rate * self._speed(scene)

    def scaled(self, factor: float) -> Self:
        return replace(self, speed=self.speed * factor, rho=None if self.rho is None else self.rho * factor)

    def length_s(self, scene: Scene) -> float:
        """Return how long the replay takes: from the first request to just after the last one."""
        return math.nextafter(self._recorded.times[-1] / self._speed(scene), inf)

    @property
    def _recorded(self) -> _Recorded:
        return _read_trace(self.path, self.column, self.size, self.length)

    def _speed(self, scene: Scene) -> float:
        return self.speed if self.rho is None else self.rho * scene.capacity / self._recorded.rate


class GivenTimes(Open):
    """Arrival times that the user gives.

    Args:
        times: Seconds, in order; those from the end of a run on are not used by it.
    """

    def __init__(self, times: Iterable[float]) -> None:
        self._rest = iter(times)
        self._seen: list[float] = []  # what was drawn so far, so that a generator serves several runs

    def times(self, dice: Random, scene: Scene) -> Iterator[float]:
        for i in itertools.count():
            if i == len(self._seen) and not self._draw():
                break
            if self._seen[i] >= scene.duration_s:
                break
            yield self._seen[i]

    def mean_rate(self, scene: Scene) -> float:
        return sum(1 for _ in self.times(Random(0), scene)) / scene.duration_s

    def scaled(self, factor: float) -> Self:
        raise ValueError("given arrival times cannot be scaled to a load: use a process, such as poisson:rho=0.7")

    def _draw(self) -> bool:
        """Draw one more time, and report whether there was one."""
        last = self._seen[-1] if self._seen else 0.0
        when = next(self._rest, None)
        if when is not None and not when >= last:
            raise ValueError(f"arrival times must rise from 0 on: {when!r} comes after {last!r}")
        if when is not None:
            self._seen.append(float(when))
        return when is not None


class _Recorded(NamedTuple):
    """The content of a trace file.

    Attributes:
        times: The arrival times in order, in seconds; the first one is 0.
        weights: The weight of each request; None if they weigh the same.
        lengths: The length of each request; None if there are none.
    """

    times: Sequence[float]
    weights: Sequence[float] | None
    lengths: Sequence[int] | None

    @property
    def rate(self) -> float:
        """The mean requests per second at the recorded speed."""
        return len(self.times) / (self.times[-1] or 1.0)


@functools.lru_cache(maxsize=8)
def _read_trace(path: str, column: str | None, size: str | None, length: str | None) -> _Recorded:
    """Read a trace file; for the arguments see `Trace`. Raises ValueError."""
    sizes, lengths = (columns.split("+") if columns else [] for columns in (size, length))
    rows = read_columns(path, column, [*sizes, *lengths])
    if not rows:
        raise ValueError(f"the trace {path} has no requests")
    behind = 1 + len(sizes)  # the first of the columns that hold lengths
    entries = [(_seconds_of(row[0]), _sum(row[1:behind]), _sum(row[behind:])) for row in rows]
    entries.sort(key=lambda entry: entry[0])
    first = entries[0][0]
    return _Recorded(
        [when - first for when, _, _ in entries],
        [weight for _, weight, _ in entries] if size else None,
        [max(1, round(units)) for _, _, units in entries] if length else None,
    )


def _sum(texts: Sequence[str]) -> float:
    return sum(float(text) for text in texts)


def read_columns(path: str, column: str | None, others: Sequence[str]) -> list[list[str]]:
    """Return `column` (the first one, if None) and `others` of each row. Raises ValueError."""
    try:
        with Path(path).open(newline="") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or []
            wanted = [column or (names[0] if names else ""), *others]
            for name in wanted:
                if name not in names:
                    raise ValueError(f"{path} has no column {name!r}; it has {', '.join(names)}")
            return [[row[name] for name in wanted] for row in reader]
    except OSError as error:
        raise ValueError(f"cannot read the trace {path}: {error.strerror}") from None


def _seconds_of(text: str) -> float:
    """Return the seconds of a time stamp: a number, or a date and time. Raises ValueError."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ValueError(
            f"{text!r} in the trace is not a time: write seconds, or a date and time such as 2023-11-16 18:17:03.97"
        ) from None
