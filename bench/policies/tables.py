"""What the runs over all workloads say: a line for each, and who was how much better than whom."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, isnan, log, nan
from statistics import fmean

from bench.policies.runs import Case, Row, Runs
from bench.policies.workloads import Workload
from bench.tools.figures import table
from carpool.simulate.policies import TUNED

OURS = "adaptive"
RIVALS = ("static", "greedy", "aimd", "cork")  # whom it is to beat; `deadline` knows the true cost
EQUAL = 0.01  # ratios within this are a draw
AHEAD, MUCH = 0.02, 0.05  # by more than the first no rival should be ahead
FIGURES = ("penalised_mean_s", "p99_s", "worker_s_per_good")  # besides goodput

Results = Mapping[tuple[str, str], "Means"]
"""By workload and policy."""


@dataclass(frozen=True, slots=True)
class Means:
    """Means over the seeds of one policy on one workload.

    Attributes:
        coordinator: The busy share of the coordinator; None if its work takes no time.
    """

    goodput: float
    mean_s: float
    p99_s: float
    penalised_mean_s: float
    worker_s_per_good: float = nan
    coordinator: float | None = None

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Means:
        return cls(
            goodput=fmean(row.goodput for row in rows),
            mean_s=fmean(row.mean_s for row in rows),
            p99_s=fmean(row.p99_s for row in rows),
            penalised_mean_s=fmean(row.penalised_mean_s for row in rows),
            worker_s_per_good=fmean(row.worker_s_per_good for row in rows),
            coordinator=fmean(shares) if (shares := _known(row.coordinator_utilisation for row in rows)) else None,
        )


@dataclass(frozen=True, slots=True)
class Duel:
    """One policy beside another on one workload.

    Attributes:
        goodput: Ours over theirs; latency: the same for the mean, where goodputs are within 1 %,
            else None.
    """

    workload: str
    goodput: float
    latency: float | None


def means_of(
    workloads: Sequence[Workload],
    policies: Sequence[str],
    seeds_of: Callable[[Workload], Sequence[int]],
    runs: Runs,
    title: str,
) -> Results:
    """Run every policy on every workload with each of its seeds, and take the means."""
    places = [(workload, policy) for workload in workloads for policy in policies]
    cases = [Case(policy, workload.settings, seed) for workload, policy in places for seed in seeds_of(workload)]
    rows = iter(runs.rows(cases, title))
    return {(workload.name, policy): Means.of([next(rows) for _ in seeds_of(workload)]) for workload, policy in places}


def workload_table(workloads: Sequence[Workload], policies: Sequence[str], results: Results) -> str:
    """Goodput / mean / p99 of every policy on every workload, and ours beside the best rival.

    Where there is a busy coordinator, its busy share comes last.
    """
    rivals = [name for name in policies if name in RIVALS]
    header = ["workload", *policies, *([f"{OURS} beside the best"] if OURS in policies and rivals else [])]
    rows = []
    for workload in workloads:
        cells = [workload.name, *(_cell(results[workload.name, policy]) for policy in policies)]
        if len(header) > len(cells):
            cells.append(_verdict(best_of(workload.name, rivals, results)))
        rows.append(cells)
    return table(header, rows, markdown=True)


def summary_table(workloads: Sequence[Workload], policies: Sequence[str], results: Results) -> str:
    """Ours beside each other policy: how often better, level or worse, the worst, and means."""
    header = ["adaptive beside", "goodput better", "level", "worse", "worst", "at", "geometric mean"]
    header += ["penalised mean better", "level", "worse", "geometric mean"]
    rows = [_summary(other, workloads, results) for other in policies if other != OURS]
    return table(header, rows, markdown=True)


def figures_table(workloads: Sequence[Workload], policies: Sequence[str], results: Results, beside: str = OURS) -> str:
    """Each policy beside one of them: geometric means of its figures over those of that one."""
    header = [f"beside {beside}", "goodput", "better", "worse", "worst", "best", "at"]
    header += ["penalised mean", "p99", "worker-seconds per good answer"]
    rows = []
    for other in (name for name in policies if name != beside):
        pairs = [(results[w.name, other], results[w.name, beside], w.name) for w in workloads]
        goodput = [goodput_ratio(theirs.goodput, ours.goodput) for theirs, ours, _ in pairs]
        better, _, worse = _count(goodput)
        best = max(range(len(pairs)), key=goodput.__getitem__)
        ratios = {name: [getattr(theirs, name) / getattr(ours, name) for theirs, ours, _ in pairs] for name in FIGURES}
        means = [geometric_mean([ratio for ratio in ratios[name] if not isnan(ratio)]) for name in FIGURES]
        cells = [f"{geometric_mean(goodput):.3f}", str(better), str(worse)]
        cells += [_percent(min(goodput)), _percent(goodput[best]), pairs[best][2]]
        rows.append([other, *cells, *(f"{mean:.3f}" for mean in means)])
    return table(header, rows, markdown=True)


def ahead_table(workloads: Sequence[Workload], policies: Sequence[str], results: Results) -> str:
    """The workloads in which another policy answers 2 % more in time than ours, the worst first.

    Cells are its figures over ours; below is how many workloads these are. `tuned` does not count,
    since its settings are not known beforehand.
    """
    found = []
    for other in (name for name in policies if name not in (OURS, TUNED)):
        for workload in workloads:
            theirs, ours = results[workload.name, other], results[workload.name, OURS]
            ratio = goodput_ratio(theirs.goodput, ours.goodput)
            if ratio > 1 + AHEAD:
                others = [getattr(theirs, name) / getattr(ours, name) for name in FIGURES]
                found.append((ratio, [workload.name, other, *(f"{each:.3f}" for each in (ratio, *others))]))
    found.sort(key=lambda pair: -pair[0])
    names = {row[0] for _, row in found}
    counted = f"{len(names)} of {len(workloads)} workloads: another policy is ahead by more than {AHEAD * 100:g} %."
    header = ["workload", "policy", "goodput", "penalised mean", "p99", "worker-seconds per good answer"]
    return f"{table(header, [row for _, row in found], markdown=True)}\n\n{counted}" if found else counted


def hindsight_table(sets: Mapping[str, Sequence[Workload]], results: Results, shown: int = 10) -> str:
    """Ours beside `tuned`, by sets of workloads, and where it is furthest behind."""
    header = ["adaptive beside tuned", "workloads", "goodput", "worse by 5 %", "by 2 %", "better by 2 %", "by 5 %"]
    rows, worst = [], []
    everything = [workload for workloads in sets.values() for workload in workloads]
    for name, workloads in [*sets.items(), ("all", everything)]:
        pairs = [(results[w.name, OURS], results[w.name, TUNED]) for w in workloads]
        goodput = [goodput_ratio(ours.goodput, tuned.goodput) for ours, tuned in pairs]
        penalised = [ours.penalised_mean_s / tuned.penalised_mean_s for ours, tuned in pairs]
        counts = [sum(ratio < 1 - part for ratio in goodput) for part in (MUCH, AHEAD)]
        counts += [sum(ratio > 1 + part for ratio in goodput) for part in (AHEAD, MUCH)]
        means = [f"{geometric_mean(ratios):.3f}" for ratios in (goodput, penalised)]
        rows.append([name, str(len(workloads)), means[0], *map(str, counts), means[1]])
        worst = sorted(zip(goodput, penalised, workloads, strict=True), key=lambda each: each[0])[:shown]
    least = [[w.name, f"{ratio:.3f}", f"{longer:.3f}"] for ratio, longer, w in worst]
    tables = (rows, [*header, "penalised mean"]), (least, [f"worst {shown}", "goodput", "penalised mean"])
    return "\n\n".join(table(titles, lines, markdown=True) for lines, titles in tables)


def best_table(workloads: Sequence[Workload], policies: Sequence[str], results: Results, shown: int = 8) -> str:
    """Ours beside the best of its rivals, workload by workload: the worst and the best of them."""
    duels = duels_with_best(workloads, policies, results)
    chosen = duels if len(duels) <= 2 * shown else [*duels[:shown], *duels[-shown:]]
    rows = [[duel.workload, _percent(duel.goodput), _percent(duel.latency)] for duel in chosen]
    return table([f"worst and best {shown}", "goodput", "mean latency at equal goodput"], rows, markdown=True)


def duels_with_best(workloads: Sequence[Workload], policies: Sequence[str], results: Results) -> list[Duel]:
    """Ours beside the best of its rivals on each workload, the worst first."""
    rivals = [name for name in policies if name in RIVALS]
    duels = [best_of(workload.name, rivals, results) for workload in workloads]
    return sorted(duels, key=lambda duel: duel.goodput)


def best_of(workload: str, rivals: Sequence[str], results: Results) -> Duel:
    """Ours beside the rivals' best goodput, and beside the least mean latency near that goodput."""
    ours = results[workload, OURS]
    theirs = [results[workload, rival] for rival in rivals]
    best = max([their.goodput for their in theirs], default=ours.goodput)
    ratio = goodput_ratio(ours.goodput, best)
    most = max(best, ours.goodput)
    level = [their.mean_s for their in theirs if their.goodput >= (1 - EQUAL) * most]
    comparable = level and ours.goodput >= (1 - EQUAL) * most
    return Duel(workload, ratio, ours.mean_s / min(level) if comparable else None)


def goodput_ratio(ours: float, theirs: float) -> float:
    """Ours over theirs; below a hundredth of a request per second, both count as nothing."""
    return max(ours, 0.01) / max(theirs, 0.01)


def geometric_mean(ratios: Sequence[float]) -> float:
    return exp(fmean(log(ratio) for ratio in ratios)) if ratios else inf


def closed_loop_ratios(policies: Sequence[str], results: Results) -> dict[str, float]:
    """Ours beside the best rival for 2 to 16 clients whose answers come within milliseconds."""
    rivals = [name for name in policies if name in RIVALS]
    names = [f"closed fixed N{n}" for n in (2, 4, 8, 16)]
    return {name: best_of(name, rivals, results).goodput for name in names if (name, OURS) in results}


def _summary(other: str, workloads: Sequence[Workload], results: Results) -> list[str]:
    pairs = [(w, results[w.name, OURS], results[w.name, other]) for w in workloads]
    goodput = [goodput_ratio(ours.goodput, theirs.goodput) for _, ours, theirs in pairs]
    # Without an SLO no request is late, so that there is nothing to penalise.
    penalised = [ours.penalised_mean_s / theirs.penalised_mean_s for w, ours, theirs in pairs if w.slo_s is not None]
    worst = min(range(len(pairs)), key=goodput.__getitem__)
    better, level, worse = _count(goodput)
    slower, same, faster = _count(penalised)
    return [
        other,
        *map(str, (better, level, worse)),
        _percent(goodput[worst]),
        pairs[worst][0].name,
        f"{geometric_mean(goodput):.3f}",
        *map(str, (faster, same, slower)),
        f"{geometric_mean(penalised):.3f}",
    ]


def _count(ratios: Sequence[float]) -> tuple[int, int, int]:
    """How many are above, level with and below 1."""
    above = sum(ratio > 1 + EQUAL for ratio in ratios)
    below = sum(ratio < 1 - EQUAL for ratio in ratios)
    return above, len(ratios) - above - below, below


def _cell(means: Means) -> str:
    goodput = f"{means.goodput:.0f}" if means.goodput >= 10 else f"{means.goodput:.1f}"
    if means.coordinator is not None:
        return f"{goodput} / {means.mean_s * 1e3:.2f} / {means.p99_s * 1e3:.2f} / {means.coordinator:.2f}"
    return f"{goodput} / {means.mean_s * 1e3:.1f} / {means.p99_s * 1e3:.1f}"


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _verdict(duel: Duel) -> str:
    latency = "" if duel.latency is None else f", mean {_percent(duel.latency)}"
    return f"{_percent(duel.goodput)}{latency}"


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{(ratio - 1) * 100:+.1f} %"
