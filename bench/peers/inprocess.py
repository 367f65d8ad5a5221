"""`@carpool.batch` beside what else a program can do without a server, in one process.

Six cases, with batches of up to 64. `tasks`: 512 tasks and a trivial async function; `task_alone`:
a single task. `threads`: 64 threads and a function that sleeps for 1 ms and 0.02 ms per item;
`threads_greedy`: the same with our Greedy, whose rule is that of `queue`, instead of the default
policy; `threads_free`: 20 threads and a trivial function; `thread_alone`: a single thread and a
trivial function, whose own time is subtracted.

The sides take turns, A B A B ..., each turn in a process of its own under the side's own Python, on
plain asyncio. `ratio` is of rates with many callers and of times with a single one. `carpool -
peer` is the median difference of neighbours, so beside `bare_loop` it is what an item costs above
the least that batching can be.

* `queue` is one worker thread behind a `SimpleQueue` that takes whatever is there, `cooperative` is
  the code of the article "Cooperative batching" (2021-10-06), where the first in line runs the
  batch, and `lock` runs each call alone.
* At their defaults batched looks for a batch every 5 ms, async-batcher and Ray's `@serve.batch`
  wait up to 10 ms. `:0` are the same told not to wait, where batched polls: it takes a whole core
  while idle.
* `@serve.batch` runs alone, without Ray; on its first call it asks for the replica that it runs in,
  for which there is a stand-in.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import get_args

from bench.peers.install import not_installed, python_of, versions
from bench.tools import options
from bench.tools.closed_loop import Case
from bench.tools.comparison import compare, one_table, take_turns
from bench.tools.figures import Facts, Spread, median_ratio, short
from bench.tools.side import SideFailed, figures_of

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
    """Seconds per item of both sides, round by round."""

    case: Case
    peer: str
    carpool: list[float]
    theirs: list[float]

    @property
    def ratio(self) -> float:
        """Of the rates where there are many callers, of the times where there is one."""
        if is_rate(self.case):
            return median_ratio(self.theirs, self.carpool)
        return median_ratio(self.carpool, self.theirs)

    @property
    def more_us(self) -> float:
        """By how much more an item costs with us than with them."""
        return median(ours - theirs for ours, theirs in zip(self.carpool, self.theirs, strict=True)) * 1e6


def is_rate(case: Case) -> bool:
    """Whether there are many callers, so that a rate says more than a time."""
    return case not in ("task_alone", "thread_alone")


def measure(rounds: int, seconds: float, case_and_peer: tuple[Case, str]) -> Iterator[Row]:
    """The row of one case with one peer."""
    case, peer = case_and_peer
    carpool = "carpool:greedy" if case == "threads_greedy" else "carpool"
    sides = {"carpool": partial(turn, carpool, case, seconds), "theirs": partial(turn, peer, case, seconds)}
    turns = take_turns(f"{case} {peer}", rounds, sides, lambda facts: amount(case, facts["seconds_per_item"]))
    seconds_per_item = {side: [facts.pop("seconds_per_item") for facts in found] for side, found in turns.items()}
    if turns["carpool"] != turns["theirs"]:
        raise SideFailed(f"{case}, {peer}: not the same Python or event loop: {turns}")
    yield Row(case, peer, **seconds_per_item)


def turn(side: str, case: Case, seconds: float) -> Facts:
    """One process that measures one side, and what it tells."""
    package, _, wait_ms = side.partition(":")
    settings = [case, str(seconds)]
    if package in PACKAGED:
        command = [str(python_of(package)), "-m", f"bench.peers.servers.{package}_function", *settings]
        command += [wait_ms] if wait_ms else []
    else:
        command = [sys.executable, "-m", "bench.peers.servers.carpool_function", side, *settings]
    return figures_of(f"{side}, {case}", command, ours=package not in PACKAGED, seconds=seconds)


def amount(case: Case, seconds: float) -> str:
    """Many callers are shown in items per second, a single one in microseconds."""
    return f"{1 / seconds:,.0f}/s" if is_rate(case) else f"{seconds * 1e6:,.2f} µs"


HEADER = ("case, peer", "carpool", "peer", "ratio", "carpool - peer, µs")


def cells(row: Row) -> list[str]:
    """One line of the table."""
    spreads = (Spread.of(side).text(partial(amount, row.case)) for side in (row.carpool, row.theirs))
    return [f"{row.case}, {row.peer}", *spreads, short(row.ratio), f"{row.more_us:+,.2f}"]


def entry(row: Row) -> Facts:
    """A row as JSON has it."""
    seconds = {"carpool": row.carpool, "peer": row.theirs}
    figures = {"ratio": row.ratio, "carpool_more_us": row.more_us}
    return {"case": row.case, "peer": row.peer, "seconds_per_item": seconds, **figures}


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__)
    options.add_names(parser, "--cases", get_args(Case), "what is measured")
    options.add_names(parser, "--peers", (*FOR_TASKS, *FOR_THREADS), "who is compared")
    options.add_measuring(parser, rounds=7, seconds=2)
    given = parser.parse_args()
    given.pairings = [(case, peer) for case in given.cases for peer in PEERS[case] if peer in given.peers]
    packages = dict.fromkeys(peer.partition(":")[0] for _, peer in given.pairings)
    if missing := [package for package in packages if package in PACKAGED and not versions(package)]:
        others = ",".join(dict.fromkeys(peer for _, peer in given.pairings if peer.partition(":")[0] not in missing))
        parser.error(f"{not_installed(*missing)}" + (f", or leave them out: --peers {others}" if others else ""))
    return given


def main() -> int:
    given = arguments()
    measured = partial(measure, given.rounds, given.seconds)
    found = compare(given.pairings, measured, versions(*PACKAGED), given.seconds)
    title = "@carpool.batch beside other batchers in one process, with batches of up to 64"
    return found.report(given, title, one_table(HEADER, cells), entry)


if __name__ == "__main__":
    sys.exit(main())
