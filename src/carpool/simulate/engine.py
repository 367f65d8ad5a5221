"""One run: arrivals go into the pipeline, batches cost what they are said to, and a report comes out.

Pipeline, batcher, queue and policy are the very objects that a service runs; only the driver is another. The sources of
chance are separate, one for each purpose, so that all policies see the same arrivals, and with them the same weights
and SLOs, whatever they do (a closed loop's arrivals follow from what they do).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

from carpool.core.batcher import INFINITY, Batch, Batcher
from carpool.core.pipeline import Pipeline
from carpool.core.queue import Queue
from carpool.drive.virtual import VirtualDriver
from carpool.policy import Policy
from carpool.request import Request
from carpool.settings import at_least, not_negative, positive
from carpool.simulate.arrivals import START_WITHIN_S, Arrivals, Closed, Open, Scene, Trace, arrivals_of
from carpool.simulate.costs import Cost, Seconds, capacity, cost_of
from carpool.simulate.policies import PolicyLike, label_of, policy_of
from carpool.simulate.record import UNFINISHED, Record
from carpool.simulate.report import Report, report_of
from carpool.simulate.weights import weights_of


def run(
    policy: PolicyLike | Sequence[PolicyLike] = "adaptive",
    arrivals: Any = "poisson:rate=800",
    cost: Any = "affine:a=8ms,b=0.25ms",
    slo_s: float | Sequence[float] | None = 0.06,
    max_batch_size: int | Sequence[int] = 64,
    workers: int | Sequence[int] = 1,
    duration_s: float | None = 30,
    seed: int = 0,
    *,
    weights: Any = None,
    weights_known: bool = False,
    hop_s: float = 0.0,
    turn_s: float = 0.0,
    max_queue_size: float = INFINITY,
) -> Report:
    """Simulate one service and report how it did.

    Requests arrive in [0, duration). The run goes on for two (of the longest) SLOs more, or for the same time again
    where there is no SLO; what is not finished then is reported as unfinished.

    Args:
        policy: a name, a spec, a policy (a template) or a function that makes one.
        arrivals: a spec, a process of `carpool.simulate.arrivals`, several of them, or times in seconds.
        cost: a spec, a cost of `carpool.simulate.costs`, or a function `n -> seconds` or `(n, now, rng) -> seconds`.
        slo_s: within which requests should be answered; of several, each request has one with equal chance.
        max_batch_size: most requests in a batch; with `weights_known` most weight.
        workers: how many serve at the same time.
        duration_s: how long requests arrive. None: a trace's own length.
        seed: of all chance.
        weights: of requests, if they differ: a spec, `Pareto(...)` or a list to draw from. A batch costs what its
            weights sum up to. A trace brings its own.
        weights_known: whether the policy is told. Then a request's size is its weight, rounded up, and a batch costs
            what its sizes sum up to.
        hop_s: what a batch spends on its way to the worker and back.
        turn_s: how long the driver gathers what happens before it decides: a turn of its loop.
        max_queue_size: most requests that wait; more are refused.

    A list of costs stands for stages in a row; `policy`, `max_batch_size` and `workers` may then be lists too.

    Raises:
        ValueError: a setting makes no sense; the text says what to change.
    """
    costs = [cost_of(part) for part in (cost if isinstance(cost, list | tuple) else [cost])]
    limits = _per_stage("max_batch_size", max_batch_size, len(costs))
    pools = _per_stage("workers", workers, len(costs))
    templates = _per_stage("policy", policy, len(costs))
    slos = _slos(slo_s)
    for limit, pool in zip(limits, pools, strict=True):
        at_least("max_batch_size", limit, 1)
        at_least("workers", pool, 1)
    not_negative("hop_s", hop_s)
    not_negative("turn_s", turn_s)
    traffic = _Traffic(arrivals_of(arrivals), costs, limits, pools, weights, weights_known, slos, duration_s, seed)
    longest_s = None if math.isinf(max(slos)) else max(slos)
    policies = [
        policy_of(template, max_batch_size=limit, slo_s=longest_s, cost_s=curve)
        for template, limit, curve in zip(templates, limits, costs, strict=True)
    ]
    driver = _driver(policies, costs, pools, traffic, seed, max_queue_size, hop_s, turn_s)
    traffic.begin(driver)
    end_s = traffic.duration_s + (traffic.duration_s if longest_s is None else 2 * longest_s)
    driver.run(until=end_s)
    return report_of(
        traffic.record,
        policy=" -> ".join(dict.fromkeys(map(label_of, templates))),
        load=traffic.load,
        seed=seed,
        end_s=end_s,
        workers=pools,
        wake_ups=driver.wake_ups,
    )


class _Traffic:
    """The requests of a run, and whoever sends them."""

    def __init__(
        self,
        processes: Sequence[Arrivals],
        costs: Sequence[Cost],
        limits: Sequence[int],
        pools: Sequence[int],
        weights: Any,
        weights_known: bool,
        slos: Sequence[float],
        duration_s: float | None,
        seed: int,
    ) -> None:
        self.weights_known = weights_known
        self._seed = seed
        self._slos = slos
        self._weights = weights_of(weights)
        self._slo_dice = Random(f"{seed}/slo")
        self._weight_dice = Random(f"{seed}/weights")
        self._open: list[tuple[Open, Scene]] = []
        self._loops: list[Closed] = []
        self._driver: VirtualDriver
        if duration_s is not None:
            positive("duration_s", duration_s)

        def scene(process: Arrivals) -> Scene:
            mean_weight = self._mean_weight(process)
            most = capacity(costs, limits, pools, mean_weight=mean_weight, weights_known=weights_known)
            return Scene(duration_s or 0.0, most)

        if duration_s is None:
            duration_s = _length_s(processes, scene)
        for process in processes:
            if isinstance(process, Closed):
                self._loops.append(process)
            else:
                self._open.append((process, scene(process)))
        self.duration_s = duration_s
        self.record = Record(duration_s, len(costs), slos)
        self.has_weights = self._weights is not None or any(_own_weights(p) is not None for p in processes)

    @property
    def load(self) -> float | None:
        """Mean arrival rate as a share of capacity; None with a closed loop, which makes its own."""
        if self._loops:
            return None
        return sum(process.mean_rate(scene) / scene.capacity for process, scene in self._open)

    def begin(self, driver: VirtualDriver) -> None:
        """Open arrivals feed the driver; clients send their first requests."""
        self._driver = driver
        streams = [self._stream(i, process, scene) for i, (process, scene) in enumerate(self._open)]
        if streams:
            merged = streams[0] if len(streams) == 1 else heapq.merge(*streams, key=lambda entry: entry[0])
            driver.feed((when, self.request(when, weight)) for when, weight in merged)
        clients = 0
        for i, loop in enumerate(self._loops):
            dice = Random(f"{self._seed}/closed/{i}")
            for _ in range(loop.clients):
                client = _Client(clients, loop, dice, self)
                driver.at(dice.uniform(0.0, START_WITHIN_S), client.send)
                clients += 1

    def request(self, when: float, weight: float | None = None, client: _Client | None = None) -> Request:
        """One that arrives at `when`."""
        record = self.record
        request = Request(len(record.arrived), INFINITY, client)
        record.arrived.append(when)
        record.finished.append(UNFINISHED)
        if self._loops:
            record.client.append(-1 if client is None else client.index)
        slo_s = self._slos[0]
        if len(self._slos) > 1:
            slo_s = self._slo_dice.choice(self._slos)
            record.slo_s.append(slo_s)
        request.due = when + slo_s
        if self.has_weights:
            if weight is None:
                weight = 1.0 if self._weights is None else self._weights.draw(self._weight_dice)
            if self.weights_known:
                request.size = _size(weight)
            record.weights.append(weight)
        return request

    def send(self, client: _Client) -> None:
        """A request of a client arrives now; none does once the run is over."""
        now = self._driver.clock.now
        if now < self.duration_s:
            self._driver.enter(self.request(now, client=client))

    def later(self, pause_s: float, event: Callable[[], None]) -> None:
        """After a pause."""
        self._driver.at(self._driver.clock.now + pause_s, event)

    def weight_of(self, batch: Batch) -> float:
        """What a batch's cost is taken at."""
        if not self.has_weights:
            return len(batch)
        if self.weights_known:
            return batch.size
        weights = self.record.weights
        return sum([weights[request.item] for request in batch.requests])  # type: ignore[call-overload]

    def size_of(self, index: object) -> int:
        """How much of a batch a request takes up in a later stage: as much as in the first."""
        return _size(self.record.weights[index]) if self.has_weights and self.weights_known else 1  # type: ignore[call-overload]

    def _stream(self, index: int, process: Open, scene: Scene) -> Iterator[tuple[float, float | None]]:
        """Times and weights of one process."""
        times = process.times(Random(f"{self._seed}/arrivals/{index}"), scene)
        own = _own_weights(process)
        return ((when, None) for when in times) if own is None else zip(times, own, strict=False)

    def _mean_weight(self, process: Arrivals) -> float:
        own = _own_weights(process)
        if own is None:
            return 1.0 if self._weights is None else self._weights.mean
        sizes = list(map(_size, own)) if self.weights_known else own
        return sum(sizes) / len(sizes)


class _Client:
    """One client of a closed loop: asks, waits for the answer, thinks, asks again."""

    __slots__ = ("_dice", "_loop", "_traffic", "index")

    def __init__(self, index: int, loop: Closed, dice: Random, traffic: _Traffic) -> None:
        self.index = index
        self._loop = loop
        self._dice = dice
        self._traffic = traffic

    def send(self) -> None:
        self._traffic.send(self)

    def answered(self, request: Request) -> None:
        loop = self._loop
        mean_s = loop.think_s if request.error is None else loop.backoff_s
        self._traffic.later(loop.pause_s(self._dice, mean_s), self.send)


def _driver(
    policies: Sequence[Policy],
    costs: Sequence[Cost],
    pools: Sequence[int],
    traffic: _Traffic,
    seed: int,
    max_queue_size: float,
    hop_s: float,
    turn_s: float,
) -> VirtualDriver:
    """The very objects that a service runs, under the virtual clock."""
    stages = [
        Batcher(f"stage {i}", policy, Queue(INFINITY if i else max_queue_size), weigh=traffic.size_of)
        for i, policy in enumerate(policies)
    ]
    seconds: list[Seconds] = [cost.over(traffic.duration_s) for cost in costs]
    dice = [Random(f"{seed}/cost/{i}") for i in range(len(costs))]
    paddings = [_padding(policy) for policy in policies]
    weight_of = traffic.weight_of

    def batch_cost(batch: Batch, now: float) -> float:
        stage = batch.stage
        return seconds[stage](paddings[stage](weight_of(batch)), now, dice[stage])

    watcher = traffic.record
    return VirtualDriver(Pipeline(stages), batch_cost, pools, hop_s=hop_s, turn_s=turn_s, watcher=watcher)


def _size(weight: float) -> int:
    """What a policy that knows weights is told."""
    return max(1, math.ceil(weight))


def _padding(policy: Policy) -> Callable[[float], float]:
    """What a batch of some size costs like, since a policy with allowed sizes has its batches padded."""
    allowed: Sequence[int] = getattr(policy, "allowed_batch_sizes", None) or ()
    if not allowed:
        return lambda n: n
    return lambda n: next((size for size in allowed if size >= n), n)


def _own_weights(process: Arrivals) -> Sequence[float] | None:
    return process.weights() if isinstance(process, Trace) else None


def _length_s(processes: Sequence[Arrivals], scene: Callable[[Arrivals], Scene]) -> float:
    """Of the longest trace."""
    lengths = [process.length_s(scene(process)) for process in processes if isinstance(process, Trace)]
    if not lengths:
        raise ValueError("duration_s can only be left out for a trace, which has a length of its own")
    return max(lengths)


def _slos(slo_s: float | Sequence[float] | None) -> Sequence[float]:
    if slo_s is None:
        return (INFINITY,)
    slos = tuple(slo_s) if isinstance(slo_s, Sequence) else (slo_s,)
    for slo in slos:
        positive("slo_s", slo)
    if not slos:
        raise ValueError("slo_s must be None, a number of seconds or several, not an empty list")
    return slos


def _per_stage(name: str, value: Any, stages: int) -> list[Any]:
    """One value for each stage; a single one counts for all."""
    if not isinstance(value, list | tuple):
        return [value] * stages
    if len(value) != stages:
        raise ValueError(f"{name} has {len(value)} entries for {stages} stages: give one value, or one for each cost")
    return list(value)
