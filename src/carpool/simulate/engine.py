"""One run: arrivals go into the core, batches cost as the user says, and a report comes out.

Core, batcher, queue and policy are the same classes that a service uses; only the driver is another
one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from math import inf
from random import Random
from typing import Any

from carpool.engine.core.batch import Batch
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.levels import BY_KEY, BY_LENGTH, LevelsOf, by_allowed_lengths
from carpool.engine.core.places import KeyedWorkers
from carpool.engine.core.queue import Queue
from carpool.engine.drive.virtual import VirtualDriver
from carpool.engine.policy import Policy
from carpool.service.checks import flag, nonnegative_seconds, optional_seconds
from carpool.simulate.arrivals import USUAL_ARRIVALS, arrivals_of
from carpool.simulate.contestants import GRID, Tuned
from carpool.simulate.coordinator import BusyDriver, Coordinator, coordinator_of
from carpool.simulate.costs import USUAL_COST, BatchShape
from carpool.simulate.features import Features
from carpool.simulate.graphs import SimulatedGraph, graph_of
from carpool.simulate.policies import TUNED, PolicyLike, label_of, policy_of
from carpool.simulate.report import Report, report_of
from carpool.simulate.servers import USUAL_LIMIT, USUAL_RULE, USUAL_WORKERS, Rule, Scaling, Servers, per_stage, rule_of
from carpool.simulate.traffic import Traffic

_LEVEL = 0.995  # goodputs of at least this share of the best one are as good; then the penalised mean decides


def run(
    policy: PolicyLike | Sequence[PolicyLike] = "adaptive",
    arrivals: Any = USUAL_ARRIVALS,
    cost: Any = USUAL_COST,
    slo_s: float | Sequence[float] | None = 0.06,
    max_batch_size: int | Sequence[int] = USUAL_LIMIT,
    workers: int | str | Sequence[int | str] = USUAL_WORKERS,
    duration_s: float | None = 30,
    seed: int = 0,
    *,
    graph: Any = None,
    ways: Mapping[str, float] | None = None,
    early: Mapping[str, float] | None = None,
    items: int | Sequence[int] | None = None,
    settle_s: float = 0.0,
    weights: Any = None,
    weights_known: bool = False,
    lengths: Any = None,
    lengths_known: bool = True,
    max_padded_size: float = inf,
    allowed_lengths: Sequence[int] | None = None,
    keys: Any = None,
    max_workers_per_key: float = inf,
    switch_s: float = 0.0,
    hop_s: float = 0.0,
    hop_item_s: float = 0.0,
    turn_s: float = 0.0,
    runs_ahead: bool = False,
    max_queue_size: float = inf,
    start_s: float = 0.0,
    scaling: Rule | str = USUAL_RULE,
    coordinator: Coordinator | str | None = None,
) -> Report:
    """Simulate one service and report how it did.

    Requests arrive in [0, duration). The run goes on for twice the (longest) SLO, or for the same
    time again where there is no SLO; what is not finished by then is reported as unfinished.

    A list of costs stands for stages in a row; `policy`, `max_batch_size` and `workers` may then be
    lists too. With `graph`, requests go through the graph of a service, whose stages have the batch
    limits, workers and queues that they are declared with.

    With the policy "tuned" it makes a run for each point of a grid of static settings, and returns
    the best report. That is the one with the least penalised mean among those with at least 99.5 %
    of the best goodput.

    Args:
        policy: A name, a spec, a policy (which serves as a template) or a function that makes one.
            Names are those of a service's policies, and `window`, `ray`, `triton`, `symphony`,
            `clockwork`, `batch` and `tuned`, which do as other systems do.
        arrivals: A spec, a process such as `Poisson(...)`, several of them, or times in seconds.
        cost: With a graph one for all stages, or a dict of them by the stage's name. Each is a
            spec, a `Cost`, or a function `n -> seconds`, `(n, longest) -> seconds`,
            `(n, now, rng) -> seconds` or `(n, longest, now, rng) -> seconds`.
        slo_s: The seconds within which requests should be answered. Of several SLOs each request
            has one, all with equal chance.
        max_batch_size: The most requests in a batch; with `weights_known` the most weight.
        workers: How many workers serve at the same time; "1-8" where they follow the load.
        duration_s: How long requests arrive, in seconds; None for the length of a trace.
        seed: The seed of everything random.
        graph: A service, or what one is made of, such as `Parallel(...)`; None for stages in a row.
        ways: The share of the items that take each branch of a `Route`, by its name, from 0 to 1.
            Branches that are not named share the rest evenly.
        early: The share of the items for which a stage answers early (`Done`), by the stage's name.
        items: How long the lists are that come to a `ForEach`: a number, or several, of which each
            list has one, all with equal chance; 4 if not given. All lists of one item are alike.
        settle_s: The seconds at the beginning whose requests the figures leave out, so that a cold
            start does not count. Batches are counted all the same.
        weights: How much requests weigh, if they differ: a spec, `Pareto(...)` or a list to draw
            from. A batch costs what the sum of its weights costs. A trace brings its own weights.
        weights_known: Whether the policy gets the weights. The size of a request is then its
            weight, rounded up, and a batch costs what the sum of its sizes costs.
        lengths: How long requests are, if batches are padded to their longest: a spec, or an object
            such as `Lognormal(...)`, of which the inputs count. A trace may bring its own lengths.
        lengths_known: Whether the policy gets the lengths, as a stage with `length=` does.
        max_padded_size: The most that a batch's count times its longest length may be.
        allowed_lengths: The lengths to which batches are padded, rising, as for models that are
            compiled for each shape; None for the longest of each batch.
        keys: How many keys there are, if only requests with equal keys may share a batch, or a spec
            such as `zipf:count=100,power=1`.
        max_workers_per_key: The most workers that may serve one key at the same time.
        switch_s: The seconds by which a batch takes longer if the one before on its worker had
            another key.
        hop_s: The seconds that a batch spends on its way to the worker and back.
        hop_item_s: The seconds for which each of its items does so besides, as large ones do: half
            of it on the way there and half on the way back.
        turn_s: The seconds for which the driver collects events before it decides and answers: a
            turn of its loop.
        runs_ahead: Whether a full batch may go to its worker shortly before the worker is free, as
            in services with workers in processes or threads. Such a batch spends no `hop_s`,
            and half of `hop_item_s`.
        max_queue_size: The most requests that may wait; further ones are refused.
        start_s: The seconds until a worker that is added takes requests.
        scaling: How many workers there should be, where they come and go: "load" (as services do),
            "ongoing:2" or "busy:0.7"; or a function that returns their number for a rate (1/s).
        coordinator: The time of the work of the coordinator, which is the process that reads
            requests and writes batches: a `Coordinator`, or a spec such as "12us,63us" (for each
            request, and for each batch). None if it takes no time. Latencies then count from the
            moment when a client has sent its request, which is before the coordinator reads it.

    Raises:
        ValueError: A setting makes no sense; the text says what to change.
        TypeError: A setting is of a wrong kind.
    """
    joints = None if graph is None else graph_of(graph, ways, early, items)
    if joints is not None and max_queue_size != inf:
        raise ValueError("max_queue_size is that of the graph's stages: leave it out")
    if joints is None and (ways or early or items):
        raise ValueError("ways, early and items say what happens in a graph: give graph=, too")
    servers = Servers.of(cost, max_batch_size, workers, joints)
    templates = per_stage("policy", policy, len(servers.costs))
    slos = slos_of(slo_s)
    _check_seconds(
        hop_s=hop_s, hop_item_s=hop_item_s, turn_s=turn_s, start_s=start_s, switch_s=switch_s, settle_s=settle_s
    )
    given = {"weights": weights, "weights_known": weights_known, "lengths": lengths, "keys": keys}
    features = Features.of({**given, "lengths_known": flag("lengths_known", lengths_known)})
    processes, rule, ahead = arrivals_of(arrivals), rule_of(scaling), flag("runs_ahead", runs_ahead)
    busy = coordinator_of(coordinator)
    if busy is not None and turn_s:
        raise ValueError("turn_s does not go with coordinator, whose turns take what its work takes: leave out turn_s")

    def simulated(templates: Sequence[PolicyLike]) -> tuple[Report, list[Policy]]:
        """Make the run with these policies; return its report, and the policies."""
        traffic = Traffic(
            processes, servers, slos=slos, duration_s=duration_s, features=features, settle_s=settle_s, seed=seed
        )
        policies = _policies(templates, servers, traffic, max(slos), max_padded_size, allowed_lengths)
        core = _core(policies, traffic, max_queue_size, max_workers_per_key, joints, seed, runs_ahead=ahead)
        costs = BatchCosts(servers, policies, traffic, switch_s, seed)
        early_answers = None if joints is None else joints.early_of(core, seed)
        way: dict[str, Any] = {"hop_s": hop_s, "hop_item_s": hop_item_s, "turns": early_answers}
        driver = _driver(core, costs, servers, traffic, busy, seed, turn_s=turn_s, **way)
        scaled = Scaling(
            driver,
            servers.ranges,
            rule,
            start_s=start_s,
            limits=servers.limits,
            slo_s=max(slos),
            duration_s=traffic.duration_s,
            settle_s=settle_s,
        )
        end_s = _end_s(traffic.duration_s, max(slos))
        traffic.begin(driver)
        driver.run(until=end_s)
        return _reported(driver, traffic, scaled, templates, seed, end_s), policies

    if TUNED in templates:
        return _best_tuned(simulated, templates)
    return simulated(templates)[0]


def _best_tuned(
    simulated: Callable[[Sequence[PolicyLike]], tuple[Report, list[Policy]]], templates: Sequence[PolicyLike]
) -> Report:
    found = []
    for spec in GRID:
        report, policies = simulated([spec if template == TUNED else template for template in templates])
        settings = tuple(policy.settings for policy in policies if isinstance(policy, Tuned))
        found.append(replace(report, policy=_label(templates), settings=settings))
    least = _LEVEL * max(report.goodput for report in found)
    return min((report for report in found if report.goodput >= least), key=lambda report: report.penalised_mean_s)


def slos_of(slo_s: float | Sequence[float] | None) -> tuple[float, ...]:
    """Return the SLOs that requests may have, in seconds; infinity for none. Raises ValueError."""
    if slo_s is None:
        return (inf,)
    slos = tuple(slo_s) if isinstance(slo_s, Sequence) else (slo_s,)
    if not slos:
        raise ValueError("slo_s must be None, a number of seconds or several, not an empty list")
    for slo in slos:
        optional_seconds("slo_s", slo)
    return slos


def _check_seconds(**settings: float) -> None:
    for name, seconds in settings.items():
        nonnegative_seconds(name, seconds)


def _policies(
    templates: Sequence[PolicyLike],
    servers: Servers,
    traffic: Traffic,
    longest_slo_s: float,
    max_padded_size: float,
    allowed_lengths: Sequence[int] | None,
) -> list[Policy]:
    slo_s = None if math.isinf(longest_slo_s) else longest_slo_s
    policies = [
        policy_of(template, max_batch_size=limit, slo_s=slo_s, cost_s=cost)
        for template, limit, cost in zip(templates, servers.limits, traffic.plain_costs, strict=True)
    ]
    for policy in policies:
        policy.max_padded_size, policy.allowed_lengths = max_padded_size, allowed_lengths
    return policies


def _core(
    policies: Sequence[Policy],
    traffic: Traffic,
    max_queue_size: float,
    max_workers_per_key: float,
    graph: SimulatedGraph | None,
    seed: int,
    *,
    runs_ahead: bool,
) -> Core:
    """Make a core with a stage for each policy; only the first stage refuses requests."""
    names = [f"stage {i}" for i in range(len(policies))] if graph is None else graph.stages
    queues = [max_queue_size, *[inf] * len(policies)] if graph is None else graph.queues
    batchers = [
        Batcher(
            name,
            policy,
            Queue(room, levels=_levels(policy, traffic)),
            runs_ahead=runs_ahead and not traffic.has_keys,
            weigh=traffic.weigh,
            keyed=KeyedWorkers(max_workers_per_key) if traffic.has_keys else None,
        )
        for name, policy, room in zip(names, policies, queues, strict=False)
    ]
    if graph is None:
        return Core(batchers)
    return Core(batchers, graph.declared(batchers, seed), content=graph.content(seed))


def _driver(
    core: Core,
    costs: BatchCosts,
    servers: Servers,
    traffic: Traffic,
    coordinator: Coordinator | None,
    seed: int,
    *,
    turn_s: float,
    **way: Any,
) -> VirtualDriver:
    at_first, record = [each.least for each in servers.ranges], traffic.record
    if coordinator is None:
        return VirtualDriver(core, costs, at_first, turn_s=turn_s, watcher=record, **way)
    own: dict[str, Any] = {"coordinator": coordinator, "dice": Random(f"{seed}/coordinator")}
    between = record.settle_s, traffic.duration_s
    return BusyDriver(core, costs, at_first, between=between, watcher=record, **own, **way)


def _levels(policy: Policy, traffic: Traffic) -> LevelsOf | None:
    """Return how a queue sorts requests by length, as in a stage with `length=` or `key=`."""
    if not traffic.tells_lengths:
        return BY_KEY if traffic.has_keys else None
    return BY_LENGTH if policy.allowed_lengths is None else by_allowed_lengths(policy.allowed_lengths)


def _end_s(duration_s: float, longest_slo_s: float) -> float:
    """Return when the run ends: requests that arrived last still have time to be answered."""
    return duration_s + (duration_s if math.isinf(longest_slo_s) else 2 * longest_slo_s)


def _reported(
    driver: VirtualDriver,
    traffic: Traffic,
    scaled: Scaling,
    templates: Sequence[PolicyLike],
    seed: int,
    end_s: float,
) -> Report:
    return report_of(
        traffic.record.settled(),
        policy=_label(templates),
        load=traffic.load,
        seed=seed,
        end_s=end_s,
        worker_s=scaled.worker_s,
        workers_over_time=scaled.over_time,
        wake_ups=driver.wake_ups,
        coordinator_s=driver.busy_s if isinstance(driver, BusyDriver) else None,
        has_keys=traffic.has_keys,
    )


def _label(templates: Sequence[PolicyLike]) -> str:
    return " -> ".join(dict.fromkeys(map(label_of, templates)))


class BatchCosts:
    """Says how long each batch takes, and records its padding and its changes of key.

    Args:
        policies: Of each stage, as they have the sizes and lengths to which batches are padded.
        switch_s: The seconds by which a batch takes longer if the one before on its worker had
            another key, or if it is the first.
        seed: The seed of everything random; each stage has a source of its own.
    """

    def __init__(
        self, servers: Servers, policies: Sequence[Policy], traffic: Traffic, switch_s: float, seed: int
    ) -> None:
        self._costs = servers.costs
        self._seconds = [cost.over(traffic.duration_s) for cost in servers.costs]
        self._dice = [Random(f"{seed}/cost/{i}") for i in range(len(self._seconds))]
        self._sizes = [_padding(policy.allowed_batch_sizes) for policy in policies]
        self._lengths = [_padding(policy.allowed_lengths) for policy in policies]
        self._traffic = traffic
        self._switch_s = switch_s
        self._last_keys: dict[tuple[int, int], Hashable] = {}

    def __call__(self, batch: Batch, now: float) -> float:
        """Return the seconds that a batch which is handed to its worker now takes."""
        stage = batch.stage
        work = self._work(batch)
        seconds = self._seconds[stage](work, now, self._dice[stage])
        record = self._traffic.record.stages[stage]
        if work.lengths:
            record.computed += self._costs[stage].computed(work)
            record.of_requests += sum(work.lengths)
        if self._traffic.has_keys and self._is_switch(batch):
            record.switches += 1
            seconds += self._switch_s
        return seconds

    def _work(self, batch: Batch) -> BatchShape:
        stage = batch.stage
        n = self._sizes[stage](self._traffic.weight_of(batch))
        lengths = self._traffic.lengths_of(batch)
        return BatchShape(n, self._lengths[stage](max(lengths)), lengths) if lengths else BatchShape(n)

    def _is_switch(self, batch: Batch) -> bool:
        place, key = (batch.stage, batch.place), batch.requests[0].lane.key
        is_switch = place not in self._last_keys or self._last_keys[place] != key
        self._last_keys[place] = key
        return is_switch


def _padding(allowed: Sequence[int] | None) -> Callable[[float], float]:
    if not allowed:
        return lambda n: n
    return lambda n: next((each for each in allowed if each >= n), n)
