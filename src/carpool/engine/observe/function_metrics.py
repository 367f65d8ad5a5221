"""The numbers of batch functions as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric

from carpool.engine.observe.function_stats import FunctionSnapshot
from carpool.engine.observe.prometheus import size_buckets

_FUNCTION = ("function",)


def function_metrics(snapshots: Sequence[FunctionSnapshot]) -> Iterator[Metric]:
    """Yield every metric, each with all functions."""
    yield from _calls(snapshots)
    yield from _times(snapshots)


def _calls(snapshots: Sequence[FunctionSnapshot]) -> Iterator[Metric]:
    calls = CounterMetricFamily(
        "carpool_function_calls", "Items that have an end, by what became of them.", labels=("function", "outcome")
    )
    waiting = GaugeMetricFamily("carpool_function_waiting", "Items that wait for their batch.", labels=_FUNCTION)
    running = GaugeMetricFamily("carpool_function_running", "Items in batches that run now.", labels=_FUNCTION)
    sizes = HistogramMetricFamily("carpool_function_batch_size", "Items in a call of the function.", labels=_FUNCTION)
    for seen in snapshots:
        for outcome, count in (("ok", seen.ok), ("error", seen.errors), ("cancelled", seen.cancelled)):
            calls.add_metric((seen.name, outcome), count)
        waiting.add_metric((seen.name,), seen.waiting)
        running.add_metric((seen.name,), seen.running)
        sizes.add_metric((seen.name,), size_buckets(seen.batch_sizes), seen.items)
    yield from (calls, waiting, running, sizes)


def _times(snapshots: Sequence[FunctionSnapshot]) -> Iterator[Metric]:
    latency = SummaryMetricFamily(
        "carpool_function_latency_seconds", "Time from a call to its answer without an error.", labels=_FUNCTION
    )
    queue = SummaryMetricFamily(
        "carpool_function_queue_seconds",
        "Time from the arrival of an item to the start of its batch.",
        labels=_FUNCTION,
    )
    compute = SummaryMetricFamily(
        "carpool_function_compute_seconds", "Time of a call of the function.", labels=_FUNCTION
    )
    for seen in snapshots:
        latency.add_metric((seen.name,), seen.ok, seen.latency_s)
        queue.add_metric((seen.name,), seen.items, seen.queue_s)
        compute.add_metric((seen.name,), seen.batches, seen.compute_s)
    yield from (latency, queue, compute)
