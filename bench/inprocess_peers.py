"""@carpool.batch beside other batchers, in one process.  python -m bench.inprocess_peers [--pairs 7] ...

Six cases, batches of up to 64. `tasks`: 512 tasks and a trivial async function; `task_alone`: a single task.
`threads`: 64 threads and a function that sleeps for 1 ms and 0.02 ms per item; `threads_greedy`: the same with
our Greedy, whose rule is that of `queue`, instead of the default policy; `threads_free`: 20 threads and a
trivial function; `thread_alone`: a single thread and a trivial function, whose own time is taken off. A B A B
..., N times over; each turn is a process of its own under the side's own Python, on plain asyncio. `batched:0`
is batched told to wait 0 ms, and so on.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import cast, get_args

from bench.closed_loop import Case
from bench.figures import Spread, machine, median_ratio, short, table
from bench.peers.install import python_of, versions
from bench.process_tree import adopt_orphans, end_on_sigterm
from bench.side import Facts, SideFailed, figures_of

PACKAGED = ("batched", "async_batcher", "ray")  # in an environment of their own
FOR_TASKS = ("bare_loop", "batched", "batched:0", "async_batcher", "async_batcher:0", "ray", "ray:0")
FOR_THREADS = ("cooperative", "queue", "lock")
PEERS: dict[Case, tuple[str, ...]] = {
    "tasks": FOR_TASKS,
    "task_alone": FOR_TASKS,
    "threads": FOR_THREADS,
    "threads_greedy": ("queue",),
    "threads_free": ("cooperative", "queue"),
    "thread_alone": FOR_THREADS,
}


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds per item of both sides, by pair."""

    case: Case
    peer: str
    carpool: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Of the rates where there are many callers, of the times where there is one."""
        if is_rate(self.case):
            return median_ratio(self.theirs, self.carpool)
        return median_ratio(self.carpool, self.theirs)

    @property
    def more_us(self) -> float:
        """What an item costs with us more than with them."""
        return median(ours - theirs for ours, theirs in zip(self.carpool, self.theirs, strict=True)) * 1e6


def is_rate(case: Case) -> bool:
    return case not in ("task_alone", "thread_alone")


def measure(case: Case, peer: str, pairs: int, seconds: float) -> Row:
    """The two sides in turn."""
    row = Row(case, peer)
    carpool = "carpool:greedy" if case == "threads_greedy" else "carpool"
    for pair in range(pairs):
        ours, theirs = turn(carpool, case, seconds), turn(peer, case, seconds)
        row.carpool.append(ours.pop("seconds_per_item"))
        row.theirs.append(theirs.pop("seconds_per_item"))
        if ours != theirs:
            raise SideFailed(f"{case}, {peer}: not the same Python or event loop: {ours}, {theirs}")
        figures = " / ".join(amount(case, side[-1]) for side in (row.carpool, row.theirs))
        print(f"  {case} {peer} pair {pair + 1}/{pairs}: {figures}", file=sys.stderr, flush=True)
    return row


def turn(side: str, case: Case, seconds: float) -> Facts:
    """One process that measures one side, and what it tells."""
    package, _, wait_ms = side.partition(":")
    if package in PACKAGED:
        program = [str(python_of(package)), "-m", f"bench.peers.{package}_function"]
        command = [*program, case, str(seconds), *([wait_ms] if wait_ms else [])]
    else:
        command = [sys.executable, "-m", "bench.inprocess_sides", side, case, str(seconds)]
    return figures_of(f"{side}, {case}", command, ours=package not in PACKAGED, seconds=seconds)


def amount(case: Case, seconds: float) -> str:
    """Many callers are told in items per second, a single one in microseconds."""
    return f"{1 / seconds:,.0f}/s" if is_rate(case) else f"{seconds * 1e6:,.2f} µs"


HEADER = ("case, peer", "carpool", "peer", "ratio", "carpool - peer, µs")


def cells(row: Row) -> list[str]:
    def spread(values: list[float]) -> str:
        found = Spread.of(values)
        middle, low, high = (amount(row.case, value) for value in (found.median, found.low, found.high))
        return f"{middle} ({low}, {high})"

    name = f"{row.case}, {row.peer}"
    return [name, spread(row.carpool), spread(row.theirs), short(row.ratio), f"{row.more_us:+,.2f}"]


def as_json(rows: list[Row], failures: list[str], facts: Facts) -> str:
    def entry(row: Row) -> Facts:
        seconds = {"carpool": row.carpool, "peer": row.theirs}
        figures = {"ratio": row.ratio, "carpool_more_us": row.more_us}
        return {"case": row.case, "peer": row.peer, "seconds_per_item": seconds, **figures}

    return json.dumps({"machine": facts, "rows": [entry(row) for row in rows], "failures": failures}, indent=1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everyone = (*FOR_TASKS, *FOR_THREADS)
    parser.add_argument("--cases", default=",".join(get_args(Case)), help="separated by commas; default: all")
    parser.add_argument("--peers", default=",".join(everyone), help="separated by commas; default: %(default)s")
    parser.add_argument("--pairs", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=2, help="of each turn; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every turn and every figure")
    parser.add_argument("--markdown", action="store_true", help="the table as Markdown")
    given = parser.parse_args()
    given.cases, given.peers = given.cases.split(","), given.peers.split(",")
    if unknown := set(given.cases) - set(get_args(Case)):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(get_args(Case))}")
    if unknown := set(given.peers) - set(everyone):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(everyone)}")
    for case, peer in pairings(given):
        package = peer.partition(":")[0]
        if package in PACKAGED and not versions(package):
            parser.error(f"{package} is not installed, for {case}: python -m bench.peers.install {package}")
    return given


def pairings(given: argparse.Namespace) -> list[tuple[Case, str]]:
    """Who is measured with what."""
    return [(case, peer) for case in cast("list[Case]", given.cases) for peer in PEERS[case] if peer in given.peers]


def main() -> int:
    given = arguments()
    end_on_sigterm()
    adopt_orphans()
    found = {name: version for package in PACKAGED for name, version in versions(package).items()}
    facts = {**machine(), "peers": found, "seconds": given.seconds}
    rows: list[Row] = []
    failures: list[str] = []
    try:
        for case, peer in pairings(given):
            try:
                rows.append(measure(case, peer, given.pairs, given.seconds))
            except SideFailed as problem:
                failures.append(str(problem))
    except KeyboardInterrupt:
        failures.append("interrupted")
    if given.json:
        given.json.write_text(as_json(rows, failures, facts))
    print("@carpool.batch beside other batchers in one process; batches of up to 64")
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    if rows:
        print("\n" + table(HEADER, [cells(row) for row in rows], markdown=given.markdown))
    for failure in failures:
        print(f"\nFAILED {failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
