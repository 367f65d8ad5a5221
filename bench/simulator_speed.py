"""How many requests per second the simulator serves on one core.

python -m bench.simulator_speed [--policy greedy] [--arrivals poisson:rho=0.7] [--duration 60] [--runs 5]

What is measured is a whole run: drawing arrivals, queue, policy, batches, record and report. Affine cost of 8 ms and
0.25 ms an item, batches of up to 64. The time is this process's own, so that a busy machine disturbs it less.
"""

from __future__ import annotations

import argparse
import statistics
import time

from carpool.simulate import run


def requests_per_second(policy: str, arrivals: str, duration_s: float, seed: int) -> float:
    begin = time.process_time()
    report = run(policy, arrivals, "affine:a=8ms,b=0.25ms", max_batch_size=64, duration_s=duration_s, seed=seed)
    return report.requests / (time.process_time() - begin)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="greedy")
    parser.add_argument("--arrivals", default="poisson:rho=0.7")
    parser.add_argument("--duration", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    requests_per_second(args.policy, args.arrivals, 1.0, 0)  # imports and caches
    found = [requests_per_second(args.policy, args.arrivals, args.duration, seed) for seed in range(args.runs)]
    print(f"{args.policy} on {args.arrivals}: {statistics.median(found):,.0f} requests/s of one core", end=" ")
    print(f"(median of {args.runs}, from {min(found):,.0f} to {max(found):,.0f})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
