"""Cutting a line of lengths into the batches that cost least, beside every way to cut it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.policy.compose import partition
from carpool.engine.policy.length_cost import LengthCost
from tests.support.properties import PROPERTY


class Cost(NamedTuple):
    """Seconds of a batch: a + n·(b·L + c·L²)."""

    setup_s: float
    b: float
    c: float = 0.0

    def item_s(self, length: float) -> float:
        return self.b * length + self.c * length * length

    def item_s_at(self, lengths: Sequence[int]) -> list[float]:
        return [self.item_s(length) for length in lengths]


def cut(levels: Sequence[tuple[int, int]], limit: int, most_padded: float, cost: Cost) -> list[tuple[int, int]]:
    """The pieces of a line of levels, each of which has a length and how many requests have it."""
    pieces = partition([(length, (), count) for length, count in levels], limit, most_padded, cast(LengthCost, cost))
    lengths = [length for length, count in levels for _ in range(count)]
    assert all(longest >= lengths[end - 1] for _, end, longest in pieces)
    return [(begin, end) for begin, end, _ in pieces]


def value(pieces: list[tuple[int, int]], lengths: list[int], cost: Cost) -> float:
    """What the partition makes least: each batch's seconds times those whom it delays."""
    n = len(lengths)
    return sum((cost.setup_s + (j - i) * cost.item_s(lengths[j - 1])) * (2 * n - i) for i, j in pieces)


def best(lengths: list[int], limit: int, most_padded: float, cost: Cost, places: set[int] | None = None) -> float:
    """The least value of any way to cut the line, or of any way to cut it at these places."""
    n = len(lengths)
    least = [0.0] + [inf] * n
    for j in range(1, n + 1):
        for i in range(max(0, j - limit), j):
            if places is not None and not {i, j} <= places:
                continue
            if j - i == 1 or (j - i) * lengths[j - 1] <= most_padded:
                seconds = cost.setup_s + (j - i) * cost.item_s(lengths[j - 1])
                least[j] = min(least[j], least[i] + seconds * (2 * n - i))
    return least[n]


LEVELS = st.dictionaries(st.integers(1, 400), st.integers(1, 12), min_size=1, max_size=12).map(
    lambda counts: sorted(counts.items())
)
COSTS = st.builds(Cost, st.floats(1e-4, 0.05), st.floats(1e-6, 1e-3), st.sampled_from([0.0, 1e-6]))


@given(LEVELS, st.integers(1, 16), st.one_of(st.just(inf), st.integers(1, 4000)), COSTS)
@PROPERTY
def test_pieces_cover_the_line_within_the_limits(
    levels: list[tuple[int, int]], limit: int, most_padded: float, cost: Cost
) -> None:
    """The pieces follow one another from the beginning of the line to its end, and none is larger
    than the limits allow.
    """
    lengths = [length for length, count in levels for _ in range(count)]
    pieces = cut(levels, limit, most_padded, cost)
    assert pieces[0][0] == 0 and pieces[-1][1] == len(lengths)
    assert all(before[1] == after[0] for before, after in pairwise(pieces))
    for begin, end in pieces:
        assert 1 <= end - begin <= limit
        assert end - begin == 1 or (end - begin) * lengths[end - 1] <= most_padded


@given(LEVELS, st.integers(1, 16), COSTS)
@PROPERTY
def test_the_pieces_are_the_best(levels: list[tuple[int, int]], limit: int, cost: Cost) -> None:
    """Of all ways to cut the line at ends of levels, and full batches behind these, none is better
    by more than a tenth.
    """
    lengths = [length for length, count in levels for _ in range(count)]
    ends = {0, *accumulate(count for _, count in levels)}
    places = {place for end in ends for place in range(end, len(lengths) + 1, limit)}
    found = value(cut(levels, limit, inf, cost), lengths, cost)
    assert found <= 1.1 * best(lengths, limit, inf, cost, places)


@pytest.mark.parametrize("n", [200, 1000])
def test_places_left_out_cost_little(n: int) -> None:
    """With many levels, where places next to one another are left out, the value is within 3 %."""
    lengths = sorted(1 + (i * 7919) % 997 * (i * 104729) % 13 // 2 + i * i % 211 for i in range(n))
    levels = [(length, lengths.count(length)) for length in sorted(set(lengths))]
    cost = Cost(2e-3, 20e-6)
    assert len(levels) > 16
    assert value(cut(levels, 32, inf, cost), lengths, cost) <= 1.03 * best(lengths, 32, inf, cost)


@pytest.mark.parametrize("most_padded", [100, 2000, 20000])
def test_many_levels_are_cut_within_the_padded_size(most_padded: int) -> None:
    """Where places next to one another are left out, batches that may hold few still reach them."""
    levels = [(length, 1 + length % 5) for length in range(10, 400, 7)]
    lengths = [length for length, count in levels for _ in range(count)]
    pieces = cut(levels, 64, most_padded, Cost(2e-3, 20e-6))
    assert [begin for begin, _ in pieces[1:]] == [end for _, end in pieces[:-1]]
    assert (pieces[0][0], pieces[-1][1]) == (0, len(lengths))
    assert all(end - begin == 1 or (end - begin) * lengths[end - 1] <= most_padded for begin, end in pieces)


def test_equal_lengths_are_cut_into_full_batches() -> None:
    """Requests of one length are parted only by full batches."""
    assert [end - begin for begin, end in cut([(20, 70)], 32, inf, Cost(2e-3, 1e-5))].count(32) == 2


def test_nothing_is_joined_where_calls_cost_nothing() -> None:
    """Where a call has no cost of its own, no two lengths share one."""
    pieces = cut([(1, 2), (50, 1), (400, 2)], 8, inf, Cost(0.0, 1e-4))
    assert list(accumulate(end - begin for begin, end in pieces)) == [2, 3, 5]
