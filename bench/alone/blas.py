"""What BLAS threads cost a service, and whether carpool chooses them well.

carpool alone: 1, 2 and 4 workers of a small net in numpy and in torch, and of scikit-learn's
nearest neighbours, with 256 callers. In each round three turns follow each other: nothing exported,
so that carpool chooses; OMP_NUM_THREADS=1 exported; and as many as there are cores, which is what
the libraries take if nobody tells them otherwise.

`chosen / one` should be about 1 where there are as many workers as cores, and the last ratio shows
what the choice is good for. It needs numpy, torch and scikit-learn; `--libraries numpy` does
without the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial

from bench.tools import options
from bench.tools.comparison import compare, one_table, take_turns
from bench.tools.figures import Spread, median_ratio, short
from bench.tools.side import figures_of
from carpool.engine.worker.place import FOR_ALL, THREAD_VARIABLES

LIBRARIES = ("numpy", "torch", "sklearn")
WORKERS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Row:
    """Answers per second, round by round: as carpool chooses, with one thread, with all cores."""

    library: str
    workers: int
    chosen: list[float]
    one: list[float]
    all_cores: list[float]


def measure(rounds: int, seconds: float, case: tuple[str, int]) -> Iterator[Row]:
    """The row of one library with so many workers."""
    library, workers = case
    exports = {"chosen": None, "one": 1, "all_cores": os.cpu_count()}
    sides = {side: partial(rate, library, workers, seconds, threads) for side, threads in exports.items()}
    yield Row(library, workers, **take_turns(f"{library}, {workers} workers", rounds, sides, short))


def rate(library: str, workers: int, seconds: float, threads: int | None) -> float:
    """One turn, in a process whose environment says so many threads, or nothing about them."""
    env = {} if threads is None else {FOR_ALL: str(threads)}
    settings = ["--model", library, "--workers", str(workers), "--seconds", str(seconds)]
    command = [sys.executable, "-m", "bench.alone.blas_side", *settings]
    title = f"{library} with {workers} workers"
    return float(figures_of(title, command, ours=True, seconds=seconds, env=env, unset=THREAD_VARIABLES)["rate"])


HEADER = ("req/s", "workers", "chosen", "one exported", "chosen / one", "all cores exported", "chosen / all")


def cells(row: Row) -> list[str]:
    """One line of the table."""
    chosen, one, all_cores = (short(Spread.of(side).median) for side in (row.chosen, row.one, row.all_cores))
    beside_one, beside_all = (f"{median_ratio(row.chosen, side):.2f}" for side in (row.one, row.all_cores))
    return [row.library, str(row.workers), chosen, one, beside_one, all_cores, beside_all]


def main() -> int:
    parser = options.parser(__doc__)
    options.add_names(parser, "--libraries", LIBRARIES, "what computes")
    options.add_names(parser, "--workers", map(str, WORKERS), "how many workers")
    options.add_measuring(parser, rounds=3, seconds=3)
    given = parser.parse_args()
    cases = [(library, int(workers)) for library in given.libraries for workers in given.workers]
    found = compare(cases, partial(measure, given.rounds, given.seconds), {}, given.seconds)
    return found.report(given, "carpool with its own choice of BLAS threads", one_table(HEADER, cells), asdict)


if __name__ == "__main__":
    sys.exit(main())
