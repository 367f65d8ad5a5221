"""What each mechanism of Adaptive is worth: the same workloads with one of them off at a time.

    python -m bench.policies.ablation                         the four sets, three seeds, in an hour
    python -m bench.policies.ablation --sets usual --seeds 1 --quick --parts gather,edge
    python -m bench.policies.ablation --each --workloads knee   what each workload says, too
    python -m bench.policies.ablation --constants --seeds 1   each constant halved and doubled

A row counts the workloads whose goodput falls, and rises, by 2 % without the mechanism, those in
which it falls by 5 %, and those whose penalised mean grows, and shrinks, by 2 %; then come the
worst ratio of goodput, and where that is. One that moves nothing anywhere, and closes no finding of
`bench.policies.recover`, does not earn its lines.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from sys import maxsize
from typing import NamedTuple

from bench.policies.runs import add_jobs, bar, prepare
from bench.policies.sets import named
from bench.policies.tables import goodput_ratio
from bench.policies.workloads import DURATION_S, Workload
from bench.tools import options
from bench.tools.docs import write
from bench.tools.figures import commit, table
from carpool.engine.policy import (
    Adaptive,
    Decision,
    adaptive,
    adaptive_learning,
    by_length,
    clients,
    compose,
    cost,
    length_cost,
    size,
)
from carpool.simulate import run

MODULES = (adaptive, adaptive_learning, by_length, clients, compose, cost, length_cost, size)
QUICK = 0.5  # of each duration
MOVES, MUCH = 0.02, 0.05
OWN = (
    Workload(
        "closed noisy N240",
        {
            "cost": "affine:a=8ms,b=0.25ms+noisy:sigma=0.3",
            "arrivals": "closed:clients=240,think=0.1ms,think=exponential,backoff=24ms",
            "max_batch_size": 64,
            "slo_s": 0.11,
            "duration_s": DURATION_S,
        },
    ),
    Workload(
        "closed tile4 N16",
        {
            "cost": "tile:a=29ms,step=7ms,width=4",
            "arrivals": "closed:clients=16,think=27ms,think=uniform",
            "max_batch_size": 32,
            "slo_s": 1.0,
            "duration_s": DURATION_S,
        },
    ),
    Workload(
        "P stalls r1.10",
        {
            "cost": "affine:a=2ms,b=0.1ms+noisy:sigma=0.05,stall_share=10%,stall_factor=5",
            "arrivals": "poisson:rho=1.1",
            "max_batch_size": 64,
            "slo_s": 0.06,
            "duration_s": DURATION_S,
        },
    ),
)
"""Workloads for it alone: a closed loop that asks too much, one whose groups miss a tile, and an
overload of a model that stalls."""


def without_gather(policy: Adaptive) -> None:
    """Never wait for clients to come back."""
    policy._back_until = lambda *_: None  # type: ignore[method-assign]


def without_plan(policy: Adaptive) -> None:
    """When the head is in a hurry, serve everything all the same."""
    policy._tight = lambda at, left, most, *_: Decision(  # type: ignore[method-assign]
        left.dropped, min(left.size, most), "free"
    )


def without_backlog(policy: Adaptive) -> None:
    """Keep the whole backlog in an overload."""
    policy._worth_keeping = lambda now, at, left, *_: left.size  # type: ignore[method-assign]


def without_edge(policy: Adaptive) -> None:
    """A backlog that stands is like any other."""
    policy._trim_edge = lambda *_: None  # type: ignore[method-assign]


def without_size(policy: Adaptive) -> None:
    """Take all that waits, up to the working size."""
    policy._sizes.choose = lambda waiting, most, *_: min(waiting, most)  # type: ignore[method-assign]


def without_share(policy: Adaptive) -> None:
    """Each of several workers takes as much as one alone."""
    policy._fair_share = lambda now, waiting, most, workers: most  # type: ignore[method-assign]


def without_tries(policy: Adaptive) -> None:
    """Never try a size for its own sake."""
    policy._sizes._next_try = maxsize


def without_ages(policy: Adaptive) -> None:
    """What was once measured is known for good."""
    cost = policy.cost
    cost._known_now = lambda i: cost._known[i]  # type: ignore[method-assign]


def without_ratios(policy: Adaptive) -> None:
    """A straight line for a cost."""
    policy.cost._pulled = lambda *_: []  # type: ignore[method-assign]


def without_level(policy: Adaptive) -> None:
    """No fast level: a drift is learned by the line alone, and a stall is believed."""
    policy.cost._believed = lambda seconds, *_: seconds  # type: ignore[method-assign]


def without_hopeless(policy: Adaptive) -> None:
    """Who could not be in time even alone waits on."""
    policy._drop_hopeless = lambda *_: None  # type: ignore[method-assign]


def without_cold(policy: Adaptive) -> None:
    """What one batch has taken is believed at once."""
    policy.cost.samples = 6


def without_tiles(policy: Adaptive) -> None:
    """A little more than the working size is two batches."""
    sizes = policy._sizes
    sizes.most_of = lambda waiting: int(min(sizes.most, sizes.part))  # type: ignore[method-assign]


def without_overlap(policy: Adaptive) -> None:
    """Batches of large items do not go in two groups."""
    policy._sizes.learn_part = lambda *_: None  # type: ignore[method-assign]


def without_ahead(policy: Adaptive) -> None:
    """Only a full batch goes to a busy worker."""
    policy._is_as_good = lambda *_: False  # type: ignore[method-assign]


def without_skipping(policy: Adaptive) -> None:
    """Each batch is learned from, however short."""
    policy._worth_skipping = lambda *_: 0  # type: ignore[method-assign]


def without_first_calls(policy: Adaptive) -> None:
    """What a worker's first batch of a size took counts as any other."""
    policy.cost._teaches = lambda *_: True  # type: ignore[method-assign]


def without_doubt(policy: Adaptive) -> None:
    """The first batch of a size is believed, however long it was."""
    policy.cost._doubted = _Everything()


def without_bias(policy: Adaptive) -> None:
    """Stalls take nothing of the capacity."""
    policy.cost.__class__ = _Unbiased


def without_way(policy: Adaptive) -> None:
    """The way to the worker costs nothing."""
    policy.cost.learn_way = lambda *_: None  # type: ignore[method-assign]


def without_steady_rate(policy: Adaptive) -> None:
    """Shares go by the last 256 arrivals."""
    arrivals = policy.arrivals
    arrivals.steady_rate = arrivals.rate  # type: ignore[method-assign]


def without_groups(policy: Adaptive) -> None:
    """Whether all clients are inside is never known."""
    policy.inside.are_all = lambda inside: False  # type: ignore[method-assign]


class _Unbiased(cost.CostModel):
    @property
    def bias(self) -> float:
        return 1.0


class _Everything(set[int]):
    """Contains whatever is asked for."""

    def __contains__(self, _: object) -> bool:
        return True


PARTS: dict[str, Callable[[Adaptive], None]] = {
    name.removeprefix("without_").replace("_", "-"): off
    for name, off in list(globals().items())
    if name.startswith("without_")
}
"""All mechanisms, by name, each with that which switches it off."""


class Figures(NamedTuple):
    """What runs of one workload have come to."""

    goodput: float
    penalised_s: float


def main() -> int:
    """Print the table, and write it into the docs if asked to."""
    parser = options.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="of each workload; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="half of each duration")
    parser.add_argument("--sets", default="usual,busy,rivals,ahead", metavar="NAMES", help="default: %(default)s")
    parser.add_argument("--workloads", default="", metavar="REGEX", help="those whose names match; default: all")
    options.add_names(parser, "--parts", PARTS, "the mechanisms")
    parser.add_argument("--constants", action="store_true", help="half and twice of each constant in their place")
    parser.add_argument("--each", action="store_true", help="print each workload that a mechanism moves")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/")
    add_jobs(parser)
    given = parser.parse_args()
    workloads = [*OWN, *(workload for each in named(given.sets, given.workloads).values() for workload in each)]
    workloads = [workload.shortened(QUICK if given.quick else 1.0) for workload in workloads]
    parts = ["", *(constants() if given.constants else given.parts)]
    cases = [(workload, part, seed) for part in parts for workload in workloads for seed in range(given.seeds)]
    found = iter(figures_of(cases, given.jobs))
    by_part = {part: [fmeans([next(found) for _ in range(given.seeds)]) for _ in workloads] for part in parts}
    whole = by_part.pop("")
    rows = [row(part, workloads, whole, without) for part, without in by_part.items()]
    header = ["without", "goodput falls", "by 5 %", "rises", "penalised mean grows", "shrinks", "worst", "at"]
    text = table([*header, "what that is"], rows, markdown=True)
    text += f"\n\n{len(workloads)} workloads, {given.seeds} seeds, commit `{commit()}`."
    print(text)
    if given.each:
        for part, without in by_part.items():
            for workload, before, after in zip(workloads, whole, without, strict=True):
                ratio, longer = goodput_ratio(after.goodput, before.goodput), after.penalised_s / before.penalised_s
                if max(abs(ratio - 1.0), abs(longer - 1.0)) > MOVES:
                    print(f"{part}: {workload.name}: goodput {ratio:.3f}, penalised mean {longer:.3f}")
    if given.docs:
        write({"ablation": text})
    return 0


def figures_of(cases: Sequence[tuple[Workload, str, int]], jobs: int) -> list[Figures]:
    """Run all cases in several processes."""
    with bar("runs") as progress, multiprocessing.get_context("spawn").Pool(jobs, initializer=prepare) as pool:
        shown = progress.add_task("ablation", total=len(cases), runs=len(cases))
        found = []
        for figures in pool.imap(simulate, cases, chunksize=4):
            progress.advance(shown)
            found.append(figures)
    return found


def simulate(case: tuple[Workload, str, int]) -> Figures:
    """Run a workload without a mechanism ("" for none)."""
    workload, part, seed = case

    def policy() -> Adaptive:
        made = Adaptive(workload.settings["max_batch_size"])
        if part in PARTS:
            PARTS[part](made)
        return made

    with changed(part):
        report = run(policy=policy, seed=seed, **workload.settings)
    return Figures(report.goodput, report.penalised_mean_s)


def constants() -> list[str]:
    """All constants of the policy that are one number, each as ` half` and ` twice`."""
    found = {}
    for module in MODULES:
        for name, value in vars(module).items():
            if name.strip("_").isupper() and type(value) in (int, float):
                found.setdefault((name, value), f"{module.__name__.rpartition('.')[2]}.{name}")
    return [f"{name} {times}" for name in found.values() for times in ("half", "twice")]


@contextmanager
def changed(part: str) -> Iterator[None]:
    """Change a constant meanwhile, in all modules that have it; does nothing for a mechanism.

    Of a value close to 1 the distance from 1 is changed: half of a memory is half as long.
    """
    place, _, times = part.partition(" ")
    name, factor = place.rpartition(".")[2], {"half": 0.5, "twice": 2.0}.get(times)
    if factor is None:
        yield
        return
    having = [module for module in MODULES if name in vars(module)]
    value = next(vars(module)[name] for module in having if module.__name__.endswith(place.partition(".")[0]))
    having = [module for module in having if vars(module)[name] == value]
    if 0.9 < value < 1.0:
        new = 1.0 - (1.0 - value) / factor
    elif 1.0 < value < 1.1:
        new = 1.0 + (value - 1.0) * factor
    else:
        new = type(value)(value * factor)
    for module in having:
        setattr(module, name, new)
    try:
        yield
    finally:
        for module in having:
            setattr(module, name, value)


def fmeans(figures: Sequence[Figures]) -> Figures:
    """Take the means over the seeds."""
    return Figures(*(fmean(values) for values in zip(*figures, strict=True)))


def row(part: str, workloads: Sequence[Workload], whole: Sequence[Figures], without: Sequence[Figures]) -> list[str]:
    """Count how many workloads a mechanism moves, in which direction."""
    goodput = [goodput_ratio(after.goodput, before.goodput) for before, after in zip(whole, without, strict=True)]
    longer = [after.penalised_s / before.penalised_s for before, after in zip(whole, without, strict=True)]
    counts = [
        sum(ratio < 1.0 - MOVES for ratio in goodput),
        sum(ratio < 1.0 - MUCH for ratio in goodput),
        sum(ratio > 1.0 + MOVES for ratio in goodput),
        sum(ratio > 1.0 + MOVES for ratio in longer),
        sum(ratio < 1.0 - MOVES for ratio in longer),
    ]
    worst = min(range(len(goodput)), key=goodput.__getitem__)
    meaning = (PARTS[part].__doc__ or "").partition(".")[0] if part in PARTS else ""
    return [part, *map(str, counts), f"{goodput[worst]:.3f}", workloads[worst].name, meaning]


if __name__ == "__main__":
    sys.exit(main())
