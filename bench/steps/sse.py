"""Server-sent events: carpool's steps beside other servers.

Every server answers `{"n": 40}` with the events 1 to 40; answers have 20 to 60. Connections are a
closed loop in one client process, which counts and checks every event. `starlette` has no worker
and no batching: an async generator for each request, on uvicorn with uvloop and httptools. The
others batch up to 64: `batches` is carpool with a generator for each batch, `mosec` its SSEWorker
(it waits 10 ms for a batch), `litserve` a generator for each batch (1 ms) and `litserve:continuous`
its continuous loop, `ray` a batched generator.

* Without model time what is compared are the servers themselves; with steps of 5 ms (asleep) an
  answer cannot come faster than its steps.
* Each server is started anew for its turns at one case, one server at a time, and warmed up. A
  ratio is the median over the rounds of ours by the peer's in the same round.
* CPU is that of the server's whole process tree, per event; that of the client is in the last
  column, as a part of one core.

A quick look:

    python -m bench.steps.sse --sides carpool,starlette --rounds 2 --seconds 1
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from bench import PYTHONPATH, ROOT
from bench.peers.contestants import Exchange, Launch, carpool
from bench.peers.install import not_installed, python_of, versions
from bench.steps.client import Client, Dialect, Run
from bench.tools import options
from bench.tools.comparison import compare, one_table, say
from bench.tools.figures import Facts, Spread, median_ratio, short
from bench.tools.server import NotServing, Server, running
from bench.tools.side import SideFailed

SERVERS = Path(__file__).parent / "servers"
SIDES = ("carpool", "starlette", "batches", "mosec", "litserve", "litserve:continuous", "ray")
CARPOOLS = {"carpool": "steps", "batches": "batches"}
OURS = Dialect(end=b'event: end\ndata: {"parts": %d}\n\n', ends=1)


@dataclass(frozen=True, slots=True)
class Case:
    """So many connections, and what a step takes."""

    connections: int
    step_s: float

    def __str__(self) -> str:
        return f"{self.connections} connections, steps of {self.step_s * 1e3:g} ms"


@dataclass(frozen=True, slots=True)
class Row:
    """One side in one case beside ours; runs of a round have the same index."""

    case: Case
    side: str
    runs: list[Run]
    ours: list[Run]

    def ratio(self, quantity: str) -> float:
        """Ours by the side's."""
        return median_ratio(*([getattr(run, quantity) for run in runs] for runs in (self.ours, self.runs)))


def dialect(side: str) -> Dialect:
    if side in CARPOOLS:
        return OURS
    return Dialect(path="/inference") if side == "mosec" else Dialect()


def launch(side: str, step_s: float) -> Launch:
    """How to start one side."""
    env = {"BENCH_STEP_S": repr(step_s)}
    body = b'{"n": 2}'
    events = Exchange(path=dialect(side).path, body=body, answer=b"data: 1\n\ndata: 2\n\n")
    peer, _, kind = side.partition(":")
    if side in CARPOOLS:
        target = f"bench.steps.servers.carpool_counts:{CARPOOLS[side]}"
        command = [*carpool(), "serve", target, "--host", "127.0.0.1", "--port", "{port}"]
        env |= {"PYTHONPATH": PYTHONPATH}
        return Launch(name=side, command=command, exchange=replace(events, answer=[1, 2]), env=env, directory=ROOT)
    words = [str(python_of(peer)), f"{peer}_counts.py"]
    if peer == "mosec":
        words += ["--address", "127.0.0.1", "--port", "{port}", "--timeout", "60000"]
    elif peer == "litserve":
        words += [kind or "batches", "{port}"]
    else:
        words += ["{port}"]
    if peer == "ray":
        env |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    return Launch(name=side, command=words, exchange=events, env=env, directory=SERVERS)


def one_turn(side: str, case: Case, seconds: float, warm_up_s: float, seed: int) -> Run:
    """Start one server, load it, and end it."""
    try:
        with running(launch(side, case.step_s)) as server:
            return load(server, dialect(side), case.connections, seconds, warm_up_s, seed)
    except NotServing as problem:
        raise SideFailed(f"{side}, {case}: {problem}") from None


def load(server: Server, dialect: Dialect, connections: int, seconds: float, warm_up_s: float, seed: int = 0) -> Run:
    """Ask a server that is up."""
    client = Client(server.port, dialect, connections, seed)
    try:
        client.run(warm_up_s)
        before = server.cpu_s()
        run = client.measured(0, seconds)
        return replace(run, cpu_s=server.cpu_s() - before)
    finally:
        client.close()


def measure(case: Case, sides: list[str], rounds: int, seconds: float, warm_up_s: float) -> Iterator[Row]:
    """Let all sides take turns in one case."""
    runs: dict[str, list[Run]] = {side: [] for side in sides}
    failed = []
    for number in range(rounds):
        for side in list(runs):
            try:
                runs[side].append(one_turn(side, case, seconds, warm_up_s, number))
            except SideFailed as problem:
                failed.append(str(problem))
                del runs[side]
        figures = ", ".join(f"{side} {of[-1].events_per_s:,.0f}" for side, of in runs.items())
        say(f"  {case}, round {number + 1} of {rounds}, events/s: {figures}")
    for side, of in runs.items():
        yield Row(case, side, of, runs.get(sides[0], of))
    if failed:
        raise SideFailed("\n".join(failed))


HEADER = (
    "side", "connections", "step ms", "events/s", "ours / its", "CPU µs/event", "ours / its",
    "first p50 ms", "between p50 ms", "wrong", "client",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    def middle(quantity: str) -> float:
        return median(getattr(run, quantity) for run in row.runs)

    busy = median(run.client_cpu_s / run.seconds for run in row.runs)
    return [
        row.side,
        str(row.case.connections),
        f"{row.case.step_s * 1e3:g}",
        Spread.of([run.events_per_s for run in row.runs]).text(lambda rate: f"{rate:,.0f}"),
        short(row.ratio("events_per_s")),
        f"{middle('cpu_per_event_s') * 1e6:.1f}",
        short(row.ratio("cpu_per_event_s")),
        f"{middle('first_s') * 1e3:.1f}",
        f"{middle('between_s') * 1e3:.2f}",
        str(sum(run.wrong for run in row.runs)),
        f"{busy:.0%}",
    ]


def entry(row: Row) -> Facts:
    return {**asdict(row), "ratios": {name: row.ratio(name) for name in ("events_per_s", "cpu_per_event_s")}}


def arguments() -> argparse.Namespace:
    parser = options.parser(__doc__)
    options.add_names(parser, "--sides", SIDES, "who is compared; ratios are those of the first one")
    parser.add_argument("--connections", default="16,64", help="separated by commas; default: %(default)s")
    parser.add_argument("--steps-ms", default="0,5", help="separated by commas; default: %(default)s")
    parser.add_argument("--warm-up", type=float, default=1, help="seconds before each turn; default: %(default)s")
    options.add_measuring(parser, rounds=5, seconds=3)
    return parser.parse_args()


def installed(sides: list[str]) -> list[str]:
    """Those that can be started; the others are named."""
    there = [side for side in sides if side in CARPOOLS or versions(side.partition(":")[0])]
    if len(there) < len(sides):
        say(f"skipped: {not_installed(*[side for side in sides if side not in there])}")
    return there


def main() -> int:
    given = arguments()
    sides = installed(given.sides)
    cases = [
        Case(int(connections), float(ms) / 1e3)
        for ms in given.steps_ms.split(",")
        for connections in given.connections.split(",")
    ]
    peers = versions(*dict.fromkeys(side.partition(":")[0] for side in sides if side not in CARPOOLS))
    found = compare(
        cases, lambda case: measure(case, sides, given.rounds, given.seconds, given.warm_up), peers, given.seconds
    )
    title = "server-sent events; a ratio is that of the first side by the line's, the median over the rounds"
    return found.report(given, title, one_table(HEADER, cells), entry)


if __name__ == "__main__":
    sys.exit(main())
