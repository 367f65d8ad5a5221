"""The working tree beside a former revision, on the paths that must not get slower.

    python -m bench.pairs 92f0e6ef --cases http:64,http:256,tasks

Both trees run the same programs under the same Python, in turns; the one that begins changes with
each round. Every turn has a process of its own. Servers are started anew in each round and then
take three turns, as one start differs from the next by some percent.

* `http:N` is `{"x": 1.5}` -> `{"y": 3.0}` by N connections of `wrk`, and `bulk` the same as lines
  of one request. `score` is the command with 200,000 lines, its start included.
* `sse:N` is an event to each of N connections, of answers with 20 to 60 of them that take no time.
* `tasks`, `threads` and `thread_alone` are those of `bench.peers.inprocess`; streams, calls and
  arrays those of `bench.peers.process`. `steps:N` streams N answers of a decoder that takes no
  time.

A ratio is the median over all pairs: above 1 the working tree is faster, and needs less CPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args

from bench import ROOT
from bench.peers.contestants import MODELS, Launch, serving
from bench.protocols import bulk
from bench.steps import sse
from bench.tools import closed_loop, options, stopwatch, wrk
from bench.tools.comparison import compare, one_table, take_turns
from bench.tools.figures import Facts, Spread, median_ratio, short
from bench.tools.server import NotServing, Server, running
from bench.tools.side import SideFailed, figures_of

HTTP = ("http:16", "http:64", "http:256")
SSE = ("sse:16", "sse:64")
STEPS = ("steps:16", "steps:32")
IN_PROCESS = ("tasks", "threads", "thread_alone")
SERVED = (*HTTP, *SSE, "bulk")
CASES = (*SERVED, "score", *IN_PROCESS, *get_args(stopwatch.Case), *STEPS)
TURNS_OF_A_SERVER = 3
SCORED_LINES = 200_000
assert set(IN_PROCESS) <= set(get_args(closed_loop.Case))


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn showed, by item; CPU only of servers."""

    seconds: float
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """All turns of a case, the former tree's and this one's."""

    case: str
    former: list[Turn]
    this: list[Turn]

    @property
    def ratio(self) -> float:
        """How many times as fast this tree is."""
        return median_ratio([turn.seconds for turn in self.former], [turn.seconds for turn in self.this])

    @property
    def cpu_ratio(self) -> float:
        """How many times as much CPU the former tree takes; nan where it is not counted."""
        return median_ratio([turn.cpu_s for turn in self.former], [turn.cpu_s for turn in self.this])


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """Check a revision out into a folder of its own, for so long."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="carpool-pairs-") as folder:
        tree = Path(folder, "tree")
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def path_of(tree: Path) -> dict[str, str]:
    """Return the environment in which carpool is that of a tree, and the programs are ours."""
    return {"PYTHONPATH": f"{tree / 'src'}:{ROOT}"}


def turn_of_program(module: str, words: list[str], seconds: float, tree: Path) -> Turn:
    """Let one process measure."""
    command = [sys.executable, "-m", module, *words, str(seconds)]
    found = figures_of(f"{' '.join(words)} of {tree}", command, ours=True, seconds=seconds, env=path_of(tree))
    return Turn(found["seconds_per_item"])


def turn_of_score(tree: Path) -> Turn:
    """Let the command answer a file."""
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder, "in.ndjson")
        lines.write_bytes(b'{"x": 1.5}\n' * SCORED_LINES)
        command = [sys.executable, "-m", "carpool", "score", f"{bulk.MODELS}:trivial", "--in", str(lines)]
        began = time.perf_counter()
        done = subprocess.run(
            [*command, "--out", str(Path(folder, "out.ndjson"))],
            env={**os.environ, **path_of(tree)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        took_s = time.perf_counter() - began
    if done.returncode:
        raise SideFailed(f"score of {tree}: status {done.returncode}\n{done.stderr[-2000:]}")
    return Turn(took_s / SCORED_LINES)


def turn_of_server(server: Server, case: str, seconds: float) -> Turn:
    """Ask a server that is up."""
    if case == "bulk":
        lines = [b'{"x": 1.5}\n'] * bulk.SENT_AT_ONCE
        found = bulk.in_bulk(server, lines, bulk.MOST_AHEAD["trivial"], seconds)
        return Turn(1 / found.items_per_s, found.cpu_s)
    connections = int(case.partition(":")[2])
    if case in SSE:
        events = sse.load(server, sse.OURS, connections, seconds, warm_up_s=0.2)
        if events.wrong:
            raise NotServing(f"{events.wrong} answers are wrong")
        return Turn(1 / events.events_per_s, events.cpu_per_event_s)
    run = wrk.run(server, connections=connections, seconds=max(1, round(seconds)))
    if run.failed:
        raise NotServing(f"{run.failed} requests have failed")
    return Turn(1 / run.requests_per_s, run.cpu_per_request_s)


def launch_of(tree: Path, case: str) -> Launch:
    """Return how the server of a tree is started."""
    ours = sse.launch("carpool", 0.0) if case in SSE else serving(f"{MODELS}:echo")
    return replace(ours, name=f"carpool of {tree}", env={**ours.env, **path_of(tree)})


def measure(trees: dict[str, Path], rounds: int, seconds: float, case: str) -> Iterator[Row]:
    """Give the row of one case."""
    found: dict[str, list[Turn]] = {side: [] for side in trees}
    for number in range(rounds):
        order = dict(list(trees.items())[:: -1 if number % 2 else 1])
        with ExitStack() as stack:
            sides: dict[str, Callable[[], Turn]]
            if case in SERVED:
                servers = {side: stack.enter_context(running(launch_of(tree, case))) for side, tree in order.items()}
                for server in servers.values():
                    turn_of_server(server, case, 1)
                sides = {side: partial(turn_of_server, server, case, seconds) for side, server in servers.items()}
                turns = TURNS_OF_A_SERVER
            else:
                sides = {side: program_of(case, seconds, tree) for side, tree in order.items()}
                turns = 1
            what = f"{case}, {number + 1} of {rounds}"
            try:
                taken = take_turns(what, turns, sides, lambda turn: f"{turn.seconds * 1e6:,.2f} µs")
            except NotServing as problem:
                raise SideFailed(f"{case}: {problem}") from None
        for side, some in taken.items():
            found[side] += some
    yield Row(case, found["former"], found["this"])


def program_of(case: str, seconds: float, tree: Path) -> Callable[[], Turn]:
    """Return what measures a case in a process of its own."""
    if case == "score":
        return partial(turn_of_score, tree)
    if case in IN_PROCESS:
        return partial(turn_of_program, "bench.peers.servers.carpool_function", ["carpool", case], seconds, tree)
    if case in STEPS:
        return partial(turn_of_program, "bench.steps.crowd", [case.partition(":")[2]], seconds, tree)
    return partial(turn_of_program, "bench.peers.servers.carpool_pipeline", [case], seconds, tree)


HEADER = ("case", "former, µs", "this, µs", "rate, ratio", "pairs from", "to", "CPU, ratio")


def cells(row: Row) -> list[str]:
    """Return one line of the table."""

    def microseconds(turns: list[Turn]) -> str:
        return Spread.of([turn.seconds * 1e6 for turn in turns]).text(short)

    ratios = [a.seconds / b.seconds for a, b in zip(row.former, row.this, strict=True)]
    cpu = f"{row.cpu_ratio:.3f}" if row.this[0].cpu_s else ""
    figures = (row.ratio, min(ratios), max(ratios))
    return [row.case, microseconds(row.former), microseconds(row.this), *(f"{x:.3f}" for x in figures), cpu]


def entry(row: Row) -> Facts:
    """Return a row as JSON has it."""
    return {**asdict(row), "ratio": row.ratio}


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = options.parser(__doc__)
    parser.add_argument("revision", help="of git, which is set beside the working tree")
    options.add_names(parser, "--cases", CASES, "what is measured")
    options.add_measuring(parser, rounds=4, seconds=2)
    given = parser.parse_args()
    needs_wrk = any(case in HTTP for case in given.cases)
    if needs_wrk and (problem := wrk.missing()):
        parser.error(problem)
    return given


def main() -> int:
    """Run the command; returns the exit status."""
    given = arguments()
    with checked_out(given.revision) as tree:
        trees = {"former": tree, "this": ROOT}
        found = compare(given.cases, partial(measure, trees, given.rounds, given.seconds), {}, given.seconds)
    title = f"the working tree beside {given.revision}; µs an item (median, least and most)"
    return found.report(given, title, one_table(HEADER, cells), entry)


if __name__ == "__main__":
    sys.exit(main())
