"""What BLAS threads cost a service, and that carpool chooses them well.  python -m bench.blas [--rounds 3] ...

carpool alone: 1, 2 and 4 workers of a small net in numpy and in torch, and of scikit-learn's nearest neighbours, with
256 callers. In each round three turns follow each other: nothing exported, so that carpool chooses; OMP_NUM_THREADS=1
exported; and as many as there are cores, which is what the libraries take where nobody tells them otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from bench.figures import Spread, machine, median_ratio, short, table
from bench.process_tree import adopt_orphans, end_on_sigterm
from bench.side import SideFailed, figures_of
from carpool.worker.blas import FOR_ALL, VARIABLES

LIBRARIES = ("numpy", "torch", "sklearn")
WORKERS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Row:
    """Answers a second by round: carpool's choice, one thread, and one for each core."""

    library: str
    workers: int
    chosen: list[float] = field(default_factory=list)
    one: list[float] = field(default_factory=list)
    all_cores: list[float] = field(default_factory=list)


def measure(library: str, workers: int, rounds: int, seconds: float) -> Row:
    """The three in turn."""
    row = Row(library, workers)
    exports = ((row.chosen, None), (row.one, 1), (row.all_cores, os.cpu_count()))
    for turn in range(rounds):
        for rates, threads in exports:
            rates.append(rate(library, workers, seconds, threads))
        figures = " / ".join(short(rates[-1]) for rates, _ in exports)
        print(f"  {library}, {workers} workers, round {turn + 1}/{rounds}: {figures}", file=sys.stderr, flush=True)
    return row


def rate(library: str, workers: int, seconds: float, threads: int | None) -> float:
    """One turn, in a process whose environment says so many threads, or nothing of them."""
    environment = [part for name in VARIABLES for part in ("-u", name)]
    if threads is not None:
        environment.append(f"{FOR_ALL}={threads}")
    settings = ["--model", library, "--workers", str(workers), "--seconds", str(seconds)]
    command = ["env", *environment, sys.executable, "-m", "bench.blas_side", *settings]
    return float(figures_of(f"{library} with {workers} workers", command, ours=True, seconds=seconds)["rate"])


def report(rows: list[Row]) -> str:
    header = ("req/s", "workers", "chosen", "one exported", "chosen / one", "all cores exported", "chosen / all")
    lines = [
        (
            row.library,
            str(row.workers),
            *(short(Spread.of(row.chosen).median), short(Spread.of(row.one).median)),
            f"{median_ratio(row.chosen, row.one):.2f}",
            short(Spread.of(row.all_cores).median),
            f"{median_ratio(row.chosen, row.all_cores):.2f}",
        )
        for row in rows
    ]
    return table(header, lines, markdown=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of measuring, a turn")
    parser.add_argument("--libraries", default=",".join(LIBRARIES))
    parser.add_argument("--workers", default=",".join(map(str, WORKERS)))
    parser.add_argument("--json", type=Path, help="where to write all figures")
    asked = parser.parse_args()
    adopt_orphans()
    end_on_sigterm()
    rows: list[Row] = []
    facts = machine()
    try:
        for library in asked.libraries.split(","):
            for workers in map(int, asked.workers.split(",")):
                rows.append(measure(library, workers, asked.rounds, asked.seconds))
    except KeyboardInterrupt:
        print("interrupted; what there is so far:", file=sys.stderr)
    except SideFailed as failure:
        raise SystemExit(str(failure)) from None
    finally:
        print("\n".join(f"{name}: {value}" for name, value in facts.items()))
        if rows:
            print(f"\n{report(rows)}")
        if asked.json:
            figures = [{name: getattr(row, name) for name in Row.__slots__} for row in rows]
            asked.json.write_text(json.dumps({"machine": facts, "rows": figures}, indent=1))


if __name__ == "__main__":
    main()
