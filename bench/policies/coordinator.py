"""A busy coordinator, real beside simulated: rates and mean batches of a trivial model over HTTP.

`greedy` with small limits forces the sizes of batches. From the processor time of the service's
process in these runs follows what it works for each request, and for each batch besides, and from
the time of calls what a batch takes in its worker. Both are given to the simulator, which has
nothing else of the machine. Then all runs are simulated: those with forced sizes, and `adaptive`.

The machine must have nothing else to do. Service, worker and wrk want a core each: where the
service gets less than one, the simulated rates are too high. So the rates for each second of the
service's processor time are compared, too; with one connection, where nobody waits for that
processor, only the rates mean something.

    python -m bench.policies.coordinator
    python -m bench.policies.coordinator --connections 1,16 --limits 4,64 --rounds 1 --seconds 1
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from bench.peers import contestants
from bench.reality.calibration import metrics
from bench.tools import options, wrk
from bench.tools.comparison import say
from bench.tools.figures import machine, origin, table
from bench.tools.process_tree import TICK_S, adopt_orphans, end_on_sigterm, read_process
from bench.tools.server import Server, running
from carpool.simulate import Affine, Coordinator, Noisy, Report, run

LIMIT = 64
NOISE = 0.2  # of short calls
THINK = "15us"  # of wrk, from an answer to its next request
SEEDS = 3


@dataclass(frozen=True, slots=True)
class Seen:
    """One real run.

    Attributes:
        requests, batches: How many there were.
        rate: Answers per second.
        cpu_s: Processor time of the service's own process.
        busy_s: Seconds that workers spent on batches.
        seconds: How long the run took.
    """

    requests: float
    batches: float
    rate: float
    cpu_s: float
    busy_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Case:
    """One policy with one limit at one number of connections, and its real runs."""

    policy: str
    limit: int
    connections: int
    runs: list[Seen] = field(default_factory=list)

    @property
    def name(self) -> str:
        what = self.policy if self.limit == LIMIT and self.policy != "greedy" else f"batches of {self.limit}"
        return f"{what}, {self.connections}"


def seen(server: Server, connections: int, seconds: int) -> Seen:
    """Load a server, after a second that does not count."""
    wrk.run(server, connections=connections, seconds=1)
    before, cpu_before_s = metrics(server), _own_cpu_s(server)
    found = wrk.run(server, connections=connections, seconds=seconds)
    cpu_s = _own_cpu_s(server) - cpu_before_s
    since = {name: value - before.get(name, 0.0) for name, value in metrics(server).items()}
    return Seen(
        requests=since["carpool_batch_size_sum"],
        batches=since["carpool_batch_size_count"],
        rate=found.requests_per_s,
        cpu_s=cpu_s,
        busy_s=since["carpool_batch_duration_seconds_sum"],
        seconds=found.duration_s,
    )


def measure(cases: Sequence[Case], rounds: int, seconds: int) -> None:
    """Make the real runs, with a new server for each policy and limit in each round."""
    for _ in range(rounds):
        for policy, limit in dict.fromkeys((case.policy, case.limit) for case in cases):
            plain = contestants.launch(f"carpool:{policy}", "echo")
            assert plain is not None
            setting = {"CARPOOL_SET": f"stages.DoubleField.max_batch_size={limit}"}
            with running(replace(plain, env={**plain.env, **setting})) as server:
                for case in cases:
                    if (case.policy, case.limit) == (policy, limit):
                        case.runs.append(seen(server, case.connections, seconds))
                        say(f"  {case.name} connections: {case.runs[-1].rate:.0f}/s")


def fitted(rows: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The a and b for which a·x + b·y comes nearest to z, by the squares of relative errors.

    Neither is below 0.
    """
    xx, xy, yy, x1, y1 = (
        fmean(values)
        for values in zip(*((x * x / z**2, x * y / z**2, y * y / z**2, x / z, y / z) for x, y, z in rows), strict=True)
    )
    determinant = xx * yy - xy * xy
    if determinant <= 1e-9 * xx * yy:  # all batches had one size
        return x1 / xx, 0.0
    a, b = (x1 * yy - y1 * xy) / determinant, (y1 * xx - x1 * xy) / determinant
    if a < 0:
        return 0.0, y1 / yy
    return (a, b) if b >= 0 else (x1 / xx, 0.0)


def simulated(case: Case, coordinator: Coordinator, cost: Noisy, seconds: float = 1.0) -> list[Report]:
    """The same case in virtual time."""
    return [
        run(
            case.policy,
            f"closed:clients={case.connections},think={THINK}",
            cost,
            slo_s=None,
            max_batch_size=case.limit,
            duration_s=seconds,
            settle_s=0.2 * seconds,
            seed=seed,
            runs_ahead=True,
            max_queue_size=1024,
            coordinator=coordinator,
        )
        for seed in range(SEEDS)
    ]


HEADER = (
    *("policy, connections", "1/s real", "simulated", "1/s a core real", "simulated", "difference"),
    *("batch real", "simulated", "difference"),
)


def cells(case: Case, reports: Sequence[Report]) -> list[str]:
    """Medians over the runs."""
    rate, a_core, size = (
        median(values)
        for values in zip(
            *((each.rate, each.rate * each.seconds / each.cpu_s, each.requests / each.batches) for each in case.runs),
            strict=True,
        )
    )
    found_rate, found_size = median(r.throughput for r in reports), median(r.mean_batch_size for r in reports)
    found_a_core = median(r.throughput / (r.coordinator_utilisation or 1.0) for r in reports)
    line = [case.name, f"{rate:.0f}", f"{found_rate:.0f}"]
    line += [f"{a_core:.0f}", f"{found_a_core:.0f}", f"{(found_a_core / a_core - 1) * 100:+.0f} %"]
    return [*line, f"{size:.1f}", f"{found_size:.1f}", f"{(found_size / size - 1) * 100:+.0f} %"]


def main() -> int:
    parser = options.parser(__doc__)
    parser.add_argument("--connections", default="1,16,64,256", help="of wrk; default: %(default)s")
    parser.add_argument("--limits", default="1,4,16,64", help="of the forced batches; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="of all real runs; default: %(default)s")
    parser.add_argument("--seconds", type=int, default=2, help="of each real run; default: %(default)s")
    given = parser.parse_args()
    if missing := wrk.missing():
        print(missing, file=sys.stderr)
        return 1
    end_on_sigterm()
    adopt_orphans()
    facts = machine()
    connections, limits = ([int(part) for part in text.split(",")] for text in (given.connections, given.limits))
    forced = [Case("greedy", limit, n) for limit in limits for n in connections if n >= limit]
    cases = [*forced, *(Case("adaptive", LIMIT, n) for n in connections)]
    measure(cases, given.rounds, given.seconds)
    of_forced = [each for case in forced for each in case.runs]
    request_s, batch_s = fitted([(each.requests, each.batches, each.cpu_s) for each in of_forced])
    item_s, call_s = fitted([(each.requests, each.batches, each.busy_s) for each in of_forced])
    coordinator, cost = Coordinator(request_s, batch_s), Noisy(Affine(call_s, item_s), NOISE)
    print(table(HEADER, [cells(case, simulated(case, coordinator, cost)) for case in cases], markdown=True))
    print(
        f"\nMeasured and given to the simulator: the service works {request_s * 1e6:.1f} µs for a request and"
        f" {batch_s * 1e6:.0f} µs for a batch, and a batch of n takes {call_s * 1e6:.1f} µs + {item_s * 1e6:.2f} µs n"
        f" in its worker ({origin(facts)}; {given.rounds} rounds of {given.seconds} s)."
    )
    return 0


def _own_cpu_s(server: Server) -> float:
    """The processor time of the service's own process, without its workers'."""
    process = read_process(server.leader.pid)
    return 0.0 if process is None else process.cpu_ticks * TICK_S


if __name__ == "__main__":
    sys.exit(main())
