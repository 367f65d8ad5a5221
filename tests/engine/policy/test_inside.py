"""How many requests are inside, and whether that is always the same number."""

from __future__ import annotations

import random

import pytest

from carpool.engine.policy.clients import Inside
from tests.effort import share


def test_clients_that_come_back_at_once_are_known_to_be_inside() -> None:
    """Once the number inside has been the same for some batches, it is known when all are there."""
    inside = Inside()
    assert not inside.are_all(256)
    for _ in range(40):
        inside.note(256, 1)
    assert inside.are_all(256)
    assert inside.are_all(253)
    assert not inside.are_all(200)
    assert not inside.are_all(300)  # then others have come


def test_batches_that_end_together_do_not_matter() -> None:
    """Where several workers end soon after each other, clients of the first are still outside then."""
    inside = Inside()
    for _ in range(40):
        for n in (156, 256, 170, 100):
            inside.note(n, 2)
    assert inside.are_all(256)
    assert not inside.are_all(170)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("mean", [1, 16, 256, 1000])
def test_other_traffic_is_never_known_to_be_inside(mean: int, workers: int) -> None:
    """Where requests come by themselves, the number inside scatters at least as a Poisson count
    does, so that there is no telling that no more will come.
    """
    dice = random.Random(mean)
    inside = Inside()
    for _ in range(share(1000) * workers):
        count = sum(dice.random() < mean / 4000 for _ in range(4000))
        assert not inside.are_all(count)
        inside.note(count, workers)


def test_lone_requests_are_no_clients_in_a_circle() -> None:
    """Where nearly all requests are alone, two of them are not all that there are."""
    dice = random.Random(3)
    inside = Inside()
    for _ in range(2000):
        count = 2 if dice.random() < 0.01 else 1
        assert count == 1 or not inside.are_all(count)
        inside.note(count, 1)
