"""In a stage of single items each item is a batch in every count and time, in `stats()` and in `/metrics` alike."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from carpool import Service, Stage
from carpool.engine.observe.prometheus import render
from carpool.engine.observe.snapshot import StageSnapshot
from tests.support import models

ITEMS = 400


async def both_texts(stage: Stage) -> tuple[StageSnapshot, dict[str, float]]:
    """The numbers of a stage that has had `ITEMS` items, as `stats()` and as `/metrics` have them."""
    async with Service(stage).run_async() as handle:
        assert [y async for y in handle.stream(range(ITEMS))] == [2 * x for x in range(ITEMS)]
        snapshot = handle.stats().stages[0]
        body, _ = render([handle.driver.stats], 0.0)
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            if "le" not in sample.labels:
                samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
    return snapshot, samples


@pytest.mark.parametrize(
    "stage", [Stage(models.double), Stage(models.scale, max_batch_size=64)], ids=["one-item", "batched"]
)
def test_stats_and_metrics_agree_on_counts_and_times(stage: Stage) -> None:
    """Batches by size, by reason and by duration are equally many in both texts, and a mean times
    its count is the time that was spent.
    """
    snapshot, metrics = asyncio.run(both_texts(stage))
    assert snapshot.batches == sum(snapshot.batch_sizes.values()) == sum(snapshot.reasons.values())
    assert sum(size * count for size, count in snapshot.batch_sizes.items()) == ITEMS
    assert metrics["carpool_batch_size_count"] == snapshot.batches
    assert metrics["carpool_batch_size_sum"] == ITEMS
    assert metrics["carpool_batches_total"] == snapshot.batches
    assert metrics["carpool_batch_duration_seconds_count"] == snapshot.batches
    assert metrics["carpool_batch_duration_seconds_sum"] == pytest.approx(
        snapshot.mean_compute_s * snapshot.batches, rel=1e-9
    )
    if stage.max_batch_size is None:
        assert snapshot.batch_sizes == {1: ITEMS}
    else:
        assert snapshot.batches < ITEMS
