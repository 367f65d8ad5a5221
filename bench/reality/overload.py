"""Real servers under more load than they can serve, beside each other and beside the simulator.

The machine must have nothing else to do. The model sleeps for 8 ms and 0.25 ms an item, so that
2,667 requests a second can be served in batches of 64. The load is open: requests come at random
times whatever becomes of the earlier ones. Goodput counts right answers within 60 ms by the
client's clock, from when the request should have left. carpool and BentoML are told the 60 ms as
SLO, mosec as time-out; how long mosec waits for a batch and how many may wait (`mosec:5:64`) are
varied. Each run has a new server, and the servers take turns. The simulator gets the same arrivals,
and what was measured of carpool's way to the worker. If the generator was often late, a warning
says so, and the exit status is 1.

A quick look:

    python -m bench.reality.overload --servers carpool --loads 3 --runs 1 --seconds 3
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from bench.peers import contestants
from bench.peers.contestants import Launch
from bench.peers.install import not_installed, versions
from bench.reality import open_loop
from bench.reality.calibration import CAPACITY, SLO_S, Added, measure, trust
from bench.reality.open_loop import Load
from bench.tools import options
from bench.tools.comparison import say
from bench.tools.docs import write
from bench.tools.figures import Facts, machine, origin, table
from bench.tools.process_tree import adopt_orphans, end_on_sigterm
from bench.tools.server import NotServing, running
from carpool.simulate import Report

NAMES = ("carpool", "mosec:10", "mosec:1:48", "mosec:1:64", "mosec:5:64", "bentoml")
WARM_UP_S = 2.0  # BentoML and carpool learn from what they have seen


@dataclass(frozen=True, slots=True)
class Row:
    """One server at one load.

    Attributes:
        cores: Processor time of the server's whole process tree per second, over each run.
        simulated: Of the same arrivals; carpool's only.
    """

    name: str
    load: float
    runs: list[Load] = field(default_factory=list)
    cores: list[float] = field(default_factory=list)
    simulated: list[Report] = field(default_factory=list)

    def median(self, quantity: str) -> float:
        return median(getattr(run, quantity) for run in self.runs)

    @property
    def share(self) -> float | None:
        """Goodput beside the simulated one, run by run."""
        if not self.simulated:
            return None
        return median(a.goodput / b.goodput for a, b in zip(self.runs, self.simulated, strict=True))


def measured(seconds: float) -> Added:
    """What carpool's driver adds on this machine."""
    with running(launch_of("carpool")) as server:
        return measure(server, seconds)


def compete(names: Sequence[str], load: float, runs: int, seconds: float, added: Added | None) -> list[Row]:
    """All servers at one load, in turn."""
    rows = [Row(name, load) for name in names]
    for seed in range(runs):
        for row in rows:
            one_run(row, seconds, seed)
            if row.name == "carpool" and added is not None:
                row.simulated.append(added.simulate("adaptive", load * CAPACITY, seconds, seed, SLO_S))
            say("  " + ", ".join(cells(Row(row.name, load, row.runs[-1:], row.cores[-1:], row.simulated[-1:]))))
    return rows


def one_run(row: Row, seconds: float, seed: int) -> None:
    """With a server of its own: what an overload leaves behind must not spoil the next run."""
    with running(launch_of(row.name)) as server:
        before_s = server.cpu_s()
        rate = row.load * CAPACITY
        load = open_loop.run(server, rate=rate, seconds=seconds, warm_up_s=WARM_UP_S, slo_s=SLO_S, seed=seed)
        row.runs.append(load)
        row.cores.append((server.cpu_s() - before_s) / load.span_s)


def launch_of(name: str) -> Launch:
    launch = contestants.launch(name, "sleep")
    assert launch is not None, name
    return launch


HEADER = (
    "server, load", "goodput (1/s)", "simulated", "share", "p50 (ms)", "p99 (ms)", "refused", "no answer",
    "CPU (cores)", "generator late, p99 (ms)",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    """Medians over the runs; latencies are those of right answers, in time or not."""
    simulated = f"{median(run.goodput for run in row.simulated):,.0f}" if row.simulated else ""
    requests = row.median("requests")
    lost = median(run.broken + run.unanswered + run.wrong for run in row.runs)
    return [
        f"{row.name} {row.load:g}",
        f"{row.median('goodput'):,.0f}",
        simulated,
        "" if row.share is None else f"{row.share:.3f}",
        f"{row.median('p50_s') * 1e3:.1f}",
        f"{row.median('p99_s') * 1e3:.1f}",
        f"{row.median('refusals') / requests:.1%}",
        f"{lost / requests:.1%}",
        f"{median(row.cores):.2f}",
        f"{row.median('late_p99_s') * 1e3:.2f}",
    ]


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--servers", default=",".join(NAMES), help="default: %(default)s")
    parser.add_argument("--loads", default="0.1,0.3,0.9,1.5,3", help="shares of capacity; default: %(default)s")
    parser.add_argument("--runs", type=int, default=3, help="of each load; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every run")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/")
    given = parser.parse_args()
    names = given.servers.split(",")
    if missing := [name for name in names if not contestants.is_installed(name)]:
        others = ",".join(name for name in names if name not in missing) or "carpool"
        parser.error(f"{not_installed(*missing)}, or leave them out: --servers {others}")
    end_on_sigterm()
    adopt_orphans()
    facts = machine()
    rows: list[Row] = []
    notes: list[str] = []
    try:
        added = measured(given.seconds) if "carpool" in names else None
        if added is not None:
            say(f"carpool: {added}")
            notes.append(f"Measured of carpool's server and given to the simulator: {added}.")
        for load in map(float, given.loads.split(",")):
            rows += compete(names, load, given.runs, given.seconds, added)
    except NotServing as problem:
        say(f"FAILED: {problem}")
        return 1
    section = "\n\n".join(
        [table(HEADER, [cells(row) for row in rows], markdown=True), *notes, footer(facts, names, given)]
    )
    print(section)
    if given.json:
        given.json.write_text(
            json.dumps({"machine": facts, "rows": [asdict(row) for row in rows]}, indent=1, default=str)
        )
    if given.docs:
        write({"overload": section})
    return trust(row.median("late_p99_s") for row in rows)


def footer(facts: Facts, names: Sequence[str], given: argparse.Namespace) -> str:
    """Where, with what and how often it was measured."""
    peers = dict.fromkeys(peer for name in names if (peer := name.partition(":")[0]) != "carpool")
    numbers = ", ".join(f"{package} {number}" for package, number in versions(*peers).items())
    return "; ".join(filter(None, [origin(facts), numbers, f"medians of {given.runs} runs of {given.seconds:g} s."]))


if __name__ == "__main__":
    sys.exit(main())
