"""How far the policies are from the best: least mean latency, and knowing all arrivals.

Both oracles know the cost and serve alone; `optimal.py` says what they assume.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from statistics import fmean

from bench.policies.optimal import clairvoyant_attainment
from bench.policies.runs import OPTIMAL, Case, Runs, optimum
from bench.policies.workloads import Workload, poisson, workload_of
from bench.tools.figures import table
from carpool.simulate import capacity
from carpool.simulate.arrivals import Scene, arrivals_of
from carpool.simulate.costs import cost_of

COSTS = ("fixed", "balanced", "item", "tile16", "sqrt", "knee")
LOADS = (0.3, 0.6, 0.85)
SEEDS = 3
DURATION_S = 40
LATENCY_POLICIES = (OPTIMAL, "greedy", "cork", "adaptive", "adaptive known")

REQUESTS = 2200
TRACES = (
    ("fixed", 0.06, "poisson:rho=0.9"),
    ("fixed", 0.06, "poisson:rho=1"),
    ("fixed", 0.06, "poisson:rho=1.2"),
    ("fixed", 0.03, "poisson:rho=0.7"),
    ("fixed", 0.03, "poisson:rho=0.9"),
    ("fixed", 0.03, "poisson:rho=1.2"),
    ("tile16", 0.05, "poisson:rho=1.2"),
    ("knee", 0.06, "poisson:rho=1.2"),
    ("balanced", 0.1, "poisson:rho=1.2"),
    ("fixed", 0.06, "mmpp:rho=0.2/1.6,mean_dwell=60ms/30ms"),
    ("fixed", 0.06, "mmpp:rho=0.25/1.3,mean_dwell=400ms/200ms"),
)
"""Cost, SLO and arrivals."""
GOODPUT_POLICIES = ("deadline", "cork", "greedy", "adaptive", "adaptive warm", "adaptive known")


def latency_table(runs: Runs, *, quick: bool = False) -> str:
    """Mean latencies in ms beside the least possible, computed and played on the same arrivals."""
    duration_s = DURATION_S / 10 if quick else DURATION_S
    workloads = [poisson(cost, load, duration_s=duration_s) for cost in COSTS for load in LOADS]
    cases = [
        Case(policy, workload.settings, seed)
        for workload in workloads
        for policy in LATENCY_POLICIES
        for seed in range(SEEDS)
    ]
    rows = iter(runs.rows(cases, "least latency"))
    lines = []
    for workload in workloads:
        means = {policy: fmean(next(rows).mean_s for _ in range(SEEDS)) for policy in LATENCY_POLICIES}
        milliseconds = [optimum(workload.settings).mean_s, *means.values()]
        above = (means["adaptive"] / means[OPTIMAL] - 1) * 100
        lines.append([workload.name, *(f"{mean_s * 1e3:.2f}" for mean_s in milliseconds), f"{above:+.1f} %"])
    header = ["cost, load", "computed", "played", *LATENCY_POLICIES[1:], "adaptive above it"]
    return table(header, lines, markdown=True)


def goodput_table(runs: Runs) -> str:
    """Attainments of short traces beside that of a scheduler that knew all arrivals."""
    cases: list[Case] = []
    bounds: list[float] = []
    for cost, slo_s, arrivals in TRACES:
        entry = {"name": "", "cost": cost, "arrivals": arrivals, "slo_s": slo_s}
        workload = workload_of(entry)
        times = [_times(workload, seed) for seed in range(SEEDS)]
        bounds.append(fmean(_bound(workload, trace, slo_s) for trace in times))
        for policy in GOODPUT_POLICIES:
            for seed, trace in enumerate(times):
                end_s = math.nextafter(trace[-1], math.inf)
                cases.append(Case(policy, {**workload.settings, "arrivals": trace, "duration_s": end_s}, seed))
    rows = iter(runs.rows(cases, "clairvoyant"))
    lines = []
    for (cost, slo_s, arrivals), bound in zip(TRACES, bounds, strict=True):
        shares = [fmean(next(rows).attainment for _ in range(SEEDS)) for _ in GOODPUT_POLICIES]
        of_bound = shares[GOODPUT_POLICIES.index("adaptive warm")] / bound
        name = f"{cost}, {slo_s * 1e3:.0f} ms, {arrivals}"
        lines.append([name, f"{bound:.3f}", *(f"{share:.3f}" for share in shares), f"{of_bound:.3f}"])
    return table(["trace", "bound", *GOODPUT_POLICIES, "warm of bound"], lines, markdown=True)


def _times(workload: Workload, seed: int) -> list[float]:
    """The first requests of a process."""
    settings = workload.settings
    scene = Scene(math.inf, capacity(settings["cost"], settings["max_batch_size"]))
    (process,) = arrivals_of(settings["arrivals"])
    stream = process.times(Random(f"trace {seed}"), scene)  # type: ignore[union-attr]
    return [next(stream) for _ in range(REQUESTS)]


def _bound(workload: Workload, times: Sequence[float], slo_s: float) -> float:
    cost, limit = cost_of(workload.settings["cost"]), workload.settings["max_batch_size"]
    return clairvoyant_attainment(times, [when + slo_s for when in times], cost, limit)
