"""Thread workers beside worker processes, with a model in pure Python: for Pythons without the GIL.

    python -m bench.alone.threads

A call takes some 80 us for each of 16 items. Each row is a service that streams items for a few
seconds, and its answers per second in each of the rounds, which alternate.
"""

from __future__ import annotations

import sys
import time
from typing import Literal

import carpool
from bench.tools import options

WAYS: tuple[tuple[Literal["thread", "process"], int], ...] = (
    ("thread", 1),
    ("thread", 2),
    ("process", 1),
    ("process", 2),
)


class Sums(carpool.Model):
    """Adds up numbers in a loop, which holds the GIL where there is one."""

    def predict(self, limits: list[int]) -> list[int]:
        return [sum(n * n for n in range(limit)) for limit in limits]


def rate(run_in: Literal["thread", "process"], workers: int, seconds: float) -> float:
    """Return the answers per second of a service with these workers."""
    service = carpool.Service(carpool.Stage(Sums, max_batch_size=16, run_in=run_in, workers=workers))
    with service.run() as handle:
        for _ in handle.stream([1000] * 200):
            pass  # the workers have learned
        began, done = time.perf_counter(), 0
        while (spent := time.perf_counter() - began) < seconds:
            done += sum(1 for _ in handle.stream([1000] * 2000))
        return done / spent


def main() -> int:
    """Run the command; returns the exit status."""
    parser = options.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a run; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=4, help="default: %(default)s")
    given = parser.parse_args()
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(f"Python {sys.version.split()[0]}, {'with' if has_gil else 'without'} the GIL")
    found: dict[tuple[str, int], list[float]] = {way: [] for way in WAYS}
    for _ in range(given.rounds):
        for way in WAYS:
            found[way].append(rate(*way, given.seconds))
    for (run_in, workers), rates in found.items():
        print(f"{run_in:8} {workers} worker(s)  {'  '.join(f'{each:9,.0f}' for each in sorted(rates))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
