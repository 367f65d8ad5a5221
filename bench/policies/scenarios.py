"""Scenarios that nobody has tuned for: all is drawn, and the commit's hash is the seed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from statistics import fmean, median

from bench.policies.runs import Runs
from bench.policies.tables import EQUAL, OURS, RIVALS, Duel, Results, best_of, means_of
from bench.policies.workloads import Workload
from bench.tools.dice import four_digits, log_uniform
from bench.tools.figures import table
from carpool.simulate import capacity
from carpool.simulate.costs import cost_of

REPLICATES = 3
REQUESTS = 12_000  # that could be served during a run
LEAST_BATCHES = 150  # of the largest size, likewise
WORST_SHOWN = 10


def draw(count: int, seed_text: str) -> list[Workload]:
    """So many scenarios; the same text gives the same."""
    return [_scenario(f"R{i}", Random(f"{seed_text}/{i}")) for i in range(count)]


def run(workloads: Sequence[Workload], policies: Sequence[str], runs: Runs) -> Results:
    """All policies in all scenarios, three times each. Every scenario has chances of its own."""
    return means_of(workloads, policies, _seeds, runs, "random scenarios")


def quantile_table(workloads: Sequence[Workload], policies: Sequence[str], results: Results) -> str:
    """Ours beside the best rival in hindsight, and beside each of the others."""
    header = ["adaptive beside", "least", "5 %", "median", "mean", "95 %", "most"]
    header += ["below -5 %", "below -2 %", "above 2 %"]
    rivals = [name for name in policies if name in RIVALS]
    lines = [["the best of the rivals", *_spread([duel.goodput for duel in _duels(workloads, rivals, results)])]]
    for other in [name for name in policies if name != OURS]:
        lines.append([other, *_spread([duel.goodput for duel in _duels(workloads, [other], results)])])
    latencies = [duel.latency for duel in _duels(workloads, rivals, results) if duel.latency is not None]
    lines.append([f"mean latency where goodputs are within {EQUAL:.0%}", *_spread(latencies)])
    return table(header, lines, markdown=True)


def worst_table(workloads: Sequence[Workload], policies: Sequence[str], results: Results) -> str:
    """Where ours fares worst, with all that was drawn, so that it can be looked into."""
    rivals = [name for name in policies if name in RIVALS]
    settings = {workload.name: workload.settings for workload in workloads}
    lines = []
    for duel in _duels(workloads, rivals, results)[:WORST_SHOWN]:
        drawn = settings[duel.workload]
        best = max(rivals, key=lambda rival, name=duel.workload: results[name, rival].goodput)  # type: ignore[misc]
        what = f"{drawn['cost']}, limit {drawn['max_batch_size']}, SLO {drawn['slo_s'] * 1e3:.4g} ms"
        what += f", {drawn['workers']} workers, {drawn['arrivals']}, {drawn['duration_s']:.1f} s"
        if len(what) > 300:  # a table for every size
            what = what.replace(drawn["cost"], drawn["cost"][:60] + "…")
        ours, theirs = results[duel.workload, OURS].goodput, results[duel.workload, best].goodput
        lines.append([duel.workload, f"{(duel.goodput - 1) * 100:+.1f} %", f"{ours:.4g} / {theirs:.4g}", best, what])
    return table(["scenario", "goodput", "ours / best", "best", "drawn"], lines, markdown=True)


def _duels(workloads: Sequence[Workload], rivals: Sequence[str], results: Results) -> list[Duel]:
    """The worst first."""
    return sorted((best_of(w.name, rivals, results) for w in workloads), key=lambda duel: duel.goodput)


def _spread(ratios: Sequence[float]) -> list[str]:
    """As differences in percent."""
    ordered = sorted((ratio - 1) * 100 for ratio in ratios)
    if not ordered:
        return ["", *[""] * 8]
    last = len(ordered) - 1
    shown = [ordered[0], ordered[round(0.05 * last)], median(ordered), fmean(ordered), ordered[round(0.95 * last)]]
    counts = [sum(x < -5 for x in ordered), sum(x < -2 for x in ordered), sum(x > 2 for x in ordered)]
    return [*(f"{x:+.1f} %" for x in (*shown, ordered[-1])), *map(str, counts)]


def _seeds(workload: Workload) -> range:
    first = Random(str(workload.settings)).getrandbits(30)
    return range(first, first + REPLICATES)


def _scenario(name: str, dice: Random) -> Workload:
    limit = dice.choice([8, 16, 32, 64, 128])
    curve = _curve(dice, limit)
    full_s = cost_of(curve)(limit)
    cost = curve + _noise(dice)
    workers = dice.choice([1, 1, 1, 2, 4])
    duration_s = max(REQUESTS / capacity(curve, limit, workers), LEAST_BATCHES * full_s)
    settings = {
        "cost": cost,
        "max_batch_size": limit,
        "workers": workers,
        "arrivals": _arrivals(dice, limit * workers, full_s, cost_of(curve)(1)),
        "slo_s": four_digits(log_uniform(dice, 1.3, 12) * full_s),
        "duration_s": four_digits(duration_s),
    }
    return Workload(name, settings)


def _curve(dice: Random, limit: int) -> str:
    """Seconds by batch size, from a hundredth to four times as much per item as per batch."""
    fixed_ms = four_digits(log_uniform(dice, 0.5, 30))
    item_ms = four_digits(fixed_ms * log_uniform(dice, 0.01, 4))
    match dice.choice(["affine", "tile", "knee", "power", "sqrt"]):
        case "affine":
            return f"affine:a={fixed_ms}ms,b={item_ms}ms"
        case "tile":
            width = dice.choice([width for width in (4, 8, 16, 32) if width <= limit])
            return f"tile:a={fixed_ms}ms,step={four_digits(item_ms * width)}ms,width={width}"
        case "knee":
            knee = dice.randint(limit // 4, 3 * limit // 4)
            extra_ms = four_digits(fixed_ms / knee * log_uniform(dice, 0.5, 6))
            return f"knee:a={fixed_ms}ms,b={item_ms}ms,knee={knee},extra={extra_ms}ms"
        case "power":
            power = dice.uniform(0.3, 0.95)
            return "table:" + ",".join(f"{n}={four_digits(fixed_ms * n**power)}ms" for n in range(1, limit + 1))
        case _:
            return f"sqrt:c={fixed_ms}ms"


def _noise(dice: Random) -> str:
    """None for half of them."""
    if dice.random() < 0.5:
        return ""
    noise = f"+noisy:sigma={dice.uniform(0.03, 0.3):.3f}"
    if dice.random() < 0.4:
        noise += f",stall_share={dice.uniform(0.003, 0.02):.4f},stall_factor={dice.uniform(3, 8):.2f}"
    return noise


def _arrivals(dice: Random, room: int, full_s: float, single_s: float) -> str:
    """One of five kinds; `room` is what all workers hold, `full_s` and `single_s` batch times."""
    match dice.choice(["poisson", "mmpp", "flash", "closed", "bursts"]):
        case "poisson":
            return f"poisson:rho={dice.uniform(0.2, 1.6):.3f}"
        case "mmpp":
            rho = f"{dice.uniform(0.1, 0.6):.3f}/{dice.uniform(1.0, 2.0):.3f}"
            dwell_ms = log_uniform(dice, 3, 60) * full_s * 1e3
            return (
                f"mmpp:rho={rho},mean_dwell={four_digits(dwell_ms)}ms/{four_digits(dwell_ms * dice.uniform(0.3, 1))}ms"
            )
        case "flash":
            begin = dice.uniform(0.2, 0.6)
            between = f"{begin:.2f}/{begin + dice.uniform(0.05, 0.3):.2f}"
            return f"flash:rho={dice.uniform(0.1, 0.6):.3f},peak_rho={dice.uniform(1.0, 4.0):.3f},between={between}"
        case "closed":
            clients = max(1, round(room * log_uniform(dice, 0.05, 4)))
            think_ms = four_digits(single_s * 1e3 * log_uniform(dice, 0.03, 3))
            kind = dice.choice(["uniform", "exponential"])
            return f"closed:clients={clients},think={think_ms}ms,think={kind},backoff={four_digits(full_s * 1e3)}ms"
        case _:
            return f"bursts:rho={dice.uniform(0.3, 1.3):.3f},mean_burst={dice.uniform(2, 16):.1f}"
