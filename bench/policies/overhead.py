"""What a policy itself costs per request, in microseconds of processor time.

That is for arrival, decision and learning; the longest pause that it makes is shown as well.

There is a queue and a policy, and nothing else; batches have a fixed mean size, and their cost the
noise that makes learning work. The same loop runs with Greedy, whose share is subtracted, so that
the figure is the policy's own.
"""

from __future__ import annotations

import random
import time

from bench.tools import options
from carpool.engine.core.batch import Batch
from carpool.engine.core.queue import Queue
from carpool.engine.policy import BY_NAME, Policy, View
from carpool.engine.request import Request

REQUESTS = 200_000


def run(policy: Policy, mean_batch: int, slo_s: float, seed: int = 0) -> tuple[float, float]:
    """CPU-microseconds per request, and the longest single `learn` in milliseconds."""
    dice = random.Random(seed)
    sizes = [max(1, round(dice.gauss(mean_batch, mean_batch / 4))) for _ in range(REQUESTS // mean_batch)]
    noise = [dice.lognormvariate(0.0, 0.1) for _ in sizes]
    queue = Queue()
    view = View(queue)
    now = 0.0
    longest = 0.0
    started = time.process_time()
    for n, factor in zip(sizes, noise, strict=True):
        step = 0.01 / n
        for _ in range(n):
            now += step
            request = Request(None, now + slo_s)
            request.arrived = now
            queue.push([request])
            policy.arrived(now, [request])
        view.now = now
        decision = policy.decide(view)
        for request in decision.drop:
            queue.remove(request)
            policy.left(now, request)
        taken = queue.take(decision.take)
        if taken:
            busy_s = (0.002 + 0.0005 * len(taken)) * factor
            done = Batch(0, 0, 0, taken, len(taken), decision.reason, now)
            done.busy_s = busy_s
            before = time.perf_counter()
            policy.learn(now, done)
            longest = max(longest, time.perf_counter() - before)
    return (time.process_time() - started) / sum(sizes) * 1e6, longest * 1e3


def main() -> None:
    """Print a row per limit."""
    parser = options.parser(__doc__)
    parser.add_argument("--policy", choices=sorted(BY_NAME), default="adaptive", help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=8, help="mean batch size; default: %(default)s")
    arguments = parser.parse_args()
    print("limit  SLO     µs/request  of that the policy's  longest pause (ms)")
    for limit in (64, 256, 4096):
        for slo_s in (float("inf"), 0.02):
            mine, base = [], []
            for seed in range(3):
                base.append(run(BY_NAME["greedy"](limit), arguments.batch, slo_s, seed)[0])
                mine.append(run(BY_NAME[arguments.policy](limit), arguments.batch, slo_s, seed))
            cost = sorted(us for us, _ in mine)[1]
            pause = sorted(ms for _, ms in mine)[1]
            print(f"{limit:5d}  {slo_s:5}  {cost:10.2f}  {cost - sorted(base)[1]:20.2f}  {pause:18.3f}")


if __name__ == "__main__":
    main()
