"""One run: arrivals go into the pipeline, batches cost what they are said to, and a report comes out.

Pipeline, batcher, queue and policy are the very objects that a service runs; only the driver is another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import inf
from random import Random
from typing import Any

from carpool.core.batcher import Batch, Batcher
from carpool.core.pipeline import Pipeline
from carpool.core.queue import Queue
from carpool.drive.virtual import BatchCost, VirtualDriver
from carpool.policy import Policy
from carpool.service.settings import flag, nonnegative_seconds, optional_seconds
from carpool.simulate.arrivals import arrivals_of
from carpool.simulate.policies import PolicyLike, label_of, policy_of
from carpool.simulate.report import Report, report_of
from carpool.simulate.servers import Servers, per_stage
from carpool.simulate.traffic import Traffic
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
    runs_ahead: bool = False,
    max_queue_size: float = inf,
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
        turn_s: how long the driver gathers what happens before it decides and tells: a turn of its loop.
        runs_ahead: whether a full batch may go to its worker shortly before that is free, as in services whose workers
            are processes or threads: it spends no `hop_s`.
        max_queue_size: most requests that wait; more are refused.

    A list of costs stands for stages in a row; `policy`, `max_batch_size` and `workers` may then be lists too.

    Raises:
        ValueError: a setting makes no sense; the text says what to change.
        TypeError: a setting is nothing of the kind.
    """
    servers = Servers.of(cost, max_batch_size, workers)
    templates = per_stage("policy", policy, len(servers.costs))
    slos = slos_of(slo_s)
    nonnegative_seconds("hop_s", hop_s)
    nonnegative_seconds("turn_s", turn_s)
    traffic = Traffic(
        arrivals_of(arrivals),
        servers,
        slos=slos,
        duration_s=duration_s,
        weights=weights_of(weights),
        weights_known=weights_known,
        seed=seed,
    )
    longest_s = max(slos)
    policies = [
        policy_of(template, max_batch_size=limit, slo_s=None if math.isinf(longest_s) else longest_s, cost_s=cost)
        for template, limit, cost in zip(templates, servers.limits, servers.costs, strict=True)
    ]
    stages = [
        Batcher(
            f"stage {i}",
            one,
            Queue(inf if i else max_queue_size),
            runs_ahead=flag("runs_ahead", runs_ahead),
            weigh=traffic.size_of,
        )
        for i, one in enumerate(policies)
    ]
    batch_cost = _batch_cost(servers, policies, traffic, seed)
    driver = VirtualDriver(
        Pipeline(stages), batch_cost, servers.workers, hop_s=hop_s, turn_s=turn_s, watcher=traffic.record
    )
    traffic.begin(driver)
    end_s = traffic.duration_s + (traffic.duration_s if math.isinf(longest_s) else 2 * longest_s)
    driver.run(until=end_s)
    return report_of(
        traffic.record,
        policy=" -> ".join(dict.fromkeys(map(label_of, templates))),
        load=traffic.load,
        seed=seed,
        end_s=end_s,
        workers=servers.workers,
        wake_ups=driver.wake_ups,
    )


def slos_of(slo_s: float | Sequence[float] | None) -> tuple[float, ...]:
    """The SLOs that requests may have; infinity for none. Raises ValueError."""
    if slo_s is None:
        return (inf,)
    slos = tuple(slo_s) if isinstance(slo_s, Sequence) else (slo_s,)
    if not slos:
        raise ValueError("slo_s must be None, a number of seconds or several, not an empty list")
    for slo in slos:
        optional_seconds("slo_s", slo)
    return slos


def _batch_cost(servers: Servers, policies: Sequence[Policy], traffic: Traffic, seed: int) -> BatchCost:
    """What batches take, with a source of chance for each stage."""
    seconds = [cost.over(traffic.duration_s) for cost in servers.costs]
    dice = [Random(f"{seed}/cost/{i}") for i in range(len(seconds))]
    paddings = [_padding(policy) for policy in policies]
    weight_of = traffic.weight_of

    def batch_cost(batch: Batch, now: float) -> float:
        stage = batch.stage
        return seconds[stage](paddings[stage](weight_of(batch)), now, dice[stage])

    return batch_cost


def _padding(policy: Policy) -> Callable[[float], float]:
    """What a batch of some size costs like, since a policy with allowed sizes has its batches padded."""
    allowed: Sequence[int] = getattr(policy, "allowed_batch_sizes", None) or ()
    if not allowed:
        return lambda n: n
    return lambda n: next((size for size in allowed if size >= n), n)
