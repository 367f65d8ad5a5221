"""The parts of a service that runs, made and connected, and not yet started: pipeline, statistics, driver, pools."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from carpool.core.batcher import Batcher
from carpool.core.journal import Journal
from carpool.core.pipeline import Pipeline
from carpool.core.queue import Queue
from carpool.core.roster import Starts
from carpool.drive.aio import Driver
from carpool.drive.guard import Guard
from carpool.drive.launch import Launch
from carpool.drive.output import LineSink
from carpool.drive.worker_pool import WorkerPool, new_roster
from carpool.logger import logger
from carpool.observe.stats import Stats
from carpool.policy import OneByOne
from carpool.service.declaration import Declaration
from carpool.service.stage import Stage
from carpool.service.warmup import warm_up_sizes
from carpool.service.weigh import weigher_of
from carpool.wire.payload import size_of
from carpool.worker import affinity, blas, program
from carpool.worker.setup import Setup

_HANG_SHARE = 3  # without `max_batch_time_s` calls are given up by this part of the service's time-out
_LEAST_STARTS = 2  # at a time: a model that never ends loading must not hold up all others


@dataclass(frozen=True, slots=True)
class Assembly:
    """What one run of a service consists of.

    Attributes:
        driver: Drives the pipeline, and has its statistics.
        pools: The workers of each stage, first to last.
        guard: Ends worker processes should this process be killed; None where there are none.
    """

    driver: Driver
    pools: Sequence[WorkerPool]
    guard: Guard | None


def assemble(service: Declaration, journal: Journal | None, output: LineSink) -> Assembly:
    """Make the parts of a service for the running loop. Nothing is started here.

    Args:
        service: What is to run.
        journal: Records what happens to each request, if given.
        output: Where the workers' output goes.
    """
    guard = Guard() if any(stage.run_in == "process" for stage in service.stages) else None
    cores = affinity.usable()
    launches = [launch(service, stage, guard, cores) for stage in range(len(service.stages))]
    rosters = [new_roster(stage.workers) for stage in service.stages]
    batchers = [_batcher(service, stage) for stage in service.stages]
    pipeline = Pipeline(batchers, slo_s=service.slo_s, measure=size_of, journal=journal)  # type: ignore[arg-type]
    singles = [isinstance(batcher.policy, OneByOne) for batcher in batchers]
    driver = Driver(pipeline, Stats(service.name, pipeline, rosters, singles, service.slo_s))
    starts = Starts(rosters, service.max_parallel_starts or max(_LEAST_STARTS, affinity.available()))
    pools = [
        WorkerPool(stage, launch, driver, roster, starts, output)
        for stage, (launch, roster) in enumerate(zip(launches, rosters, strict=True))
    ]
    return Assembly(driver, pools, guard)


def _batcher(service: Declaration, stage: Stage) -> Batcher:
    weigher = weigher_of(stage)
    return Batcher(
        stage.name,
        stage.new_policy(service.overload, service.slo_s),
        Queue(stage.max_queue_size, stage.max_queue_bytes),
        max_batch_time_s=stage.max_batch_time_s or inf,
        patience_s=service.timeout_s / _HANG_SHARE,
        idempotent=stage.idempotent,
        runs_ahead=stage.run_in != "loop",  # which has no time to itself anyway
        weigh=None if weigher is None else weigher.of_encoded,
    )


def launch(service: Declaration, index: int, guard: Guard | None, usable: int) -> Launch:
    """What the workers of one stage are started with.

    Args:
        service: The service.
        index: The position of the stage in it.
        guard: The guard of its worker processes, if there is one.
        usable: How many cores there are for all workers.
    """
    stage = service.stages[index]
    everywhere = affinity.current()
    warm_up = warm_up_sizes(stage)
    root = logging.getLogger()
    setup = Setup(
        program=program.describe(),
        model=program.pack_model(stage.model, stage.kwargs) if stage.run_in == "process" else b"",
        stage=stage.name,
        place=0,
        batched=stage.max_batch_size is not None,
        allowed_batch_sizes=tuple(sizes) if (sizes := stage.new_policy().allowed_batch_sizes) else None,
        warm_up=tuple(warm_up),
        is_first=index == 0,
        is_last=index == len(service.stages) - 1,
        isolate_errors=stage.isolate_errors,
        retry_on_oom=stage.idempotent or stage.isolate_errors,
        oom_errors=stage.oom_errors,
        cores=None,
        log_level=root.level if root.handlers else None,
    )
    # a worker always sets its affinity, also to "everywhere": it would inherit a pinned coordinator's
    cores = stage.cpus or (everywhere if stage.run_in == "process" else None,) * stage.workers
    env = _environments(service, stage, usable) if stage.run_in == "process" else ()
    return Launch(stage.run_in, setup, stage.model, stage.kwargs, cores, env, warm_up, guard)


def _environments(service: Declaration, stage: Stage, usable: int) -> tuple[Mapping[str, str], ...]:
    """For each worker of a stage, the variables that it gets besides this process's own."""
    threads = blas.decide(
        stage.name,
        os.environ,
        stage.env,
        workers=stage.workers,
        pinned=None if stage.cpus is None else [len(cores) for cores in stage.cpus],
        cores=usable,
        all_workers=sum(other.workers for other in service.stages if other.run_in == "process"),
    )
    logger.info("%s", threads.why)
    return tuple({**variables, **stage.env} for variables in threads.variables)
