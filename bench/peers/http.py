"""carpool beside other HTTP servers under `wrk`, one peer after the other.

Everyone serves the same model, {"x": 1.5} -> {"y": 3.0}, in batches of up to 64, with everything
else at its default. `mosec:1` is mosec with `max_wait_time=1` (ms), and so on; plain `mosec` waits
its default of 10 ms. Ray's replicas may hold 256 requests, since no batch could grow beyond 5
otherwise. `bare_echo` is not a peer but a limit: httptools on uvloop, sending the body back. The
rows of 6 MB are raw bodies that come back as they were, one at a time; LitServe has none, because
it reads every body as JSON or as a form.

* Runs alternate, A B A B ..., and a ratio is the median over the rounds: other work on the machine
  slows both neighbours alike. `a / b` is ours and the peer's; above 1 is better for req/s, below 1
  for times and CPU.
* Both servers stay up and take turns. Where one of them takes more than 2 % of a core while idle
  (LitServe, Ray), which would slow the other, each is started anew for its turn, alone.
* CPU is user and system time of the server's whole process tree during the run, per answer.
* `failed` counts answers with a status of 400 or more, and connections that broke or waited 10
  seconds.
* `wrk` is a closed loop in one thread and takes a core of its own: with two cores it slows all
  servers, the fast ones most.

`carpool_keys` asks for an API key, `carpool_tls` speaks TLS, and `mosec_behind_nginx` has nginx do
that. What each of these costs, and how TLS of our own stands beside TLS by nginx:

    python -m bench.peers.http --peers carpool_keys,carpool_tls
    python -m bench.peers.http --ours carpool_tls --peers mosec_behind_nginx

A quick look:

    python -m bench.peers.http --peers mosec,bare_echo --rounds 3 --seconds 2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial

from bench.peers import contestants
from bench.peers.contestants import LOCKED, NAMES, Launch, Workload
from bench.peers.install import PACKAGES, not_installed, versions
from bench.tools import options, wrk
from bench.tools.comparison import compare, one_table, say, take_turns
from bench.tools.figures import Facts, Spread, median_ratio, short
from bench.tools.server import NotServing, Server, running
from bench.tools.side import SideFailed
from bench.tools.wrk import Run

QUIET_SHARE = 0.02  # of one core; a server that takes more while idle may not stay up beside another

Opener = Callable[[Launch], AbstractContextManager[Server]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long and how often is measured."""

    ours: str
    connections: list[int]
    rounds: int
    seconds: int
    warm_up_s: int
    alone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One peer beside ours at one number of connections; runs of a round have the same index."""

    ours: str
    peer: str
    workload: Workload
    connections: int
    our_runs: list[Run]
    peer_runs: list[Run]

    def ratio(self, quantity: str) -> float:
        return median_ratio(values(self.our_runs, quantity), values(self.peer_runs, quantity))


def values(runs: list[Run], quantity: str) -> list[float]:
    """One quantity of every run."""
    return [getattr(run, quantity) for run in runs]


def measure(plan: Plan, case: tuple[Workload, str]) -> Iterator[Row]:
    """The rows of one peer with one workload, each as soon as it is full."""
    workload, name = case
    what = f"{name}, {workload}"
    ours, peer = contestants.launch(plan.ours, workload), contestants.launch(name, workload)
    if ours is None or peer is None:
        say(f"{what}: not possible")
        return
    if not contestants.is_installed(name):
        raise SideFailed(f"{what}: {not_installed(name)}")
    say(what)
    try:
        with taking_turns(ours, peer, alone=plan.alone) as server_of:
            for connections in plan.connections if workload == "echo" else [1]:
                turns = {
                    side: partial(one_turn, server_of, launch, connections, plan)
                    for side, launch in (("our_runs", ours), ("peer_runs", peer))
                }
                title = f"{name} {workload} c={connections}"
                runs = take_turns(title, plan.rounds, turns, lambda run: f"{run.requests_per_s:,.0f} req/s")
                yield Row(ours=plan.ours, peer=name, workload=workload, connections=connections, **runs)
    except NotServing as problem:
        raise SideFailed(f"{what}: {problem}") from None


@contextmanager
def taking_turns(ours: Launch, peer: Launch, *, alone: bool) -> Iterator[Opener]:
    """What gives the server whose turn it is: one that stays up, or a new one each time."""
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


def one_turn(server_of: Opener, launch: Launch, connections: int, plan: Plan) -> Run:
    """One run of one server, warmed up: its caches are cold, or it has learned of other loads."""
    with server_of(launch) as server:
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
        return Spread.of(values(runs, "requests_per_s")).text(lambda rate: f"{rate:,.0f}")

    def both(quantity: str, factor: float, digits: int) -> str:
        sides = (Spread.of(values(runs, quantity)).median for runs in (row.our_runs, row.peer_runs))
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


def entry(row: Row) -> Facts:
    """A row as JSON has it: the figures of the table, and every single run."""
    quantities = ("requests_per_s", "p50_s", "p99_s", "cpu_per_request_s")
    sides = {"our": row.our_runs, "peer": row.peer_runs}
    return {
        **asdict(row),
        "ratios": {quantity: row.ratio(quantity) for quantity in quantities},
        **{
            side: {quantity: asdict(Spread.of(values(runs, quantity))) for quantity in quantities}
            for side, runs in sides.items()
        },
    }


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__)
    options.add_names(parser, "--peers", (*NAMES, *LOCKED), "who is compared", default=",".join(NAMES))
    parser.add_argument("--ours", default="carpool", help="who is set beside them; default: %(default)s")
    parser.add_argument("--connections", default="1,16,64,256", help="separated by commas; default: %(default)s")
    options.add_names(parser, "--workloads", ("echo", "raw"), "what is asked; raw gives the row of 6 MB")
    parser.add_argument("--warm-up", type=int, default=1, help="seconds before each run; default: %(default)s")
    parser.add_argument("--alone", action="store_true", help="start each server anew for its turn, in any case")
    options.add_measuring(parser, rounds=7, seconds=3)
    given = parser.parse_args()
    if given.ours not in (known := ("carpool", *NAMES, *LOCKED)):
        parser.error(f"unknown: {given.ours}; choose from {', '.join(known)}")
    if problem := wrk.missing():
        parser.error(problem)
    return given


def main() -> int:
    given = arguments()
    plan = Plan(
        ours=given.ours,
        connections=[int(number) for number in given.connections.split(",")],
        rounds=given.rounds,
        seconds=max(1, round(given.seconds)),
        warm_up_s=given.warm_up,
        alone=given.alone,
    )
    cases = [(workload, peer) for workload in given.workloads for peer in given.peers]
    found = compare(cases, partial(measure, plan), versions(*PACKAGES), plan.seconds)
    title = f"{given.ours} beside its peers; a / b is {given.ours} / peer, a ratio the median over the rounds"
    return found.report(given, title, one_table(HEADER, cells), entry)


if __name__ == "__main__":
    sys.exit(main())
