"""The learned cost: its shape, its level, its margin and its bias."""

from __future__ import annotations

from itertools import pairwise
from math import log
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.policy.cost import MOST_KNOTS, CostModel, Knots, knots_for
from carpool.simulate import Affine, Cost, Sqrt
from tests.engine.policy.learned import FIXED, KNEE, TILES, learned
from tests.support.properties import PROPERTY

limits = st.one_of(st.integers(1, 300), st.integers(1, 1_000_000))
batches = st.lists(st.tuples(st.integers(1, 200), st.floats(1e-6, 100)), min_size=1, max_size=80)


@pytest.mark.parametrize("few", [(4, 40), (1, 8), (16, 64)])
def test_an_affine_cost_is_learned_from_two_sizes(few: tuple[int, int]) -> None:
    """From a dozen batches of each of two sizes it is known what all other sizes take, set-up and
    all.
    """
    model = learned(FIXED, sizes=few, batches=24)

    assert [model.seconds(n) for n in range(1, 65)] == pytest.approx([FIXED(n) for n in range(1, 65)], rel=0.04)
    assert model.setup_s == pytest.approx(0.008, rel=0.05)


@pytest.mark.parametrize("cost", [FIXED, TILES, KNEE, Sqrt(0.005), Affine(0.0005, 0.002)], ids=repr)
def test_any_rising_curve_is_learned(cost: Cost) -> None:
    """Any rising curve is known once all its sizes have been seen, however often it bends."""
    model = learned(cost, batches=640)

    assert [model.seconds(n) for n in range(1, 65)] == pytest.approx([cost(n) for n in range(1, 65)], rel=0.01)


def test_a_tile_is_learned_at_a_large_limit() -> None:
    """Where the limit is large, a step at the end of a tile is still found between 64 and 65, since
    both are knots.
    """
    model = learned(lambda n: 1.0 if n <= 64 else 2.0, limit=1000, sizes=(16, 32, 64, 65, 96, 97, 128), batches=300)

    assert model.seconds(64) == pytest.approx(1, rel=0.05)
    assert model.seconds(65) == pytest.approx(2, rel=0.05)


def test_noise_is_averaged_out() -> None:
    """The expected cost is off by less than half of what a single batch is off by, and the noise is
    measured.
    """
    model, dice = learned(FIXED, batches=200, noise=0.2), Random(1)
    off = noise = 0.0
    for n in dice.choices(range(1, 65), k=3000):
        factor = dice.lognormvariate(0.0, 0.2)
        model.add(n, FIXED(n) * factor)
        off += abs(log(model.seconds(20) / FIXED(20)))
        noise += abs(log(factor))

    assert off < 0.45 * noise
    assert model.cv == pytest.approx(0.2, abs=0.06)


def test_fractions_lie_between_their_neighbours() -> None:
    """The cost of a size that is not whole, such as an expectation, lies between those of its
    neighbours.
    """
    model = learned(FIXED)

    assert model.seconds(10.5) == pytest.approx(FIXED(10.5))


def test_oversize_batches_teach_the_largest_size() -> None:
    """A batch of half as much again as the limit teaches the largest size, with the seconds that
    are its share.
    """
    model = learned(Affine(0.01, 0.001), sizes=(4, 16, 32, 96), batches=200)

    assert model.seconds(64) == pytest.approx(0.074, rel=0.05)
    assert model.seconds(32) == pytest.approx(0.042, rel=0.05)


@PROPERTY
@given(st.integers(1, 100), batches, st.booleans())
def test_more_never_take_less(limit: int, batches: list[tuple[int, float]], sure: bool) -> None:
    """Whatever was measured, and in whatever order, a larger batch is never expected to take less
    time.
    """
    model = CostModel(limit)
    for n, seconds in batches:
        model.add(n, seconds, sure)
    expected = [model.seconds(n) for n in range(1, limit + 1)]

    assert expected[0] > 0
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(expected))
    assert 1 <= model.margin <= 2
    assert 0 < model.bias <= 1
    assert 0 < model.samples <= len(batches)
    assert model.samples == len(batches) or not sure


@PROPERTY
@given(st.integers(1, 500), batches, st.floats(1e-6, 200), st.floats(0, 1))
def test_the_largest_within_is_the_inverse(
    limit: int, batches: list[tuple[int, float]], seconds: float, part: float
) -> None:
    """The largest size within some seconds fits and the next does not; for the seconds of a size it
    is that size or an equal one.
    """
    model = CostModel(limit)
    for size, busy_s in batches:
        model.add(size, busy_s)
    n = model.largest_within(seconds)
    size = 1 + int(part * (limit - 1))

    assert 0 <= n <= limit
    assert n == 0 or model.seconds(n) <= seconds * (1 + 1e-9)
    assert n == limit or model.seconds(n + 1) > seconds * (1 - 1e-9)
    assert model.largest_within(model.seconds(size) * (1 + 1e-9)) >= size


def test_cold_calls_are_soon_forgotten() -> None:
    """The first two calls of a process took ten times as long as any later one; twenty batches later
    nothing is left of it.
    """
    model = CostModel(100)
    for seconds in (0.0626, 0.0461):
        model.add(100, seconds)
    for _ in range(10):
        for n, seconds in ((100, 0.006), (80, 0.005)):
            model.add(n, seconds)

    assert model.seconds(100) == pytest.approx(0.006, rel=0.1)
    assert model.seconds(80) == pytest.approx(0.005, rel=0.1)


def test_times_that_are_sure_are_not_forgotten() -> None:
    """They are the shortest of several: a later one that is shorter yet has another reason."""
    model = CostModel(100)
    model.add(100, 0.06, sure=True)
    model.add(100, 0.006)

    assert [count for _, _, count in model.points()] == [pytest.approx(2, abs=0.05)]


# -- the level


def test_a_drift_is_followed() -> None:
    """When a model has become 1.8 times as slow, it is known within 40 batches, for sizes that were
    not seen as well.
    """
    model = learned(FIXED, batches=200)
    for n in Random(1).choices(range(8, 33), k=40):
        model.add(n, 1.8 * FIXED(n))

    assert [model.seconds(n) for n in (1, 8, 20, 32, 64)] == pytest.approx(
        [1.8 * FIXED(n) for n in (1, 8, 20, 32, 64)], rel=0.1
    )


def test_a_drift_back_is_followed_too() -> None:
    """When a model's factor goes from 1.8 back to 1.2, that is known as soon."""
    model = learned(FIXED, batches=200)
    for factor in (1.8, 1.2):
        for n in Random(1).choices(range(8, 33), k=60):
            model.add(n, factor * FIXED(n))

    assert model.seconds(20) == pytest.approx(1.2 * FIXED(20), rel=0.05)


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("factor", [5.0, 0.2])
def test_a_lone_stall_is_not_believed(noise: float, factor: float) -> None:
    """One batch far outside the noise changes next to nothing in what is expected."""
    model = learned(FIXED, batches=200, noise=noise)
    before = model.seconds(20)
    model.add(20, factor * FIXED(20))
    for _ in range(5):
        model.add(20, before)

    assert model.seconds(20) == pytest.approx(before, rel=0.02)


@pytest.mark.parametrize("stalled", range(1, 6))
def test_a_stall_among_the_first_batches_is_not_believed(stalled: int) -> None:
    """One stall among the first batches, but for the very first, is not believed: nobody knows the
    noise yet, but the other sizes tell what to expect.
    """
    model = CostModel(8)
    for i, n in enumerate([1, 2, 4, 1, 2, 4]):
        model.add(n, FIXED(n) * (8 if i == stalled else 1))

    assert [model.seconds(n) for n in (1, 2, 4)] == pytest.approx([FIXED(n) for n in (1, 2, 4)], rel=0.02)


def test_what_is_much_slower_than_expected_is_believed_the_second_time() -> None:
    """The first batch of a size that is much slower than expected may have compiled its kernels;
    two in a row are believed to be a step in the curve.
    """
    once, twice, sure = (
        learned(FIXED, sizes=(1, 2, 4)),
        learned(FIXED, sizes=(1, 2, 4)),
        learned(FIXED, sizes=(1, 2, 4)),
    )
    once.add(8, 5 * FIXED(8))
    twice.add(8, 5 * FIXED(8))
    twice.add(8, 5 * FIXED(8))
    sure.add(8, 5 * FIXED(8), sure=True)

    assert once.seconds(8) == pytest.approx(FIXED(8), rel=0.02)
    assert twice.seconds(8) > 2 * FIXED(8)
    assert sure.seconds(8) == pytest.approx(twice.seconds(8))


def test_a_stall_is_believed_when_it_repeats() -> None:
    """What takes twice as long again and again is believed to take that; what does so once in ten
    is not.
    """
    often, seldom = learned(FIXED, batches=200), learned(FIXED, batches=200)
    often.add(20, 2 * FIXED(20))
    assert often.seconds(20) == pytest.approx(FIXED(20), rel=0.01)
    often.add(20, 2 * FIXED(20))
    moved = often.level
    for i in range(200):
        often.add(20, 2 * FIXED(20))
        seldom.add(20, (2 if i % 10 == 0 else 1) * FIXED(20))

    assert moved > 1.03
    assert often.seconds(20) == pytest.approx(2 * FIXED(20), rel=0.02)
    assert seldom.seconds(20) == pytest.approx(FIXED(20), rel=0.03)


def test_a_size_never_seen_does_not_move_the_level() -> None:
    """A first batch of a size that was never seen changes the shape of the curve, and not its
    level.
    """
    model = learned(FIXED, sizes=(8, 12, 16), batches=120)
    model.add(64, 2.5 * FIXED(64), sure=True)

    assert model.seconds(12) == pytest.approx(FIXED(12), rel=0.03)
    assert model.seconds(64) > 1.5 * FIXED(64)


# -- margin and bias


@pytest.mark.parametrize("noise", [0.1, 0.25])
def test_the_margin_is_exceeded_by_three_of_ten(noise: float) -> None:
    """The margin is the 0.7-quantile of measured over expected time: three of ten batches exceed
    it.
    """
    model, dice = learned(FIXED, batches=500, noise=noise), Random(1)
    sizes = dice.choices(range(1, 65), k=4000)
    over = total = 0.0
    for n in sizes:
        seconds = FIXED(n) * dice.lognormvariate(0.0, noise)
        over += seconds > model.seconds(n) * model.margin
        total += model.margin
        model.add(n, seconds)

    assert over / len(sizes) == pytest.approx(0.3, abs=0.04)
    assert 1 < total / len(sizes) < 1 + 1.2 * noise


def test_without_noise_there_is_no_margin() -> None:
    """Without noise the margin is nothing but a step now and then, of rounding."""
    assert learned(FIXED).margin == pytest.approx(1, abs=0.03)


def test_stalls_cost_capacity() -> None:
    """When one batch in ten takes five times as long, that is in the bias and not in what is
    expected of a batch.
    """
    model = learned(FIXED, batches=200)
    for i in range(600):
        n = 1 + i * 7 % 64
        model.add(n, (5.0 if i % 10 == 9 else 1.0) * FIXED(n))

    assert model.seconds(20) == pytest.approx(FIXED(20), rel=0.05)
    assert model.bias == pytest.approx(1 / 1.4, rel=0.15)


def test_the_bias_is_never_a_gain() -> None:
    """Batches that are faster than expected do not make the capacity larger than that of the best
    size.
    """
    model = learned(FIXED, batches=200)
    for _ in range(20):
        model.add(20, 0.5 * FIXED(20))

    assert model.bias <= 1


# -- refreshes


def test_the_version_tells_when_the_tables_have_changed() -> None:
    """Each refresh of the tables counts the version up; between two of them expectations stay as
    they are.
    """
    model = CostModel(64)
    seen = {}
    for n in Random(0).choices(range(1, 65), k=300):
        model.add(n, FIXED(n))
        table = [model.seconds(k) for k in range(1, 65)]
        assert seen.setdefault(model.version, table) == table

    assert len(seen) < 230


# -- what is known


def test_what_was_measured_fades() -> None:
    """What has just been measured for the first time counts half once 16 others have come; what has
    held for long, after 128.
    """
    model = learned(FIXED, sizes=(32,), batches=40)
    model.add(64, FIXED(64))
    for _ in range(16):
        model.add(32, FIXED(32))
    assert model.known(64) == pytest.approx(0.5, rel=0.02)
    for _ in range(4):
        for n in (32,) * 60 + (64,):
            model.add(n, FIXED(n))
    known = model.known(64)
    for _ in range(128):
        model.add(32, FIXED(32))

    assert model.known(64) == pytest.approx(0.5 * known, rel=0.02)
    assert model.is_known(32)


def test_when_one_size_has_changed_all_others_are_known_less() -> None:
    """A size that takes a fifth of what it took is known by that alone; others count half, as what
    has slowed it down may have slowed them down, too.
    """
    model = learned(lambda n: FIXED(n) * (5.0 if n > 8 else 1.0), sizes=(8, 32, 64), batches=30)
    for _ in range(100):
        model.add(8, FIXED(8))
    before = model.known(64)
    for _ in range(3):
        model.add(32, FIXED(32))

    assert model.seconds(32) < 2.0 * FIXED(32)
    assert model.known(32) < 4.0
    assert model.known(64) <= 0.51 * before


def test_what_was_measured_at_another_speed_is_known_less() -> None:
    """The machine has become three times as slow: a size that was not run since is known by a
    few batches at most, and believed to be slower, too.
    """
    model = learned(FIXED, sizes=(16, 64), batches=40)
    assert model.is_known(64)
    for _ in range(30):
        model.add(16, 3 * FIXED(16))

    assert 1.5 * FIXED(64) < model.seconds(64) < 3.3 * FIXED(64)
    assert model.known(64) < 3.0


def test_what_is_not_known_may_take_less_but_not_less_than_smaller_ones() -> None:
    """A size that was never run may take less than a line says, but not less than a smaller one. As
    long as all are of one size, each item of fewer may take less.
    """
    model, lone = (learned(FIXED, sizes=sizes, batches=60) for sizes in ((16, 32), (16,)))
    hoped, alone = (dict(zip(each.sizes, each.hoped, strict=True)) for each in (model, lone))

    assert (hoped[16], hoped[32]) == (model.seconds(16), model.seconds(32))
    assert all(hoped[n] < model.seconds(n) for n in (1, 8, 24, 48, 64))
    assert min(hoped[n] for n in range(17, 32)) >= hoped[16]
    assert min(hoped[n] for n in range(33, 65)) >= hoped[32]
    assert all(FIXED(16) * n / 16 <= hoped[n] < model.seconds(n) for n in range(1, 16))
    assert alone[16] == pytest.approx(FIXED(16))
    assert all(0.7 * FIXED(16) * n / 16 < alone[n] < FIXED(16) * n / 16 for n in range(1, 16))


def test_where_items_are_dearer_the_more_there_are_fewer_are_hoped_to_be_cheaper() -> None:
    """Beyond a knee each further item takes more than the mean one, and so fewer may take less."""
    model = learned(lambda n: 0.002 + 0.0001 * n + 0.0004 * max(0.0, n - 16), sizes=(32, 64), batches=60)
    hoped = dict(zip(model.sizes, model.hoped, strict=True))

    assert hoped[16] / 16 < 0.75 * model.seconds(32) / 32


def test_amid_noise_a_time_far_from_the_line_is_believed() -> None:
    """A knee is farther from the line than noise can be: one batch at it shows as much."""
    model = learned(lambda n: FIXED(n) * (6.0 if n > 16 else 1.0), sizes=(32, 48, 64), batches=120, noise=0.3)
    for _ in range(4):
        model.add(12, FIXED(12))

    assert model.seconds(12) < 1.6 * FIXED(12)


def test_what_was_measured_long_ago_gives_way() -> None:
    """A size that was measured long ago is expected to take what was measured then, unless one
    that was measured since shows that it cannot: a larger one that takes less. The first new sample
    of it takes the place of all old ones.
    """
    model = learned(lambda n: 4.0 if n > 32 else 1.0, sizes=range(1, 65), batches=256)
    for _ in range(2500):
        model.add(32, 1.0)
    assert (model.seconds(40), model.seconds(64)) == pytest.approx((4.0, 4.0), rel=0.02)

    model.add(48, 1.5)

    assert model.seconds(48) == pytest.approx(1.5, rel=0.05)
    assert model.seconds(40) == pytest.approx(1.5, rel=0.05)
    assert model.seconds(64) == pytest.approx(4.0, rel=0.02)


def test_between_sizes_that_were_seen_the_table_is_straight() -> None:
    """What sticks out of the line at the ends of a gap is shared by what lies within."""
    curve = {1: 1.0, 5: 5.0, 9: 29.0}
    model = learned(lambda n: curve[int(n)], 9, (1, 5, 9), batches=90)

    assert [model.seconds(n) for n in range(1, 10)] == pytest.approx([1, 2, 3, 4, 5, 11, 17, 23, 29], rel=0.01)


def test_the_way_is_part_of_what_a_batch_takes() -> None:
    """But of one that has gone ahead its worker is taken up only by the part that nothing hides."""
    model = learned(FIXED)
    for n in (4, 32, 64) * 20:
        model.learn_way(n, 0.002 + 0.001 * n, False)
    assert model.seconds(32) == pytest.approx(FIXED(32) + 0.034, rel=0.02)
    assert model.setup_s == pytest.approx(0.010, rel=0.05)
    assert model.unit_s == pytest.approx(0.00125, rel=0.05)
    assert model.following_s(32) == pytest.approx(FIXED(32) + 0.016, rel=0.02)
    for _ in range(20):
        model.learn_way(32, 0.008, True)

    assert model.following_s(32) == pytest.approx(FIXED(32) + 0.008, rel=0.02)


# -- the sizes that have an entry


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
    found = Knots(limit)
    n = 1 + int(part * (limit - 1))
    knots = found.knots

    assert knots[found.index(n)] == max(knot for knot in knots if knot <= n)
    assert abs(knots[found.nearest(n)] - n) == min(abs(knot - n) for knot in knots)


def test_a_size_over_the_limit_counts_for_the_largest() -> None:
    """A size over the limit, as of a batch of one oversize request, counts for the largest knot."""
    for limit in (8, 64, 100):
        found = Knots(limit)
        assert found.knots[found.nearest(3 * limit)] == limit


def test_first_batches_of_several_sizes_that_all_take_long_are_believed() -> None:
    """Only one of them may be a stall: the next one that takes longer than a line promises counts."""
    model = CostModel(64)
    for _ in range(6):
        model.add(1, 0.0025)
    model.add(24, 0.0485)
    assert model.seconds(30) < 0.02
    model.add(28, 0.0565)
    assert model.seconds(30) == pytest.approx(0.06, rel=0.1)
