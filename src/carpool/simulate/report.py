"""What a run was worth: the figures by which policies are compared.

They are about the requests that arrive in [0, duration); nothing is trimmed, so a cold start counts. A request is good
when it is served within its SLO, or at all where there is none. A mean latency says little by itself, since dropping
half of the requests lowers it; so there is also the penalised mean, in which a drop costs two SLOs.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import compress
from math import inf
from statistics import fmean

from carpool.simulate.record import DROPPED, UNFINISHED, Record

NAN = math.nan


@dataclass(frozen=True)
class Report:
    """Figures of one run, or the means over several.

    Attributes:
        policy: its name; load: mean arrival rate as a share of capacity, None with a closed loop.
        duration_s, seeds: of what runs.
        requests: how many arrived; served, dropped, unfinished: what became of them; late: served after their SLO.
        throughput, goodput: served, and served in time, per second; attainment: the good ones' share of all.
        mean_s, p50_s, p99_s: latency of the served, and of the unfinished up to the end of the run.
        penalised_mean_s: latency of all, where late or unfinished ones count for at least, and dropped ones for, two
            SLOs. Without an SLO a dropped one counts as if it had waited to the end.
        starvation: the longest latency over the median.
        fairness: Jain's index over the good requests of each closed-loop client; 1 is even. None without clients.
        class_attainment: by SLO; class_ratio: the least of these over the greatest. For a single SLO that is 1.
        wake_ups: how often the policy was asked only because of the time, per request.
        batches, mean_batch_size, batch_sizes, utilisation: of the busiest stage; utilisation is the share of its
            workers' time until the last arrival in which they were busy; batch_sizes counts batches by requests.
        stage_utilisation, stage_batch_size: of each stage.
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

    @property
    def drop_share(self) -> float:
        """Dropped requests as a share of all."""
        return self.dropped / self.requests if self.requests else 0.0

    @property
    def late_share(self) -> float:
        """Late requests as a share of all."""
        return self.late / self.requests if self.requests else 0.0

    def to_dict(self) -> dict[str, object]:
        """Plain values, as JSON has them; a figure that cannot be told is None."""
        figures = {**asdict(self), "drop_share": self.drop_share, "late_share": self.late_share}
        return {name: _plain(value) for name, value in figures.items()}

    def to_json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict())


def report_of(
    record: Record, *, policy: str, load: float | None, seed: int, end_s: float, workers: Sequence[int], wake_ups: int
) -> Report:
    """The figures of one run, which went on to `end_s`, with so many workers in each stage."""
    requests, dropped, unfinished = len(record.arrived), *map(record.finished.count, (DROPPED, UNFINISHED))
    served = requests - dropped - unfinished
    good = _good(record)
    latencies = sorted(_latencies(record, end_s))
    p50_s = _quantile(latencies, 0.5)
    by_class = _class_attainment(record, good)
    utilisation = tuple(stage.busy_s / (n * record.duration_s) for stage, n in zip(record.stages, workers, strict=True))
    sizes = [_mean_size(stage.sizes) for stage in record.stages]
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
        batches=sum(record.stages[busiest].sizes.values()),
        mean_batch_size=sizes[busiest],
        utilisation=utilisation[busiest],
        stage_utilisation=utilisation,
        stage_batch_size=tuple(sizes),
        batch_sizes=dict(sorted(record.stages[busiest].sizes.items())),
    )


def mean_of(reports: Iterable[Report]) -> Report:
    """One report for runs that differ in their seeds: every figure is the mean, batches are put together."""
    all = list(reports)
    first = all[0]
    values: dict[str, object] = {}
    for name in (f.name for f in fields(Report)):
        value = getattr(first, name)
        if name == "seeds":
            values[name] = tuple(seed for report in all for seed in report.seeds)
        elif name == "batch_sizes":
            sizes = {n for report in all for n in report.batch_sizes}
            values[name] = {n: sum(report.batch_sizes.get(n, 0) for report in all) for n in sorted(sizes)}
        elif name == "class_attainment":
            classes = sorted({slo_s for report in all for slo_s in report.class_attainment})
            values[name] = {c: _mean([r.class_attainment.get(c, NAN) for r in all]) for c in classes}
        elif isinstance(value, tuple):
            values[name] = tuple(_mean(column) for column in zip(*[getattr(r, name) for r in all], strict=True))
        elif value is None or isinstance(value, str):
            values[name] = value
        else:
            values[name] = _mean([getattr(report, name) for report in all])
    return Report(**values)  # type: ignore[arg-type]


def _latencies(record: Record, end_s: float) -> list[float]:
    """From arrival to answer; of the unfinished to the end of the run. Dropped requests have none."""
    rows = zip(record.arrived, record.finished, strict=True)
    return [(end_s if end == UNFINISHED else end) - arrived for arrived, end in rows if end != DROPPED]


def _good(record: Record) -> list[bool]:
    """Whether each was served in time. The due time is computed as the core does, so that equality holds."""
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
    """The good ones' share of the requests of each SLO that some have."""
    if len(record.slos) == 1:
        return {record.slos[0]: sum(good) / len(good)} if good else {}
    count = Counter(record.slo_s)
    in_time = Counter(compress(record.slo_s, good))
    return {slo_s: in_time[slo_s] / count[slo_s] for slo_s in sorted(count)}


def _jain(record: Record, good: list[bool]) -> float | None:
    """(Σk)² / (N Σk²) over the clients' good requests; even where nobody has any."""
    if not record.client:
        return None
    counts: dict[int, int] = {}
    for client, is_good in zip(record.client, good, strict=True):
        if client >= 0:
            counts[client] = counts.get(client, 0) + is_good
    squares = sum(k * k for k in counts.values())
    return sum(counts.values()) ** 2 / (len(counts) * squares) if squares else 1.0


def _quantile(ordered: Sequence[float], q: float) -> float:
    """The smallest value that at least the share q does not exceed."""
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else NAN


def _mean_size(sizes: dict[int, int]) -> float:
    batches = sum(sizes.values())
    return sum(n * count for n, count in sizes.items()) / batches if batches else NAN


def _share(part: float, whole: float) -> float:
    """Of nothing, all is well."""
    return part / whole if whole else 1.0


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None and not math.isnan(value)]
    return fmean(known) if known else NAN


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return value
