"""The gain of each fast path: small pieces of work with and without it, in turns, in one process.

    python -m bench fast_paths
    python -m bench fast_paths known_heads answer_now --rounds 15

The figure is the processor time without the fast path as a multiple of that with it, the median
over the rounds; of a worker process only the caller's side counts. A path below 1.1 is to go unless
a published figure would fall with it; the table has its bytecodes, which are counted, not timed.
"""

from __future__ import annotations

import time
from statistics import median

from bench.fast_paths.paths import PATHS, Path
from bench.tools import options
from bench.tools.figures import machine, table
from carpool.engine.fast_paths import without

TURN_S = 0.1
HEADER = ("fast path", "stands for", "work", "without / with", "lowest", "highest", "was", "figures")


def main() -> None:
    names = [path.name for path in PATHS]
    parser = options.parser(__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which; all by default, of {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=9, help="of turns of both sides; default: %(default)s")
    given = parser.parse_args()
    if unknown := set(given.names) - set(names):
        parser.error(f"there is no fast path {', '.join(sorted(unknown))}")
    rows = [row_of(path, given.rounds) for path in PATHS if path.name in (given.names or names)]
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(table(HEADER, rows, markdown=False))


def row_of(path: Path, rounds: int) -> tuple[str, ...]:
    """Measure a fast path."""
    n = 4
    while seconds(path, n) < TURN_S:
        n *= 2
    ratios = []
    for i in range(rounds):
        first = seconds(path, n, is_on=bool(i % 2))
        second = seconds(path, n, is_on=not i % 2)
        ratios.append(first / second if i % 2 == 0 else second / first)
    figures = (median(ratios), min(ratios), max(ratios), path.gain)
    return (path.name, path.stands_for, path.workload.__name__, *(f"{x:.2f}" for x in figures), path.figure)


def seconds(path: Path, n: int, *, is_on: bool = True) -> float:
    """Return the processor time of the work with the fast path, or without it."""
    with without(*() if is_on else (path.name,)):
        began = time.process_time()
        path.workload(n)
        return time.process_time() - began


if __name__ == "__main__":
    main()
