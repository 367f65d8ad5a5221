"""What each mechanism of Adaptive is worth: the same workloads with one of them off at a time.

    python -m bench.policies.ablation                         the four sets, three seeds, in hours
    python -m bench.policies.ablation --sets usual --seeds 1 --quick --parts gather,edge
    python -m bench.policies.ablation --each --workloads knee   what each workload says, too
    python -m bench.policies.ablation --constants --seeds 1   each constant halved and doubled

A row counts the workloads whose goodput falls, and rises, by 2 % without the mechanism, those in
which it falls by 5 %, and those whose penalised mean grows, and shrinks, by 2 %; then come the
worst ratio of goodput, and where that is. One that moves nothing anywhere, and closes no finding of
`bench.policies.recover`, does not earn its lines. Some are not in the list: what only saves
processor time (`lone_slack_s`, and that a trifle goes without more ado), what works for
`prefer="efficiency"` alone, and what a composed batch leaves out where requests have sizes, or
batches are padded to allowed sizes. `--constants` takes a grid, or several numbers of one name, as
one constant.
"""

from __future__ import annotations

import multiprocessing
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from statistics import fmean
from sys import maxsize
from types import ModuleType
from typing import Any, NamedTuple

from bench.policies.runs import add_jobs, bar, prepare
from bench.policies.sets import named
from bench.policies.tables import goodput_ratio
from bench.policies.workloads import DURATION_S, Workload
from bench.shapes import workloads as shapes
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
from carpool.engine.policy.base import NOTHING, DoneBatch
from carpool.simulate import run

MODULES = (cost, size, clients, length_cost, compose, by_length, adaptive_learning, adaptive)  # first who defines
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
OF_SHAPES: dict[shapes.Kind, str] = {
    "closed": "cv1 padded N16 W1|cv2 setup N64|bimodal padded N256 W4",
    "open": "cv1 padded load 0.7 burst 8|cv2 square load|bimodal padded load 0.7 burst 1 W4",
    "slo": "cv1 padded SLO 2 load 1.20 W1|bimodal padded SLO 4 load 2.00 W1|cv2 padded SLO 4 N64",
}
"""Those whose requests have lengths."""
KEYS = {"keys": 4, "switch_s": 5e-3}  # what one of them has besides


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
    cost._known_now = lambda i: cost._measured[i].count if i in cost._measured else 0.0  # type: ignore[method-assign]


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


def without_changes(policy: Adaptive) -> None:
    """A size that suddenly takes twice as much is learned like any other noise."""
    note = policy.cost._note

    def noted(i: int, known: float, relative: float, _: float, is_news: bool) -> float:
        before = policy.cost._measured.get(i)
        return note(i, known, relative, before.mean / relative if before else 1.0, is_news)

    policy.cost._note = noted  # type: ignore[method-assign]


def without_hopes(policy: Adaptive) -> None:
    """Sizes that are not known may take no less than they seem to."""
    policy.cost._hopes = lambda line, shape, pulled: [*shape]  # type: ignore[method-assign]


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


def without_shrinking(policy: Adaptive) -> None:
    """Of a backlog all that can be served is kept, however long an overload lasts."""
    worth_keeping = policy._worth_keeping

    def fresh(now: float, *given: Any) -> int:
        policy._overloaded_since = now
        return worth_keeping(now, *given)

    policy._worth_keeping = fresh  # type: ignore[method-assign]


def without_probes(policy: Adaptive) -> None:
    """Where none can be in time, all are refused, even if the cost was mislearned."""
    policy._hopeless = lambda late, _: Decision(drop=late)  # type: ignore[method-assign]


def without_price(policy: Adaptive) -> None:
    """A smaller batch for the first costs nothing, however high the load."""
    tight = policy._tight
    policy._tight = lambda at, left, most, load, workers: tight(at, left, most, 0.0, workers)  # type: ignore[method-assign]


def without_sending(policy: Adaptive) -> None:
    """No batch goes to a busy worker."""
    policy._ahead = lambda *_: NOTHING  # type: ignore[method-assign]


def without_cold_sending(policy: Adaptive) -> None:
    """No batch goes to a busy worker before costs are learned."""
    ahead = policy._ahead
    policy._ahead = lambda *given: NOTHING if policy.cost.samples < cost.LEARNED else ahead(*given)  # type: ignore[method-assign]


def without_trifles(policy: Adaptive) -> None:
    """Very short batches are decided about like others."""
    learn = policy.learn

    def learn_all(now: float, done: DoneBatch) -> None:
        learn(now, done)
        policy._was_trifle = False

    policy.learn = learn_all  # type: ignore[method-assign]


def without_waits_for_tries(policy: Adaptive) -> None:
    """A size for which too few wait is not tried."""
    policy._back_for_try = lambda *_: None  # type: ignore[method-assign]


def without_cluster(policy: Adaptive) -> None:
    """Whoever comes in a window is taken for a client that is back."""
    policy.gather.__class__ = _Credulous


def without_pull(policy: Adaptive) -> None:
    """What was measured once at a size is its cost, however noisy."""
    cost = policy.cost
    cost._pulled = lambda _: [(i, each.mean, cost._known_now(i)) for i, each in sorted(cost._measured.items())]  # type: ignore[method-assign]


def without_stalls(policy: Adaptive) -> None:
    """The first batch that is far outside the noise is believed."""
    believed = policy.cost._believed
    policy.cost._believed = lambda seconds, *given: believed(seconds, *given) or seconds  # type: ignore[method-assign]


def without_margin(policy: Adaptive) -> None:
    """Batches are planned by their mean time, amid noise, too."""
    policy.cost.__class__ = _Marginless


def without_forgetting(policy: Adaptive) -> None:
    """Slow first calls are not forgotten when later ones are quicker."""
    policy.cost.forget = lambda: None  # type: ignore[method-assign]


def without_fading(policy: Adaptive) -> None:
    """A way that nothing measures any more stays as it was."""
    policy.cost.way._fade = lambda: None  # type: ignore[method-assign]


def without_working_size(policy: Adaptive) -> None:
    """The largest batch is the working size."""
    _after_refresh(policy, lambda sizes: setattr(sizes, "most", policy.cost.limit))


def without_noise(policy: Adaptive) -> None:
    """Amid noise, too, whatever seems better is preferred."""
    _after_refresh(policy, lambda sizes: setattr(sizes, "_noise", 0.0))


def without_reach(policy: Adaptive) -> None:
    """Sizes beyond a worker's share are tried, too."""
    policy._sizes._reach = lambda waiting, everything: min(waiting, policy.cost.limit)  # type: ignore[method-assign]


def without_halves(policy: Adaptive) -> None:
    """No batch of half the size shows how the way grows."""
    learn_part = policy._sizes.learn_part

    def learn(*given: Any) -> None:
        learn_part(*given)
        policy._sizes._halves = False

    policy._sizes.learn_part = learn  # type: ignore[method-assign]


def without_lengths(policy: Adaptive) -> None:
    """Batches are never composed by length, nor by key."""
    _by_length(policy).composes = lambda _: False  # type: ignore[method-assign]


def without_plain_order(policy: Adaptive) -> None:
    """Batches are composed even where that saves little."""
    _by_length(policy)._composer.keeps_plain_order = lambda *_: False  # type: ignore[method-assign]


def without_fairness(policy: Adaptive) -> None:
    """Lengths that are seldom in time have no larger say."""
    _by_length(policy)._composer.answered = lambda *_: None  # type: ignore[method-assign]


def without_company(policy: Adaptive) -> None:
    """Where batches are composed, clients are not waited for."""
    _by_length(policy)._until = lambda *_: None  # type: ignore[method-assign]


def without_leaving_out(policy: Adaptive) -> None:
    """A composed batch keeps those that are late with it."""
    _by_length(policy)._composer.without_late = lambda _, choice: choice  # type: ignore[method-assign]


def without_share_by_length(policy: Adaptive) -> None:
    """Each of several workers composes batches as large as one alone."""
    _by_length(policy)._share = lambda *_: policy.limit  # type: ignore[method-assign]


def without_hopeless_by_length(policy: Adaptive) -> None:
    """Who could not be in time even alone waits on, where batches are composed."""
    _by_length(policy)._hopeless_alone = lambda *_: []  # type: ignore[method-assign]


def without_switches(policy: Adaptive) -> None:
    """A batch of another key seems to cost no more."""
    _by_length(policy).cost.learn_switch = lambda *_: None  # type: ignore[method-assign]


def without_level_of_lengths(policy: Adaptive) -> None:
    """Where requests have lengths, only weights learn a drift, and a stall is believed."""
    _by_length(policy).cost._believed = lambda seconds, *_: seconds  # type: ignore[method-assign]


def _by_length(policy: Adaptive) -> by_length.ByLength:
    """Return what decides where requests have lengths, which is made before the first of these."""
    if policy._by_length is None:
        policy._by_length = by_length.ByLength(policy)
    return policy._by_length


def _after_refresh(policy: Adaptive, change: Callable[[size.Sizes], None]) -> None:
    sizes = policy._sizes
    refresh = sizes.refresh

    def refreshed() -> None:
        refresh()
        change(sizes)

    sizes.refresh = refreshed  # type: ignore[method-assign]


class _Unbiased(cost.CostModel):
    @property
    def bias(self) -> float:
        return 1.0


class _Marginless(cost.CostModel):
    @property
    def margin(self) -> float:
        return 1.0


class _Credulous(clients.Gather):
    def _windows(self) -> Iterator[tuple[float, float]]:
        stray, self._stray = self._stray, 0.0
        yield from super()._windows()
        self._stray = stray


class _Everything(set[int]):
    """Contains whatever is asked for."""

    def __contains__(self, _: object) -> bool:
        return True


PARTS: dict[str, Callable[[Adaptive], None]] = {
    name.removeprefix("without_").replace("_", "-"): off
    for name, off in list(globals().items())
    if name.startswith("without_")
}
"""All mechanisms of a policy, by name, each with that which switches it off."""


def in_fixed_pieces(rising: compose.Rising, limit: int, *_: Any) -> list[tuple[int, int, int]]:
    """All that wait, by length, are cut into full batches."""
    lengths = [length for length, _, count in rising for _ in range(count)]
    return [(max(0, end - limit), end, lengths[end - 1]) for end in range(len(lengths), 0, -limit)][::-1]


def as_measured(values: Sequence[float], _: Any) -> list[float]:
    """Larger batches may seem to take less time."""
    return [*values]


FUNCTIONS: dict[str, tuple[ModuleType, str, Callable[..., Any]]] = {
    "rising": (cost, "_rising", as_measured),
    "cut": (compose, "partition", in_fixed_pieces),
}
"""Mechanisms that are functions of a module, each with that which takes its place."""


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
    options.add_names(parser, "--parts", [*PARTS, *FUNCTIONS], "the mechanisms")
    parser.add_argument("--constants", action="store_true", help="half and twice of each constant in their place")
    parser.add_argument("--each", action="store_true", help="print each workload that a mechanism moves")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/")
    add_jobs(parser)
    given = parser.parse_args()
    workloads = [*own(given.workloads), *chain(*named(given.sets, given.workloads).values())]
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


def own(pattern: str) -> list[Workload]:
    """The workloads for it alone whose names match."""
    found = [*OWN]
    for kind, names in OF_SHAPES.items():
        loaded = shapes.load(kind, None, names)
        found += [Workload(f"L {each.name}", {**each.settings, "settle_s": 0.0}) for each in loaded]
    first = found[len(OWN)]
    found.append(Workload(f"{first.name} keys", {**first.settings, **KEYS}))
    return [each for each in found if re.search(pattern, each.name)]


def constants() -> list[str]:
    """All constants of the policy, each as ` half` and ` twice`."""
    found = {}
    for module in MODULES:
        for name, value in vars(module).items():
            if name.strip("_").isupper() and _is_constant(value):
                found.setdefault((name, repr(value)), f"{module.__name__.rpartition('.')[2]}.{name}")
    return [f"{name} {times}" for name in found.values() for times in ("half", "twice")]


def _is_constant(value: Any) -> bool:
    if isinstance(value, dict | tuple):
        return all(map(_is_constant, value.values() if isinstance(value, dict) else value))
    return type(value) in (int, float)


@contextmanager
def changed(part: str) -> Iterator[None]:
    """Change a constant, or a function of a module, meanwhile; other mechanisms change nothing."""
    place, _, times = part.partition(" ")
    if part in FUNCTIONS:
        module, name, new = FUNCTIONS[part]
        having, value = [module], vars(module)[name]
    elif times:
        of, _, name = place.partition(".")
        value = next(vars(module)[name] for module in MODULES if module.__name__.rpartition(".")[2] == of)
        having = [module for module in MODULES if vars(module).get(name) == value]
        new = scaled(value, 0.5 if times == "half" else 2.0)
    else:
        having = []
    for module in having:
        setattr(module, name, new)
    try:
        yield
    finally:
        for module in having:
            setattr(module, name, value)


def scaled(value: Any, factor: float) -> Any:
    """A constant times a factor, or all the numbers in it.

    Of a number close to 1 the distance from 1 is changed: half of a memory is half as long.
    """
    if isinstance(value, dict):
        return {name: scaled(each, factor) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(scaled(each, factor) for each in value)
    if 0.9 < value < 1.0:
        return 1.0 - (1.0 - value) / factor
    if 1.0 < value < 1.1:
        return 1.0 + (value - 1.0) * factor
    return type(value)(value * factor)


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
    off = PARTS.get(part) or FUNCTIONS.get(part, [None])[-1]
    meaning = (off.__doc__ or "").partition(".")[0] if off else ""
    return [part, *map(str, counts), f"{goodput[worst]:.3f}", workloads[worst].name, meaning]


if __name__ == "__main__":
    sys.exit(main())
