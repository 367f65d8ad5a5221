"""The simulator beside a real service: latency under open-loop load, of a model of known cost.

The machine must have nothing else to do: the model sleeps, so two cores are enough, but whoever
wakes up late adds to every batch. First it is measured what a real driver adds, at two loads with
small and with large batches, on other arrivals than those of the table:

* to the work of a batch: how much longer than asked a sleep lasts, and reading and writing of the
  items;
* `hop_s`: the way of a batch to the worker and back. What of it grows with the batch counts as
  work;
* `turn_s`: by how much the gap between two batches, while requests wait, is longer than the hop;
* outside: what lies between the client's clock and the driver's (HTTP, the kernel, the client's own
  turn). The simulator has no network: this is a constant that is added to its latencies, and delays
  no batch.

Nothing else is fitted. Then both get the very same arrival times at each load. A run in which
requests left late, because something else had taken the processor, is made again. If the generator
was often late all the same, a warning says so, and the exit status is 1.
"""

from __future__ import annotations

import sys
import threading
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import TypeVar

from bench.peers import contestants
from bench.peers.servers.sleeping import ITEM_S, SETUP_S
from bench.reality import open_loop
from bench.reality.open_loop import Load, poisson_times
from bench.tools import options
from bench.tools.comparison import say
from bench.tools.docs import write
from bench.tools.figures import machine, origin, table
from bench.tools.process_tree import adopt_orphans, end_on_sigterm
from bench.tools.server import HOST, Server, running
from carpool.simulate import Affine, Report
from carpool.simulate import run as simulate

LIMIT = 64
CAPACITY = LIMIT / (SETUP_S + ITEM_S * LIMIT)
SLO_S = 0.06
SAMPLE_S = 0.1
PROBES = (0.3, 0.8)  # loads, shares of capacity
LATE_S = 0.0015  # a generator that is later than this at its 99th percentile had no processor to run on
ATTEMPTS = 4  # at a run in which it had one


@dataclass(frozen=True, slots=True)
class Added:
    """What a real driver adds to the decisions, in seconds.

    Attributes:
        batch_s, item_s: to the work of a batch, and for each of its items.
        hop_s, turn_s: as the simulator has them.
        outside_s: To the latency of a request, before and after the driver.
    """

    batch_s: float
    item_s: float
    hop_s: float
    turn_s: float
    outside_s: float

    def __str__(self) -> str:
        return (
            f"{self.batch_s * 1e6:.0f} µs a batch and {self.item_s * 1e6:.1f} µs an item on top of the cost, hop_s"
            f" {self.hop_s * 1e6:.0f} µs, turn_s {self.turn_s * 1e6:.0f} µs, outside {self.outside_s * 1e6:.0f} µs"
        )

    def simulate(self, policy: str, rate: float, seconds: float, seed: int, slo_s: float | None) -> Report:
        """The same arrivals in virtual time."""
        return simulate(
            policy,
            poisson_times(rate, seconds, seed),
            Affine(SETUP_S + self.batch_s, ITEM_S + self.item_s),
            slo_s=slo_s,
            max_batch_size=LIMIT,
            duration_s=seconds,
            seed=seed,
            hop_s=self.hop_s,
            turn_s=self.turn_s,
            max_queue_size=1024,
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one load: real and simulated runs of the same arrivals."""

    policy: str
    load: float
    outside_s: float
    real: list[Load]
    simulated: list[Report]

    def both(self, quantity: str) -> tuple[float, float]:
        """The medians over the runs, by the client's clock."""
        real, simulated = (median(getattr(run, quantity) for run in runs) for runs in (self.real, self.simulated))
        return real, simulated + self.outside_s


def metrics(server: Server) -> dict[str, float]:
    """The samples of a carpool server's /metrics, by name; those of several labels added up."""
    found: dict[str, float] = {}
    with urllib.request.urlopen(f"http://{HOST}:{server.port}/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if not line.startswith("#"):
                labelled, value = line.rsplit(" ", 1)
                name = labelled.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
    return found


class HopSampler(threading.Thread):
    """Reads the hop that a server has learned, again and again, while somebody else loads it."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._over = threading.Event()
        self.seconds: list[float] = []

    def run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.seconds.append(metrics(self._server)["carpool_policy_hop_seconds"])

    def stop(self) -> float:
        """Its mean."""
        self._over.set()
        self.join()
        return fmean(self.seconds)


@dataclass(frozen=True, slots=True)
class Probe:
    """The means at one load.

    Attributes:
        size: Of batches.
        busy_s: Work of a batch beyond the sleep.
        hop_s: Way of a batch to the worker and back.
        gap_s: Time before a batch in which its worker was idle.
        outside_s: Time of a request outside the driver.
        late_p99_s: How late requests left, at the 99th percentile.
    """

    size: float
    busy_s: float
    hop_s: float
    gap_s: float
    outside_s: float
    late_p99_s: float


Seen = TypeVar("Seen", Load, Probe)


def undisturbed(attempt: Callable[[], Seen]) -> Seen:
    """What the first attempt in which the generator had a processor gave, or else the last one."""
    for _ in range(ATTEMPTS):
        seen = attempt()
        if seen.late_p99_s <= LATE_S:
            break
        say(f"  requests left {seen.late_p99_s * 1e3:.1f} ms late")
    return seen


def measure(server: Server, seconds: float, slo_s: float = SLO_S) -> Added:
    """What this server on this machine adds: straight lines through two loads."""
    small, large = (undisturbed(partial(probe, server, seconds, load, slo_s)) for load in PROBES)
    apart = large.size - small.size
    busy_slope_s = max(0.0, (large.busy_s - small.busy_s) / apart)
    hop_slope_s = max(0.0, (large.hop_s - small.hop_s) / apart)
    return Added(
        batch_s=small.busy_s - busy_slope_s * small.size,
        item_s=busy_slope_s + hop_slope_s,
        hop_s=max(0.0, small.hop_s - hop_slope_s * small.size),
        turn_s=max(0.0, (small.gap_s - small.hop_s + large.gap_s - large.hop_s) / 2),
        outside_s=max(0.0, (small.outside_s + large.outside_s) / 2),
    )


def probe(server: Server, seconds: float, load: float, slo_s: float) -> Probe:
    """Load it, and compare what it says with what the client saw."""
    rate = load * CAPACITY
    open_loop.run(server, rate=rate, seconds=1, warm_up_s=0, slo_s=slo_s, seed=998)
    before = metrics(server)
    sampler = HopSampler(server)
    sampler.start()
    seen = open_loop.run(server, rate=rate, seconds=seconds, warm_up_s=0, slo_s=slo_s, seed=999)
    hop_s = sampler.stop()
    since = {name: value - before.get(name, 0.0) for name, value in metrics(server).items()}
    batches, items = since["carpool_batch_size_count"], since["carpool_batch_size_sum"]
    busy_s = since["carpool_batch_duration_seconds_sum"] - SETUP_S * batches - ITEM_S * items
    gap_s = since["carpool_worker_idle_gap_seconds_sum"] / since["carpool_worker_idle_gap_seconds_count"]
    inside_s = since["carpool_request_duration_seconds_sum"] / since["carpool_request_duration_seconds_count"]
    outside_s = seen.mean_s - seen.late_mean_s - inside_s
    return Probe(items / batches, busy_s / batches, hop_s, gap_s, outside_s, seen.late_p99_s)


def calibrate(policy: str, loads: Sequence[float], runs: int, seconds: float) -> tuple[Added, list[Row]]:
    """One real server, all loads; then the same in virtual time."""
    launch = contestants.serving(f"{contestants.MODELS}:sleep_{policy}")
    rows = []
    with running(launch) as server:
        added = measure(server, seconds)
        say(f"{policy}: {added}")
        for load in loads:
            row = Row(policy, load, added.outside_s, [], [])
            for seed in range(runs):
                rate = load * CAPACITY
                real = partial(open_loop.run, server, rate=rate, seconds=seconds, warm_up_s=1, slo_s=SLO_S, seed=seed)
                row.real.append(undisturbed(real))
                row.simulated.append(added.simulate(policy, rate, seconds, seed, None))
                say(
                    f"  {load:g}, run {seed + 1}: "
                    + ", ".join(cells(Row(policy, load, added.outside_s, row.real[-1:], row.simulated[-1:])))
                )
            rows.append(row)
    return added, rows


HEADER = (
    "policy, load", "p50 real", "simulated", "difference", "p99 real", "simulated", "difference", "generator late, p99",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    """Times in ms."""
    line = [f"{row.policy} {row.load:g}"]
    for quantity in ("p50_s", "p99_s"):
        real, simulated = row.both(quantity)
        line += [f"{real * 1e3:.2f}", f"{simulated * 1e3:.2f}", f"{(simulated / real - 1) * 100:+.1f} %"]
    return [*line, f"{median(run.late_p99_s for run in row.real) * 1e3:.2f}"]


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--policies", default="adaptive,greedy", help="of these two; default: %(default)s")
    parser.add_argument("--loads", default="0.3,0.5,0.7,0.9", help="shares of capacity; default: %(default)s")
    parser.add_argument("--runs", type=int, default=3, help="of each load; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run; default: %(default)s")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/")
    given = parser.parse_args()
    end_on_sigterm()
    adopt_orphans()
    facts = machine()
    rows: list[Row] = []
    added: dict[str, Added] = {}
    for policy in given.policies.split(","):
        added[policy], more = calibrate(policy, list(map(float, given.loads.split(","))), given.runs, given.seconds)
        rows += more
    text = table(HEADER, [cells(row) for row in rows], markdown=True)
    notes = "; ".join(f"`{policy}`: {what}" for policy, what in added.items())
    how = f"{origin(facts)}; {given.runs} runs of {given.seconds:g} s"
    section = f"{text}\n\nWhat was measured and given to the simulator: {notes} ({how})."
    print(section)
    if given.docs:
        write({"calibration": section})
    return trust(median(run.late_p99_s for run in row.real) for row in rows)


def trust(late_s: Iterable[float]) -> int:
    """The exit status: 1, with a warning, if the generator was too late for figures to count."""
    if max(late_s, default=0.0) <= LATE_S:
        return 0
    say("the generator was often late: something else runs on this machine, and the figures are not to be trusted")
    return 1


if __name__ == "__main__":
    sys.exit(main())
