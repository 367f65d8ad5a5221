"""What it takes to compose a batch by length, in microseconds, by how many requests wait.

Each decision is on a queue that has just been filled: log-normal lengths (cv 1, median 14), a cost
of 2 ms and 20 µs for each position of the padded batch, at most 32 in a batch. All is included that
`Adaptive.decide` and the picking of the batch do. The middle and the worst tenth of many are shown.
"""

from __future__ import annotations

import random
import time
from math import inf

from bench.tools import options
from carpool.engine.core.batch import Batch, WarmUpBatch
from carpool.engine.core.levels import BY_LENGTH
from carpool.engine.core.queue import Queue
from carpool.engine.policy import Adaptive, View
from carpool.engine.request import Request

LIMIT = 32


def policy() -> Adaptive:
    """Return a policy that has learned what batches cost."""
    made = Adaptive(LIMIT)
    for n in (1, 4, 16, 32):
        for length in (5, 20, 100, 400):
            for longest in (length, 0):
                made.learn(0.0, WarmUpBatch(0.0, 0, n, n, longest, 2e-3 + 20e-6 * n * length))
    return made


def decisions(waiting: int, due_s: float, rounds: int) -> list[tuple[float, float]]:
    """Return the microseconds of each decision, and those of picking what it chose."""
    dice = random.Random(waiting)
    decides = policy()
    ended = Batch(0, 0, 0, [], 8, "length", 1.0, longest=20)
    ended.n, ended.busy_s = 8, 2e-3 + 20e-6 * 160
    took = []
    for _ in range(rounds):
        queue = Queue(levels=BY_LENGTH)
        arrivals = sorted(dice.random() for _ in range(waiting))
        requests = []
        for arrived in arrivals:
            request = Request(None, arrived + due_s)
            request.length = max(1, min(512, int(dice.lognormvariate(2.64, 0.83))))
            request.arrived = request.admitted = arrived
            requests.append(request)
        queue.push(requests)
        decides.learn(1.0, ended)  # before each decision
        begun = time.perf_counter()
        decision = decides.decide(View(queue, 1.0))
        decided = time.perf_counter()
        queue.pick(decision.chosen, 1.0)
        took.append((1e6 * (decided - begun), 1e6 * (time.perf_counter() - decided)))
    return took


def main() -> None:
    """Print a row for each number of requests that wait."""
    parser = options.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=400, help="decisions of each kind; default: %(default)s")
    rounds = parser.parse_args().rounds
    print("waiting  due in   decision (µs)  worst tenth  picking (µs)")
    for waiting in (64, 256, 1024):
        for due_s in (inf, 10.0):
            took = decisions(waiting, due_s, rounds)
            middle, tenth = (sorted(us for us, _ in took)[int(share * rounds)] for share in (0.5, 0.9))
            picking = sorted(us for _, us in took)[rounds // 2]
            print(f"{waiting:7d}  {due_s:6}  {middle:14.0f}  {tenth:11.0f}  {picking:12.0f}")


if __name__ == "__main__":
    main()
