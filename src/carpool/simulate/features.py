"""How the requests of a run differ from each other: in weight, in length and by key.

Lengths are units of input, such as tokens, and with steps parts of the answer. In stages without
steps only the inputs count: batches are padded to the longest of them.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, cycle, islice, repeat
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Protocol, cast

from carpool.simulate import specs
from carpool.simulate.arrivals import read_columns


class Features(NamedTuple):
    """How requests differ.

    Attributes:
        weights: The weights of requests that bring none; None where these weigh 1.
        weights_known: Whether the core gets the weights, as sizes.
        lengths: The lengths of requests that bring none; None where these have none.
        lengths_known: Whether the core gets the lengths.
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


LENGTH_EXAMPLE = "lognormal:input=200,output=180"

_SAMPLES = 2000  # draws by which a source is judged before a run


class Length(NamedTuple):
    """One request.

    Attributes:
        input: Units of work before its first part.
        output: How many parts its answer has.
    """

    input: int
    output: int = 1


class Lengths(Protocol):
    """A source of lengths."""

    def draw(self, dice: Random) -> Iterator[Length]:
        """Yield the lengths of one request after another."""


@dataclass(frozen=True)
class Fixed:
    """Requests that are all alike, such as the equal steps of a diffusion model.

    Args:
        input: Units of work before the first part.
        output: How many parts an answer has.
    """

    input: int = 1
    output: int = 30

    def __post_init__(self) -> None:
        _check_positive("fixed", input=self.input, output=self.output)

    def draw(self, dice: Random) -> Iterator[Length]:
        while True:
            yield Length(self.input, self.output)


@dataclass(frozen=True)
class Lognormal:
    """Lengths with long tails, as those of chats have.

    Args:
        input: The median of the inputs.
        output: The median of the answers.
        input_sigma: The standard deviation of the logarithm of the inputs.
        output_sigma: The same of the answers.
        most_input: The longest input; longer ones count as this one.
        most_output: The longest answer.
    """

    input: float = 200
    output: float = 180
    input_sigma: float = 1.1
    output_sigma: float = 0.8
    most_input: int = 2048
    most_output: int = 1024

    def __post_init__(self) -> None:
        _check_positive("lognormal", input=self.input, output=self.output)

    def draw(self, dice: Random) -> Iterator[Length]:
        while True:
            tokens = self.input * dice.lognormvariate(0.0, self.input_sigma)
            parts = self.output * dice.lognormvariate(0.0, self.output_sigma)
            yield Length(_whole(tokens, self.most_input), _whole(parts, self.most_output))


@dataclass(frozen=True)
class Exponential:
    """Inputs of any length between two bounds, all as likely, and answers that end at random.

    Args:
        least_input: The shortest input.
        most_input: The longest input.
        output: The mean of the answers.
        most_output: The longest answer.
    """

    least_input: int = 8
    most_input: int = 64
    output: float = 32
    most_output: int = 160

    def __post_init__(self) -> None:
        _check_positive("exponential", least_input=self.least_input, output=self.output)
        if self.most_input < self.least_input:
            raise ValueError("exponential: most_input must not be below least_input")

    def draw(self, dice: Random) -> Iterator[Length]:
        while True:
            tokens = dice.randint(self.least_input, self.most_input)
            yield Length(tokens, _whole(dice.expovariate(1 / self.output), self.most_output))


@dataclass(frozen=True)
class Bimodal:
    """Two kinds of requests, such as queries and documents, each with lengths around a mean.

    Args:
        short: The mean of the short ones.
        long: The mean of the long ones.
        long_share: The share of requests that are long.
        spread: The standard deviation of the short ones, as a share of their mean.
        long_spread: The same of the long ones.
    """

    short: float = 10
    long: float = 200
    long_share: float = 0.1
    spread: float = 0.2
    long_spread: float = 0.1

    def __post_init__(self) -> None:
        _check_positive("bimodal", short=self.short, long=self.long)
        if not 0 <= self.long_share <= 1:
            raise ValueError(f"bimodal: long_share must be from 0 to 1, not {self.long_share!r}")

    def draw(self, dice: Random) -> Iterator[Length]:
        short, long = (self.short, self.short * self.spread), (self.long, self.long * self.long_spread)
        while True:
            yield Length(max(1, int(dice.gauss(*(long if dice.random() < self.long_share else short)))))


@dataclass(frozen=True)
class FromFile:
    """The lengths in a file, those of one request in each line.

    Args:
        path: The file: the inputs alone, or a CSV file with a header line.
        column: The column of the inputs; the first one if not given.
        in_order: Whether requests have the lengths of the file's lines in order, again from the top
            at its end. If not, each line is as likely as the others.
        output: The column of the answers; each has one part if not given.
    """

    path: str
    column: str | None = None
    in_order: bool = False
    output: str | None = None

    def __post_init__(self) -> None:
        if not self._lines():
            raise ValueError(f"the file {self.path} has no lengths")

    def draw(self, dice: Random) -> Iterator[Length]:
        lines = self._lines()
        if self.in_order:
            yield from cycle(lines)
        while True:
            yield dice.choice(lines)

    def _lines(self) -> list[Length]:
        return _read_lengths(self.path, self.column, self.output)


def Recorded(
    path: str, input: str = "ContextTokens", output: str = "GeneratedTokens", in_order: bool = False
) -> FromFile:
    """Return the lengths of a trace, whose columns have the names of published ones."""
    return FromFile(path, column=input, in_order=in_order, output=output)


_LENGTHS: dict[str, Callable[..., Lengths]] = {
    "fixed": Fixed,
    "lognormal": Lognormal,
    "exponential": Exponential,
    "bimodal": Bimodal,
    "file": FromFile,
    "trace": Recorded,
}


def lengths_of(lengths: object) -> Lengths:
    """Return a source of lengths, which may be given as a spec.

    Raises:
        ValueError: The spec is wrong; the text says what to change.
        TypeError: `lengths` is neither.
    """
    if isinstance(lengths, str):
        return specs.build(lengths, _LENGTHS, "source of lengths", LENGTH_EXAMPLE)
    if hasattr(lengths, "draw"):
        return cast(Lengths, lengths)
    raise TypeError(f"lengths must be a spec such as {LENGTH_EXAMPLE!r} or Lognormal(...), not {lengths!r}")


def sample_of(lengths: Lengths) -> list[int]:
    """Return the inputs of many requests, by which a source is judged before a run."""
    return [length.input for length in islice(lengths.draw(Random(0)), _SAMPLES)]


@functools.lru_cache(maxsize=8)
def _read_lengths(path: str, column: str | None, output: str | None) -> list[Length]:
    try:
        if column is None and _is_bare(path):
            with Path(path).open(newline="") as file:
                rows = [row[:1] for row in csv.reader(file) if row]
        else:
            rows = read_columns(path, column, [output] if output else [])
    except OSError as error:
        raise ValueError(f"cannot read the lengths {path}: {error.strerror}") from None
    try:
        return [Length(*[max(1, int(float(text))) for text in row]) for row in rows]
    except ValueError:
        raise ValueError(f"{path} is not a file of lengths: it should have a number in each line") from None


def _is_bare(path: str) -> bool:
    """Report whether a file begins with a number instead of the names of its columns."""
    with Path(path).open(newline="") as file:
        first = next(csv.reader(file), [""])
    try:
        float(first[0])
    except (ValueError, IndexError):
        return False
    return True


def _whole(value: float, most: int) -> int:
    return max(1, min(most, int(value)))


def _check_positive(kind: str, **values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{kind}: {name} must be positive, not {value!r}")
