"""When requests come: open processes, which do not care how they fare, and clients in a closed loop, which do.

An open process gives its times in [0, duration). Its rate is in requests per second, or as `rho`, a share of what the
simulated workers can serve (`servers.capacity`), which is known when the run starts.
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
from typing import Any, NamedTuple

from carpool.simulate import specs

EXAMPLE = "poisson:rate=800"
START_WITHIN_S = 0.02  # clients of a closed loop send their first requests at random within so many seconds

THINKS = ("uniform", "exponential", "fixed")


class Scene(NamedTuple):
    """What a process must know of the run: how long it is, and how many requests per second can be served."""

    duration_s: float
    capacity: float


class Open(ABC):
    """Requests that come whatever happens to the earlier ones."""

    @abstractmethod
    def times(self, dice: Random, scene: Scene) -> Iterator[float]:
        """When they come, in order, from 0 to before the end."""

    @abstractmethod
    def mean_rate(self, scene: Scene) -> float:
        """Requests per second on the mean of the run."""

    @abstractmethod
    def scaled(self, factor: float) -> Open:
        """The same with so many times the requests."""


def _check_rate(kind: str, rate: object, rho: object) -> None:
    """One of the two is given, and makes sense."""
    if (rate is None) is (rho is None):
        raise ValueError(f"{kind} needs either rate (requests per second) or rho (share of capacity)")
    given = rho if rate is None else rate
    for value in given if isinstance(given, tuple) else (given,):
        if not isinstance(value, int | float) or not 0 <= value < inf:
            raise ValueError(f"{kind}: a rate must be a number of at least 0, not {value!r}")


def _rate(process: Poisson | Gamma | Sine | Flash | Bursts, scene: Scene) -> float:
    return process.rate if process.rate is not None else (process.rho or 0.0) * scene.capacity


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


@dataclass(frozen=True)
class Poisson(Open):
    """Independent requests: exponential gaps."""

    rate: float | None = None
    rho: float | None = None

    def __post_init__(self) -> None:
        _check_rate("poisson", self.rate, self.rho)

    def times(self, dice: Random, scene: Scene) -> Iterator[float]:
        return _poisson(dice, _rate(self, scene), 0.0, scene.duration_s)

    def mean_rate(self, scene: Scene) -> float:
        return _rate(self, scene)

    def scaled(self, factor: float) -> Poisson:
        return replace(self, rate=_times(self.rate, factor), rho=_times(self.rho, factor))


@dataclass(frozen=True)
class Gamma(Open):
    """Independent gaps whose standard deviation is `cv` times their mean: 1 is Poisson, more is burstier."""

    rate: float | None = None
    cv: float = 1.0
    rho: float | None = None

    def __post_init__(self) -> None:
        _check_rate("gamma", self.rate, self.rho)
        if not self.cv > 0:
            raise ValueError(f"gamma: cv must be positive, not {self.cv!r}")

    def times(self, dice: Random, scene: Scene) -> Iterator[float]:
        rate = _rate(self, scene)
        if not rate:
            return
        shape = 1 / self.cv**2
        scale = 1 / (rate * shape)
        when = dice.gammavariate(shape, scale)
        while when < scene.duration_s:
            yield when
            when += dice.gammavariate(shape, scale)

    def mean_rate(self, scene: Scene) -> float:
        return _rate(self, scene)

    def scaled(self, factor: float) -> Gamma:
        return replace(self, rate=_times(self.rate, factor), rho=_times(self.rho, factor))


@dataclass(frozen=True)
class MMPP(Open):
    """Poisson whose rate changes at random: states in turn, each for an exponential time; the first state begins.

    Args:
        rates: requests per second in each state.
        mean_dwell_s: how long each state lasts on the mean.
        rho: the rates as shares of capacity.
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

    def scaled(self, factor: float) -> MMPP:
        rates = None if self.rates is None else tuple(rate * factor for rate in self.rates)
        return replace(self, rates=rates, rho=None if self.rho is None else tuple(r * factor for r in self.rho))

    def _rates(self, scene: Scene) -> tuple[float, ...]:
        return self.rates if self.rates is not None else tuple(share * scene.capacity for share in self.rho or ())


@dataclass(frozen=True)
class Sine(Open):
    """A day: rate + swing · sin(2π t / period), not below 0.

    Args:
        rate: requests per second on the mean, or
        rho: the same as a share of capacity.
        swing: how far it goes up and down, in the unit of the mean.
        period_s: how long a day is; the whole run if not given.
    """

    rate: float | None = None
    swing: float = 0.0
    period_s: float | None = None
    rho: float | None = None

    def __post_init__(self) -> None:
        _check_rate("sine", self.rate, self.rho)
        if self.swing < 0 or (self.period_s is not None and self.period_s <= 0):
            raise ValueError("sine: swing must be at least 0 and period positive")

    def times(self, dice: Random, scene: Scene) -> Iterator[float]:
        mean, swing, turn = self._shape(scene)
        top = mean + swing
        for when in _poisson(dice, top, 0.0, scene.duration_s):
            if dice.random() * top < mean + swing * math.sin(turn * when):
                yield when

    def mean_rate(self, scene: Scene) -> float:
        mean, swing, turn = self._shape(scene)
        steps = 10_000
        step_s = scene.duration_s / steps
        return sum(max(0.0, mean + swing * math.sin(turn * (i + 0.5) * step_s)) for i in range(steps)) / steps

    def scaled(self, factor: float) -> Sine:
        rate, rho = _times(self.rate, factor), _times(self.rho, factor)
        return replace(self, rate=rate, rho=rho, swing=self.swing * factor)

    def _shape(self, scene: Scene) -> tuple[float, float, float]:
        unit = 1.0 if self.rate is not None else scene.capacity
        return _rate(self, scene), self.swing * unit, 2 * math.pi / (self.period_s or scene.duration_s)


@dataclass(frozen=True)
class Flash(Open):
    """A flash crowd: Poisson at one rate, and at another one between two parts of the run.

    Args:
        rate, peak_rate: requests per second before and after, and within, or
        rho, peak_rho: the same as shares of capacity.
        between: where the crowd comes and goes, as parts of the run.
    """

    rate: float | None = None
    peak_rate: float | None = None
    between: tuple[float, float] = (0.4, 0.55)
    rho: float | None = None
    peak_rho: float | None = None

    def __post_init__(self) -> None:
        _check_rate("flash", self.rate, self.rho)
        _check_rate("flash's peak", self.peak_rate, self.peak_rho)
        if len(self.between) != 2 or not 0 <= self.between[0] <= self.between[1] <= 1:
            raise ValueError("flash: between must be two parts of the run, such as 0.4/0.55")

    def times(self, dice: Random, scene: Scene) -> Iterator[float]:
        rate, peak = _rate(self, scene), self._peak(scene)
        begin, end = (part * scene.duration_s for part in self.between)
        yield from _poisson(dice, rate, 0.0, begin)
        yield from _poisson(dice, peak, begin, end)
        yield from _poisson(dice, rate, end, scene.duration_s)

    def mean_rate(self, scene: Scene) -> float:
        part = self.between[1] - self.between[0]
        return _rate(self, scene) * (1 - part) + self._peak(scene) * part

    def scaled(self, factor: float) -> Flash:
        rate, rho = _times(self.rate, factor), _times(self.rho, factor)
        peak_rate, peak_rho = _times(self.peak_rate, factor), _times(self.peak_rho, factor)
        return replace(self, rate=rate, rho=rho, peak_rate=peak_rate, peak_rho=peak_rho)

    def _peak(self, scene: Scene) -> float:
        return self.peak_rate if self.peak_rate is not None else (self.peak_rho or 0.0) * scene.capacity


@dataclass(frozen=True)
class Bursts(Open):
    """Bursts at independent moments; how many come at the same instant is geometric with mean `mean_burst`.

    Args:
        rate: requests (not bursts) per second, or
        rho: the same as a share of capacity.
    """

    rate: float | None = None
    mean_burst: float = 8.0
    rho: float | None = None

    def __post_init__(self) -> None:
        _check_rate("bursts", self.rate, self.rho)
        if not self.mean_burst >= 1:
            raise ValueError(f"bursts: mean_burst must be at least 1, not {self.mean_burst!r}")

    def times(self, dice: Random, scene: Scene) -> Iterator[float]:
        ends = 1 / self.mean_burst
        for when in _poisson(dice, _rate(self, scene) * ends, 0.0, scene.duration_s):
            yield when
            while dice.random() >= ends:
                yield when

    def mean_rate(self, scene: Scene) -> float:
        return _rate(self, scene)

    def scaled(self, factor: float) -> Bursts:
        return replace(self, rate=_times(self.rate, factor), rho=_times(self.rho, factor))


@dataclass(frozen=True)
class Trace(Open):
    """Replay of a CSV file with a header line. The first request comes at 0.

    Args:
        path: the file.
        column: of the times, which are seconds or such as `2023-11-16 18:17:03.97`; the first column if not given.
        size: columns whose sum is a request's weight, joined by `+`; requests weigh the same if not given.
        mean_size: scales the weights to this mean; they are as in the file if not given.
        speed: how many times as fast as it was, or
        rho: such a speed that the mean rate is this share of capacity.
    """

    path: str
    column: str | None = None
    size: str | None = None
    mean_size: float | None = None
    speed: float = 1.0
    rho: float | None = None

    def __post_init__(self) -> None:
        if not self.speed > 0 or (self.rho is not None and not self.rho > 0):
            raise ValueError("trace: speed and rho must be positive")
        _read_trace(self.path, self.column, self.size)

    def times(self, dice: Random, scene: Scene) -> Iterator[float]:
        speed = self._speed(scene)
        for when in self._content.times:
            if when / speed >= scene.duration_s:
                break
            yield when / speed

    def weights(self) -> Sequence[float] | None:
        """Of the requests, in step with `times`; None if all weigh the same."""
        weights = self._content.weights
        if weights is None or self.mean_size is None:
            return weights
        factor = self.mean_size * len(weights) / sum(weights)
        return [weight * factor for weight in weights]

    def mean_rate(self, scene: Scene) -> float:
        return self._content.rate * self._speed(scene)

    def scaled(self, factor: float) -> Trace:
        return replace(self, speed=self.speed * factor, rho=_times(self.rho, factor))

    def length_s(self, scene: Scene) -> float:
        """How long the replay takes, from the first request to just after the last one."""
        return math.nextafter(self._content.times[-1] / self._speed(scene), inf)

    @property
    def _content(self) -> _Content:
        return _read_trace(self.path, self.column, self.size)

    def _speed(self, scene: Scene) -> float:
        return self.speed if self.rho is None else self.rho * scene.capacity / self._content.rate


class GivenTimes(Open):
    """Times of the user's: seconds, in order; those from the end of the run on are not looked at."""

    def __init__(self, times: Iterable[float]) -> None:
        self._rest = iter(times)
        self._seen: list[float] = []  # what was drawn, so that a generator serves several runs

    def times(self, dice: Random, scene: Scene) -> Iterator[float]:
        for i in itertools.count():
            if i == len(self._seen) and not self._draw():
                break
            if self._seen[i] >= scene.duration_s:
                break
            yield self._seen[i]

    def mean_rate(self, scene: Scene) -> float:
        return sum(1 for _ in self.times(Random(0), scene)) / scene.duration_s

    def scaled(self, factor: float) -> GivenTimes:
        raise ValueError("given arrival times cannot be scaled to a load: take a process, such as poisson:rho=0.7")

    def _draw(self) -> bool:
        """Have one more time; whether there was one."""
        last = self._seen[-1] if self._seen else 0.0
        when = next(self._rest, None)
        if when is not None and not when >= last:
            raise ValueError(f"arrival times must rise from 0 on: {when!r} comes after {last!r}")
        if when is not None:
            self._seen.append(float(when))
        return when is not None


@dataclass(frozen=True)
class Closed:
    """Clients that wait for their answer, think, and ask again.

    Args:
        clients: how many; their first requests come at random within 20 ms.
        think_s: mean time from an answer to the next request; the way over the network, mostly.
        think: how it is distributed; uniform means from a half to one and a half of the mean.
        backoff_s: mean time from a refusal to the next try, distributed in the same way.
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
        """A think time, or a time to back off."""
        if self.think == "uniform":
            return mean_s * (0.5 + dice.random())
        if self.think == "exponential" and mean_s:
            return dice.expovariate(1 / mean_s)
        return mean_s

    def scaled(self, factor: float) -> Closed:
        """The same with so many times the clients, at least one."""
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


def arrivals_of(arrivals: Any) -> list[Arrivals]:
    """The processes of one run: from a spec, a process, several of both, or times. Raises ValueError or TypeError."""
    if isinstance(arrivals, Open | Closed):
        return [arrivals]
    if isinstance(arrivals, str):
        return [specs.build(part, KINDS, "arrival process", EXAMPLE) for part in specs.split(arrivals, "+", KINDS)]
    if isinstance(arrivals, list | tuple) and any(isinstance(part, str | Open | Closed) for part in arrivals):
        return [process for part in arrivals for process in arrivals_of(part)]
    if isinstance(arrivals, Iterable):
        return [GivenTimes(arrivals)]
    raise TypeError(f"arrivals must be a spec such as {EXAMPLE!r}, a process, several, or times, not {arrivals!r}")


def _poisson(dice: Random, rate: float, begin: float, end: float) -> Iterator[float]:
    """Times of a Poisson process; it has no memory, so pieces of different rates can be put together."""
    if rate <= 0:
        return
    draw = dice.expovariate
    when = begin + draw(rate)
    while when < end:
        yield when
        when += draw(rate)


class _Content(NamedTuple):
    """Of a trace file."""

    times: Sequence[float]  # from 0 on, in order
    weights: Sequence[float] | None

    @property
    def rate(self) -> float:
        return len(self.times) / (self.times[-1] or 1.0)


@functools.lru_cache(maxsize=8)
def _read_trace(path: str, column: str | None, size: str | None) -> _Content:
    try:
        with Path(path).open(newline="") as file:
            reader = csv.DictReader(file)
            names = reader.fieldnames or []
            wanted = [column or (names[0] if names else ""), *(size.split("+") if size else [])]
            for name in wanted:
                if name not in names:
                    raise ValueError(f"{path} has no column {name!r}; it has {', '.join(names)}")
            rows = [[row[name] for name in wanted] for row in reader]
    except OSError as error:
        raise ValueError(f"cannot read the trace {path}: {error.strerror}") from None
    if not rows:
        raise ValueError(f"the trace {path} has no requests")
    entries = sorted((_moment(row[0]), sum(float(value) for value in row[1:])) for row in rows)
    first = entries[0][0]
    return _Content([when - first for when, _ in entries], [weight for _, weight in entries] if size else None)


def _moment(text: str) -> float:
    """Seconds of a time stamp: a number, or a date and time."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ValueError(f"{text!r} in the trace is no time: seconds, or such as 2023-11-16 18:17:03.97") from None
