"""carpool beside other HTTP servers, pair by pair, under `wrk`.  python -m bench.http_peers [--peers ...] ...

For each peer and number of connections: A B A B ..., N times over, in one run. Both servers stay up and take
turns; where one of them burns processor time while idle, which would slow the other, each is started anew for
its turn.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench import contestants, wrk
from bench.contestants import NAMES, Launch, Workload
from bench.figures import Spread, machine, median_ratio, short, table
from bench.peers.install import PACKAGES, versions
from bench.process_tree import adopt_orphans, end_on_sigterm
from bench.server import NotServing, Server, running
from bench.wrk import Run

QUIET_SHARE = 0.02  # of one core; a server that takes more while idle may not stay up beside another

Facts = dict[str, Any]
Opener = Callable[[Launch], AbstractContextManager[Server]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long and how often."""

    connections: list[int]
    pairs: int
    seconds: int
    warm_up_s: int
    alone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One peer beside ours at one number of connections; the runs of a pair have the same index."""

    ours: str
    peer: str
    workload: Workload
    connections: int
    our_runs: list[Run] = field(default_factory=list)
    peer_runs: list[Run] = field(default_factory=list)

    def ratio(self, quantity: str) -> float:
        return median_ratio(self.values(self.our_runs, quantity), self.values(self.peer_runs, quantity))

    @staticmethod
    def values(runs: list[Run], quantity: str) -> list[float]:
        return [getattr(run, quantity) for run in runs]


def compare(ours: Launch, peer: Launch, workload: Workload, plan: Plan, rows: list[Row]) -> None:
    """Measure the two in turn; each row is added when it is full."""
    with taking_turns(ours, peer, alone=plan.alone) as server_of:
        for connections in plan.connections if workload == "echo" else [1]:
            row = Row(ours=ours.name, peer=peer.name, workload=workload, connections=connections)
            for pair in range(plan.pairs):
                for launch, runs in ((ours, row.our_runs), (peer, row.peer_runs)):
                    with server_of(launch) as server:
                        runs.append(one_turn(server, connections, plan))
                progress(row, pair, plan)
            rows.append(row)


@contextmanager
def taking_turns(ours: Launch, peer: Launch, *, alone: bool) -> Iterator[Opener]:
    """A function that gives the server whose turn it is: one that stays up, or a new one each time."""
    with ExitStack() as stack:
        if not alone:
            kept_up = {launch.name: stack.enter_context(running(launch)) for launch in (ours, peer)}
            shares = {name: server.idle_share() for name, server in kept_up.items()}
            if max(shares.values()) <= QUIET_SHARE:
                yield lambda launch: kept(kept_up[launch.name])
                return
            restless = ", ".join(f"{name} takes {share:.0%} of a core" for name, share in shares.items())
            say(f"  idle, {restless}: one at a time")
            stack.close()
        yield running


@contextmanager
def kept(server: Server) -> Iterator[Server]:
    """A server that outlives its turn."""
    yield server


def one_turn(server: Server, connections: int, plan: Plan) -> Run:
    # Every turn is warmed up: a new server has cold caches, a learning one has seen other loads.
    if plan.warm_up_s:
        wrk.run(server, connections=connections, seconds=plan.warm_up_s)
    return wrk.run(server, connections=connections, seconds=plan.seconds)


HEADER = (
    "peer", "connections", "ours, req/s", "peer, req/s", "ratio",
    "p50 ms", "ratio", "p99 ms", "ratio", "CPU µs/req", "ratio", "failed",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    """One line of the table; `a / b` is ours and theirs."""

    def rate(runs: list[Run]) -> str:
        spread = Spread.of(Row.values(runs, "requests_per_s"))
        return f"{spread.median:,.0f} ({spread.low:,.0f}-{spread.high:,.0f})"

    def both(quantity: str, factor: float, digits: int) -> str:
        sides = (Spread.of(Row.values(runs, quantity)).median for runs in (row.our_runs, row.peer_runs))
        return " / ".join(f"{value * factor:.{digits}f}" for value in sides)

    failed = " / ".join(str(sum(run.failed for run in runs)) for runs in (row.our_runs, row.peer_runs))
    return [
        row.peer if row.workload == "echo" else f"{row.peer}, 6 MB",
        str(row.connections),
        rate(row.our_runs),
        rate(row.peer_runs),
        short(row.ratio("requests_per_s")),
        both("p50_s", 1e3, 2),
        short(row.ratio("p50_s")),
        both("p99_s", 1e3, 2),
        short(row.ratio("p99_s")),
        both("cpu_per_request_s", 1e6, 0),
        short(row.ratio("cpu_per_request_s")),
        failed,
    ]


def as_json(rows: Sequence[Row], failures: dict[str, str], facts: Facts) -> str:
    """Everything: the figures of the table and every single run."""

    def entry(row: Row) -> Facts:
        quantities = ("requests_per_s", "p50_s", "p99_s", "cpu_per_request_s")
        sides = {"our": row.our_runs, "peer": row.peer_runs}
        return {
            **asdict(row),
            "ratios": {quantity: row.ratio(quantity) for quantity in quantities},
            **{
                side: {quantity: asdict(Spread.of(Row.values(runs, quantity))) for quantity in quantities}
                for side, runs in sides.items()
            },
        }

    return json.dumps({"machine": facts, "rows": [entry(row) for row in rows], "failures": failures}, indent=1)


def progress(row: Row, pair: int, plan: Plan) -> None:
    ours, peer = row.our_runs[-1], row.peer_runs[-1]
    say(
        f"  {row.peer} {row.workload} c={row.connections} pair {pair + 1}/{plan.pairs}: "
        f"{ours.requests_per_s:,.0f} / {peer.requests_per_s:,.0f} req/s"
    )


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=",".join(NAMES), help="separated by commas; default: %(default)s")
    parser.add_argument("--ours", default="carpool", help="who is set against them; default: %(default)s")
    parser.add_argument("--connections", default="1,16,64,256", help="default: %(default)s")
    parser.add_argument("--pairs", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--seconds", type=int, default=3, help="of each run; default: %(default)s")
    parser.add_argument("--warm-up", type=int, default=1, help="s before each run; default: %(default)s")
    parser.add_argument("--workloads", default="echo,raw", help="raw is the 6 MB row; default: %(default)s")
    parser.add_argument("--alone", action="store_true", help="always start each server anew for its turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every run and every figure")
    parser.add_argument("--markdown", action="store_true", help="the table as Markdown")
    given = parser.parse_args()
    known = ("carpool", *NAMES)
    if unknown := [name for name in (given.ours, *given.peers.split(",")) if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
    if not wrk.is_installed():
        parser.error("wrk is missing (Debian: apt-get install wrk)")
    return given


def main() -> int:
    given = arguments()
    plan = Plan(
        connections=[int(number) for number in given.connections.split(",")],
        pairs=given.pairs,
        seconds=given.seconds,
        warm_up_s=given.warm_up,
        alone=given.alone,
    )
    end_on_sigterm()
    adopt_orphans()
    facts = {**machine(), "peers": {peer: versions(peer) for peer in PACKAGES}, "seconds": plan.seconds}
    rows: list[Row] = []
    failures: dict[str, str] = {}
    try:
        for workload in given.workloads.split(","):
            for peer in given.peers.split(","):
                measure(given.ours, peer, workload, plan, rows, failures)
    except KeyboardInterrupt:
        failures["run"] = "interrupted"
    report(rows, failures, facts, given)
    return 1 if failures else 0


def measure(ours: str, peer: str, workload: Workload, plan: Plan, rows: list[Row], failures: dict[str, str]) -> None:
    """Add the rows of one peer, or the reason why there are none: one that fails does not end the run."""
    what = f"{peer}, {workload}"
    one, other = contestants.launch(ours, workload), contestants.launch(peer, workload)
    if one is None or other is None:
        say(f"{what}: not possible")
    elif not contestants.is_installed(peer):
        failures[what] = "not installed: python -m bench.peers.install"
    else:
        say(what)
        try:
            compare(one, other, workload, plan, rows)
        except NotServing as problem:
            failures[what] = str(problem)


def report(rows: list[Row], failures: dict[str, str], facts: Facts, given: argparse.Namespace) -> None:
    if given.json:
        given.json.write_text(as_json(rows, failures, facts))
    print(f"{given.ours} beside its peers; a / b is {given.ours} / peer, a ratio the median over pairs")
    print(", ".join(f"{name} {value}" for name, value in facts.items() if name != "peers"))
    print(", ".join(f"{name} {number}" for peer in facts["peers"].values() for name, number in peer.items()))
    if rows:
        print("\n" + table(HEADER, [cells(row) for row in rows], markdown=given.markdown))
    for what, reason in failures.items():
        print(f"\nFAILED {what}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
