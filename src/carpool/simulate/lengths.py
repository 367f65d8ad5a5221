"""How long requests are: units of input, such as tokens, and with steps parts of the answer.

In stages without steps only the inputs count: batches are padded to the longest of them.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol, cast

from carpool.simulate import specs
from carpool.simulate.arrivals import read_columns

EXAMPLE = "lognormal:input=200,output=180"

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
    """The lengths of inputs in a file, one in each line.

    Args:
        path: The file: numbers alone, or a CSV file with a header line.
        column: The column of the lengths; the first one if not given.
        in_order: Whether requests have the lengths of the file's lines in order, again from the top
            at its end. If not, each line is as likely as the others.
    """

    path: str
    column: str | None = None
    in_order: bool = False

    def __post_init__(self) -> None:
        if not self._lines():
            raise ValueError(f"the file {self.path} has no lengths")

    def draw(self, dice: Random) -> Iterator[Length]:
        yield from _drawn(self._lines(), self.in_order, dice)

    def _lines(self) -> list[Length]:
        return _read_lengths(self.path, self.column)


def _drawn(lines: Sequence[Length], in_order: bool, dice: Random) -> Iterator[Length]:
    """Yield lengths of a file for ever: line by line, or each as likely as the others."""
    if in_order:
        yield from cycle(lines)
    while True:
        yield dice.choice(lines)


@dataclass(frozen=True)
class Recorded:
    """The lengths of a CSV file with a header line.

    Args:
        path: The file.
        input: The column of the inputs.
        output: The column of the answers.
        in_order: Whether requests have the lengths of the file's lines in order, again from the top
            at its end. If not, each line is as likely as the others.
    """

    path: str
    input: str = "ContextTokens"
    output: str = "GeneratedTokens"
    in_order: bool = False

    def __post_init__(self) -> None:
        if not self._lines():
            raise ValueError(f"the trace {self.path} has no requests")

    def draw(self, dice: Random) -> Iterator[Length]:
        yield from _drawn(self._lines(), self.in_order, dice)

    def _lines(self) -> list[Length]:
        rows = read_columns(self.path, self.input, [self.output])
        return [Length(max(1, int(float(tokens))), max(1, int(float(parts)))) for tokens, parts in rows]


KINDS: dict[str, Callable[..., Lengths]] = {
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
        return specs.build(lengths, KINDS, "source of lengths", EXAMPLE)
    if hasattr(lengths, "draw"):
        return cast(Lengths, lengths)
    raise TypeError(f"lengths must be a spec such as {EXAMPLE!r} or Lognormal(...), not {lengths!r}")


def sample_of(lengths: Lengths) -> list[int]:
    """Return the inputs of many requests, by which a source is judged before a run."""
    return [length.input for length in islice(lengths.draw(Random(0)), _SAMPLES)]


@functools.lru_cache(maxsize=8)
def _read_lengths(path: str, column: str | None) -> list[Length]:
    """Read a file of lengths; for the arguments see `FromFile`. Raises ValueError."""
    try:
        if column is None and _is_bare(path):
            with Path(path).open(newline="") as file:
                texts = [row[0] for row in csv.reader(file) if row]
        else:
            texts = [text for (text,) in read_columns(path, column, [])]
    except OSError as error:
        raise ValueError(f"cannot read the lengths {path}: {error.strerror}") from None
    try:
        return [Length(max(1, int(float(text)))) for text in texts]
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
    """Raise ValueError if one of the values is not positive."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{kind}: {name} must be positive, not {value!r}")
