"""What of the way to a worker and back grows with the batch: learned of sizes, and 0 where it is a trifle."""

from __future__ import annotations

import random

import pytest

from carpool.policy.hop_cost import HopCost
from carpool.policy.shape import Shape
from carpool.simulate import run

BUSY_S = 0.001


def learned(fixed_s: float, unit_s: float, sizes: list[int], noise: float = 0.0) -> HopCost:
    way, rng = HopCost(), random.Random(1)
    for n in sizes:
        way.learn(n, (fixed_s + unit_s * n) * rng.uniform(1 - noise, 1 + noise), BUSY_S, 16, 1.0)
    return way


def test_a_way_that_grows_is_learned_from_batches_of_different_sizes() -> None:
    way = learned(0.002, 0.005, [16, 1, 8, 4] * 20, noise=0.1)

    assert way.unit_s == pytest.approx(0.005, rel=0.1)
    assert way.fixed_s == pytest.approx(0.002, abs=0.002)
    assert way.share > 0.8


def test_while_sizes_do_not_differ_all_of_a_long_way_is_taken_to_grow() -> None:
    """Else all batches would be large, and nobody would ever find out."""
    assert learned(0.08, 0.0, [16] * 10).share > 0.9


def test_that_a_way_does_not_grow_is_noticed_once_sizes_differ() -> None:
    way = learned(0.05, 0.0, [16] * 10 + [1, 2, 1, 3] * 10)

    assert way.share == 0.0
    assert way.fixed_s == pytest.approx(0.05, rel=0.05)


@pytest.mark.parametrize(("fixed_s", "unit_s"), [(0.0003, 0.0), (0.0003, 1e-6), (0.0, 0.0), (0.0002, 0.00004)])
def test_the_way_of_small_items_is_a_trifle(fixed_s: float, unit_s: float) -> None:
    assert learned(fixed_s, unit_s, [16, 1, 8, 4] * 5).share == 0.0


def test_what_a_service_does_for_each_small_item_is_a_trifle() -> None:
    """Ten microseconds for each of a hundred items are a millisecond, but nothing that travels."""
    assert learned(0.0002, 0.00001, [100] * 10).share == 0.0


def test_a_way_that_has_become_short_is_a_trifle() -> None:
    """A machine that was busy at first made each item seem large; batches are of one size."""
    assert learned(0.0, 0.0001, [100] * 5 + [64] * 60).share > 0.1
    way = learned(0.0, 0.0001, [100] * 5)
    for _ in range(60):
        way.learn(64, 0.00064, 0.0016, 100, 1.0)

    assert way.share == 0.0


def test_items_are_large_by_their_own_size() -> None:
    """Where items count as thousands of units, as of tokens, a unit is on its way for no time."""
    way = HopCost()
    for _ in range(10):
        way.learn(16_000, 0.08, BUSY_S, 16_000, 1_000.0)

    assert way.share > 0.9


def test_one_stall_does_not_make_a_way_long() -> None:
    way = learned(0.0003, 0.0, [16, 1, 8, 4] * 5)
    way.learn(16, 0.1, BUSY_S, 16, 1.0)

    assert way.share == 0.0


def test_a_part_of_times_that_turns_out_to_depend_on_the_size_is_split() -> None:
    """Batches of 8 were all that was seen, and their way was taken to be set-up."""
    shape = Shape(16)
    shape.start(8, 0.042)
    for _ in range(5):
        shape.add(8, 0.042, 0.0)
    shape.fit(0.0)
    assert shape.at[0] > 0.5 * shape.at[7]

    shape.split(0.04, 0.0, 0.005)
    shape.fit(0.0)

    assert shape.at[7] == pytest.approx(0.042, rel=0.01)
    assert shape.at[0] < 0.2 * shape.at[7]


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


def simulated(clients: int, policy: object = "adaptive", ahead: bool = True, **settings: object) -> tuple[float, float]:
    """The rate, and the mean size of batches."""
    given = {"slo_s": None, "duration_s": 10, "settle_s": 2, "runs_ahead": ahead, **settings}
    report = run(policy, f"closed:clients={clients},think=0s", **given)  # type: ignore[arg-type]
    return report.throughput, report.mean_batch_size


@pytest.mark.parametrize("slo_s", [None, 0.1])
def test_of_several_small_batches_one_travels_while_another_runs(slo_s: float | None) -> None:
    """What travels there and what travels back pass each other, so twice as much is done."""
    rate, size = simulated(16, slo_s=slo_s, **LARGE_ITEMS)
    others, _ = simulated(16, "greedy", slo_s=slo_s, **LARGE_ITEMS)

    assert rate > 1.8 * others
    assert size < 3


@pytest.mark.parametrize(("ahead", "clients"), [(False, 16), (True, 1)])
def test_where_nothing_can_overlap_batches_are_as_large_as_ever(
    ahead: bool, clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = simulated(clients, ahead=ahead, **LARGE_ITEMS)
    monkeypatch.setattr(HopCost, "learn", lambda *_: 0.0)

    assert found == simulated(clients, ahead=ahead, **LARGE_ITEMS)


@pytest.mark.parametrize(("clients", "settings"), [(64, TYPICAL), (128, MANY)])
def test_small_items_are_batched_as_if_their_way_did_not_grow(
    clients: int, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = simulated(clients, **settings)
    monkeypatch.setattr(HopCost, "learn", lambda *_: 0.0)

    assert found == simulated(clients, **settings)


def test_a_long_way_that_does_not_grow_is_a_reason_for_large_batches() -> None:
    _, size = simulated(16, cost="affine:a=0.1ms,b=0.01ms", hop_s=0.05)

    assert size > 8
