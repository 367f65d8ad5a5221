"""The report of a run: the figures by which policies are compared.

They cover the requests that arrive in [0, duration), or from `settle_s` on. A request is good if it
is served within its SLO, or at all where there is none. A mean latency says little by itself, since
dropping half of the requests lowers it; so there is also the penalised mean, in which a dropped
request counts for two SLOs.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import compress, repeat
from math import inf
from statistics import fmean
from typing import Any

from carpool.engine.core.batch import Batch
from carpool.engine.request import Request

NAN = math.nan
_LONGEST_TENTH = 9  # it begins after this many tenths


@dataclass(frozen=True)
class Report:
    """Figures of one run, or their means over several runs.

    A latency is the time from arrival to answer, in seconds; that of an unfinished request reaches
    to the end of the run, and dropped requests have none.

    Attributes:
        policy: The name of the policy.
        load: The mean arrival rate as a share of capacity; None with a closed loop.
        duration_s: How long requests arrived, in seconds.
        seeds: The seeds of the runs.
        requests: How many requests arrived.
        served: How many were answered, in time or late.
        dropped: How many were refused, or dropped while they waited.
        unfinished: How many had no answer at the end of the run.
        late: How many were served after their SLO.
        throughput: Served requests per second.
        goodput: Good requests per second.
        attainment: The share of all requests that were good.
        mean_s: The mean latency.
        p50_s: The median latency.
        p99_s: The latency that 99 % of the requests do not exceed.
        penalised_mean_s: The mean latency over all requests, where late and unfinished requests
            count for at least two SLOs and dropped ones for two SLOs. Without an SLO a dropped
            request counts as if it had waited to the end of the run.
        starvation: The longest latency over the median.
        fairness: Jain's index over the good requests of the clients of closed loops; 1 is even.
            None without such clients.
        class_attainment: The attainment by SLO in seconds.
        class_ratio: The smallest of these over the greatest; 1 for a single SLO.
        wake_ups: How often the policy was asked only because time had passed, per request.
        batches: How many batches the busiest stage ran.
        mean_batch_size: The mean number of requests in a batch of the busiest stage.
        utilisation: The share of time for which the workers of the busiest stage were busy, until
            the end of the arrivals.
        stage_utilisation: The same for each stage.
        stage_batch_size: The mean number of requests in a batch for each stage.
        batch_sizes: How many batches the busiest stage ran, by the number of requests in them.
        worker_s: The sum over all workers of the seconds for which they were there, or on their
            way, while requests arrived.
        workers_over_time: By the second, how many there were in the stage whose workers come and
            go; empty where their number is fixed.
        padding_share: The share of what the busiest stage computed that was padding, in units of
            length; None where requests have no lengths.
        long_p99_s: The 99th percentile of the latencies of the longest tenth of the requests.
        long_attainment: The share of the longest tenth that were good.
        length_p99_s: The 99th percentile of the latencies by length, for lengths up to each power
            of two and above the one before; empty where requests have no lengths.
        switch_share: The share of the busiest stage's batches that had another key than the one
            before on their worker; None where requests have no keys.
        worker_s_per_good: The seconds for which workers of all stages ran batches, while requests
            arrived, for each good request.
        coordinator_utilisation: The share of time for which the coordinator was busy, until the end
            of the arrivals; None where its work takes no time.
        settings: The settings that were best, for each stage of which the policy is "tuned"; empty
            for all other policies. Of several runs they are those that were best most often.
    """

    policy: str
    load: float | None
    duration_s: float
    seeds: tuple[int, ...]
    requests: float
    served: float
    dropped: float
    unfinished: float
    late: float
    throughput: float
    goodput: float
    attainment: float
    mean_s: float
    p50_s: float
    p99_s: float
    penalised_mean_s: float
    starvation: float
    fairness: float | None
    class_attainment: dict[float, float]
    class_ratio: float
    wake_ups: float
    batches: float
    mean_batch_size: float
    utilisation: float
    stage_utilisation: tuple[float, ...]
    stage_batch_size: tuple[float, ...]
    batch_sizes: dict[int, int] = field(repr=False)
    worker_s: float
    workers_over_time: dict[float, float] = field(repr=False)
    padding_share: float | None = None
    long_p99_s: float | None = None
    long_attainment: float | None = None
    length_p99_s: dict[int, float] = field(default_factory=dict, repr=False)
    switch_share: float | None = None
    worker_s_per_good: float = NAN
    coordinator_utilisation: float | None = None
    settings: tuple[dict[str, float], ...] = ()

    @property
    def drop_share(self) -> float:
        """The share of all requests that were dropped."""
        return self.dropped / self.requests if self.requests else 0.0

    @property
    def late_share(self) -> float:
        """The share of all requests that were late."""
        return self.late / self.requests if self.requests else 0.0

    def to_dict(self) -> dict[str, object]:
        """Return the figures as values that JSON has; unknown and infinite ones are None."""
        figures = {**asdict(self), "drop_share": self.drop_share, "late_share": self.late_share}
        return {name: _plain(value) for name, value in figures.items()}

    def to_json(self) -> str:
        """Return the figures as JSON text."""
        return json_text(self.to_dict())


def report_of(
    record: Record,
    *,
    policy: str,
    load: float | None,
    seed: int,
    end_s: float,
    worker_s: Sequence[float],
    workers_over_time: dict[float, float],
    wake_ups: int,
    has_keys: bool = False,
    coordinator_s: float | None = None,
) -> Report:
    """Return the figures of one run, which ended at `end_s`; for the others see `Report`.

    Args:
        worker_s: The seconds that the workers of each stage were there, in all.
        wake_ups: How often the policy was asked only because time had passed, in all.
        coordinator_s: The seconds for which the coordinator was busy; None if its work takes none.
    """
    requests, dropped, unfinished = len(record.arrived), *map(record.finished.count, (DROPPED, UNFINISHED))
    served = requests - dropped - unfinished
    good = _good(record)
    latencies = sorted(_latencies(record, end_s))
    p50_s = _quantile(latencies, 0.5)
    by_class = _class_attainment(record, good)
    utilisation = tuple(stage.busy_s / seconds for stage, seconds in zip(record.stages, worker_s, strict=True))
    sizes = [_mean_size(stage.batch_sizes) for stage in record.stages]
    busiest = utilisation.index(max(utilisation))
    return Report(
        policy=policy,
        load=load,
        duration_s=record.duration_s,
        seeds=(seed,),
        requests=requests,
        served=served,
        dropped=dropped,
        unfinished=unfinished,
        late=served - sum(good),
        throughput=served / record.duration_s,
        goodput=sum(good) / record.duration_s,
        attainment=_share(sum(good), requests),
        mean_s=fmean(latencies) if latencies else NAN,
        p50_s=p50_s,
        p99_s=_quantile(latencies, 0.99),
        penalised_mean_s=_penalised_mean(record, end_s),
        starvation=latencies[-1] / p50_s if latencies and p50_s else NAN,
        fairness=_jain(record, good),
        class_attainment=by_class,
        class_ratio=min(by_class.values()) / max(by_class.values()) if any(by_class.values()) else NAN,
        wake_ups=wake_ups / requests if requests else 0.0,
        batches=sum(record.stages[busiest].batch_sizes.values()),
        mean_batch_size=sizes[busiest],
        utilisation=utilisation[busiest],
        stage_utilisation=utilisation,
        stage_batch_size=tuple(sizes),
        batch_sizes=dict(sorted(record.stages[busiest].batch_sizes.items())),
        worker_s=sum(worker_s),
        workers_over_time=workers_over_time,
        padding_share=_padding_share(record.stages[busiest]),
        switch_share=_switch_share(record.stages[busiest]) if has_keys else None,
        worker_s_per_good=sum(stage.busy_s for stage in record.stages) / sum(good) if any(good) else NAN,
        coordinator_utilisation=None if coordinator_s is None else coordinator_s / record.duration_s,
        **_by_length(record, good, end_s),
    )


def mean_of(reports: Iterable[Report]) -> Report:
    """Return one report for runs that differ only in their seeds.

    Every figure is the mean over the runs, and the batches of all runs are counted together.
    """
    runs = list(reports)
    values = {f.name: _mean_figure(f.name, [getattr(run, f.name) for run in runs]) for f in fields(Report)}
    return Report(**values)


def _mean_figure(name: str, values: Sequence[Any]) -> Any:
    first = values[0]
    if name == "seeds":
        return tuple(seed for seeds in values for seed in seeds)
    if name == "batch_sizes":
        return {n: sum(counts.get(n, 0) for counts in values) for n in _keys_of(values)}
    if name in ("class_attainment", "length_p99_s", "workers_over_time"):
        return {key: _mean([figures.get(key, NAN) for figures in values]) for key in _keys_of(values)}
    if name == "settings":
        return max(values, key=values.count)
    if isinstance(first, tuple):
        return tuple(_mean(column) for column in zip(*values, strict=True))
    return first if first is None or isinstance(first, str) else _mean(values)


def _keys_of(mappings: Sequence[Mapping[float, object]]) -> list[float]:
    return sorted({key for mapping in mappings for key in mapping})


def _latencies(record: Record, end_s: float) -> list[float]:
    return [latency_s for latency_s in _latency_of_each(record, end_s) if latency_s is not None]


def _latency_of_each(record: Record, end_s: float) -> Iterable[float | None]:
    """Yield the latency of each request; None for those that were dropped."""
    for arrived, end in zip(record.arrived, record.finished, strict=True):
        yield None if end == DROPPED else (end_s if end == UNFINISHED else end) - arrived


def _by_length(record: Record, good: list[bool], end_s: float) -> dict[str, Any]:
    if not record.lengths:
        return {}
    least = sorted(record.lengths)[_LONGEST_TENTH * len(record.lengths) // 10]
    of_long: list[float] = []
    by_power: dict[int, list[float]] = {}
    for length, latency_s in zip(record.lengths, _latency_of_each(record, end_s), strict=True):
        if latency_s is not None:
            by_power.setdefault((length - 1).bit_length(), []).append(latency_s)
            if length >= least:
                of_long.append(latency_s)
    good_long = [is_good for length, is_good in zip(record.lengths, good, strict=True) if length >= least]
    return {
        "long_p99_s": _quantile(sorted(of_long), 0.99),
        "long_attainment": _share(sum(good_long), len(good_long)),
        "length_p99_s": {2**power: _quantile(sorted(by_power[power]), 0.99) for power in sorted(by_power)},
    }


def _good(record: Record) -> list[bool]:
    """Return whether each request was good.

    Arrival and SLO are added as for `Request.due`, so that rounding makes no difference.
    """
    rows = zip(record.arrived, record.finished, record.slo_of_each, strict=True)
    return [0.0 <= end <= arrived + slo_s for arrived, end, slo_s in rows]


def _penalised_mean(record: Record, end_s: float) -> float:
    total = 0.0
    for arrived, end, slo_s in zip(record.arrived, record.finished, record.slo_of_each, strict=True):
        if 0.0 <= end <= arrived + slo_s:
            total += end - arrived
        elif slo_s == inf:
            total += end_s - arrived
        elif end == DROPPED:
            total += 2 * slo_s
        else:
            total += max(2 * slo_s, (end_s if end == UNFINISHED else end) - arrived)
    return total / len(record.arrived) if record.arrived else NAN


def _class_attainment(record: Record, good: list[bool]) -> dict[float, float]:
    if len(record.slos) == 1:
        return {record.slos[0]: sum(good) / len(good)} if good else {}
    count = Counter(record.slo_s)
    in_time = Counter(compress(record.slo_s, good))
    return {slo_s: in_time[slo_s] / count[slo_s] for slo_s in sorted(count)}


def _jain(record: Record, good: list[bool]) -> float | None:
    """Return (Σk)² / (N Σk²) over the good requests k of N clients; 1 where no client has any."""
    if not record.client:
        return None
    counts: dict[int, int] = {}
    for client, is_good in zip(record.client, good, strict=True):
        if client >= 0:
            counts[client] = counts.get(client, 0) + is_good
    squares = sum(k * k for k in counts.values())
    return sum(counts.values()) ** 2 / (len(counts) * squares) if squares else 1.0


def _padding_share(stage: StageRecord) -> float | None:
    return 1 - stage.of_requests / stage.computed if stage.computed else None


def _switch_share(stage: StageRecord) -> float:
    batches = sum(stage.batch_sizes.values())
    return stage.switches / batches if batches else NAN


def _quantile(ordered: Sequence[float], q: float) -> float:
    """Return the smallest value that a share of at least `q` does not exceed."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else NAN


def _mean_size(sizes: dict[int, int]) -> float:
    batches = sum(sizes.values())
    return sum(n * count for n, count in sizes.items()) / batches if batches else NAN


def _share(part: float, whole: float) -> float:
    """Return a share of requests, which is 1 where there are none: nothing went wrong."""
    return part / whole if whole else 1.0


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None and not math.isnan(value)]
    return fmean(known) if known else NAN


def json_text(value: object, indent: int | None = None) -> str:
    """Return figures as JSON text; unknown and infinite ones are null."""
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    return value


UNFINISHED = -1.0
DROPPED = -2.0


class StageRecord:
    """The record of one stage.

    Attributes:
        busy_s: The seconds for which its workers were busy, in the time that counts.
        computed: How many units of length its workers computed, padding included.
        of_requests: How many of these belonged to requests and were not padding.
        switches: How many batches had another key than the one before on their worker.
    """

    def __init__(self) -> None:
        self.batch_sizes: Counter[int] = Counter()
        self.busy_s = 0.0
        self.computed = 0.0
        self.of_requests = 0.0
        self.switches = 0


class Record:
    """The record of a whole run. It is the `Watcher` of the driver.

    The request that arrives n-th, counted from 0, has index n in every column.

    Attributes:
        duration_s: The seconds in which the requests that count arrive.
        settle_s: The seconds before that, whose requests do not count.
        slos: The SLOs that requests may have.
        arrived: When each request arrived.
        finished: When each request was served; or DROPPED or UNFINISHED.
        slo_s: The SLO of each request. The column is empty if there is only one SLO.
        client: The client that sent each request, or -1 for requests of open processes. The column
            is empty if there is no closed loop.
        weights: The weight of each request. The column is empty if they all weigh the same.
        lengths: The length of each request. The column is empty if they have none.
    """

    def __init__(self, duration_s: float, stages: int, slos: Sequence[float], settle_s: float = 0.0) -> None:
        self.duration_s = duration_s - settle_s
        self.settle_s = settle_s
        self.slos = slos
        self.arrived = array("d")
        self.finished = array("d")
        self.slo_s = array("d")
        self.client = array("l")
        self.weights = array("d")
        self.lengths = array("l")
        self.stages = [StageRecord() for _ in range(stages)]

    @property
    def slo_of_each(self) -> Iterable[float]:
        """The SLO of each request, in the order of the columns."""
        return self.slo_s if len(self.slos) > 1 else repeat(self.slos[0], len(self.arrived))

    def started(self, now: float, batch: Batch, busy_s: float) -> None:
        """Count a batch, and the seconds of it that are within the time that counts."""
        stage = self.stages[batch.stage]
        stage.batch_sizes[batch.n] += 1
        begin, end = max(now, self.settle_s), self.settle_s + self.duration_s
        stage.busy_s += max(0.0, min(now + busy_s, end) - begin)

    def settled(self) -> Record:
        """Return the record without the requests that do not count; batches all count."""
        if not self.settle_s:
            return self
        kept = Record(self.duration_s, 0, self.slos)
        kept.stages = self.stages
        counts = [arrived >= self.settle_s for arrived in self.arrived]
        for name in ("arrived", "finished", "slo_s", "client", "weights", "lengths"):
            column = getattr(self, name)
            setattr(kept, name, array(column.typecode, compress(column, counts)))
        return kept

    def answered(self, now: float, requests: Sequence[Request]) -> None:
        """Note when requests were answered. The item of a request is its index, in every stage."""
        finished = self.finished
        for request in requests:
            finished[request.item] = now if request.error is None else DROPPED  # type: ignore[call-overload]
