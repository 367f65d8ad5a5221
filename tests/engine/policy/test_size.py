"""How many to take: by least delay, to the end of a tile, up to a knee; and the tries that find these."""

from __future__ import annotations

from math import inf, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.policy.cost import CostModel
from carpool.engine.policy.size import Sizes
from carpool.simulate import Affine, Cost, Knee, Tile
from tests.effort import examples
from tests.engine.policy.learned import FIXED, KNEE, TILES, learned
from tests.support.properties import PROPERTY

BALANCED = Affine(0.002, 0.001)


def sized(cost: CostModel, tries: bool = False) -> Sizes:
    """The chooser of sizes for this cost; it tries none unless it is to."""
    size = Sizes(cost)
    size.refresh()
    if not tries:
        size._next_try = 10**9
    return size


def chosen(size: Sizes, waiting: int, load: float) -> int:
    """The size for so many, by one worker."""
    return size.choose(waiting, size.most_of(waiting), load, inf)


def delay(cost: Cost, waiting: int, n: int, load: float, capacity: float) -> float:
    """J(n), as the theory has it."""
    return waiting * (cost(n) - n / capacity) / ((1 - load) * n) + n / (2 * capacity)


# -- the working size


@pytest.mark.parametrize(("cost", "working"), [(FIXED, 64), (BALANCED, 64), (TILES, 64), (KNEE, 32)], ids=repr)
def test_the_working_size_is_the_most_efficient(cost: Cost, working: int) -> None:
    """The working size is the limit or the knee, whichever is more efficient, and the capacity is
    that of this size.
    """
    size = sized(learned(cost))

    assert size.most == working
    assert size.rate == pytest.approx(working / cost(working), rel=0.001)


def bending(loss: float, limit: int = 64) -> CostModel:
    """Best at 32; up to the limit efficiency falls by `loss`."""
    return learned(lambda n: 0.016 if n <= 32 else 0.0005 * n / (1 - loss * (n - 32) / (limit - 32)), limit)


def test_the_working_size_stays_while_it_is_good() -> None:
    """The working size stays while it is within one percent of the best; otherwise the smallest
    size of nearly the best efficiency takes its place.
    """
    assert sized(bending(0.008)).most == 64
    assert sized(bending(0.03)).most == 32


def test_the_working_size_does_not_follow_small_changes() -> None:
    """Once the working size is at the knee, it stays there when the sizes above become as good
    within a percent.
    """
    cost = bending(0.03)
    size = sized(cost)
    for _ in range(200):
        cost.add(64, 64 * 0.0005 * 0.996)
    size.refresh()

    assert cost.seconds(64) < 64 * 0.0005
    assert size.most == 32


def test_noise_makes_the_working_size_larger() -> None:
    """Where noise hides which size is best, the working size is the largest of those that may be."""
    cost = bending(0.03)
    for n in [*range(1, 65)] * 20:
        for factor in (1.15, 1 / 1.15):
            cost.add(n, cost.seconds(n) * factor)

    assert cost.cv > 0.1
    assert sized(cost).most > 50


def test_a_little_more_than_the_working_size_goes_along() -> None:
    """Up to a quarter more than the working size goes in one batch."""
    size = sized(learned(KNEE))

    assert [size.most_of(n) for n in (31, 32, 33, 40, 41, 100)] == [32, 32, 33, 40, 32, 32]


# -- the size of one batch


@pytest.mark.parametrize(("waiting", "best"), [(16, 9.5), (32, 13.4), (64, 19.0), (128, 26.9)])
def test_the_closed_form(waiting: int, best: float) -> None:
    """The size is near sqrt(2·a·x·μ/(1-ρ)), for a = 2 ms, b = 1 ms and a load of 0.3; policy
    iteration has 9, 13, 19 and 27.
    """
    assert chosen(sized(learned(BALANCED, limit=512)), waiting, 0.3) == pytest.approx(best, abs=1)


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_tiles(load: float) -> None:
    """Of a few more requests than a tile holds one tile goes, and of nearly two tiles all go."""
    size = sized(learned(TILES))

    assert [chosen(size, n, load) for n in range(17, 26)] == [16] * 9
    assert [chosen(size, n, load) for n in range(28, 33)] == [*range(28, 33)]
    assert [chosen(size, n, load) for n in range(1, 17)] == [*range(1, 17)]
    assert [chosen(size, n, load) for n in range(33, 38)] == [32] * 5


affine = st.builds(Affine, st.floats(0.0002, 0.02), st.floats(0.0001, 0.01))


@examples(100, derandomize=True)
@given(affine, st.integers(1, 64), st.floats(0, 0.95))
def test_no_size_is_much_better_for_a_line(cost: Cost, waiting: int, load: float) -> None:
    """On a straight line no size has a smaller expected delay than the chosen one, but for the one
    percent in favour of all.
    """
    size = sized(learned(cost, batches=200))
    n = chosen(size, waiting, load)
    least = min(delay(cost, waiting, k, load, size.rate) for k in range(1, waiting + 1))

    assert 1 <= n <= waiting
    assert delay(cost, waiting, n, load, size.rate) <= least / 0.985


@examples(100, derandomize=True)
@given(st.lists(st.floats(0.0001, 0.01), min_size=24, max_size=24), st.integers(1, 24), st.floats(0, 0.95))
def test_no_choice_is_worse_than_all(steps: list[float], waiting: int, load: float) -> None:
    """Whatever the curve, the chosen size has no larger expected delay than taking all."""
    sums = [sum(steps[:n]) for n in range(1, 25)]
    model = learned(lambda n: sums[int(n) - 1], limit=24, batches=480)
    size = sized(model)
    everything = min(waiting, size.most_of(waiting))
    n = chosen(size, waiting, load)

    def expected(n: int) -> float:
        return waiting * (model.seconds(n) - n / size.rate) / ((1 - load) * n) + n / (2 * size.rate)

    assert 1 <= n <= everything
    assert expected(n) <= expected(everything) * (1 + 1e-9)


def test_the_busier_the_larger() -> None:
    """The larger the load the more go at once, and at a load of 1 and above all go."""
    size = sized(learned(BALANCED))
    sizes = [chosen(size, 40, load) for load in (0.0, 0.3, 0.6, 0.8, 1.0, 3.0)]

    assert sizes == sorted(sizes)
    assert sizes[0] == pytest.approx(sqrt(2 * 2 * 40), abs=1)
    assert sizes[-1] == 40


def test_small_gains_do_not_count_amid_noise() -> None:
    """Of twelve requests eight go where the curve is known, which gains six percent; amid noise
    that is not sure, and all go.
    """
    cost = learned(BALANCED)
    assert chosen(sized(cost), 12, 0.3) == 8

    for n in [*range(1, 65)] * 20:
        for factor in (1.15, 1 / 1.15):
            cost.add(n, BALANCED(n) * factor)
    assert chosen(sized(cost), 12, 0.3) == 12


# -- tries


def backlogged(cost: Cost, size: Sizes, model: CostModel, batches: int, slack_s: float = inf) -> list[int]:
    """The sizes of so many batches while a lot waits."""
    sizes = []
    for _ in range(batches):
        size.refresh()
        n = size.choose(1000, size.most_of(1000), 1.5, slack_s)
        size.ran(n, cost(n))
        model.add(n, cost(n))
        sizes.append(n)
    return sizes


def test_what_may_be_better_is_tried_while_it_has_time() -> None:
    """An unknown size is tried where it would be better by what it may take, but not with
    requests that lack the time.
    """
    cost = learned(Affine(0.02, 0.0001), sizes=(4, 8, 16), batches=400)
    size = sized(cost, tries=True)
    size.most = 16

    assert size.choose(100, 16, 1.5, inf) > 16
    assert size.choose(100, 16, 1.5, 0.001) == 16


def test_below_the_working_size_the_end_of_a_tile_is_looked_for() -> None:
    """Nine take two tiles of four and a third, and eight might take no longer than seven. What was
    tried is known for a while, whatever came of it.
    """
    tiles = Tile(0.029, 0.007, 4)
    cost = learned(tiles, limit=32, sizes=(1, 4, 7, 9, 32), batches=300)
    size = sized(cost, tries=True)

    assert chosen(size, 9, 1.0) == 8
    assert size.is_try(8)
    taken_s = tiles(8) * 9 / 8  # it would not have been worth it
    size.ran(8, taken_s)
    cost.add(8, taken_s)
    size.refresh()
    size._next_try = 0
    assert chosen(size, 9, 1.0) != 8


def test_asking_is_not_trying() -> None:
    """Asked repeatedly for a size to try, the same one is named until it was run; then there is a
    pause.
    """
    size = sized(cost := learned(Affine(0.002, 0.001), sizes=(32, 64), batches=400), tries=True)
    first = chosen(size, 48, 0.0)

    assert size.is_try(first)
    assert [chosen(size, 48, 0.0) for _ in range(5)] == [first] * 5
    size.ran(first, 0.02)
    cost.add(first, 0.02)
    assert not size.is_try(chosen(size, 48, 0.0))


@pytest.mark.parametrize("slow", [2.0, 5.0, 20.0])
def test_a_size_that_was_slow_for_a_while_is_run_again(slow: float) -> None:
    """The largest size took longer for a while, however much that was. Seven half-lives later it
    is the one that goes.
    """
    cost = learned(lambda n: FIXED(n) * (slow if n == 64 else 1.0), sizes=(16, 64), batches=8)
    size = sized(cost, tries=True)
    for _ in range(7 * 128):
        n = chosen(size, 64, 0.5)
        size.ran(n, FIXED(n))
        cost.add(n, FIXED(n))
        size.refresh()

    assert chosen(size, 64, 0.5) > 60


def test_a_dear_try_waits_until_less_is_known() -> None:
    """A batch of one of many, which was seen to take nearly as long as all, is tried the later the
    longer that is.
    """
    ages = []
    for setup_s in (0.004, 0.016):
        cost = learned(lambda n, a=setup_s: a + 0.00025 * n, sizes=(1, 8), batches=16)
        size, age = sized(cost, tries=True), 0
        while size.worth_trying(8, 8, 8, 0.5, inf) != 1 and age < 2000:
            cost.add(8, setup_s + 0.002)
            size.refresh()
            age += 1
        ages.append(age)

    assert 128 < ages[0] < ages[1]


@pytest.mark.parametrize("knee", [20, 24, 32, 40, 48])
def test_a_knee_is_found(knee: int) -> None:
    """From full batches, which are far beyond it, the knee is found within two hundred, and then
    nearly all is served that can be.
    """

    def cost(n: float) -> float:
        return 0.008 + 0.00025 * n + 0.0009 * max(0.0, n - knee)

    model = learned(cost, sizes=(1, 4), batches=8)
    size = Sizes(model)
    assert 64 / cost(64) < 0.7 * knee / cost(knee)
    backlogged(cost, size, model, 200)  # type: ignore[arg-type]
    sizes = backlogged(cost, size, model, 100)  # type: ignore[arg-type]

    assert sum(sizes) / sum(map(cost, sizes)) > 0.92 * knee / cost(knee)


def test_tries_cost_little() -> None:
    """When all sizes near are known, one is tried only once in a while."""
    model = learned(KNEE, sizes=(1, 4), batches=8)
    size = Sizes(model)
    backlogged(KNEE, size, model, 500)
    sizes = backlogged(KNEE, size, model, 1000)

    assert sum(n not in (size.most - 1, size.most, size.most + 1) for n in sizes) < 60
    assert sum(sizes) / sum(map(KNEE, sizes)) > 0.97 * 32 / KNEE(32)


@pytest.mark.parametrize("factor", [1.0, 3.0, 0.3])
def test_a_knee_that_moves_is_noticed(factor: float) -> None:
    """When memory has become free, so that 32 is no longer the best size, larger ones win within
    some hundred batches, also where the machine has become slower or faster.
    """
    model = learned(KNEE, sizes=(1, 4), batches=8)
    size = Sizes(model)
    backlogged(KNEE, size, model, 300)
    assert 30 <= size.most <= 34
    backlogged(Affine(factor * FIXED.a_s, factor * FIXED.b_s), size, model, 600)

    assert size.most > 38


def test_sizes_that_were_slow_for_a_while_are_run_again() -> None:
    """What made all larger batches slow is over: within a thousand batches they are the best again."""
    model = learned(FIXED, sizes=(1, 16, 32, 64), batches=200)
    size = Sizes(model)
    backlogged(Knee(0.008, 0.00025, 32, 0.01), size, model, 300)
    assert size.most < 40
    backlogged(FIXED, size, model, 1000)

    assert size.most > 60


def test_one_is_one() -> None:
    """Of one request one goes."""
    assert chosen(sized(learned(FIXED)), 1, 0.5) == 1
    assert chosen(sized(learned(FIXED, limit=1)), 100, 0.5) == 1


# -- several workers


def total_delay(cost: Affine, waiting: float, n: float, rate: float, workers: int) -> float:
    """Of those that wait and those that come until batches of `n` have drained the queue, beyond the usual."""
    drain = workers * n / cost(n) - rate
    even = rate * cost.a_s / (workers - rate * cost.b_s)
    return waiting * waiting / (2 * drain) + waiting * cost(n) + rate * waiting / drain * (cost(n) - cost(even))


@pytest.mark.parametrize(("workers", "rate", "waiting"), [(2, 400, 10), (4, 800, 6), (4, 800, 20), (8, 1600, 40)])
def test_a_share_makes_the_delay_least(workers: int, rate: int, waiting: int) -> None:
    """The closed form is the minimum of the delay until the queue is drained, of half of those that wait."""
    cost = Affine(0.010, 0.0025)
    even = rate * cost.a_s / (workers - rate * cost.b_s)
    grid = [even + 0.01 * k for k in range(1, 6000)]
    best = min(grid, key=lambda n: total_delay(cost, waiting / 2, n, rate, workers))

    share = sized(learned(cost)).share(waiting, rate, workers)

    assert share == min(waiting, int(max(best, waiting / workers) + 0.5))


@given(
    workers=st.integers(2, 16),
    rate=st.floats(0, 1e5),
    waiting=st.integers(1, 500),
    a=st.floats(0, 0.1),
    b=st.floats(0, 0.1),
)
@PROPERTY
def test_a_share_is_enough_for_all(workers: int, rate: float, waiting: int, a: float, b: float) -> None:
    """It is at least one, at most all, and if every worker takes one, all go that fit."""
    model = learned(Affine(a, b), 16, batches=32)

    share = sized(model).share(waiting, rate, workers)

    assert 1 <= share <= max(waiting, model.limit)
    assert workers * (share + 0.5) >= min(waiting, model.limit)


def test_the_busier_the_larger_the_share() -> None:
    """Beyond what small batches can serve, nothing is left for others."""
    size = sized(learned(Affine(0.010, 0.0025)))

    shares = [size.share(20, rate, 4) for rate in (0, 400, 800, 1200, 1600, 2000)]

    assert shares == sorted(shares)
    assert shares[0] < 8
    assert shares[-1] >= 20


# -- batches that overlap


def travelling(fixed_s: float, unit_s: float) -> Sizes:
    """A chooser for batches that may go ahead, after some of several sizes."""
    model = learned(Affine(0.0001, 0.00001), batches=200)
    for n in (16, 8, 12, 4) * 5:
        model.learn_way(n, fixed_s + unit_s * n, False)
    size = sized(model)
    size.runs_ahead = True
    size.refresh()
    return size


def test_clients_that_are_all_here_go_in_two_groups_where_the_way_grows() -> None:
    """Of 16, half is on its way while the other half runs, of 160 a full batch; not if the way is
    the same for all sizes, if it is a trifle, or if others may come.
    """
    size = travelling(0.0003, 0.005)
    for inside, workers, part in (
        (16, 1, 8),
        (16, 2, 4),
        (15, 1, 8),
        (96, 1, 48),
        (160, 1, 64),
        (1, 1, inf),
        (0, 1, inf),
    ):
        size.learn_part(inside, 1.0, workers)
        assert size.part == part
    for way in ((0.05, 0.0), (0.0003, 0.00001), (0.0, 0.0)):
        size = travelling(*way)
        size.learn_part(16, 1.0, 1)
        assert size.part == inf


def test_where_batches_of_one_size_hide_how_a_long_way_grows_half_of_one_is_sent() -> None:
    """It is sent until sizes differ; and never where the way is short, or nothing goes ahead."""
    size = travelling(0.08, 0.0)
    way = size._cost.way
    for _ in range(200):
        way.learn(16, 0.08, False)
    size.learn_part(16, 1.0, 1)
    assert (size.choose(16, 16, 0.5, inf), size.is_try(8)) == (8, True)
    assert size.choose(16, 16, 0.0, inf) == 8

    way.learn(8, 0.08, False)
    size.learn_part(16, 1.0, 1)
    assert size.choose(16, 16, 0.5, inf) == 16
    size.runs_ahead = False
    size.learn_part(16, 1.0, 1)
    assert size.choose(1, 1, 0.0, inf) == 1


@pytest.mark.parametrize(("inside", "half"), [(16.0, 8), (16.0 + 1e-9, 8), (15.0, 8), (17.0, 9), (17.0 - 1e-9, 9)])
def test_half_of_the_clients_is_the_same_where_their_number_is_not_exact(inside: float, half: int) -> None:
    """Two groups of eight overlap; of nine and seven the larger one would wait."""
    size = sized(cost := learned(lambda n: 0.0005 * n, limit=16))
    for n in (4, 16) * 20:
        cost.learn_way(n, 0.002 + 0.001 * n, False)
    size.runs_ahead = True
    size.refresh()
    size.learn_part(inside, 1.0, 1)

    assert size.part == half
