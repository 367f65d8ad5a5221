"""The counters of services and batch functions as Prometheus metrics, from one collector in the
coordinator.

Labels come from closed sets (models and stages as declared, outcomes, reasons, worker states), so
no client can add series.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from carpool.engine.observe.function_stats import FunctionSnapshot
from carpool.engine.observe.snapshot import DURATION_BOUNDS, Durations, StreamStats
from carpool.engine.observe.stats import StageStats, Stats, explained

_STAGE = ("model", "stage")
_PLACE = (*_STAGE, "place")


def render(
    services: Sequence[Stats], now: float, accept: str = "", more: Iterable[Collector] = ()
) -> tuple[bytes, str]:
    """Return the metrics of all services at `now`, and their content type; `accept` is the header
    that says which format is wanted, `more` has collectors of other metrics.
    """
    registry = CollectorRegistry()
    registry.register(_Services(services, now))
    for collector in more:
        registry.register(collector)
    encode, content_type = exposition.choose_encoder(accept)
    return encode(registry), content_type


class _Services(Collector):
    def __init__(self, services: Sequence[Stats], now: float) -> None:
        self._services = services
        self._now = now

    def collect(self) -> Iterable[Metric]:
        yield from service_metrics(self._services, self._now)


class CallerMetrics(Collector):
    """Collects how many requests each caller has made, and how many had no key or a wrong one."""

    def __init__(self, requests: Mapping[str, int], rejected: int) -> None:
        self._requests = requests
        self._rejected = rejected

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily("carpool_caller_requests", "Requests, by the name of their key.", labels=["key"])
        for name, count in self._requests.items():
            requests.add_metric((name,), count)
        yield requests
        yield CounterMetricFamily(
            "carpool_unauthorized", "Requests without a key, or with a wrong one.", value=self._rejected
        )


class ConnectionMetrics(Collector):
    """Collects how many connections each service has open, and how many were refused for want of
    room.
    """

    def __init__(self, connections: Mapping[str, int], refused: int) -> None:
        self._connections = connections
        self._refused = refused

    def collect(self) -> Iterable[Metric]:
        connections = GaugeMetricFamily(
            "carpool_connections", "Open connections, by the model that they have asked last.", labels=("model",)
        )
        for name, count in self._connections.items():
            connections.add_metric((name,), count)
        yield connections
        yield CounterMetricFamily(
            "carpool_connections_refused",
            "Connections that were refused, since as many were open as may be.",
            value=self._refused,
        )


def service_metrics(services: Sequence[Stats], now: float) -> Iterator[Metric]:
    yield from _requests(services)
    stages = [(stats.name, stage) for stats in services for stage in stats.stages]
    yield from _queues(stages)
    if any(stage.waited for _, stage in stages):
        yield from _places(services)
    yield from _batches(stages)
    yield from _failures(stages)
    yield from _policies(stages, now)
    yield from _workers(stages)
    streams = [(stats.name, stats.streams) for stats in services if stats.streams is not None]
    if streams:
        yield from _streams(streams)
        yield from _running_sets(streams)


_Streams = list[tuple[str, StreamStats]]
_Stages = list[tuple[str, StageStats]]


def _requests(services: Sequence[Stats]) -> Iterator[Metric]:
    outcomes = CounterMetricFamily("carpool_requests", "Requests, by what became of them.", labels=("model", "outcome"))
    overloads = CounterMetricFamily(
        "carpool_overloads", "Requests that were refused (429), by the reason.", labels=("model", "reason")
    )
    latency = HistogramMetricFamily(
        "carpool_request_duration_seconds",
        "Time from the admission of a request to its answer, for requests without an error.",
        labels=("model",),
    )
    in_flight = GaugeMetricFamily(
        "carpool_in_flight_requests", "Admitted requests that have no answer yet.", labels=("model",)
    )
    on_time = CounterMetricFamily(
        "carpool_requests_within_slo",
        "Answers without an error that came within the service's slo_s, or whose first part did.",
        labels=("model",),
    )
    for stats in services:
        for outcome, count in {**stats.outcomes, "cancelled": stats.cancelled}.items():
            outcomes.add_metric((stats.name, outcome), count)
        for reason, count in stats.overloads.items():
            overloads.add_metric((stats.name, reason), count)
        latency.add_metric((stats.name,), _buckets(stats.latency), stats.latency.sum_s)
        in_flight.add_metric((stats.name,), stats.core.unanswered)
        if stats.slo_s is not None:
            on_time.add_metric((stats.name,), stats.within_slo)
    yield from (outcomes, overloads, latency, in_flight, on_time)


def _queues(stages: _Stages) -> Iterator[Metric]:
    length = GaugeMetricFamily("carpool_queue_length", "Requests waiting for a worker.", labels=_STAGE)
    nbytes = GaugeMetricFamily("carpool_queue_bytes", "Bytes of the requests waiting for a worker.", labels=_STAGE)
    waited = HistogramMetricFamily(
        "carpool_queue_duration_seconds",
        "Time from the arrival of a request in a stage to the start of its batch.",
        labels=_STAGE,
    )
    for model, stage in stages:
        labels = (model, stage.name)
        length.add_metric(labels, len(stage.crew.queue))
        nbytes.add_metric(labels, stage.crew.queue.nbytes)
        waited.add_metric(labels, _buckets(stage.queue_time), stage.queue_time.sum_s)
    yield from (length, nbytes, waited)


def _places(services: Sequence[Stats]) -> Iterator[Metric]:
    came = CounterMetricFamily("carpool_place_requests", "Requests that came to a place of a stage.", labels=_PLACE)
    length = GaugeMetricFamily("carpool_place_queue_length", "Requests waiting at a place of a stage.", labels=_PLACE)
    waited = HistogramMetricFamily(
        "carpool_place_queue_duration_seconds",
        "Time from the arrival of a request at a place of a stage to the start of its batch.",
        labels=_PLACE,
    )
    for stats in services:
        for stage in stats.stages:
            for node, durations in stage.waited.items():
                labels = (stats.name, stage.name, stats.places[node].name)
                came.add_metric(labels, node.entered)
                length.add_metric(labels, node.queued)
                waited.add_metric(labels, _buckets(durations), durations.sum_s)
    yield from (came, length, waited)


def _batches(stages: _Stages) -> Iterator[Metric]:
    sizes = HistogramMetricFamily("carpool_batch_size", "Requests in a call of the model.", labels=_STAGE)
    reasons = CounterMetricFamily(
        "carpool_batches", "Batches, by the reason why they were sent to a worker.", labels=(*_STAGE, "reason")
    )
    compute = HistogramMetricFamily(
        "carpool_batch_duration_seconds",
        "Time that a worker spent on a batch; on an item in a stage of single items.",
        labels=_STAGE,
    )
    padding = CounterMetricFamily(
        "carpool_padding", "Items added to batches to reach an allowed batch size.", labels=_STAGE
    )
    positions = CounterMetricFamily(
        "carpool_positions", "Positions (tokens, frames, ...) computed for items, padding included.", labels=_STAGE
    )
    length_padding = CounterMetricFamily(
        "carpool_length_padding", "Positions added to items to reach the longest of their batch.", labels=_STAGE
    )
    running = GaugeMetricFamily("carpool_in_flight_batches", "Batches that workers are running.", labels=_STAGE)
    for model, stage in stages:
        labels = (model, stage.name)
        items = sum(size * count for size, count in stage.batch_sizes.items())
        sizes.add_metric(labels, size_buckets(stage.batch_sizes), items)
        for reason, count in stage.reasons.items():
            reasons.add_metric((*labels, reason), count)
        compute.add_metric(labels, _buckets(stage.compute_time), stage.compute_time.sum_s)
        padding.add_metric(labels, stage.padding)
        positions.add_metric(labels, stage.positions)
        length_padding.add_metric(labels, stage.length_padding)
        running.add_metric(labels, len(stage.crew.in_flight))
    yield from (sizes, reasons, compute, padding, positions, length_padding, running)


def _failures(stages: _Stages) -> Iterator[Metric]:
    split = CounterMetricFamily(
        "carpool_split_batches", "Batches that raised an error and were run again in parts.", labels=_STAGE
    )
    unsplit = CounterMetricFamily(
        "carpool_unsplit_batches", "Batches that failed as a whole, because too many had been run again.", labels=_STAGE
    )
    memory = CounterMetricFamily("carpool_out_of_memory", "Batches that ran out of memory.", labels=_STAGE)
    safe = GaugeMetricFamily(
        "carpool_safe_batch_size",
        "The largest batch known to fit into memory, once one has run out of it.",
        labels=_STAGE,
    )
    early = CounterMetricFamily("carpool_early_answers", "Answers that the stage's model gave early.", labels=_STAGE)
    for model, stage in stages:
        labels = (model, stage.name)
        early.add_metric(labels, stage.crew.lobby.early)
        split.add_metric(labels, stage.split_batches)
        unsplit.add_metric(labels, stage.unsplit_batches)
        memory.add_metric(labels, stage.out_of_memory)
        if stage.safe_batch_size is not None:
            safe.add_metric(labels, stage.safe_batch_size)
    yield from (split, unsplit, memory, safe)
    if any(stage.crew.lobby.early for _, stage in stages):
        yield early


def _policies(stages: _Stages, now: float) -> Iterator[Metric]:
    """Yield the explanations of policies that mean the same for all of them."""
    info = GaugeMetricFamily(
        "carpool_policy_info",
        "Always 1; the labels say the policy and the rule of its last decision.",
        labels=(*_STAGE, "policy", "rule"),
    )
    hop = GaugeMetricFamily(
        "carpool_policy_hop_seconds", "Learned time of the way of a batch to its worker and back.", labels=_STAGE
    )
    cost = GaugeMetricFamily(
        "carpool_policy_batch_cost_seconds",
        "Learned time of a batch of one request, and of the largest batch.",
        labels=(*_STAGE, "n"),
    )
    rate = GaugeMetricFamily(
        "carpool_policy_arrival_rate", "Learned arrivals per second, counted by size.", labels=_STAGE
    )
    size = GaugeMetricFamily(
        "carpool_policy_expected_batch_size",
        "The largest batch that the policy makes on purpose; as long as fewer requests wait, batches are smaller.",
        labels=_STAGE,
    )
    for model, stage in stages:
        labels = (model, stage.name)
        why = explained(stage.crew.lobby.policy, now, stage.crew)
        names = [why[key] if isinstance(why.get(key), str) else "" for key in ("policy", "rule")]
        info.add_metric((*labels, *names), 1)
        for gauge, key in ((hop, "hop_s"), (rate, "arrival_rate"), (size, "expected_batch_size")):
            if isinstance(why.get(key), int | float):  # a policy may be the user's and say anything
                gauge.add_metric(labels, why[key])
        for n, seconds in _shortest_and_longest(why.get("cost_s")):
            cost.add_metric((*labels, n), seconds)
    yield from (info, hop, cost, rate, size)


def _shortest_and_longest(costs: object) -> Iterator[tuple[str, float]]:
    """Yield the seconds of a batch of one and of the largest batch, if a policy states them."""
    if not isinstance(costs, dict) or not costs:
        return
    if not all(isinstance(number, int | float) for entry in costs.items() for number in entry):
        return
    if 1 in costs:
        yield "1", costs[1]
    yield "max", costs[max(costs)]


def _workers(stages: _Stages) -> Iterator[Metric]:
    states = GaugeMetricFamily("carpool_workers", "Workers, by state.", labels=(*_STAGE, "state"))
    restarts = CounterMetricFamily("carpool_worker_restarts", "Workers that have been replaced.", labels=_STAGE)
    gaps = HistogramMetricFamily(
        "carpool_worker_idle_gap_seconds",
        "Time that a worker waited between two batches although requests were waiting.",
        labels=_STAGE,
    )
    late = CounterMetricFamily(
        "carpool_late_results", "Results for requests that had been answered or cancelled before.", labels=_STAGE
    )
    stray = CounterMetricFamily(
        "carpool_stray_replies", "Results for requests that the worker was not running.", labels=_STAGE
    )
    broken = CounterMetricFamily(
        "carpool_protocol_errors", "Workers that were ended because they sent something wrong.", labels=_STAGE
    )
    info = GaugeMetricFamily(
        "carpool_worker_info",
        "Always 1, for each worker that runs somewhere else; the labels say where.",
        labels=(*_STAGE, "worker", "host", "node", "actor", "device"),
    )
    for model, stage in stages:
        labels = (model, stage.name)
        for place, hello in stage.elsewhere.items():
            info.add_metric((*labels, str(place), hello.host, hello.node, hello.actor, hello.device), 1)
        for state, count in stage.workers.items():
            states.add_metric((*labels, str(state)), count)
        restarts.add_metric(labels, 0 if stage.roster is None else stage.roster.restarts)
        gaps.add_metric(labels, _buckets(stage.idle_gap), stage.idle_gap.sum_s)
        late.add_metric(labels, stage.crew.late_results)
        stray.add_metric(labels, stage.crew.stray_replies)
        broken.add_metric(labels, stage.protocol_errors)
    yield from (states, restarts, gaps, late, stray, broken)
    if any(stage.elsewhere for _, stage in stages):
        yield info


def _streams(services: _Streams) -> Iterator[Metric]:
    ends = CounterMetricFamily(
        "carpool_streams", "Answers that callers took part by part, by how they ended.", labels=("model", "end")
    )
    good = CounterMetricFamily(
        "carpool_good",
        "Complete streams whose first part came within slo_s, and the others part_slo_s apart on average.",
        labels=("model",),
    )
    for model, streams in services:
        for end, count in streams.ends.items():
            ends.add_metric((model, end), count)
        if streams.has_goals:
            good.add_metric((model,), streams.good)
    yield from (ends, good)
    times = (
        ("first_part", "Time from the admission of a stream to its first part."),
        ("part", "Mean distance of the parts of a stream, without pauses of its reader."),
        ("longest_gap", "Longest distance of two parts of a stream, without pauses of its reader."),
    )
    for name, text in times:
        metric = HistogramMetricFamily(f"carpool_{name}_seconds", text, labels=("model",))
        for model, streams in services:
            durations: Durations = getattr(streams, name)
            metric.add_metric((model,), _buckets(durations), durations.sum_s)
        yield metric


def _running_sets(services: _Streams) -> Iterator[Metric]:
    running = GaugeMetricFamily("carpool_running", "Requests in the running sets of workers.", labels=_STAGE)
    size = GaugeMetricFamily(
        "carpool_running_size", "Units, as of size=, that the running sets may come to hold.", labels=_STAGE
    )
    paused = GaugeMetricFamily(
        "carpool_paused", "Streams in running sets that pause, since their readers lag.", labels=_STAGE
    )
    step = HistogramMetricFamily("carpool_step_seconds", "Time of a step of a running set.", labels=_STAGE)
    start = HistogramMetricFamily(
        "carpool_start_seconds", "Time of starting the requests that join before a step.", labels=_STAGE
    )
    parts = CounterMetricFamily("carpool_parts", "Parts that were handed on.", labels=_STAGE)
    resumed = CounterMetricFamily(
        "carpool_resumed", "Streams that went on from their parts, mostly on another worker.", labels=_STAGE
    )
    stray = CounterMetricFamily(
        "carpool_stray_parts", "Parts of streams that had been cancelled or had expired.", labels=_STAGE
    )
    for model, streams in services:
        stepper = streams.stepper
        labels = (model, stepper.name)
        running.add_metric(labels, stepper.running)
        size.add_metric(labels, streams.size)
        paused.add_metric(labels, streams.pausing)
        step.add_metric(labels, _buckets(streams.step), streams.step.sum_s)
        start.add_metric(labels, _buckets(streams.start), streams.start.sum_s)
        parts.add_metric(labels, stepper.parts)
        resumed.add_metric(labels, stepper.resumed)
        stray.add_metric(labels, stepper.stray_parts)
    yield from (running, size, paused, step, start, parts, resumed, stray)


def _buckets(durations: Durations) -> list[tuple[str, float]]:
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip(DURATION_BOUNDS, durations.counts, strict=False):
        total += count
        buckets.append((str(bound), total))
    return [*buckets, ("+Inf", total + durations.counts[-1])]


def size_buckets(sizes: dict[int, int]) -> list[tuple[str, float]]:
    """Return cumulative counts of batch sizes, with the bounds 1, 2, 4 … 4096."""
    bounds = [2**k for k in range(13)]
    buckets = [(str(b), float(sum(n for size, n in sizes.items() if size <= b))) for b in bounds]
    return [*buckets, ("+Inf", float(sum(sizes.values())))]


_FUNCTION = ("function",)


def function_metrics(snapshots: Sequence[FunctionSnapshot]) -> Iterator[Metric]:
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
