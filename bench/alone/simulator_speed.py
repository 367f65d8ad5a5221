"""How many requests per second the simulator serves on one core.

What is measured is a whole run: drawing arrivals, queue, policy, batches, record and report, with a
cost of 8 ms per batch and 0.25 ms per item, and batches of up to 64. The time is this process's own
processor time, so that a busy machine disturbs it less.
"""

from __future__ import annotations

import statistics
import sys
import time

from bench.tools import options
from carpool.simulate import run


def requests_per_second(policy: str, arrivals: str, duration_s: float, seed: int) -> float:
    begin = time.process_time()
    report = run(policy, arrivals, "affine:a=8ms,b=0.25ms", max_batch_size=64, duration_s=duration_s, seed=seed)
    return report.requests / (time.process_time() - begin)


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--policy", default="greedy", help="default: %(default)s")
    parser.add_argument("--arrivals", default="poisson:rho=0.7", help="default: %(default)s")
    parser.add_argument(
        "--duration", type=float, default=60.0, metavar="SECONDS", help="of virtual time; default: %(default)s"
    )
    parser.add_argument("--runs", type=int, default=5, help="default: %(default)s")
    given = parser.parse_args()
    requests_per_second(given.policy, given.arrivals, 1.0, 0)  # imports and caches
    found = [requests_per_second(given.policy, given.arrivals, given.duration, seed) for seed in range(given.runs)]
    print(f"{given.policy} on {given.arrivals}: {statistics.median(found):,.0f} requests/s of one core", end=" ")
    print(f"(median of {given.runs}, from {min(found):,.0f} to {max(found):,.0f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
