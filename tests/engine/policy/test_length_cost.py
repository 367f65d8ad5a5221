"""The cost of batches by count and longest length, learned from few samples."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import fmean

import pytest

from carpool.engine.policy.length_cost import LengthCost, padded

Curve = Callable[[float, float], float]

CURVES: dict[str, Curve] = {
    "padded": lambda n, length: 2e-3 + 20e-6 * n * length,
    "setup": lambda n, length: 12e-3 + 7e-6 * n * length,
    "square": lambda n, length: 2e-3 + 10e-6 * n * length + 3e-7 * n * length * length,
    "per item": lambda n, length: 1e-3 + 1e-3 * n + 5e-6 * n * length,
}


def learned(curve: Curve, samples: int, noise: float = 0.0, seed: int = 1) -> LengthCost:
    """A cost that has seen batches of several counts and lengths."""
    dice, cost = random.Random(seed), LengthCost()
    for _ in range(samples):
        n, length = dice.choice([1, 4, 8, 16, 32]), dice.choice([5, 10, 20, 40, 80, 160])
        cost.add(n, length, curve(n, length) * dice.lognormvariate(0.0, noise))
    return cost


def worst(cost: LengthCost, curve: Curve) -> float:
    """The largest factor by which the cost is wrong, between and a little beyond what was seen."""
    shapes = [(n, length) for n in (1, 2, 12, 32) for length in (5, 30, 100, 200)]
    ratios = [cost.seconds(n, length) / curve(n, length) for n, length in shapes]
    return max(max(ratio, 1 / ratio) for ratio in ratios)


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_is_learned_from_few_samples(name: str) -> None:
    """Sixteen batches without noise show the curve to 5 %, hundreds with noise to 25 %."""
    assert worst(learned(CURVES[name], 16), CURVES[name]) < 1.05
    assert worst(learned(CURVES[name], 400, noise=0.2), CURVES[name]) < 1.25


def test_no_part_of_a_cost_is_negative() -> None:
    """More items and longer ones never cost less, whatever was measured."""
    dice = random.Random(3)
    for seed in range(20):
        cost = LengthCost()
        for _ in range(30):
            cost.add(dice.randint(1, 32), dice.randint(1, 300), dice.expovariate(100.0 + seed))
        costs = [cost.seconds(n, length) for n in (1, 8, 32) for length in (1, 50, 300)]
        assert all(seconds > 0 for seconds in costs)
        for n in (1, 8, 32):
            row = [cost.seconds(n, length) for length in (1, 50, 300)]
            assert row == sorted(row)


def test_a_machine_that_slows_down_is_followed() -> None:
    """If all batches take twice as long, expectations are about right again after some batches."""
    curve = CURVES["padded"]
    cost, dice = learned(curve, 200, noise=0.1), random.Random(2)
    for _ in range(30):
        n, length = dice.choice([4, 8, 16]), dice.choice([10, 40, 160])
        cost.add(n, length, 2 * curve(n, length) * dice.lognormvariate(0.0, 0.1))
    assert worst(cost, lambda n, length: 2 * curve(n, length)) < 1.35


def test_one_stall_is_not_believed() -> None:
    """One batch that takes far longer than ever changes little."""
    curve = CURVES["padded"]
    cost = learned(curve, 200, noise=0.1)
    before = cost.seconds(8, 40)
    cost.add(8, 40, 20 * before)
    assert cost.seconds(8, 40) < 1.1 * before


def test_shapes_that_the_model_pads_to_cost_the_same() -> None:
    """Counts and lengths that are padded up to the same shape cost the same."""
    cost = LengthCost([1, 4, 8], [16, 64])
    for n, length in [(1, 16), (4, 16), (8, 64), (4, 64), (8, 16)] * 4:
        cost.add(n, length, 1e-3 + 1e-5 * n * length)
    assert cost.seconds(3, 10) == cost.seconds(4, 16) == pytest.approx(1e-3 + 64e-5, rel=0.05)
    assert cost.seconds(5, 40) == cost.seconds(8, 64)
    assert [padded(value, [16, 64]) for value in (1, 16, 17, 64, 100)] == [16, 16, 64, 64, 64]


@pytest.mark.parametrize("allowed_lengths", [None, [16, 64, 256]])
def test_a_batch_takes_its_setup_and_the_seconds_of_its_items(allowed_lengths: list[int] | None) -> None:
    """What a batch takes is the setup and what each item takes at its length, padded up or not."""
    cost = LengthCost(None, allowed_lengths)
    for n in (1, 4, 16, 32):
        for length in (5, 20, 100, 250):
            cost.add(n, length, 2e-3 + 20e-6 * n * length + 1e-7 * n * length * length)
    lengths = [3, 17, 80, 200]
    found = [cost.setup_s + 7 * item_s for item_s in cost.item_s_at(lengths)]
    assert found == pytest.approx([cost.seconds(7, length) for length in lengths])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_a_warm_up_has_found_stays_right_beside_noisy_batches(seed: int) -> None:
    """A warm-up without noise and noisy batches agree on what a call costs beside its items."""
    dice = random.Random(seed)
    cost = LengthCost()
    for n in (1, 8, 16, 32) * 2:
        for length in (8, 11, 220):
            cost.add(n, length, 2e-3 + 20e-6 * n * length)
    calls = []
    for _ in range(400):
        n, length = dice.choice([(32, 10), (32, 12), (30, 14), (24, 200), (28, 220)])
        cost.add(n, length, (2e-3 + 20e-6 * n * length) * dice.lognormvariate(-0.02, 0.2))
        calls.append(cost.setup_s / cost.item_s_at([100])[0])
    assert fmean(calls) < 1.08 * 2e-3 / (20e-6 * 100)
