"""Costs of batches and weights of requests: curves by hand, disturbances on the mean."""

from __future__ import annotations

from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from carpool.simulate import (
    Affine,
    Drifting,
    Grid,
    Knee,
    Noisy,
    Padded,
    Pareto,
    SortedInside,
    Sqrt,
    Table,
    Tile,
    capacity,
)
from carpool.simulate.costs import BatchShape, Cost, cost_of
from carpool.simulate.features import weights_of


@pytest.mark.parametrize(
    ("cost", "n", "seconds"),
    [
        (Affine(8, 0.25), 4, 9),
        (Tile(3, 4, 16), 16, 7),
        (Tile(3, 4, 16), 17, 11),
        (Sqrt(5), 9, 15),
        (Knee(8, 0.25, 32, 0.9), 32, 16),
        (Knee(8, 0.25, 32, 0.9), 34, 18.3),
        (Table({1: 8, 9: 10, 17: 20}), 1, 8),
        (Table({1: 8, 9: 10, 17: 20}), 5, 9),
        (Table({1: 8, 9: 10, 17: 20}), 9, 10),
        (Table({1: 8, 9: 10, 17: 20}), 13, 15),
        (Table({1: 8, 9: 10, 17: 20}), 25, 30),
        (Table({4: 8}), 64, 8),
        (cost_of(lambda n: 2 * n), 3, 6),
        (cost_of({1: 1.0, 3: 2.0}), 2, 1.5),
        (Noisy(Affine(8, 0.25), 0.3), 4, 9),
        (Drifting(Affine(8, 0.25), (2, 3)), 4, 9),
    ],
    ids=str,
)
def test_curves(cost: Cost, n: float, seconds: float) -> None:
    """Cost curves have the values that were computed by hand, and disturbances do not show in them."""
    assert cost(n) == pytest.approx(seconds)


def test_noise_has_mean_one_and_stalls_come_on_top() -> None:
    """Noise has mean one and stalls come on top: one of five times in 1 % of the batches adds 4 %."""
    dice = Random(1)
    seconds = Noisy(Affine(1.0, 0.0), 0.25).over(10)
    stalling = Noisy(Affine(1.0, 0.0), 0.0, 0.01, 5).over(10)

    assert fmean(seconds(BatchShape(1), 0, dice) for _ in range(20_000)) == pytest.approx(1.0, rel=0.01)
    assert fmean(stalling(BatchShape(1), 0, dice) for _ in range(40_000)) == pytest.approx(1.04, rel=0.01)


def test_drift_comes_in_equal_parts() -> None:
    """Drift divides the run into equal parts, and its last factor goes on after the arrivals."""
    seconds = Drifting(Affine(1.0, 0.0), (1.0, 1.8, 1.2)).over(30)

    assert [seconds(BatchShape(1), now, Random(0)) for now in (0, 9.9, 10, 19.9, 20, 29.9, 35)] == [
        1,
        1,
        1.8,
        1.8,
        1.2,
        1.2,
        1.2,
    ]


def test_a_function_may_know_the_time_and_throw_dice() -> None:
    """Of a cost function that knows the time and throws dice, its mean counts as the undisturbed
    cost.
    """
    cost = cost_of(lambda n, now, rng: n * rng.choice([1.0, 3.0]) + now)

    assert cost(10) == pytest.approx(20, rel=0.3)
    assert cost.over(1)(BatchShape(1), 100.0, Random(0)) in (101, 103)


@pytest.mark.parametrize(
    ("cost", "n", "longest", "seconds"),
    [
        (Padded(2, 3), 4, 5, 2 + 4 * 5 * 3),
        (Padded(2, 3, 0.5, 0.25), 4, 5, 2 + 4 * (5 * 3 + 25 * 0.5 + 0.25)),
        (Grid({(1, 1): 1, (1, 5): 5, (9, 1): 9, (9, 5): 21}), 5, 3, 9),
        (Grid({(1, 1): 1, (1, 5): 5, (9, 1): 9, (9, 5): 21}), 1, 7, 7),
        (Grid({(1, 1): 1, (1, 5): 5, (9, 1): 9, (9, 5): 21}), 13, 1, 13),
        (SortedInside(Padded(2, 3), 8), 20, 5, 3 * 2 + 20 * 5 * 3),
        (Noisy(Padded(2, 3), 0.3), 4, 5, 62),
        (Affine(8, 0.25), 4, 500, 9),
        (cost_of(lambda n, longest: n * longest), 3, 7, 21),
        (cost_of(lambda n, longest, now, rng: n * longest + rng.choice([2.0, 2.0])), 3, 7, 23),
    ],
    ids=str,
)
def test_curves_over_size_and_length(cost: Cost, n: float, longest: float, seconds: float) -> None:
    """Costs of padded batches have the values that were computed by hand, and other curves ignore
    the length.
    """
    assert cost(n, longest) == pytest.approx(seconds)


def test_code_that_sorts_inside_pads_each_part_to_its_own_longest() -> None:
    """A batch that is sorted inside costs its parts, shortest first, and computes their padding
    only.
    """
    cost = cost_of("padded:a=1s,b=1s+sorted:2")
    work = BatchShape(5, 9, [9, 1, 3, 2, 4])

    assert cost.over(1)(work, 0.0, Random(0)) == (1 + 2 * 2) + (1 + 2 * 4) + (1 + 9)
    assert cost.computed(work) == 4 + 8 + 9
    assert cost_of("padded:a=1s,b=1s").computed(work) == 45


def test_a_table_from_a_file_and_in_words(tmp_path: Path) -> None:
    """A table of costs is read from a file or from words, with a line of names or without."""
    named, bare = tmp_path / "named.csv", tmp_path / "bare.csv"
    named.write_text("n,seconds\n1,0.008\n64,0.024\n")
    bare.write_text("1,0.008\n64,0.024\n")

    for cost in (cost_of(f"table:{named}"), cost_of(f"table:{bare}"), cost_of("table:1=8ms,64=24ms")):
        assert repr(cost) == "Table({1: 0.008, 64: 0.024})"


def test_a_table_by_size_and_length_from_a_file_and_in_words(tmp_path: Path) -> None:
    """A table with a third column, or whose words have an x, is one by size and length."""
    path = tmp_path / "costs.csv"
    path.write_text("n,length,seconds\n1,16,0.008\n1,128,0.009\n64,16,0.02\n64,128,0.09\n")
    words = "table:1x16=8ms,1x128=9ms,64x16=20ms,64x128=90ms"

    for cost in (
        cost_of(f"table:{path}"),
        cost_of(words),
        cost_of({(1, 16): 0.008, (1, 128): 0.009, (64, 16): 0.02, (64, 128): 0.09}),
    ):
        assert (cost(1, 16), cost(64, 72)) == pytest.approx((0.008, 0.055))


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("table:1x16=8ms,64x128=90ms", "1 items of length 128 are missing"),
        ("table:1x16=8ms,64=90ms", "needs both of them"),
        ("table:0x16=8ms", "at least 1"),
        ("table:1x16=-8ms", "cannot be negative"),
        ("padded:a=2ms", "it needs b too"),
        ("padded:a=2ms,b=1ms+sorted:0", "size must be at least 1"),
    ],
)
def test_bad_costs_of_padded_batches(table: str, told: str) -> None:
    """What is wrong with a cost of padded batches is said."""
    with pytest.raises(ValueError, match=told):
        cost_of(table)


def test_bad_tables(tmp_path: Path) -> None:
    """A table with sizes below 1, with nothing in it or with words for numbers is refused."""
    odd = tmp_path / "odd.csv"
    odd.write_text("1,slow\n")

    for bad in ({}, {0: 1.0}, {1: -1.0}):
        with pytest.raises(ValueError, match="a cost table needs sizes of at least 1"):
            Table(bad)
    with pytest.raises(ValueError, match="is not a cost table"):
        Table(path=str(odd))


def test_capacity_is_that_of_the_best_batch() -> None:
    """The capacity is that of the slowest stage with its best batch size, times its workers."""
    assert capacity("affine:a=8ms,b=0.25ms", 64) == pytest.approx(64 / 0.024)
    assert capacity("affine:a=8ms,b=0.25ms", 64, workers=2) == pytest.approx(128 / 0.024)
    assert capacity(Knee(0.008, 0.00025, 32, 0.0009), 64) == pytest.approx(2000)
    assert capacity(["affine:a=1ms,b=0s", "affine:a=2ms,b=0s"], [10, 4], [1, 3]) == pytest.approx(6000)


def test_capacity_of_requests_with_lengths_is_that_of_equal_ones() -> None:
    """Where requests have lengths the capacity is that of batches of equal length, in the mean."""
    lengths = "bimodal:short=10,long=50,long_share=0.5,spread=0,long_spread=0"

    assert capacity("padded:a=0s,b=1ms", 8, lengths=lengths) == pytest.approx(1000 / 30, rel=0.05)
    assert capacity("affine:a=8ms,b=0.25ms", 64, lengths=lengths) == pytest.approx(64 / 0.024)


def test_a_heavy_tail_has_mean_one() -> None:
    """A heavy tail has mean one, cap and all, and half of the weights are far below that."""
    weights = Pareto(1.7, 50)
    dice = Random(3)
    found = sorted(weights.draw(dice) for _ in range(100_000))

    assert fmean(found) == pytest.approx(1.0, rel=0.03)
    assert found[-1] == 50 and found[len(found) // 2] < 0.7
    assert Pareto(1.0, 50).draw(Random(0)) > 0
    assert weights_of("pareto:shape=1.7,cap=50") == weights


@pytest.mark.parametrize("weights", ["pareto:shape=0", "pareto:cap=1", "normal", [], [1.0, -1.0]])
def test_bad_weights(weights: object) -> None:
    """Weights that cannot be are refused with their value."""
    with pytest.raises(ValueError, match=r"pareto|weights"):
        weights_of(weights)
