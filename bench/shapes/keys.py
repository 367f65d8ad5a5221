"""Requests with thousands of keys: what a round costs, what is left, and what affinity saves.

The first table is of one request in and one batch out of batcher and policy, once while each key's
request comes and goes before the next one does, and once while requests with that many keys wait
side by side; and of the memory that is left when all have gone. The second is simulated: how often
workers change from one key to another, where a change takes 5 ms and a batch 2 ms and 0.1 ms for
each request, beside what chance would make of it.
"""

from __future__ import annotations

import sys
import tracemalloc
from math import inf
from time import perf_counter

from bench.tools import options
from bench.tools.docs import write
from bench.tools.figures import commit, table
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.levels import BY_KEY
from carpool.engine.core.places import KeyedWorkers
from carpool.engine.core.queue import Queue
from carpool.engine.drive.virtual import VirtualDriver
from carpool.engine.policy import Adaptive
from carpool.engine.request import Lane
from carpool.simulate import run

KEYS = (1, 10, 100, 1000, 10_000)
LIMIT = 32
GAP_S = 0.002  # between requests that come in turn; a batch takes half of it


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/")
    given = parser.parse_args()
    kept = left(1)
    lines = [
        [f"{keys:,}", *(f"{round_us(keys, in_turn=in_turn):.0f}" for in_turn in (True, False)), f"{left(keys) - kept}"]
        for keys in KEYS
    ]
    header = ["keys", "µs of a round, in turn", "waiting at once", "bytes kept, more than of one key"]
    rounds = table(header, lines, markdown=True)
    lines = [[str(keys), str(workers), *affinity(keys, workers)] for keys in (4, 16, 64) for workers in (1, 4)]
    changes = table(
        ["keys", "workers", "changes, % of batches", "by chance", "mean, ms", "p99, ms"], lines, markdown=True
    )
    print(f"{rounds}\n\n{changes}\n\ncommit {commit()}")
    if given.docs:
        write({"shapes-keys": f"{rounds}\n\n{changes}"})
    return 0


def round_us(keys: int, *, in_turn: bool) -> float:
    """Microseconds from a request to its answer, the virtual driver included."""
    driver = driver_of()
    rounds = max(keys, 2000) if in_turn else keys
    for i in range(rounds):
        if in_turn:
            driver.arrive(GAP_S * i, i, lane=Lane(0, i % keys, 0))
        else:
            driver.submit(i, lane=Lane(0, i, 0))
    begin = perf_counter()
    driver.run()
    return 1e6 * (perf_counter() - begin) / rounds


def left(keys: int) -> int:
    """The bytes by which more is kept after requests with so many keys than after some with ten.

    That may be less than nothing, since the policy keeps times of the last requests.
    """
    driver = driver_of()
    tracemalloc.start()
    serve(driver, 10_000, 10)  # the policy remembers when the last ones came, whatever their keys
    before = tracemalloc.get_traced_memory()[0]
    serve(driver, 10_000, keys)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return after - before


def serve(driver: VirtualDriver, requests: int, keys: int) -> None:
    """Have requests with keys in turn come and go, and keep nothing of them."""
    begin = driver.clock.now
    for i in range(requests):
        driver.arrive(begin + GAP_S * i, i, lane=Lane(0, i % keys, 0))
    driver.run()
    driver.batches.clear()
    driver.answers.clear()


def driver_of() -> VirtualDriver:
    """One stage with one worker, of which each batch takes a millisecond."""
    batcher = Batcher("keyed", Adaptive(LIMIT), Queue(levels=BY_KEY), keyed=KeyedWorkers(inf))
    return VirtualDriver(Core([batcher]), [lambda n: 1e-3])


def affinity(keys: int, workers: int) -> list[str]:
    """How often workers change keys, by chance and in fact, and the latency."""
    arrivals, cost = f"poisson:rate={80 * workers}", "affine:a=2ms,b=0.1ms"
    report = run("adaptive", arrivals, cost, None, LIMIT, workers, 30, keys=keys, switch_s=0.005)
    changes = report.switch_share or 0.0
    return [
        f"{100 * changes:.0f}",
        f"{100 * (1 - 1 / keys):.0f}",
        f"{1e3 * report.mean_s:.1f}",
        f"{1e3 * report.p99_s:.1f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
