"""The counters in Prometheus' words. One collector in the parent; workers report in their replies.

Labels come from closed sets (models and stages as declared, outcomes, reasons, worker states), so no client can make
series.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from carpool.observe.stats import DURATION_BOUNDS, Durations, StageStats, Stats

_STAGE = ("model", "stage")


def render(services: Sequence[Stats], accept: str = "") -> tuple[bytes, str]:
    """The present numbers of all services, and their content type, in the format that `accept` asks for."""
    registry = CollectorRegistry()
    registry.register(_Services(services))
    encode, content_type = exposition.choose_encoder(accept)
    return encode(registry), content_type


class _Services(Collector):
    def __init__(self, services: Sequence[Stats]) -> None:
        self._services = services

    def collect(self) -> Iterable[Metric]:
        """Every metric of every service and stage."""
        yield from _requests(self._services)
        stages = [(stats.name, stage) for stats in self._services for stage in stats.stages]
        yield from _queues(stages)
        yield from _batches(stages)
        yield from _workers(stages)


_Stages = list[tuple[str, StageStats]]


def _requests(services: Sequence[Stats]) -> Iterator[Metric]:
    outcomes = CounterMetricFamily("carpool_requests", "Requests by what became of them.", labels=("model", "outcome"))
    latency = HistogramMetricFamily(
        "carpool_request_duration_seconds", "From admission to a good answer.", labels=("model",)
    )
    in_flight = GaugeMetricFamily(
        "carpool_in_flight_requests", "Admitted requests whose callers still wait.", labels=("model",)
    )
    on_time = CounterMetricFamily(
        "carpool_requests_within_slo", "Good answers within the service's slo_s.", labels=("model",)
    )
    for stats in services:
        for outcome, count in {**stats.outcomes, "cancelled": stats.cancelled}.items():
            outcomes.add_metric((stats.name, outcome), count)
        latency.add_metric((stats.name,), _buckets(stats.latency), stats.latency.sum_s)
        in_flight.add_metric((stats.name,), stats.pipeline.unanswered)
        if stats.slo_s is not None:
            on_time.add_metric((stats.name,), stats.within_slo)
    yield from (outcomes, latency, in_flight, on_time)


def _queues(stages: _Stages) -> Iterator[Metric]:
    length = GaugeMetricFamily("carpool_queue_length", "Requests that wait for a worker.", labels=_STAGE)
    nbytes = GaugeMetricFamily("carpool_queue_bytes", "Bytes that wait for a worker.", labels=_STAGE)
    waited = HistogramMetricFamily(
        "carpool_queue_duration_seconds", "From a request's arrival in a stage to its batch.", labels=_STAGE
    )
    for model, stage in stages:
        labels = (model, stage.name)
        length.add_metric(labels, len(stage.batcher.queue))
        nbytes.add_metric(labels, stage.batcher.queue.nbytes)
        waited.add_metric(labels, _buckets(stage.queue_time), stage.queue_time.sum_s)
    yield from (length, nbytes, waited)


def _batches(stages: _Stages) -> Iterator[Metric]:
    sizes = HistogramMetricFamily("carpool_batch_size", "Requests per call of the model.", labels=_STAGE)
    reasons = CounterMetricFamily(
        "carpool_batches", "Batches by why they went when they did.", labels=(*_STAGE, "reason")
    )
    compute = HistogramMetricFamily("carpool_batch_duration_seconds", "Time of a batch in its worker.", labels=_STAGE)
    padding = CounterMetricFamily("carpool_padding", "Items added to batches to reach an allowed size.", labels=_STAGE)
    running = GaugeMetricFamily("carpool_in_flight_batches", "Batches that workers are busy with.", labels=_STAGE)
    for model, stage in stages:
        labels = (model, stage.name)
        items = sum(size * count for size, count in stage.batch_sizes.items())
        sizes.add_metric(labels, _size_buckets(stage.batch_sizes), items)
        for reason, count in stage.reasons.items():
            reasons.add_metric((*labels, reason), count)
        compute.add_metric(labels, _buckets(stage.compute_time), stage.compute_time.sum_s)
        padding.add_metric(labels, stage.padding)
        running.add_metric(labels, len(stage.batcher.in_flight))
    yield from (sizes, reasons, compute, padding, running)


def _workers(stages: _Stages) -> Iterator[Metric]:
    states = GaugeMetricFamily("carpool_workers", "Workers by state.", labels=(*_STAGE, "state"))
    restarts = CounterMetricFamily("carpool_worker_restarts", "Workers that were replaced.", labels=_STAGE)
    gaps = HistogramMetricFamily(
        "carpool_worker_idle_gap_seconds", "A worker's wait between batches while work was there.", labels=_STAGE
    )
    late = CounterMetricFamily(
        "carpool_late_results", "Results whose caller had been answered or had gone.", labels=_STAGE
    )
    stray = CounterMetricFamily("carpool_stray_replies", "Answers that nobody had asked for.", labels=_STAGE)
    for model, stage in stages:
        labels = (model, stage.name)
        for state, count in stage.workers.items():
            states.add_metric((*labels, str(state)), count)
        restarts.add_metric(labels, 0 if stage.roster is None else stage.roster.restarts)
        gaps.add_metric(labels, _buckets(stage.idle_gap), stage.idle_gap.sum_s)
        late.add_metric(labels, stage.batcher.late_results)
        stray.add_metric(labels, stage.batcher.stray_replies)
    yield from (states, restarts, gaps, late, stray)


def _buckets(durations: Durations) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, as Prometheus wants them."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip(DURATION_BOUNDS, durations.counts, strict=False):
        total += count
        buckets.append((str(bound), total))
    return [*buckets, ("+Inf", total + durations.counts[-1])]


def _size_buckets(sizes: dict[int, int]) -> list[tuple[str, float]]:
    """Batch sizes in doubling buckets: 1, 2, 4 ... 4096."""
    bounds = [2**k for k in range(13)]
    buckets = [(str(b), float(sum(n for size, n in sizes.items() if size <= b))) for b in bounds]
    return [*buckets, ("+Inf", float(sum(sizes.values())))]
