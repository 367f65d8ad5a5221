"""How many to take: by the closed form, to the end of a tile, up to a knee; and the probes that find these."""

from __future__ import annotations

from math import sqrt

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from carpool.policy.batch_size import BatchSize
from carpool.policy.cost import CostModel
from carpool.simulate import Affine, Cost, Tile
from tests.effort import examples
from tests.policy.learned import FIXED, KNEE, TILES, learned
from tests.support.properties import PROPERTY

BALANCED = Affine(0.002, 0.001)


def sized(cost: CostModel) -> BatchSize:
    """The chooser of sizes for this cost."""
    size = BatchSize(cost)
    size.refresh()
    return size


def chosen(size: BatchSize, waiting: int, load: float) -> int:
    """The size for so many, by one worker."""
    return size.choose(waiting, size.most(waiting), load, size.capacity)


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

    assert (size.working, size.best) == (working, working)
    assert size.capacity == pytest.approx(working / cost(working), rel=0.001)


def bending(loss: float, limit: int = 64) -> CostModel:
    """Best at 32; up to the limit efficiency falls by `loss`."""
    return learned(lambda n: 0.016 if n <= 32 else 0.0005 * n / (1 - loss * (n - 32) / (limit - 32)), limit)


def test_the_working_size_stays_while_it_is_good() -> None:
    """The working size stays while it is within one percent of the best; otherwise the smallest
    size of nearly the best efficiency takes its place.
    """
    assert sized(bending(0.008)).working == 64
    assert sized(bending(0.03)).working == 32


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
    assert size.working == 32


def test_noise_makes_the_working_size_larger() -> None:
    """Where noise hides which size is best, the working size is the largest of those that may be."""
    cost = bending(0.03)
    for n in [*range(1, 65)] * 20:
        for factor in (1.15, 1 / 1.15):
            cost.add(n, cost.seconds(n) * factor)

    assert cost.cv > 0.1
    assert sized(cost).working > 50


def test_a_little_more_than_the_working_size_goes_along() -> None:
    """Up to a quarter more than the working size goes in one batch, as far as that is no less
    efficient.
    """
    size = sized(
        learned(lambda n: 0.016 if n < 32 else n / 2000 / (1.004 if 33 <= n <= 40 else 1.0 if n == 32 else 0.97))
    )
    assert (size.working, size.best) == (32, 40)

    assert [size.most(n) for n in (31, 32, 33, 40, 41, 100)] == [32, 32, 33, 40, 32, 32]
    assert sized(learned(KNEE)).most(33) == 32


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
    least = min(delay(cost, waiting, k, load, size.capacity) for k in range(1, waiting + 1))

    assert 1 <= n <= waiting
    assert delay(cost, waiting, n, load, size.capacity) <= least / 0.985


@examples(100, derandomize=True)
@given(st.lists(st.floats(0.0001, 0.01), min_size=24, max_size=24), st.integers(1, 24), st.floats(0, 0.95))
def test_no_choice_is_worse_than_all(steps: list[float], waiting: int, load: float) -> None:
    """Whatever the curve, the chosen size has no larger expected delay than taking all."""
    sums = [sum(steps[:n]) for n in range(1, 25)]
    model = learned(lambda n: sums[int(n) - 1], limit=24, batches=480)
    size = sized(model)
    everything = min(waiting, size.most(waiting))
    n = chosen(size, waiting, load)

    def expected(n: int) -> float:
        return waiting * (model.seconds(n) - n / size.capacity) / ((1 - load) * n) + n / (2 * size.capacity)

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
        for factor in (1.1, 1 / 1.1):
            cost.add(n, BALANCED(n) * factor)
    assert chosen(sized(cost), 12, 0.3) == 12


# -- probes


def test_without_a_backlog_nothing_is_tried() -> None:
    """Without a backlog no size is tried in place of a batch below the working size, and none with
    requests that lack the time.
    """
    cost = learned(FIXED, sizes=(4, 8, 16), batches=400)
    size = sized(cost)
    size.working = 16

    assert size.probe(16, 16, 1.0) == 16
    assert size.probe(8, 100, 1.0) == 8
    assert size.probe(16, 100, FIXED(17)) < 16
    assert size.probe(16, 100, 0.0) == 16
    assert size.probe(16, 100, 1.0) > 16


def test_below_the_working_size_the_end_of_a_tile_is_looked_for() -> None:
    """Below the working size the end of a tile is looked for once: nine take two tiles of four and
    a third, and eight might take no longer than seven.
    """
    tiles = Tile(0.029, 0.007, 4)
    cost = learned(tiles, limit=32, sizes=(7, 9, 32), batches=300)
    size = sized(cost)

    assert chosen(size, 9, 1.0) == 8
    cost.add(8, tiles(8) * 9 / 8)  # it would not have been worth it
    size.completed()
    assert chosen(size, 9, 1.0) == 9


def test_amid_a_backlog_no_smaller_size_is_hoped_for() -> None:
    """Amid a backlog sizes near the working size are tried instead of smaller ones, since that
    brings more.
    """
    cost = learned(Tile(0.029, 0.007, 4), limit=32, sizes=(7, 9), batches=300)
    size = sized(cost)
    size.working = 9

    assert chosen(size, 9, 1.0) == 9


def test_asking_is_not_trying() -> None:
    """Asked repeatedly for a size to try, the same one is named until a batch is done; then there
    is a pause.
    """
    cost = learned(FIXED, sizes=(4, 8, 16), batches=400)
    size = sized(cost)
    size.working = 16
    first = size.probe(16, 100, 1.0)

    assert first != 16
    assert [size.probe(16, 100, 1.0) for _ in range(5)] == [first] * 5
    cost.add(first, FIXED(first))
    size.completed()
    assert size.probe(16, 100, 1.0) == 16


def backlogged(cost: Cost, size: BatchSize, model: CostModel, batches: int) -> list[int]:
    """The sizes of so many batches while a lot waits."""
    sizes = []
    for _ in range(batches):
        size.refresh()
        n = size.probe(size.choose(1000, size.most(1000), 1.5, size.capacity), 1000, 10.0)
        model.add(n, cost(n))
        size.completed()
        sizes.append(n)
    return sizes


@pytest.mark.parametrize("knee", [20, 24, 32, 40, 48])
def test_a_knee_is_found(knee: int) -> None:
    """From full batches, which are far beyond it, the knee is found within two hundred, and then
    nearly all is served that can be.
    """

    def cost(n: float) -> float:
        return 0.008 + 0.00025 * n + 0.0009 * max(0.0, n - knee)

    model = learned(cost, sizes=(1, 4), batches=8)
    size = BatchSize(model)
    assert 64 / cost(64) < 0.7 * knee / cost(knee)
    backlogged(cost, size, model, 200)
    sizes = backlogged(cost, size, model, 100)

    assert sum(sizes) / sum(map(cost, sizes)) > 0.92 * knee / cost(knee)


def test_probes_become_rare() -> None:
    """When all sizes near are known, one is tried only once in a while."""
    model = learned(KNEE, sizes=(1, 4), batches=8)
    size = BatchSize(model)
    backlogged(KNEE, size, model, 500)
    sizes = backlogged(KNEE, size, model, 1000)

    assert sum(n != size.working for n in sizes) < 20


def test_a_knee_that_moves_is_noticed() -> None:
    """When memory has become free, so that 32 is no longer the best size, larger ones win as soon
    as old samples have aged.
    """
    model = learned(KNEE, sizes=(1, 4), batches=8)
    size = BatchSize(model)
    backlogged(KNEE, size, model, 300)
    assert 30 <= size.working <= 34
    backlogged(FIXED, size, model, 2000)

    assert size.working > 38


@PROPERTY
@given(st.integers(1, 64), st.integers(1, 200), st.integers(1, 64), st.floats(0, 0.2))
def test_a_probe_is_possible(working: int, waiting: int, n: int, slack_s: float) -> None:
    """A size that is tried is no larger than what waits and what may go, and fits into the time
    there is.
    """
    cost = learned(FIXED, sizes=(4, 8, 16), batches=60)
    size = sized(cost)
    size.working = working
    assume(n <= waiting)
    probe = size.probe(n, waiting, slack_s)

    assert 1 <= probe <= min(waiting, 64)
    assert probe == n or (cost.seconds(probe) <= slack_s and n >= working and waiting > n)


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
