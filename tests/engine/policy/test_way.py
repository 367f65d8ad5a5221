"""What of the way to a worker and back grows with the batch, and the batches that overlap where it does."""

from __future__ import annotations

import random

import pytest

from carpool.engine.policy.cost import HopCost
from carpool.engine.policy.size import Sizes
from carpool.simulate import run


def learned(fixed_s: float, unit_s: float, sizes: list[int], noise: float = 0.0) -> HopCost:
    way, rng = HopCost(), random.Random(1)
    for n in sizes:
        way.learn(n, (fixed_s + unit_s * n) * rng.uniform(1 - noise, 1 + noise), False)
    return way


def test_a_way_that_grows_is_learned_from_batches_of_different_sizes() -> None:
    way = learned(0.002, 0.005, [16, 1, 8, 4] * 20, noise=0.1)

    assert way.unit_s == pytest.approx(0.005, rel=0.1)
    assert way.fixed_s == pytest.approx(0.002, abs=0.002)


def test_batches_of_one_size_say_nothing_of_a_slope() -> None:
    """One of half the size does, and what it has shown stays while sizes do not differ."""
    assert learned(0.08, 0.005, [16] * 100).unit_s == 0.0
    assert learned(0.08, 0.005, [16] * 100 + [8]).unit_s > 0.0025
    assert learned(0.08, 0.005, [16] * 100 + [8, 16, 8] + [16] * 200).unit_s == pytest.approx(0.005, rel=0.25)


def test_that_a_way_does_not_grow_is_noticed_once_sizes_differ() -> None:
    way = learned(0.0, 0.005, [16, 8] * 10)
    for n in (16, 8) * 30:
        way.learn(n, 0.05, False)

    assert way.unit_s == pytest.approx(0.0, abs=2e-4)
    assert way.fixed_s == pytest.approx(0.05, rel=0.05)


def test_one_stall_does_not_make_a_way_long() -> None:
    way = learned(0.0003, 0.0, [16, 1, 8, 4] * 5)
    way.learn(16, 0.1, False)

    assert way.seconds(16) < 0.0005


def test_a_way_that_has_become_long_is_noticed() -> None:
    """Whatever was believed before, a second long one is no stall."""
    way = learned(0.0003, 0.0, [16, 1, 8, 4] * 5)
    for n in (16, 1, 8, 4) * 10:
        way.learn(n, 0.1, False)

    assert way.seconds(8) == pytest.approx(0.1, rel=0.15)


def test_of_batches_ahead_only_the_part_counts_that_nothing_hides() -> None:
    """While all go ahead, what is known of the whole way fades, until one does not and measures it."""
    way = learned(0.002, 0.005, [16, 1, 8, 4] * 20)
    for _ in range(400):
        way.learn(16, 0.04, True)
    assert way.ahead_unit_s == pytest.approx(0.0025)
    assert way.seconds(16) < 0.5 * 0.082

    for n in (16, 8, 16):
        way.learn(n, 0.002 + 0.005 * n, False)
    assert way.seconds(16) > 0.7 * 0.082


# -- what comes of it

LARGE_ITEMS = {"cost": "affine:a=0.1ms,b=0.01ms", "hop_s": 0.0003, "hop_item_s": 0.005}
TYPICAL = {"cost": "affine:a=8ms,b=0.25ms", "hop_s": 0.0003, "hop_item_s": 0.00001}

MANY = {
    "cost": "affine:a=0.25ms,b=0.0225ms+noisy:sigma=0.1",
    "hop_s": 0.0002,
    "hop_item_s": 0.00001,
    "max_batch_size": 100,
    "duration_s": 1,
    "settle_s": 0.2,
}


def simulated(
    clients: int, policy: object = "adaptive", ahead: bool = True, think: str = "0s", **settings: object
) -> tuple[float, float]:
    """The rate, and the mean size of batches."""
    given = {"slo_s": None, "duration_s": 10, "settle_s": 2, "runs_ahead": ahead, **settings}
    report = run(policy, f"closed:clients={clients},think={think}", **given)  # type: ignore[arg-type]
    return report.throughput, report.mean_batch_size


@pytest.mark.parametrize("slo_s", [None, 0.1])
def test_of_several_small_batches_one_travels_while_another_runs(slo_s: float | None) -> None:
    """What travels there and what travels back pass each other, so twice as much is done."""
    rate, size = simulated(16, slo_s=slo_s, **LARGE_ITEMS)
    others, _ = simulated(16, "greedy", slo_s=slo_s, **LARGE_ITEMS)

    assert rate > 1.8 * others
    assert size < 9


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_where_two_full_batches_are_inside_one_travels_while_another_runs(seed: int) -> None:
    """To count the whole way as cost made batches of three and four, at half of the rate."""
    settings = {**LARGE_ITEMS, "cost": "affine:a=0.1ms,b=0.5ms", "max_batch_size": 8, "seed": seed}
    rate, _ = simulated(16, **settings)
    others, _ = simulated(16, "greedy", **settings)

    assert rate > 0.95 * others


@pytest.mark.parametrize("seed", [0, 1])
def test_where_two_full_batches_are_inside_they_overlap_from_the_third_batch_on(seed: int) -> None:
    """They do so while nothing is learned, and before it is known that they are of clients."""
    settings = {"cost": "affine:a=0.1ms,b=0.02ms", "max_batch_size": 100, "settle_s": 0, "seed": seed}
    rate, _ = simulated(400, think="1ms,think=exponential", **LARGE_ITEMS | settings)
    others, _ = simulated(400, "greedy", think="1ms,think=exponential", **LARGE_ITEMS | settings)

    assert rate > 0.95 * others


@pytest.mark.parametrize(("ahead", "clients"), [(False, 16), (True, 1)])
def test_where_nothing_can_overlap_batches_are_as_large_as_ever(
    ahead: bool, clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = simulated(clients, ahead=ahead, **LARGE_ITEMS)
    monkeypatch.setattr(Sizes, "learn_part", lambda *_: None)

    assert found == simulated(clients, ahead=ahead, **LARGE_ITEMS)


@pytest.mark.parametrize(("clients", "settings"), [(64, TYPICAL), (128, MANY)])
def test_small_items_are_batched_as_if_their_way_did_not_grow(
    clients: int, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = simulated(clients, **settings)
    monkeypatch.setattr(Sizes, "learn_part", lambda *_: None)

    assert found == simulated(clients, **settings)


def test_a_long_way_that_does_not_grow_is_a_reason_for_large_batches() -> None:
    _, size = simulated(16, cost="affine:a=0.1ms,b=0.01ms", hop_s=0.05)

    assert size > 8
