"""What each part of Adaptive is worth: the same workloads with one part switched off at a time.

A part that changes nothing anywhere does not earn its lines.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from statistics import mean
from sys import maxsize

from bench.policies.workloads import DURATION_S, Workload, load
from bench.tools import options
from bench.tools.docs import write
from carpool.engine.policy import Adaptive, Decision
from carpool.simulate import run

WORKLOADS = (
    "P fixed r0.90",
    "P fixed r1.20",
    "P fixed slo30 r0.70",
    "P fixed slo30 r1.20",
    "P item r0.90",
    "P tile16 r0.60",
    "P tile16 r0.85",
    "P knee r0.90",
    "P knee r1.20",
    "X diurnal knee",
    "P noisy r1.20",
    "P drift r0.60",
    "P noisy r1.00",
    "MMPP slow fixed",
    "MMPP fast fixed",
    "flash x10 3.0 fixed",
    "closed fixed N16",
    "closed fixed N64",
    "X closed sqrt N32 rtt5uni",
    "X tile8b r0.8",
    "X fixed slo1s r1.2",
    "X mixSLO fixed r1.2",
    "X flash x10 tile16",
    "P table m4 r0.50",
)
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
)
"""Workloads for it alone: a closed loop that asks too much, and one whose groups miss a tile."""


def without_gather(policy: Adaptive) -> None:
    """Never wait for clients to come back."""
    policy._worth_waiting_until = lambda *_: None  # type: ignore[method-assign]


def without_plan(policy: Adaptive) -> None:
    """When the head is in a hurry, serve everything all the same."""
    policy._tight = lambda at, left, most, _: Decision(  # type: ignore[method-assign]
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


PARTS: dict[str, Callable[[Adaptive], None]] = {
    "gather": without_gather,
    "plan": without_plan,
    "backlog": without_backlog,
    "edge": without_edge,
    "size": without_size,
    "share": without_share,
    "tries": without_tries,
    "ages": without_ages,
    "ratios": without_ratios,
    "level": without_level,
}


def simulate(case: tuple[Workload, str, int]) -> tuple[float, float]:
    """Goodput and mean milliseconds of a workload without a part ("" for none)."""
    workload, part, seed = case

    def policy() -> Adaptive:
        made = Adaptive(workload.settings["max_batch_size"])
        if part:
            PARTS[part](made)
        return made

    settings = {name: value for name, value in workload.settings.items() if name != "name"}
    report = run(policy=policy, seed=seed, **settings)
    return report.goodput, report.mean_s * 1e3


def main() -> None:
    """Print the table, and write it into the docs if asked to."""
    parser = options.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="of each workload; default: %(default)s")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes work; default: %(default)s")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/")
    given = parser.parse_args()
    workloads = [*(workload for workload in load() if workload.name in WORKLOADS), *OWN]
    variants = ["", *PARTS]
    cases = [(workload, part, seed) for workload in workloads for part in variants for seed in range(given.seeds)]
    with ProcessPoolExecutor(given.jobs) as pool:
        figures = iter(list(pool.map(simulate, cases)))
    rows = ["| workload | Adaptive | " + " | ".join(f"no {part}" for part in PARTS) + " |"]
    rows.append("| --- |" + " ---: |" * len(variants))
    for workload in workloads:
        cells = []
        whole: tuple[float, float] | None = None
        for _ in variants:
            runs = [next(figures) for _ in range(given.seeds)]
            found = mean(goodput for goodput, _ in runs), mean(ms for _, ms in runs)
            cells.append(cell(found, whole))
            whole = whole or found
        rows.append(f"| {workload.name} | " + " | ".join(cells) + " |")
    table = "\n".join(rows)
    print(table)
    if given.docs:
        write({"ablation": table})


def cell(found: tuple[float, float], whole: tuple[float, float] | None) -> str:
    """Goodput and mean; beside the whole, only if they differ by half a percent, in bold by 5 %."""
    if whole is None:
        return f"{found[0]:.0f} / {found[1]:.1f}"
    changes = [new / old - 1.0 for new, old in zip(found, whole, strict=True)]
    if all(abs(change) < 0.005 for change in changes):
        return "="
    text = " / ".join(f"{change:+.0%}" if abs(change) >= 0.005 else "=" for change in changes)
    return f"**{text}**" if changes[0] < -0.05 or changes[1] > 0.05 else text


if __name__ == "__main__":
    main()
