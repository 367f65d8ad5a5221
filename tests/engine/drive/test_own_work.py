"""What the coordinator works for a request and for a batch is found again in sums of both."""

from __future__ import annotations

from random import Random

import pytest

from carpool.engine.drive.loop_thread import OwnWork


def learned(request_s: float, batch_s: float, sizes: list[float], noise: float = 0.0) -> OwnWork:
    """After sums over a hundred batches of each of the sizes in turn."""
    work, dice = OwnWork(), Random(1)
    for i in range(200):
        requests = round(100 * sizes[i % len(sizes)])
        work.learn((request_s * requests + batch_s * 100) * dice.gauss(1.0, noise), requests, 100)
    return work


@pytest.mark.parametrize(("request_s", "batch_s"), [(12e-6, 63e-6), (12e-6, 300e-6), (30e-6, 63e-6), (0.0, 1e-3)])
def test_both_numbers_are_found_where_sizes_differ(request_s: float, batch_s: float) -> None:
    """Where batches of several sizes are seen, work is divided as it was, also with some noise."""
    work = learned(request_s, batch_s, [1, 4, 16, 64], noise=0.02)

    assert work.request_s == pytest.approx(request_s, rel=0.1, abs=2e-6)
    assert work.batch_s == pytest.approx(batch_s, rel=0.2)


def test_one_size_says_nothing_of_how_work_divides() -> None:
    """With batches of one size a batch counts as five requests, and the work of one is as it was."""
    work = learned(1e-3, 3e-3, [7])

    assert work.batch_s == pytest.approx(5.0 * work.request_s)
    assert 7 * work.request_s + work.batch_s == pytest.approx(7 * 1e-3 + 3e-3)


def test_neither_number_is_negative() -> None:
    """Work that falls with the number of requests, or with that of batches, counts for the other alone."""
    falls, fewer = OwnWork(), OwnWork()
    for _ in range(50):
        for requests, seconds in ((100, 5e-3), (6400, 4e-3)):
            falls.learn(seconds, requests, 100)
        for batches, seconds in ((100, 50e-3), (10, 60e-3)):
            fewer.learn(seconds, 1000, batches)

    assert falls.request_s == 0.0 < falls.batch_s
    assert fewer.batch_s == 0.0 < fewer.request_s


def test_numbers_follow_what_changes_and_no_time_teaches_nothing() -> None:
    """Work that takes twice as long from some time on is known after a hundred sums; no time is no sum."""
    work = learned(10e-6, 50e-6, [2, 8])
    for i in range(100):
        work.learn(2 * (10e-6 * 100 * (2, 8)[i % 2] + 50e-6 * 100), 100 * (2, 8)[i % 2], 100)
    found = work.request_s, work.batch_s
    work.learn(0.0, 100, 100)
    work.learn(-1.0, 100, 100)

    assert found == pytest.approx((20e-6, 100e-6), rel=0.02)
    assert (work.request_s, work.batch_s) == found
