"""One run of a stage of steps: who joins its running sets when, and what the readers see of it.

Only the driver is another one than in a service. A request is *good* if its first part came within
the SLO and the others, on average, within the SLO of parts (DistServe's goodput). It is *smooth* as
well if every part was there by the time at which a reader at that pace wants it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice, pairwise
from math import inf
from random import Random
from statistics import fmean
from typing import Any

from carpool.engine.clock import VirtualClock
from carpool.engine.core.core import Core
from carpool.engine.core.queue import Queue
from carpool.engine.core.stepper import Stepper
from carpool.engine.drive.virtual import StepCosts, VirtualDriver
from carpool.engine.policy import StepPolicy, new_step_policy
from carpool.engine.policy.cost_line import CostLine
from carpool.engine.request import Request, Stream
from carpool.simulate import specs
from carpool.simulate.arrivals import Closed, Scene, arrivals_of
from carpool.simulate.features import Length, lengths_of

EXAMPLE = "steps:a=5ms,b=0.1ms,c=18ms,d=0.15ms"
_TOLERANCE_S = 1e-9

StepPolicyLike = str | StepPolicy | Callable[[], StepPolicy]
"""A name (`paced`), a policy of steps (a template) or a function that makes one."""


@dataclass(frozen=True)
class StepCost:
    """The cost of a model of steps: starting takes a + b·length, a step of n streams c + d·n.

    Args:
        a_s: Seconds of starting, whatever is started.
        b_s: Seconds of starting per unit of input.
        c_s: Seconds of a step, whatever is stepped.
        d_s: Seconds of a step per stream.
        sigma: Standard deviation of the logarithm of the noise, whose mean is 1.
        stall_share: The share of starts and steps that stall, from 0 to 1.
        stall_s: How much longer those take.
    """

    a_s: float
    b_s: float
    c_s: float
    d_s: float
    sigma: float = 0.0
    stall_share: float = 0.0
    stall_s: float = 0.0

    def __post_init__(self) -> None:
        if min(asdict(self).values()) < 0 or not self.c_s + self.d_s > 0:
            raise ValueError("steps: no value must be negative, and a step must take some time")

    @property
    def is_noisy(self) -> bool:
        """Whether equal work takes unequal times."""
        return self.sigma > 0 or self.stall_share > 0

    def seconds(self, dice: Random) -> tuple[Callable[[int], float], Callable[[int], float]]:
        """Return the seconds of starts, by length, and those of steps, by streams, as functions."""
        a, b, c, d = self.a_s, self.b_s, self.c_s, self.d_s
        disturb = self.disturbed(dice)
        return lambda length: disturb(a + b * length), lambda n: disturb(c + d * n)

    def disturbed(self, dice: Random) -> Callable[[float], float]:
        """Return the function from undisturbed seconds to those that are measured."""
        shift = -self.sigma * self.sigma / 2

        def disturb(seconds: float) -> float:
            seconds *= dice.lognormvariate(shift, self.sigma) if self.sigma else 1.0
            return seconds + (self.stall_s if dice.random() < self.stall_share else 0.0)

        return disturb if self.is_noisy else lambda seconds: seconds


def step_cost_of(cost: object) -> StepCost:
    """Return a cost of steps, which may be given as a spec.

    Raises:
        ValueError: The spec is wrong; the text says what to change.
        TypeError: `cost` is neither.
    """
    if isinstance(cost, StepCost):
        return cost
    if isinstance(cost, str):
        return specs.build(cost, {"steps": StepCost}, "cost of steps", EXAMPLE)
    raise TypeError(f"cost must be a spec such as {EXAMPLE!r} or StepCost(...), not {cost!r}")


@dataclass(frozen=True)
class StepReport:
    """The figures of one run, or the mean of several; times are in seconds.

    Attributes:
        policy: The policy.
        requests: How many requests came.
        good: Share of them that were good.
        smooth: Share of them that were good and smooth.
        refused: Share of them that were refused.
        gap_p99_s: 99th percentile of the longest gap between two parts of a request.
        first_p50_s: Median time to the first part.
        first_p99_s: Its 99th percentile.
        part_p50_s: Median of the mean distance of a request's parts.
        part_p99_s: Its 99th percentile.
        parts_per_s: Parts per second.
        rows: Mean number of streams in a step.
    """

    policy: str
    requests: float
    good: float
    smooth: float
    refused: float
    gap_p99_s: float
    first_p50_s: float
    first_p99_s: float
    part_p50_s: float
    part_p99_s: float
    parts_per_s: float
    rows: float


def mean_of_steps(reports: Sequence[StepReport]) -> StepReport:
    """Return the means of several reports about one policy."""
    names = [field.name for field in fields(StepReport) if field.name != "policy"]
    means = {name: fmean([getattr(report, name) for report in reports]) for name in names}
    return StepReport(reports[0].policy, **means)


class Reading:
    """One request, and when its parts came.

    Attributes:
        arrived: When it came.
        output: How many parts it should get.
        times: When each of them came.
        is_refused: Whether it was refused.
    """

    __slots__ = ("arrived", "clock", "is_refused", "output", "times")

    def __init__(self, clock: VirtualClock, arrived: float, output: int) -> None:
        self.clock = clock
        self.arrived = arrived
        self.output = output
        self.times: list[float] = []
        self.is_refused = False

    def take_part(self, request: Request, part: object) -> None:
        """Note a part."""
        self.times.append(self.clock.now)

    def answered(self, request: Request) -> None:
        """Note the end."""
        self.is_refused = request.error is not None

    def is_good(self, slo_s: float, part_slo_s: float) -> bool:
        """Report whether the first part, and the others on average, came in time."""
        times = self.times
        if len(times) < self.output or times[0] - self.arrived > slo_s:
            return False
        return times[-1] - times[0] <= part_slo_s * (len(times) - 1) + _TOLERANCE_S

    def is_smooth(self, part_slo_s: float) -> bool:
        """Report whether no part came later than a reader at the SLO's pace wants it."""
        first = self.times[0]
        return all(at <= first + i * part_slo_s + _TOLERANCE_S for i, at in enumerate(self.times))


def run_steps(
    policy: StepPolicyLike = "paced",
    arrivals: Any = "poisson:rate=4",
    cost: Any = EXAMPLE,
    lengths: Any = "lognormal:input=200,output=180",
    *,
    slo_s: float | None = 1.0,
    part_slo_s: float | None = 0.05,
    rows: int = 64,
    workers: int = 1,
    duration_s: float = 120.0,
    seed: int = 0,
    learned: bool = False,
    most_requests: int | None = None,
) -> StepReport:
    """Simulate a stage of steps, and report the waits of its readers.

    Requests arrive in [0, duration), and the run goes on until all of them are done.

    Args:
        policy: A name, a policy of steps (which serves as a template) or a function that makes one.
        arrivals: As in `run`, but for closed loops.
        cost: A spec or a `StepCost`. Arrivals given by `rho` are a share of the parts per second
            that full sets make.
        lengths: A spec, or a source such as `Lognormal(...)`.
        slo_s: The seconds within which the first part should come; None for no such goal, in which
            case no request is refused.
        part_slo_s: How far apart parts should be on average; None gives the policy no goal.
        rows: The most streams in a running set.
        workers: How many workers have a set each.
        duration_s: How long requests arrive, in seconds.
        seed: The seed of everything random.
        learned: Whether the policy must learn the costs from what it sees, instead of knowing them
            from the start.
        most_requests: How many requests come at most.

    Raises:
        ValueError: A setting makes no sense; the text says what to change.
        TypeError: A setting is of a wrong kind.
    """
    cost = step_cost_of(cost)
    made = _policy(policy, rows, slo_s, part_slo_s, None if learned else cost)
    stepper = Stepper("steps", made, Queue(), rows=rows)
    start_s, step_s = cost.seconds(Random(f"{seed}/cost"))
    driver = VirtualDriver(Core([stepper], slo_s=slo_s), [], [workers], steps=StepCosts(start_s, step_s))
    readings: list[Reading] = []
    traffic = traffic_of(arrivals, lengths, cost, rows, workers, duration_s, seed, most_requests)
    driver.feed(_requests(traffic, driver.clock, readings))
    driver.run()
    name = policy if isinstance(policy, str) else type(made).__name__
    return report_on(name, readings, slo_s, part_slo_s, _mean_rows(driver))


def _requests(
    traffic: Iterable[tuple[float, Length]], clock: VirtualClock, readings: list[Reading]
) -> Iterator[tuple[float, Request]]:
    """Yield when each request comes, and the request; what its reader sees joins `readings`."""
    for when, (units, parts) in traffic:
        reading = Reading(clock, when, parts)
        request = Request(parts, inf, caller=reading)
        request.stream = Stream(units)
        readings.append(reading)
        yield when, request


def traffic_of(
    arrivals: Any,
    lengths: Any,
    cost: StepCost,
    rows: int,
    workers: int,
    duration_s: float,
    seed: int,
    most_requests: int | None,
) -> Iterator[tuple[float, Length]]:
    """Return the requests of a run, each with the time of its arrival; see `run_steps`.

    Raises:
        ValueError: A setting makes no sense.
    """
    processes = arrivals_of(arrivals)
    if len(processes) != 1 or isinstance(processes[0], Closed):
        raise ValueError("a simulation of steps needs one open process of arrivals, such as poisson:rate=4")
    scene = Scene(duration_s, workers * rows / (cost.c_s + cost.d_s * rows))
    times = processes[0].times(Random(f"{seed}/arrivals"), scene)
    source = lengths_of(lengths).draw(Random(f"{seed}/lengths"))
    return islice(zip(times, source, strict=False), most_requests)


def _policy(
    policy: StepPolicyLike, rows: int, slo_s: float | None, part_slo_s: float | None, known: StepCost | None
) -> StepPolicy:
    template = policy() if callable(policy) and not isinstance(policy, StepPolicy) else policy
    made = new_step_policy(template, rows, part_slo_s=part_slo_s, slo_s=slo_s)
    if known is not None:
        made.start, made.step = CostLine(known.a_s, known.b_s), CostLine(known.c_s, known.d_s)
    return made


def _mean_rows(driver: VirtualDriver) -> float:
    steps = sum(worker.steps for worker in driver.step_workers.values())
    return sum(worker.rows for worker in driver.step_workers.values()) / max(1, steps)


def report_on(
    policy: str, readings: Sequence[Reading], slo_s: float | None, part_slo_s: float | None, rows: float
) -> StepReport:
    """Return the figures of a run.

    Args:
        slo_s: The seconds within which the first part should have come; None for no such goal.
        part_slo_s: How far apart parts should have been on average; None for no such goal.
        rows: The mean number of streams in a step.
    """
    pace_s = part_slo_s or inf
    good = [reading for reading in readings if reading.is_good(slo_s or inf, pace_s)]
    smooth = good if pace_s == inf else [reading for reading in good if reading.is_smooth(pace_s)]
    n = max(1, len(readings))
    begun = [reading for reading in readings if reading.times]
    spread = [reading.times for reading in begun if len(reading.times) > 1]
    firsts = sorted(reading.times[0] - reading.arrived for reading in begun)
    distances = sorted((times[-1] - times[0]) / (len(times) - 1) for times in spread)
    gaps = sorted(max(b - a for a, b in pairwise(times)) for times in spread)
    ends = max((reading.times[-1] for reading in begun), default=0.0)
    return StepReport(
        policy,
        requests=len(readings),
        good=len(good) / n,
        smooth=len(smooth) / n,
        refused=sum(reading.is_refused for reading in readings) / n,
        gap_p99_s=_quantile(gaps, 0.99),
        first_p50_s=_quantile(firsts, 0.5),
        first_p99_s=_quantile(firsts, 0.99),
        part_p50_s=_quantile(distances, 0.5),
        part_p99_s=_quantile(distances, 0.99),
        parts_per_s=sum(len(reading.times) for reading in begun) / ends if ends else 0.0,
        rows=rows,
    )


def _quantile(values: Sequence[float], q: float) -> float:
    return values[min(len(values) - 1, int(q * len(values)))] if values else 0.0
