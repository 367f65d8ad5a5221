"""Thousands of keys in a running service: every answer is right, no batch is mixed, nothing slows down."""

from __future__ import annotations

import time

import pytest

import carpool

KEYS = 10_000


class OfOneKey(carpool.Model):
    """Answers with the key and the number of an item, or with an error if a batch has several keys."""

    def predict(self, items: list[tuple[int, int]]) -> list[tuple[int, int]]:
        if len({key for key, _ in items}) > 1:
            raise RuntimeError(f"a batch has several keys: {items}")
        return items


def first(item: tuple[int, int]) -> int:
    """The key of an item."""
    return item[0]


@pytest.mark.slow
def test_ten_thousand_keys_in_turn_get_their_own_answers() -> None:
    """Requests with ten thousand keys in turn, many of which wait side by side, get their own
    answers in order, from batches of one key, and the last thousand take about as long as the first.
    """
    stage = carpool.Stage(OfOneKey, max_batch_size=32, workers=2, run_in="thread", key=first)
    items = [(i % KEYS, i) for i in range(2 * KEYS)]
    with carpool.Service(stage, name="keyed").run() as service:
        list(service.stream(items[:1000]))
        took = []
        for begin in range(0, len(items), KEYS // 2):
            some = items[begin : begin + KEYS // 2]
            started = time.perf_counter()
            assert [tuple(answer) for answer in service.stream(some)] == some
            took.append(time.perf_counter() - started)

    assert took[-1] < 5 * took[0]  # it would be many times as long if keys that have gone were kept
