"""The waiting requests of a lane by their lengths, in levels of nearly the same length.

A policy that composes batches by length asks for all that wait in the order of their lengths. To
sort hundreds of requests for each decision would take longer than to decide, so they are kept in
levels: eight for each doubling of the length, or one for each length that the model is padded to.
Requests of one level are taken to be as long as the longest of them, which is at most 9 % more.

A picked request leaves no entry in its lane's list, which is rebuilt instead (20 µs for 256): an
entry of a request that waits in another stage would count here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from math import inf, log2
from typing import Final, NamedTuple

from carpool.engine.request import Request

_PER_DOUBLING: Final = 8
_SAME_S: Final = 1e-6  # two allowances that differ by less are the same, but for rounding

LevelOf = Callable[[int], int]
"""Returns the number of the level of a length; it never falls as lengths rise."""


def level_of(length: int) -> int:
    return int(_PER_DOUBLING * log2(length))


def one_level(length: int) -> int:
    return 0


class LevelsOf(NamedTuple):
    """How the requests of a queue are sorted into levels; for the lengths see `Levels`."""

    level_of: LevelOf = level_of
    lengths: Sequence[int] | None = None


BY_LENGTH: Final = LevelsOf()
"""Sorts into levels of nearly the same length."""

BY_KEY: Final = LevelsOf(one_level)
"""Sorts into one level for each key."""


def by_allowed_lengths(allowed_lengths: Sequence[int]) -> LevelsOf:
    """Return what sorts by the lengths, rising, to which a model pads.

    What is longer than the last of them belongs to it.
    """
    last = len(allowed_lengths) - 1
    return LevelsOf(lambda length: min(bisect_left(allowed_lengths, length), last), allowed_lengths)


class Levels:
    """The requests of one lane, level by level; those of a level in the order of their arrival.

    If the model pads, each level is of one of the `lengths`; else a level is as long as the longest
    request seen in it.

    Attributes:
        allowance_s: Seconds from the admission of each request to its due time, infinity included;
            0 if they differ.
    """

    __slots__ = ("_by_level", "_lengths", "_level_of", "_longest", "allowance_s", "key")

    def __init__(self, level_of: LevelOf, key: Hashable = None, lengths: Sequence[int] | None = None) -> None:
        self.key = key
        self.allowance_s = -1.0  # until the first one comes
        self._lengths = lengths
        self._level_of = level_of
        self._by_level: dict[int, dict[Request, None]] = {}
        self._longest: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._by_level)

    def add(self, request: Request) -> None:
        allowance_s = request.due - request.admitted
        if not self._by_level:
            self.allowance_s = allowance_s
        elif abs(allowance_s - self.allowance_s) > _SAME_S:
            self.allowance_s = 0.0
        length = request.length
        at = self._level_of(length)
        if self._lengths is not None:
            length = self._lengths[at]
        level = self._by_level.get(at)
        if level is None:
            self._by_level[at] = {request: None}
            self._longest[at] = length
            return
        level[request] = None
        if length > self._longest[at]:
            self._longest[at] = length

    def put_back(self, request: Request) -> None:
        self.add(request)
        at = self._level_of(request.length)
        in_order = sorted(self._by_level[at], key=lambda each: each.arrived)
        self._by_level[at] = dict.fromkeys(in_order)

    def discard(self, requests: Iterable[Request]) -> None:
        for request in requests:
            at = self._level_of(request.length)
            level = self._by_level[at]
            del level[request]
            if not level:
                del self._by_level[at], self._longest[at]

    @property
    def earliest_due(self) -> float:
        if self.allowance_s == inf:
            return inf
        if self.allowance_s:  # the oldest of each level is due first
            return min([next(iter(level)).due for level in self._by_level.values()], default=inf)
        return min([request.due for level in self._by_level.values() for request in level], default=inf)

    def rising(self) -> list[tuple[int, Iterable[Request], int]]:
        by_level, longest = self._by_level, self._longest
        return [(longest[at], by_level[at], len(by_level[at])) for at in sorted(by_level)]
