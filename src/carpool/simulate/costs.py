"""The cost of a batch, in seconds of a worker's time: curves over its size, and disturbances.

A curve is called with the size of a batch, which is the sum of the weights where requests have any,
and need not be a whole number, and with the length that all of its items are padded to, which most
curves ignore. `over` returns the function from which a run takes its seconds: the curve, with noise
or drift if there is any.

`carpool profile` writes measured costs into a file, which `simulate` and `plan` read.
"""

from __future__ import annotations

import csv
import functools
import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, cast

import msgspec

from carpool.engine.type_hints import signature_of
from carpool.simulate import specs


class BatchShape(NamedTuple):
    """The load of a worker in one call.

    Attributes:
        n: The size of the batch after padding to an allowed size, if there are any.
        longest: The length that all of its items are padded to; 1 where lengths do not matter.
        lengths: The lengths of its items; empty where lengths do not matter.
    """

    n: float
    longest: float = 1.0
    lengths: Sequence[float] = ()


Seconds = Callable[[BatchShape, float, Random], float]
"""The seconds of a batch, from its load, the time of the run in seconds, and a random source."""

USUAL_COST = "affine:a=8ms,b=0.25ms"
"""The cost of a simulation without `cost`, and the example in error texts."""

_SAMPLES = 64  # for the mean of a function that draws its seconds at random


class Cost(ABC):
    """The cost of batches: undisturbed, and in a run."""

    @abstractmethod
    def __call__(self, n: float, longest: float = 1.0) -> float:
        """Return the seconds of a batch, without noise and drift.

        Args:
            n: Its size.
            longest: The length that its items are padded to.
        """

    def over(self, duration_s: float) -> Seconds:
        """Return the function of the seconds of batches in a run of `duration_s` seconds."""
        return lambda work, now, dice: self(work.n, work.longest)

    def computed(self, work: BatchShape) -> float:
        """Return how many units of length are computed for a batch, padding included."""
        return work.n * work.longest


@dataclass(frozen=True)
class Affine(Cost):
    """A fixed part, and a part for each item: a + b·n."""

    a_s: float
    b_s: float

    def __call__(self, n: float, longest: float = 1.0) -> float:
        return self.a_s + self.b_s * n


@dataclass(frozen=True)
class Tile(Cost):
    """The cost on hardware that works in tiles: a + step·ceil(n / width)."""

    a_s: float
    step_s: float
    width: int

    def __call__(self, n: float, longest: float = 1.0) -> float:
        return self.a_s + self.step_s * math.ceil(n / self.width)


@dataclass(frozen=True)
class Sqrt(Cost):
    """A cost of c·√n: the larger the batch, the cheaper each item."""

    c_s: float

    def __call__(self, n: float, longest: float = 1.0) -> float:
        return self.c_s * math.sqrt(n)


@dataclass(frozen=True)
class Knee(Cost):
    """An affine cost with `extra_s` more for each item above a size, as when a cache is full."""

    a_s: float
    b_s: float
    knee: int
    extra_s: float

    def __call__(self, n: float, longest: float = 1.0) -> float:
        return self.a_s + self.b_s * n + self.extra_s * max(0.0, n - self.knee)


@dataclass(frozen=True)
class Padded(Cost):
    """The cost of n items padded to the longest, of length L: a + b·n·L + c·n·L² + e·n."""

    a_s: float
    b_s: float
    c_s: float = 0.0
    e_s: float = 0.0

    def __call__(self, n: float, longest: float = 1.0) -> float:
        return self.a_s + n * (longest * (self.b_s + self.c_s * longest) + self.e_s)


class Table(Cost):
    """Measured seconds by batch size, joined by straight lines, of which the last one goes on.

    Args:
        seconds: The seconds by batch size; a smaller batch than all of these takes as long as the
            smallest one.
        path: A CSV file to read them from instead, with two columns: size and seconds.
    """

    def __init__(self, seconds: Mapping[int, float] | None = None, path: str | None = None) -> None:
        if path is not None:
            seconds = cast(Mapping[int, float], _read_table(path))
        if not seconds or min(seconds) < 1 or min(seconds.values()) < 0:
            raise ValueError("a cost table needs sizes of at least 1 and their seconds: Table({1: 0.008, 64: 0.024})")
        self._sizes = sorted(seconds)
        self._seconds = [seconds[n] for n in self._sizes]

    def __call__(self, n: float, longest: float = 1.0) -> float:
        return _on_lines(self._sizes, self._seconds, n)

    def __repr__(self) -> str:
        return f"Table({dict(zip(self._sizes, self._seconds, strict=True))})"


class Grid(Cost):
    """Measured seconds by batch size and by the length that items are padded to.

    Both are joined by straight lines, of which the last ones go on, as those of a `Table`.

    Args:
        seconds: The seconds by size and length, for each of the sizes with each of the lengths.
    """

    def __init__(self, seconds: Mapping[tuple[int, int], float]) -> None:
        if any(not isinstance(key, tuple) or len(key) != 2 or min(key) < 1 for key in seconds):
            raise ValueError("a cost table by size and length needs both of them, at least 1, for all of its seconds")
        if min(seconds.values()) < 0:
            raise ValueError("the seconds of a cost table cannot be negative")
        self._sizes = sorted({n for n, _ in seconds})
        self._lengths = sorted({longest for _, longest in seconds})
        for n in self._sizes:
            for longest in self._lengths:
                if (n, longest) not in seconds:
                    raise ValueError(
                        f"a cost table needs each size with each length: {n} items of length {longest} are missing"
                    )
        self._rows = [[seconds[n, longest] for longest in self._lengths] for n in self._sizes]

    def __call__(self, n: float, longest: float = 1.0) -> float:
        return _on_lines(self._sizes, [_on_lines(self._lengths, row, longest) for row in self._rows], n)

    def __repr__(self) -> str:
        rows = zip(self._sizes, self._rows, strict=True)
        return f"Grid({ {(n, L): s for n, row in rows for L, s in zip(self._lengths, row, strict=True)} })"


@dataclass(frozen=True)
class Changed(Cost):
    """Base of costs that are another cost, changed in a run but not where it is undisturbed."""

    cost: Cost

    def __call__(self, n: float, longest: float = 1.0) -> float:
        return self.cost(n, longest)

    def computed(self, work: BatchShape) -> float:
        return self.cost.computed(work)


@dataclass(frozen=True)
class Noisy(Changed):
    """Another cost times log-normal noise with a mean of 1, and now and then a stall.

    Args:
        cost: The undisturbed cost.
        sigma: The standard deviation of the logarithm of the noise.
        stall_share: The share of the batches that stall, from 0 to 1.
        stall_factor: How many times longer a batch that stalls takes, on top of the noise.
    """

    sigma: float
    stall_share: float = 0.0
    stall_factor: float = 1.0

    def over(self, duration_s: float) -> Seconds:
        inner = self.cost.over(duration_s)
        shift = -self.sigma * self.sigma / 2

        def seconds(work: BatchShape, now: float, dice: Random) -> float:
            noise = math.exp(shift + self.sigma * dice.gauss(0.0, 1.0))
            stall = self.stall_factor if dice.random() < self.stall_share else 1.0
            return inner(work, now, dice) * noise * stall

        return seconds


@dataclass(frozen=True)
class Drifting(Changed):
    """Another cost times a factor that changes during the run.

    Args:
        cost: The undisturbed cost.
        factors: The factors, one after the other, each for an equal part of the run. After its end
            the last one stays.
    """

    factors: tuple[float, ...]

    def over(self, duration_s: float) -> Seconds:
        inner, factors = self.cost.over(duration_s), self.factors
        last = len(factors) - 1
        part_s = duration_s / len(factors)
        return lambda work, now, dice: inner(work, now, dice) * factors[min(last, int(now / part_s))]


@dataclass(frozen=True)
class SortedInside(Changed):
    """Another cost where the user's code sorts its items by length, and runs them in parts.

    Args:
        cost: The cost of one part.
        size: How many items a part has at most.
    """

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError("size must be at least 1")

    def __call__(self, n: float, longest: float = 1.0) -> float:
        full, rest = divmod(n, self.size)
        return full * self.cost(self.size, longest) + (self.cost(rest, longest) if rest else 0.0)

    def over(self, duration_s: float) -> Seconds:
        inner = self.cost.over(duration_s)
        return lambda work, now, dice: sum([inner(part, now, dice) for part in self._parts(work)])

    def computed(self, work: BatchShape) -> float:
        return sum(map(self.cost.computed, self._parts(work)))

    def _parts(self, work: BatchShape) -> list[BatchShape]:
        """Return the parts of a batch, the shortest items first."""
        lengths, size = sorted(work.lengths), self.size
        if not lengths:
            lengths = [work.longest] * round(work.n)
        parts = [lengths[i : i + size] for i in range(0, len(lengths), size)]
        return [BatchShape(len(part), part[-1], part) for part in parts]


class GivenSeconds(Cost):
    """The cost that a function of the user says.

    It is one of `n -> seconds`, `(n, longest) -> seconds`, `(n, now, rng) -> seconds` and
    `(n, longest, now, rng) -> seconds`. The undisturbed cost of a function that throws dice is the
    mean of some tries at time 0.
    """

    def __init__(self, function: Callable[..., float]) -> None:
        arguments = _required_arguments(function)
        self._function = function
        self._is_random = arguments >= 3
        self._takes_length = arguments in (2, 4)
        self._mean = functools.lru_cache(maxsize=None)(self._mean_of_samples)

    def __call__(self, n: float, longest: float = 1.0) -> float:
        return self._mean(n, longest) if self._is_random else self._function(*self._shape(n, longest))

    def over(self, duration_s: float) -> Seconds:
        if not self._is_random:
            return super().over(duration_s)
        function, shape = self._function, self._shape
        return lambda work, now, dice: function(*shape(work.n, work.longest), now, dice)

    def __repr__(self) -> str:
        return getattr(self._function, "__name__", repr(self._function))

    def _shape(self, n: float, longest: float) -> tuple[float, ...]:
        return (n, longest) if self._takes_length else (n,)

    def _mean_of_samples(self, n: float, longest: float) -> float:
        dice, shape = Random(0), self._shape(n, longest)
        return sum(self._function(*shape, 0.0, dice) for _ in range(_SAMPLES)) / _SAMPLES


CURVES: dict[str, Callable[..., Cost]] = {
    "affine": Affine,
    "tile": Tile,
    "sqrt": Sqrt,
    "knee": Knee,
    "padded": Padded,
    "table": Table,
}
CHANGES: dict[str, Callable[..., Cost]] = {"noisy": Noisy, "drifting": Drifting, "sorted": SortedInside}


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
        return _measured(cost)
    if callable(cost):
        return GivenSeconds(cost)
    raise TypeError(f"cost must be a spec such as {USUAL_COST!r}, a Cost or a function of the batch size, not {cost!r}")


def _measured(seconds: Mapping[Any, float]) -> Table | Grid:
    return Grid(seconds) if any(isinstance(key, tuple) for key in seconds) else Table(seconds)


def _from_spec(text: str) -> Cost:
    parts = specs.split(text, "+", [*CURVES, *CHANGES])
    is_table = parts[0].startswith("table:")
    cost = _table(parts[0]) if is_table else specs.build(parts[0], CURVES, "cost", USUAL_COST)
    for part in parts[1:]:
        cost = specs.build(part, CHANGES, "change of a cost", f"{USUAL_COST}+noisy:sigma=0.25", cost=cost)
    return cost


def _table(text: str) -> Cost:
    """Make a table from `table:1=8ms,64=24ms`, `table:1x16=8ms,…` or `table:costs.csv`.

    Raises ValueError.
    """
    content = text.partition(":")[2].strip()
    if "=" not in content:
        return _measured(_read_table(content))
    try:
        entries = [entry.split("=") for entry in content.split(",")]
        return _measured({_key(shape.split("x")): specs.duration(seconds) for shape, seconds in entries})
    except ValueError as error:
        raise ValueError(
            f"cost {text!r}: {error}; for example table:1=8ms,8=10ms,64=24ms,"
            " or by size and length table:1x16=8ms,1x128=9ms,64x16=20ms,64x128=90ms"
        ) from None


def _key(shape: Sequence[str]) -> int | tuple[int, ...]:
    numbers = tuple(map(int, shape))
    return numbers[0] if len(numbers) == 1 else numbers


def _read_table(path: str) -> dict[int | tuple[int, ...], float]:
    try:
        with Path(path).open(newline="") as file:
            rows = [row for row in csv.reader(file) if row]
        if rows and not rows[0][0].strip().isdigit():
            rows = rows[1:]  # the first line holds the names of the columns
        if any(not 2 <= len(row) <= 3 for row in rows):
            raise ValueError
        return {_key(row[:-1]): float(row[-1]) for row in rows}
    except OSError as error:
        raise ValueError(f"cannot read the cost table {path}: {error.strerror}") from None
    except ValueError:
        raise ValueError(
            f"{path} is not a cost table: its rows should be size and seconds, such as 8,0.010,"
            " or size, length and seconds, such as 8,128,0.040"
        ) from None


def _on_lines(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """Return the value at a place on the lines between the given places.

    Before the first place it is the first value; behind the last place the last line goes on.
    """
    if at <= places[0] or len(places) == 1:
        return values[0]
    i = min(max(1, bisect_left(places, at)), len(places) - 1)
    slope = (values[i] - values[i - 1]) / (places[i] - places[i - 1])
    return max(0.0, values[i - 1] + slope * (at - places[i - 1]))


def _required_arguments(function: Callable[..., Any]) -> int:
    try:
        parameters = signature_of(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return 1
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


class StageCosts(msgspec.Struct, frozen=True):
    """The costs of the batches of one stage.

    Attributes:
        stage: The name of the stage.
        max_batch_size: The largest batch that it makes.
        seconds: The seconds of a worker for a batch, by its size.
    """

    stage: str
    max_batch_size: int
    seconds: dict[int, float]

    @property
    def spec(self) -> str:
        """The costs as `simulate` takes them in one word."""
        return "table:" + ",".join(f"{size}={seconds * 1e6:.0f}us" for size, seconds in sorted(self.seconds.items()))


class _CostFile(msgspec.Struct):
    service: str
    stages: list[StageCosts]
    is_line: bool = True


def write_costs(path: Path, service: str, stages: list[StageCosts], *, is_line: bool = True) -> None:
    """Write the costs of a service's stages, first to last. Raises OSError."""
    path.write_bytes(costs_as_json(service, stages, is_line=is_line) + b"\n")


def costs_as_json(service: str, stages: list[StageCosts], *, is_line: bool = True) -> bytes:
    """Return the content of such a file; `is_line` says whether the stages stand in a row."""
    return msgspec.json.format(msgspec.json.encode(_CostFile(service, stages, is_line)))


def read_costs(path: Path, *, may_branch: bool = False) -> list[StageCosts]:
    """Return the costs of a service's stages, in the order in which they are written.

    Args:
        may_branch: Whether the stages need not stand in a row.

    Raises:
        ValueError: It has none, or they are of stages that do not stand in a row.
    """
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_CostFile)
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path} cannot be read as a file of costs, which carpool profile writes: {error}") from None
    found = file.stages
    if not file.is_line and not may_branch:
        raise ValueError(
            f"{path} has the costs of a graph, service {file.service}: use carpool simulate --service MODULE:SERVICE"
            f" --cost {path}; carpool plan is for stages in a row"
        )
    if not found or not all(stage.seconds for stage in found):
        raise ValueError(f"{path} has no costs: make it with carpool profile module:service --out {path}")
    return found


def given_costs(given: list[str] | None, usual: str) -> tuple[list[str], list[int] | None]:
    """Return the specs of costs as given on a command line, and the batch limits if they are known.

    Args:
        given: A spec for each stage, or one file of costs for all of them; None for the usual one.

    Raises:
        ValueError: The file cannot be read, or there is something beside it.
    """
    if not given:
        return [usual], None
    files = [each for each in given if each.endswith(".json")]
    if not files:
        return given, None
    if len(given) > 1:
        raise ValueError(f"--cost {files[0]} has the costs of all stages: give no other --cost beside it")
    stages = read_costs(Path(files[0]))
    return [stage.spec for stage in stages], [stage.max_batch_size for stage in stages]


def costs_by_stage(given: list[str] | None, usual: str, stages: Sequence[str]) -> dict[str, str]:
    """Return the spec of the cost of each stage of a graph, by its name.

    Args:
        given: A file of costs; or `STAGE=spec` for each stage; or a spec for all of them; None for
            the usual one.

    Raises:
        ValueError: The file cannot be read, or several are given of which one names no stage.
    """
    if given and given[0].endswith(".json"):
        if len(given) > 1:
            raise ValueError(f"--cost {given[0]} has the costs of all stages: give no other --cost beside it")
        return {costs.stage: costs.spec for costs in read_costs(Path(given[0]), may_branch=True)}
    named = [each.partition("=") for each in given or ()]
    if all(name in stages for name, *_ in named) and named:
        return {name: spec for name, _, spec in named}
    if len(named) > 1:
        name = next(name for name, *_ in named if name not in stages)
        raise ValueError(f"--cost {name}=…: there is no stage {name!r}; there are {', '.join(stages)}")
    return dict.fromkeys(stages, (given or [usual])[0])
