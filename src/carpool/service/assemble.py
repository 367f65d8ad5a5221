"""The assembly of a running service: pipeline, statistics, driver and pools, made and connected.

Nothing is started here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from carpool.core.batcher import Batcher
from carpool.core.journal import Journal
from carpool.core.keyed_workers import KeyedWorkers
from carpool.core.levels import BY_KEY, BY_LENGTH, LevelsOf, by_allowed_lengths
from carpool.core.pipeline import Pipeline
from carpool.core.queue import Queue
from carpool.core.roster import Starts
from carpool.core.stepper import Stepper
from carpool.drive.aio import Driver
from carpool.drive.guard import Guard
from carpool.drive.launch import Launch, WarmUpShape
from carpool.drive.output import LineSink
from carpool.drive.steps import StepPool
from carpool.drive.worker_pool import WorkerPool, new_roster
from carpool.errors import StartupError
from carpool.logger import logger
from carpool.observe.stats import Stats
from carpool.policy import OneByOne
from carpool.service.checks import why_never_held_back
from carpool.service.declaration import Declaration
from carpool.service.routes import adapters_of
from carpool.service.stage import Stage
from carpool.service.warmup import warm_up_shapes, warm_up_sizes
from carpool.service.weigh import weigher_of
from carpool.wire.order import size_of_kept
from carpool.wire.payload import size_of
from carpool.worker import affinity, blas, program
from carpool.worker.devices import VISIBLE_DEVICES, among_visible
from carpool.worker.place import COUNT_VARIABLE, INDEX_VARIABLE
from carpool.worker.setup import Setup

_HANG_SHARE = 3  # without `max_batch_time_s` an unwanted call is given up after this part of `timeout_s`
_LEAST_STARTS = 2  # workers that may load at a time: one that never ends must not hold up all others


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts of one run of a service.

    Attributes:
        driver: Drives the pipeline, and holds its statistics.
        pools: The workers of each stage, first to last.
        guard: Ends the worker processes if this process is killed; None if there are none.
    """

    driver: Driver
    pools: Sequence[WorkerPool]
    guard: Guard | None


def assemble(service: Declaration, journal: Journal | None, output: LineSink) -> Assembly:
    """Make the parts of a service for the running loop. Nothing is started here.

    Args:
        service: What is to run.
        journal: Records what happens to each request; None to record nothing.
        output: Takes each line that a worker prints.

    Raises:
        StartupError: A stage asks for a device that this process does not see.
    """
    guard = Guard(service.name) if any(stage.run_in == "process" for stage in service.stages) else None
    cores = affinity.usable()
    launches = [launch(service, stage, guard, usable_cores=cores) for stage in range(len(service.stages))]
    rosters = [new_roster(stage.workers) for stage in service.stages]
    batchers = [_batcher(service, *each) for each in zip(service.stages, [None, *service.stages], strict=False)]
    pipeline = Pipeline(batchers, slo_s=service.slo_s, measure=size_of, journal=journal)  # type: ignore[arg-type]
    singles = [isinstance(batcher.policy, OneByOne) for batcher in batchers]
    stats = Stats(service.name, pipeline, rosters, singles, service.slo_s, service.part_slo_s)
    driver = Driver(pipeline, stats)
    starts = Starts(rosters, service.max_parallel_starts or max(_LEAST_STARTS, affinity.available()))
    pools = [
        _pool_class(service.stages[stage])(stage, launch, driver, roster, starts, output)
        for stage, (launch, roster) in enumerate(zip(launches, rosters, strict=True))
    ]
    return Assembly(driver, pools, guard)


def _pool_class(stage: Stage) -> type[WorkerPool]:
    return StepPool if stage.traits.in_parts else WorkerPool


def _batcher(service: Declaration, stage: Stage, before: Stage | None) -> Batcher:
    if stage.traits.in_parts:
        return _stepper(service, stage, before)
    weigher = weigher_of(stage, before)
    policy = stage.new_policy(service.overload, service.slo_s)
    why = why_never_held_back(policy)
    if why is not None:
        logger.warning("stage %s: %s", stage.name, why, extra={"model": service.name, "stage": stage.name})
    return Batcher(
        stage.name,
        policy,
        Queue(stage.max_queue_size, stage.max_queue_bytes, levels=_levels(stage)),
        max_batch_time_s=stage.max_batch_time_s or inf,
        patience_s=service.timeout_s / _HANG_SHARE,
        idempotent=stage.idempotent,
        runs_ahead=stage.run_in != "loop"
        and stage.key is None,  # a worker on the loop never waits for a message from there
        weigh=None if weigher is None else weigher.weigh_encoded,
        keyed=None if stage.key is None else KeyedWorkers(stage.max_workers_per_key or inf),
    )


def _levels(stage: Stage) -> LevelsOf | None:
    """Return how the stage's requests are sorted; None where neither lengths nor keys matter."""
    if stage.length is None:
        return None if stage.key is None else BY_KEY
    return BY_LENGTH if stage.allowed_lengths is None else by_allowed_lengths(stage.allowed_lengths)


def _stepper(service: Declaration, stage: Stage, before: Stage | None) -> Stepper:
    stepper = Stepper(
        stage.name,
        stage.new_step_policy(service.part_slo_s, service.slo_s, service.overload),
        Queue(stage.max_queue_size, stage.max_queue_bytes),
        rows=stage.rows,
        limit=inf if stage.size is None else stage.max_batch_size or inf,
        resumable=stage.traits.can_resume and stage.idempotent,
        silence_s=service.timeout_s,
        max_stream_s=service.max_stream_s,
        max_batch_time_s=stage.max_batch_time_s or inf,
        patience_s=service.timeout_s / _HANG_SHARE,
        idempotent=stage.idempotent,
        measure=size_of_kept,
    )
    weigher = weigher_of(stage, before)
    if weigher is not None:
        stepper.weigh = weigher.weigh_encoded
    return stepper


def launch(service: Declaration, index: int, guard: Guard | None, usable_cores: int) -> Launch:
    """Return what the workers of one stage are started with.

    Args:
        service: The service.
        index: The position of the stage in the service.
        guard: The guard of the service's worker processes; None if it has none.
        usable_cores: How many cores there are for all workers together.
    """
    stage = service.stages[index]
    in_processes = stage.run_in == "process"
    warm_up = warm_up_sizes(stage)
    shapes = warm_up_shapes(stage)
    setup = _setup(service, index, warm_up, shapes)
    # A worker process always sets its affinity, even to all the cores that this process may use
    # now: otherwise it would inherit that of a coordinator that has been pinned meanwhile.
    cores = stage.cpus or (affinity.current() if in_processes else None,) * stage.workers
    env = _environments(service, stage, usable_cores) if in_processes else ()
    adapters = adapters_of(service.routes) if index == 0 else ()
    return Launch(stage.run_in, setup, stage.model, stage.kwargs, adapters, cores, env, warm_up, guard, shapes)


def _setup(service: Declaration, index: int, warm_up: Mapping[int, int], shapes: Sequence[WarmUpShape]) -> Setup:
    """Return the `Setup` of a stage's workers; for each of them, place and cores are filled in."""
    stage = service.stages[index]
    root = logging.getLogger()
    adapters = adapters_of(service.routes) if index == 0 else ()
    return Setup(
        program=program.describe(),
        model=program.pack_model(stage.model, stage.kwargs, adapters) if stage.run_in == "process" else b"",
        stage=stage.name,
        place=0,
        batched=stage.max_batch_size is not None,
        allowed_batch_sizes=_allowed_sizes(stage),
        warm_up=tuple(warm_up),
        is_first=index == 0,
        is_last=index == len(service.stages) - 1,
        isolate_errors=stage.isolate_errors,
        retry_on_oom=stage.idempotent or stage.isolate_errors,
        oom_errors=stage.oom_errors,
        cores=None,
        log_level=root.level if root.handlers else None,
        most_examples=stage.rows if stage.size is None else 1,
        warm_up_shapes=tuple((shape.example, shape.n) for shape in shapes),
    )


def _allowed_sizes(stage: Stage) -> tuple[int, ...] | None:
    """Return the numbers of items that the model is called with; None for any number."""
    sizes = None if stage.traits.in_parts else stage.new_policy().allowed_batch_sizes
    return tuple(sizes) if sizes else None


def _environments(service: Declaration, stage: Stage, usable_cores: int) -> tuple[Mapping[str, str], ...]:
    """Return the variables that each worker of a stage gets besides those of this process."""
    threads = [
        blas.decide(
            stage.name,
            os.environ,
            env,
            workers=stage.workers,
            pinned=None if stage.cpus is None else [len(cores) for cores in stage.cpus],
            cores=usable_cores,
            all_workers=sum(other.workers for other in service.stages if other.run_in == "process"),
        )
        for env in stage.env
    ]
    for why in dict.fromkeys(each.why for each in threads):
        logger.info("%s", why, extra={"model": service.name, "stage": stage.name})
    visible = _visible_devices(service, stage)
    return tuple(
        {
            **each.variables[place],
            **env,
            **visible[place],
            INDEX_VARIABLE: str(place),
            COUNT_VARIABLE: str(stage.workers),
        }
        for place, (each, env) in enumerate(zip(threads, stage.env, strict=True))
    )


def _visible_devices(service: Declaration, stage: Stage) -> tuple[Mapping[str, str], ...]:
    """Return the variables that make each worker of a stage see its devices and no others.

    Raises:
        StartupError: This process does not see one of them.
    """
    if stage.devices is None:
        return ({},) * stage.workers
    try:
        names = among_visible(stage.devices, os.environ.get(VISIBLE_DEVICES))
    except ValueError as error:
        raise StartupError(f"stage {stage.name}: {error}") from None
    text, about = "workers 0 to %d of stage %s see the devices %s", {"model": service.name, "stage": stage.name}
    logger.info(text, stage.workers - 1, stage.name, " | ".join(names), extra=about)
    return tuple({VISIBLE_DEVICES: each} for each in names)
