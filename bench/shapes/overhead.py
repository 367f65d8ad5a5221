"""What a decision costs where requests have lengths or keys: microseconds, by how many wait.

The first table is of `decide` alone with log-normal lengths (cv 1) and a cost that is learned
already, each time on a queue that is new. The second is of a whole round of batcher and policy, one
request in and one batch out, while requests with so many different keys wait; and of how much
memory is left when all have gone.
"""

from __future__ import annotations

import sys
import tracemalloc
from math import inf
from random import Random
from statistics import median
from time import perf_counter

from bench.shapes.rules import trained
from bench.shapes.workloads import LIMIT, Workload
from bench.tools import options
from bench.tools.docs import write
from bench.tools.figures import commit, table
from carpool.core.batcher import Batcher
from carpool.core.keyed_workers import KeyedWorkers
from carpool.core.levels import BY_KEY, BY_LENGTH
from carpool.core.pipeline import Pipeline
from carpool.core.queue import Queue
from carpool.drive.virtual import VirtualDriver
from carpool.policy import Adaptive, Policy
from carpool.request import Lane, Request
from carpool.simulate.lengths import Lognormal

LENGTHS = Lognormal(input=14, input_sigma=0.8326, most_input=512)
WORKLOAD = Workload("", "closed", {
    "cost": "padded:a=2ms,b=20us", "lengths": LENGTHS, "max_batch_size": LIMIT, "slo_s": None
})  # fmt: skip
WAITING = (16, 64, 256, 1024)
KEYS = (1, 10, 100, 1000, 10_000)
TRIES = 40


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--docs", action="store_true", help="write the tables into docs/")
    given = parser.parse_args()
    lines = [[str(n), f"{decision_us(n):.0f}"] for n in WAITING]
    lengths = table(["waiting", "µs of a decision"], lines, markdown=True)
    lines = [[f"{keys:,}", *(f"{figure:.0f}" for figure in round_of(keys))] for keys in KEYS]
    keyed = table(["keys that wait", "µs of a round", "bytes left per key"], lines, markdown=True)
    print(f"{lengths}\n\n{keyed}\n\ncommit {commit()}")
    if given.docs:
        write({"shapes-decision": f"{lengths}\n\n{keyed}"})
    return 0


def decision_us(waiting: int) -> float:
    """The median of the first decisions about a queue."""
    dice = Random(waiting)
    draw = LENGTHS.draw(dice)
    policy = trained(WORKLOAD, with_lengths=True)
    took = []
    for _ in range(TRIES):
        queue = Queue(levels=BY_LENGTH)
        requests = []
        for i in range(waiting):
            request = Request(i, inf)
            request.length = next(draw).input
            request.admitted = request.arrived = i / waiting
            requests.append(request)
        queue.push(requests)
        policy.arrived_together(1.0, requests)
        begin = perf_counter()
        policy.decide(1.0, queue, 1, 0)
        took.append(perf_counter() - begin)
    return 1e6 * median(took)


def round_of(keys: int) -> tuple[float, float]:
    """Microseconds of a round with so many keys in the queue, and the bytes that each leaves."""
    driver = driver_of(Adaptive(LIMIT))
    for key in range(100):  # what is made only once
        driver.submit(key, lane=Lane(0, ("first", key), 0))
    driver.run()
    driver.batches.clear()
    driver.answers.clear()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for key in range(keys):
        driver.submit(key, lane=Lane(0, key, 0))
    driver.run()
    driver.batches.clear()
    driver.answers.clear()
    left = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    driver = driver_of(Adaptive(LIMIT))
    for key in range(keys):
        driver.submit(key, lane=Lane(0, key, 0))
    begin = perf_counter()
    driver.run()
    return 1e6 * (perf_counter() - begin) / keys, left / keys


def driver_of(policy: Policy) -> VirtualDriver:
    """One stage with one worker, of which each batch takes a millisecond."""
    batcher = Batcher("keyed", policy, Queue(levels=BY_KEY), keyed=KeyedWorkers(inf))
    return VirtualDriver(Pipeline([batcher]), [lambda n: 1e-3])


if __name__ == "__main__":
    sys.exit(main())
