"""When requests come: by open processes, or from clients that wait for their answers.

The arrivals of an open process come whatever becomes of the earlier ones.

A process gives the arrival times of one run, from 0 to before its end. Its rate is given either in
requests per second (`rate`) or as a share of what the simulated workers can serve (`rho`), which is
known only when the run starts (`servers.capacity`).
"""

from __future__ import annotations

import csv
import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Self

from carpool.simulate import specs


class Scene(NamedTuple):
    """The facts of a run that a process needs.

    Attributes:
        duration_s: How long requests arrive.
        capacity: How many requests per second the simulated workers can serve.
    """

    duration_s: float
    capacity: float


class Open(ABC):
    """A process that sends requests whatever becomes of the earlier ones."""

    @abstractmethod
    def times(self, dice: Random, scene: Scene) -> Iterator[float]:
        """Yield the arrival times in order, in seconds, from 0 to before the end of the run."""

    @abstractmethod
    def mean_rate(self, scene: Scene) -> float:
        """Return the requests per second, averaged over the run."""

    @abstractmethod
    def scaled(self, factor: float) -> Self:
        """Return the same process with `factor` times as many requests."""


@dataclass(frozen=True)
class _Rated(Open):
    """Base of the processes with one rate, which their fields `rate` and `rho` give.

    The fields are declared by the subclasses, because their order is the order of the arguments.
    """

    def __post_init__(self) -> None:
        rate, rho = self._given
        _check_rate(type(self).__name__.lower(), rate, rho)

    def mean_rate(self, scene: Scene) -> float:
        return self._rate(scene)

    def scaled(self, factor: float) -> Self:
        rate, rho = self._given
        scaled: dict[str, Any] = {"rate": _times(rate, factor), "rho": _times(rho, factor)}
        return replace(self, **scaled)

    def _rate(self, scene: Scene) -> float:
        return _per_second(*self._given, scene)

    @property
    def _given(self) -> tuple[float | None, float | None]:
        fields = vars(self)
        return fields["rate"], fields["rho"]


@dataclass(frozen=True)
class Poisson(_Rated):
    """Independent requests, with exponential gaps between them.

    Args:
        rate: Requests per second; give either this or `rho`.
        rho: The rate as a share of capacity.
    """

    rate: float | None = None
    rho: float | None = None

    def times(self, dice: Random, scene: Scene) -> Iterator[float]:
        return _poisson(dice, self._rate(scene), 0.0, scene.duration_s)


@dataclass(frozen=True)
class Gamma(_Rated):
    """Requests with independent gaps, more or less regular than those of a Poisson process.

    Args:
        rate: Requests per second; give either this or `rho`.
        cv: The standard deviation of the gaps as a multiple of their mean: 1 is a Poisson process,
            more is burstier.
        rho: The rate as a share of capacity.
    """

    rate: float | None = None
    cv: float = 1.0
    rho: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.cv > 0:
            raise ValueError(f"gamma: cv must be positive, not {self.cv!r}")

    def times(self, dice: Random, scene: Scene) -> Iterator[float]:
        rate = self._rate(scene)
        if not rate:
            return
        shape = 1 / self.cv**2
        scale = 1 / (rate * shape)
        when = dice.gammavariate(shape, scale)
        while when < scene.duration_s:
            yield when
            when += dice.gammavariate(shape, scale)


@dataclass(frozen=True)
class MMPP(Open):
    """A Poisson process with a rate that changes at random (Markov-modulated).

    Its states follow each other in turn, from the first one on, and each lasts an exponential time.

    Args:
        rates: Requests per second in each state; give either these or `rho`.
        mean_dwell_s: How long each state lasts on average, in seconds.
        rho: The rates as shares of capacity.
    """

    rates: tuple[float, ...] | None = None
    mean_dwell_s: tuple[float, ...] = ()
    rho: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _check_rate("mmpp", self.rates, self.rho)
        states = self.rates or self.rho or ()
        if len(states) < 2 or len(self.mean_dwell_s) != len(states) or not all(s > 0 for s in self.mean_dwell_s):
            raise ValueError(
                "mmpp needs two or more rates and as many positive dwell times: mmpp:rates=200/2000,mean_dwell=1s/500ms"
            )

    def times(self, dice: Random, scene: Scene) -> Iterator[float]:
        begin, state = 0.0, 0
        rates = self._rates(scene)
        while begin < scene.duration_s:
            end = begin + dice.expovariate(1 / self.mean_dwell_s[state])
            yield from _poisson(dice, rates[state], begin, min(end, scene.duration_s))
            begin, state = end, (state + 1) % len(rates)

    def mean_rate(self, scene: Scene) -> float:
        weighted = sum(rate * dwell_s for rate, dwell_s in zip(self._rates(scene), self.mean_dwell_s, strict=True))
        return weighted / sum(self.mean_dwell_s)

    def scaled(self, factor: float) -> Self:
        rates = None if self.rates is None else tuple(rate * factor for rate in self.rates)
        return replace(self, rates=rates, rho=None if self.rho is None else tuple(r * factor for r in self.rho))

    def _rates(self, scene: Scene) -> tuple[float, ...]:
        return self.rates if self.rates is not None else tuple(share * scene.capacity for share in self.rho or ())


@dataclass(frozen=True)
class Sine(_Rated):
    """A day: the rate follows mean + swing · sin(2π (phase + t / period)), and never falls below 0.

    Args:
        rate: The mean in requests per second; give either this or `rho`.
        swing: How far the rate goes up and down, in the unit of the mean.
        period_s: How long a day is, in seconds; the whole run if not given.
        rho: The mean as a share of capacity.
        phase: At which part of the day the run begins; 0.75 for the hour with the fewest requests.
    """

    rate: float | None = None
    swing: float = 0.0
    period_s: float | None = None
    rho: float | None = None
    phase: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.swing < 0 or (self.period_s is not None and self.period_s <= 0):
            raise ValueError("sine: swing must be at least 0 and period positive")

    def times(self, dice: Random, scene: Scene) -> Iterator[float]:
        mean, swing, turn = self._curve(scene)
        begin = 2 * math.pi * self.phase
        top = mean + swing
        for when in _poisson(dice, top, 0.0, scene.duration_s):
            if dice.random() * top < mean + swing * math.sin(begin + turn * when):
                yield when

    def mean_rate(self, scene: Scene) -> float:
        mean, swing, turn = self._curve(scene)
        begin = 2 * math.pi * self.phase
        steps = 10_000
        step_s = scene.duration_s / steps
        return sum(max(0.0, mean + swing * math.sin(begin + turn * (i + 0.5) * step_s)) for i in range(steps)) / steps

    def scaled(self, factor: float) -> Self:
        return replace(super().scaled(factor), swing=self.swing * factor)

    def _curve(self, scene: Scene) -> tuple[float, float, float]:
        """Return mean and swing in requests per second, and the angular frequency in 1/s."""
        unit = 1.0 if self.rate is not None else scene.capacity
        return self._rate(scene), self.swing * unit, 2 * math.pi / (self.period_s or scene.duration_s)


@dataclass(frozen=True)
class Flash(_Rated):
    """A flash crowd: a Poisson process with one rate, and with another for a part of the run.

    Args:
        rate: Requests per second before and after the crowd; give either this or `rho`.
        peak_rate: Requests per second while it is there; give either this or `peak_rho`.
        between: When the crowd comes and when it leaves, as fractions of the run.
        rho: `rate` as a share of capacity.
        peak_rho: `peak_rate` as a share of capacity.
    """

    rate: float | None = None
    peak_rate: float | None = None
    between: tuple[float, float] = (0.4, 0.55)
    rho: float | None = None
    peak_rho: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_rate("flash's peak", self.peak_rate, self.peak_rho)
        if len(self.between) != 2 or not 0 <= self.between[0] <= self.between[1] <= 1:
            raise ValueError("flash: between must be two parts of the run, such as 0.4/0.55")

    def times(self, dice: Random, scene: Scene) -> Iterator[float]:
        rate, peak = self._rate(scene), self._peak(scene)
        begin, end = (part * scene.duration_s for part in self.between)
        yield from _poisson(dice, rate, 0.0, begin)
        yield from _poisson(dice, peak, begin, end)
        yield from _poisson(dice, rate, end, scene.duration_s)

    def mean_rate(self, scene: Scene) -> float:
        part = self.between[1] - self.between[0]
        return self._rate(scene) * (1 - part) + self._peak(scene) * part

    def scaled(self, factor: float) -> Self:
        peak_rate, peak_rho = _times(self.peak_rate, factor), _times(self.peak_rho, factor)
        return replace(super().scaled(factor), peak_rate=peak_rate, peak_rho=peak_rho)

    def _peak(self, scene: Scene) -> float:
        return _per_second(self.peak_rate, self.peak_rho, scene)


@dataclass(frozen=True)
class Bursts(_Rated):
    """Bursts at independent moments, each of several requests that arrive at the same instant.

    Args:
        rate: Requests (not bursts) per second; give either this or `rho`.
        mean_burst: The mean number of requests in a burst, which is distributed geometrically.
        rho: The rate as a share of capacity.
    """

    rate: float | None = None
    mean_burst: float = 8.0
    rho: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.mean_burst >= 1:
            raise ValueError(f"bursts: mean_burst must be at least 1, not {self.mean_burst!r}")

    def times(self, dice: Random, scene: Scene) -> Iterator[float]:
        ends = 1 / self.mean_burst
        for when in _poisson(dice, self._rate(scene) * ends, 0.0, scene.duration_s):
            yield when
            while dice.random() >= ends:
                yield when


def _check_rate(kind: str, rate: object, rho: object) -> None:
    """Raise ValueError unless exactly one of the two is given, as a rate or a tuple of rates."""
    if (rate is None) is (rho is None):
        raise ValueError(f"{kind} needs either rate (requests per second) or rho (share of capacity)")
    given = rho if rate is None else rate
    for value in given if isinstance(given, tuple) else (given,):
        if not isinstance(value, int | float) or not 0 <= value < inf:
            raise ValueError(f"{kind}: a rate must be a number of at least 0, not {value!r}")


def _per_second(rate: float | None, rho: float | None, scene: Scene) -> float:
    """Return a rate in requests per second, whichever way it was given."""
    return rate if rate is not None else (rho or 0.0) * scene.capacity


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _poisson(dice: Random, rate: float, begin: float, end: float) -> Iterator[float]:
    """Yield the times of a Poisson process from `begin` to before `end`.

    The process has no memory, so pieces with different rates can be put together.
    """
    if rate <= 0:
        return
    draw = dice.expovariate
    when = begin + draw(rate)
    while when < end:
        yield when
        when += draw(rate)


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
        return len(self.times) / (self.times[-1] or 1.0)


@functools.lru_cache(maxsize=8)
def _read_trace(path: str, column: str | None, size: str | None, length: str | None) -> _Recorded:
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


USUAL_ARRIVALS = "poisson:rate=800"
"""The requests of a simulation without `arrivals`, and the example in error texts."""

START_WITHIN_S = 0.02
"""The clients of a closed loop send their first requests at random within this time."""

THINKS = ("uniform", "exponential", "fixed")


@dataclass(frozen=True)
class Closed:
    """A closed loop: clients that wait for their answer, think, and ask again.

    Args:
        clients: How many there are; their first requests come at random within 20 ms.
        think_s: Mean time from an answer to the next request: mostly the way over the network.
        think: How this time is distributed: `uniform` (from a half to one and a half of the mean),
            `exponential` or `fixed`.
        backoff_s: Mean time from a refusal to the next try, distributed in the same way.
    """

    clients: int = 16
    think_s: float = 0.001
    think: str = "uniform"
    backoff_s: float = 0.02

    def __post_init__(self) -> None:
        if not isinstance(self.clients, int) or self.clients < 1:
            raise ValueError(f"closed: clients must be a whole number of at least 1, not {self.clients!r}")
        if self.think not in THINKS:
            raise ValueError(f"closed: think must be one of {', '.join(THINKS)}, not {self.think!r}")
        if self.think_s < 0 or not self.backoff_s > 0:
            raise ValueError("closed: think must be at least 0 and backoff positive")

    def pause_s(self, dice: Random, mean_s: float) -> float:
        """Draw the time that a client thinks or backs off, in seconds."""
        if self.think == "uniform":
            return mean_s * (0.5 + dice.random())
        if self.think == "exponential" and mean_s:
            return dice.expovariate(1 / mean_s)
        return mean_s

    def scaled(self, factor: float) -> Closed:
        """Return the same loop with `factor` times as many clients, but at least one."""
        return replace(self, clients=max(1, round(self.clients * factor)))


Arrivals = Open | Closed

KINDS: dict[str, Callable[..., Arrivals]] = {
    "poisson": Poisson,
    "gamma": Gamma,
    "mmpp": MMPP,
    "sine": Sine,
    "flash": Flash,
    "bursts": Bursts,
    "closed": Closed,
    "trace": Trace,
}
"""The names that a spec can have."""


def arrivals_of(arrivals: Any) -> list[Arrivals]:
    """Return the processes of one run, from a spec, a process, several of both, or times.

    Raises:
        ValueError: A spec is wrong; the text says what to change.
        TypeError: `arrivals` is none of these.
    """
    if isinstance(arrivals, Open | Closed):
        return [arrivals]
    if isinstance(arrivals, str):
        return [
            specs.build(part, KINDS, "arrival process", USUAL_ARRIVALS) for part in specs.split(arrivals, "+", KINDS)
        ]
    if isinstance(arrivals, list | tuple) and any(isinstance(part, str | Open | Closed) for part in arrivals):
        return [process for part in arrivals for process in arrivals_of(part)]
    if isinstance(arrivals, Iterable):
        return [GivenTimes(arrivals)]
    raise TypeError(
        f"arrivals must be a spec such as {USUAL_ARRIVALS!r}, a process, several, or times, not {arrivals!r}"
    )
