"""What it costs that nobody else can change a value: 6 MB through a stage that runs in a thread.

Such a stage copies a large buffer in and out, where `docs/models.md` has the rule; a worker
process has it copied by its socket. A model writes to one element of its array and returns it, for
one caller. What a call of 6 MB takes more than one of a single number, over the two copies, is the
cost of one. Beside it stands a bare copy of the same bytes into memory that is used again and
again, with which no copy can do better.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, Final, Literal

import numpy as np

import carpool
from bench.peers.servers.carpool_models import Array, Touch
from bench.tools import options
from bench.tools.stopwatch import ARRAY_ITEMS

RUNS_IN: Final[tuple[Literal["thread", "process"], ...]] = ("thread", "process")
COPIES: Final = 2  # into the stage, and out of it


def seconds_per_call(service: Any, n: int, seconds: float) -> float:
    """The median of lone calls with an array of `n` numbers."""
    array = np.zeros(n)
    taken = []
    end = time.perf_counter() + seconds
    while True:
        began = time.perf_counter()
        answer = service.predict(array)
        now = time.perf_counter()
        assert answer[0] == 1 and array[0] == 0 and len(answer) == n
        taken.append(now - began)
        if now > end:
            return statistics.median(taken)


def seconds_of_bare_copy(seconds: float) -> float:
    """The median of copies of as many bytes."""
    source, target = memoryview(np.zeros(ARRAY_ITEMS)).cast("B"), memoryview(bytearray(8 * ARRAY_ITEMS))
    taken = []
    end = time.perf_counter() + seconds
    while True:
        began = time.perf_counter()
        target[:] = source
        now = time.perf_counter()
        taken.append(now - began)
        if now > end:
            return statistics.median(taken)


def shown(seconds: list[float]) -> str:
    """Milliseconds: the median of the rounds, the least and the most."""
    return f"{statistics.median(seconds) * 1e3:.3f} ms ({min(seconds) * 1e3:.3f}-{max(seconds) * 1e3:.3f})"


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="of turns of all sides; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=0.5, help="that each turn takes; default: %(default)s")
    given = parser.parse_args()
    bare = []
    for run_in in RUNS_IN:
        large, small, each = [], [], []
        service: carpool.Service[Array, Array] = carpool.Service(carpool.Stage(Touch, run_in=run_in), name=run_in)
        with service.run() as running:
            for _ in range(given.rounds):
                large.append(seconds_per_call(running, ARRAY_ITEMS, given.seconds))
                small.append(seconds_per_call(running, 1, given.seconds))
                each.append((large[-1] - small[-1]) / COPIES)
                bare.append(seconds_of_bare_copy(given.seconds))
        print(f"{run_in}: a call of 6 MB {shown(large)}, of one number {shown(small)}: {shown(each)} for each copy")
    print(f"a bare copy {shown(bare)}; {given.rounds} rounds")


if __name__ == "__main__":
    main()
