"""One run: arrivals go into the pipeline, batches cost what the user says, and a report comes out.

Pipeline, batcher, queue and policy are the same classes that a service uses; only the driver is
another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from math import inf
from random import Random
from typing import Any

from carpool.core.batch import Batch
from carpool.core.batcher import Batcher
from carpool.core.pipeline import Pipeline
from carpool.core.queue import Queue
from carpool.drive.virtual import BatchCost, VirtualDriver
from carpool.policy import Policy
from carpool.service.checks import flag, nonnegative_seconds, optional_seconds
from carpool.simulate.arrivals import USUAL_ARRIVALS, arrivals_of
from carpool.simulate.costs import USUAL_COST
from carpool.simulate.policies import PolicyLike, label_of, policy_of
from carpool.simulate.report import Report, report_of
from carpool.simulate.servers import Servers, per_stage
from carpool.simulate.traffic import Traffic
from carpool.simulate.weights import weights_of


def run(
    policy: PolicyLike | Sequence[PolicyLike] = "adaptive",
    arrivals: Any = USUAL_ARRIVALS,
    cost: Any = USUAL_COST,
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

    Requests arrive in [0, duration). The run goes on for twice the (longest) SLO, or for the same
    time again where there is no SLO; what is not finished by then is reported as unfinished.

    A list of costs stands for stages in a row; `policy`, `max_batch_size` and `workers` may then be
    lists too.

    Args:
        policy: A name, a spec, a policy (which serves as a template) or a function that makes one.
        arrivals: A spec, a process such as `Poisson(...)`, several of them, or times in seconds.
        cost: A spec, a `Cost`, or a function `n -> seconds` or `(n, now, rng) -> seconds`.
        slo_s: The seconds within which requests should be answered. Of several SLOs each request
            has one, all with equal chance.
        max_batch_size: The most requests in a batch; with `weights_known` the most weight.
        workers: How many workers serve at the same time.
        duration_s: How long requests arrive, in seconds; None for the length of a trace.
        seed: The seed of everything random.
        weights: How much requests weigh, if they differ: a spec, `Pareto(...)` or a list to draw
            from. A batch costs what the sum of its weights costs. A trace brings its own weights.
        weights_known: Whether the policy is told the weights. The size of a request is then its
            weight, rounded up, and a batch costs what the sum of its sizes costs.
        hop_s: The seconds that a batch spends on its way to the worker and back.
        turn_s: The seconds for which the driver collects events before it decides and answers: a
            turn of its loop.
        runs_ahead: Whether a full batch may go to its worker shortly before the worker is free, as
            in services with workers in processes or threads. Such a batch spends no `hop_s`.
        max_queue_size: The most requests that may wait; further ones are refused.

    Raises:
        ValueError: A setting makes no sense; the text says what to change.
        TypeError: A setting is of a wrong kind.
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
    policies = _policies(templates, servers, max(slos))
    driver = VirtualDriver(
        _pipeline(policies, traffic, max_queue_size, runs_ahead=flag("runs_ahead", runs_ahead)),
        _batch_cost(servers, policies, traffic, seed),
        servers.workers,
        hop_s=hop_s,
        turn_s=turn_s,
        watcher=traffic.record,
    )
    end_s = _end_s(traffic.duration_s, max(slos))
    traffic.begin(driver)
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
    """Return the SLOs that requests may have, in seconds; infinity for none. Raises ValueError."""
    if slo_s is None:
        return (inf,)
    slos = tuple(slo_s) if isinstance(slo_s, Sequence) else (slo_s,)
    if not slos:
        raise ValueError("slo_s must be None, a number of seconds or several, not an empty list")
    for slo in slos:
        optional_seconds("slo_s", slo)
    return slos


def _policies(templates: Sequence[PolicyLike], servers: Servers, longest_slo_s: float) -> list[Policy]:
    """Make the policy of each stage. Raises ValueError or TypeError."""
    slo_s = None if math.isinf(longest_slo_s) else longest_slo_s
    return [
        policy_of(template, max_batch_size=limit, slo_s=slo_s, cost_s=cost)
        for template, limit, cost in zip(templates, servers.limits, servers.costs, strict=True)
    ]


def _pipeline(policies: Sequence[Policy], traffic: Traffic, max_queue_size: float, *, runs_ahead: bool) -> Pipeline:
    """Make a pipeline with a stage for each policy; only the first stage refuses requests."""
    return Pipeline(
        [
            Batcher(
                f"stage {i}",
                policy,
                Queue(inf if i else max_queue_size),
                runs_ahead=runs_ahead,
                weigh=traffic.weigh,
            )
            for i, policy in enumerate(policies)
        ]
    )


def _end_s(duration_s: float, longest_slo_s: float) -> float:
    """Return when the run ends: requests that arrived last still have time to be answered."""
    return duration_s + (duration_s if math.isinf(longest_slo_s) else 2 * longest_slo_s)


def _batch_cost(servers: Servers, policies: Sequence[Policy], traffic: Traffic, seed: int) -> BatchCost:
    """Return the function that gives a batch its seconds, with a random source for each stage."""
    seconds = [cost.over(traffic.duration_s) for cost in servers.costs]
    dice = [Random(f"{seed}/cost/{i}") for i in range(len(seconds))]
    paddings = [_padding(policy) for policy in policies]
    weight_of = traffic.weight_of

    def batch_cost(batch: Batch, now: float) -> float:
        stage = batch.stage
        return seconds[stage](paddings[stage](weight_of(batch)), now, dice[stage])

    return batch_cost


def _padding(policy: Policy) -> Callable[[float], float]:
    """Return the function from the size of a batch to its size after padding.

    Batches are padded only where the policy has allowed batch sizes.
    """
    allowed: Sequence[int] = getattr(policy, "allowed_batch_sizes", None) or ()
    if not allowed:
        return lambda n: n
    return lambda n: next((size for size in allowed if size >= n), n)
