"""The shape of a cost curve: knots, the line, and what is learned size by size."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.policy.shape import MOST_KNOTS, Shape, knots_for
from tests.support.properties import PROPERTY

limits = st.one_of(st.integers(1, 300), st.integers(1, 1_000_000))
batches = st.lists(st.tuples(st.integers(1, 100), st.floats(1e-5, 10)), min_size=1, max_size=60)


def shaped(limit: int, batches: list[tuple[int, float]], cv: float = 0.0) -> Shape:
    """The table made of these sizes and seconds."""
    shape = Shape(limit)
    shape.start(*batches[0])
    for n, seconds in batches:
        shape.add(n, seconds, cv)
    shape.fit(cv)
    return shape


@pytest.mark.parametrize("limit", [1, 2, 31, 32, 33, 64])
def test_small_limits_have_all_sizes(limit: int) -> None:
    """All sizes are knots as long as there are no more of them than the most knots."""
    assert knots_for(limit) == [*range(1, limit + 1)]


@PROPERTY
@given(limits)
def test_knots(limit: int) -> None:
    """Knots rise from 1 to the limit and are never too many; all small sizes are among them, and no
    gap is over an octave.
    """
    knots = knots_for(limit)

    assert (knots[0], knots[-1]) == (1, limit)
    assert len(knots) <= MOST_KNOTS
    assert all(a < b <= 2 * a + 1 for a, b in pairwise(knots))
    assert knots[: min(32, limit)] == [*range(1, min(32, limit) + 1)]


@pytest.mark.parametrize("limit", [2**20, 2**21, 2**21 + 1, 10**7, 2**31])
def test_there_are_few_knots_however_large_the_limit(limit: int) -> None:
    """However large the limit is, as that of a batch without one, the table stays as short as any."""
    knots = knots_for(limit)

    assert len(knots) <= MOST_KNOTS
    assert knots[-1] == limit
    assert all(a < b <= 2 * a + 1 for a, b in pairwise(knots))


@pytest.mark.parametrize("limit", [128, 256, 512, 1024, 4096])
def test_tile_ends_are_seen_from_both_sides(limit: int) -> None:
    """The powers of two, where tiles end, are knots, and so are the sizes after them, where the
    next tiles begin.
    """
    knots = knots_for(limit)
    ends = [2**k for k in range(5, limit.bit_length() - 1)]

    assert set(ends) | {end + 1 for end in ends} <= set(knots)


def test_ends_within_an_octave_are_seen_where_there_is_room() -> None:
    """Where there is room, ends of tiles within an octave are knots: at a limit of 128 the
    multiples of 16 up to 64 and of 32 beyond.
    """
    assert {48, 49, 64, 65, 96, 97, 128} <= set(knots_for(128))


@PROPERTY
@given(limits, st.floats(0, 1))
def test_samples_count_for_the_nearest_knot(limit: int, part: float) -> None:
    """A sample counts for the nearest knot, and `index` finds the last knot that is not larger."""
    shape = Shape(limit)
    n = 1 + int(part * (limit - 1))
    knots = shape.knots

    assert knots[shape.index(n)] == max(knot for knot in knots if knot <= n)
    assert abs(knots[shape.nearest(n)] - n) == min(abs(knot - n) for knot in knots)


def test_a_size_over_the_limit_counts_for_the_largest() -> None:
    """A size over the limit, as of a batch of one oversize request, counts for the largest knot."""
    for limit in (8, 64, 100):
        shape = Shape(limit)
        assert shape.knots[shape.nearest(3 * limit)] == limit


@PROPERTY
@given(st.integers(1, 200), batches, st.sampled_from([0.0, 0.05, 0.1, 0.3]))
def test_a_table_never_falls(limit: int, batches: list[tuple[int, float]], cv: float) -> None:
    """Whatever was measured, a table never falls, and nothing takes no time."""
    shape = shaped(limit, batches, cv)

    assert len(shape.at) == len(shape.knots)
    assert shape.at[0] > 0
    assert all(a <= b for a, b in pairwise(shape.at))
    assert shape.setup >= 0
    assert shape.slope >= 0


def test_falling_measurements_are_pooled() -> None:
    """Two neighbours of which the larger was measured to be faster share their mean, if both have
    the weight of one sample.
    """
    shape = shaped(3, [(1, 1.0), (2, 4.0), (3, 2.0)] * 20)

    assert shape.at == pytest.approx([1, 3, 3])


@pytest.mark.parametrize("few", [(4, 40), (1, 64), (8, 9), (30, 60)])
def test_two_sizes_make_a_line(few: tuple[int, int]) -> None:
    """Two sizes make a line that gives all others."""
    shape = shaped(64, [(n, 0.008 + 0.00025 * n) for n in few] * 40)

    assert shape.at == pytest.approx([0.008 + 0.00025 * n for n in shape.knots], rel=0.04)


def test_one_size_alone_does_not_destroy_the_line() -> None:
    """When batches become all alike, the split of the line into set-up and slope is kept, for a
    while at least.
    """
    two = [(n, 0.008 + 0.00025 * n) for n in (4, 40)] * 40
    shape = shaped(64, two + [(20, 0.013)] * 100)

    assert shape.setup == pytest.approx(0.008, rel=0.05)
    assert shape.slope == pytest.approx(0.00025, rel=0.1)


def test_between_sizes_that_were_seen_the_table_is_straight() -> None:
    """Between sizes that were seen the table is straight: what sticks out of the line at the ends
    of a gap is shared by what lies within.
    """
    shape = shaped(9, [(1, 1.0), (5, 5.0), (9, 29.0)] * 30)

    assert shape.at == pytest.approx([1, 2, 3, 4, 5, 11, 17, 23, 29])


def test_a_line_without_set_up_does_not_bend_what_was_measured() -> None:
    """Beyond a knee the fitted line runs through zero; what it says of small sizes does not raise
    those that were measured up to the knee.
    """
    knee = {n: 8.0 + 0.25 * n + 0.9 * max(0, n - 32) for n in (1, 16, 32, 36, 40, 64)}
    shape = shaped(64, [*[(n, y) for n, y in knee.items() if n != 40] * 2, *[(32, knee[32])] * 8, (40, knee[40])])

    assert shape.setup == 0.0
    assert {n: shape.at[n - 1] for n in knee} == pytest.approx(knee)


def test_noise_makes_single_sizes_doubtful() -> None:
    """A few odd measurements of a size are taken as they are where nothing is noisy, and as half
    chance where much is.
    """
    batches = [(n, 1.0 + 0.1 * n) for n in range(1, 17)] * 4 + [(16, 5.2)] * 4
    sure, unsure = shaped(16, batches, 0.0), shaped(16, batches, 0.11)
    line = sure.setup + 16 * sure.slope

    assert sure.at[15] == pytest.approx(3.9)
    assert unsure.at[15] - line == pytest.approx((3.9 - line) / 2, rel=0.2)


def test_old_samples_lose_weight_but_not_about_the_present_size() -> None:
    """Old samples of sizes other than the present one lose weight, so that what is far from where
    batches are now is tried again.
    """
    shape = shaped(64, [(n, 1.0) for n in range(1, 65)] * 4)
    for _ in range(128):
        shape.add(32, 1.0, 0.0)

    assert shape.known(31) == 132
    assert shape.known(0) == shape.known(33) == shape.known(63) == 0


def test_what_was_measured_long_ago_gives_way() -> None:
    """A size that was measured long ago is expected to take what was measured then, unless one
    that was measured since shows that it cannot: a larger one that takes less. The first new sample
    of it takes the place of all old ones.
    """
    shape = shaped(64, [(n, 4.0 if n > 32 else 1.0) for n in range(1, 65)] * 4)
    for _ in range(128):
        shape.add(32, 1.0, 0.0)
    shape.fit(0.0)
    assert (shape.at[39], shape.at[63]) == pytest.approx((4.0, 4.0), rel=0.01)

    shape.add(48, 1.5, 0.0)
    shape.fit(0.0)

    assert shape.at[47] == pytest.approx(1.5, rel=0.05)
    assert shape.at[39] == pytest.approx(1.5, rel=0.05)
    assert shape.at[63] == pytest.approx(4.0, rel=0.01)
