"""The assembly of a running service: core, statistics, driver and pools, made and connected.

Nothing is started here. The warm-up of a worker uses several batch sizes, so that its timings can
train the policy.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, cycle, islice
from math import inf
from typing import Any

import msgspec

from carpool.engine.core.batcher import Batcher
from carpool.engine.core.core import Core
from carpool.engine.core.journal import Journal
from carpool.engine.core.levels import BY_KEY, BY_LENGTH, LevelsOf, by_allowed_lengths
from carpool.engine.core.places import KeyedWorkers
from carpool.engine.core.queue import Queue
from carpool.engine.core.roster import Recycling, Starts
from carpool.engine.core.stepper import Crew, Stepper
from carpool.engine.drive.aio import Driver
from carpool.engine.drive.changes import Changes, CoreShares, StageUpkeep, Upkeep
from carpool.engine.drive.guard import Guard
from carpool.engine.drive.pools import BatchPool, StepPool
from carpool.engine.drive.worker import Launch, WarmUpShape
from carpool.engine.drive.worker_pool import WorkerPool, new_roster
from carpool.engine.logger import logger
from carpool.engine.observe.log import LineSink
from carpool.engine.observe.snapshot import StreamStats
from carpool.engine.observe.stats import Stats
from carpool.engine.policy import OneByOne
from carpool.engine.policy.length_cost import padded
from carpool.engine.wire.payload import size_of
from carpool.engine.worker import program
from carpool.engine.worker.place import (
    COUNT_VARIABLE,
    INDEX_VARIABLE,
    VISIBLE_DEVICES,
    among_visible,
    available_cores,
    core_limit,
    current_cores,
    decide_threads,
    usable_cores,
)
from carpool.engine.worker.program import Setup
from carpool.errors import CarpoolError, StartupError
from carpool.service.checks import why_never_held_back
from carpool.service.content import Payloads
from carpool.service.declaration import Declaration, adapters_of
from carpool.service.elsewhere import Site
from carpool.service.graph import firsts_of
from carpool.service.places import declared, spots_of
from carpool.service.stage import Stage
from carpool.service.weigh import weigher_of

_HANG_SHARE = 3  # without `max_batch_time_s` an unwanted call is given up after this part of `timeout_s`
_LEAST_STARTS = 2  # workers that may load at a time: one that never ends must not hold up all others


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts of one run of a service.

    Attributes:
        changes: Has workers come and go as the user says.
        upkeep: Has workers come and go as the load and their state ask for it.
    """

    driver: Driver
    pools: Sequence[WorkerPool]
    guard: Guard | None
    changes: Changes
    upkeep: Upkeep


def assemble(service: Declaration, journal: Journal | None, output: LineSink, site: Site | None = None) -> Assembly:
    """Make the parts of a service for the running loop. Nothing is started here.

    Args:
        journal: Records what happens to each request; None to record nothing.

    Raises:
        StartupError: A stage asks for a device that this process does not see.
    """
    has_processes = site is None and any(stage.run_in == "process" for stage in service.stages)
    guard = Guard(service.name) if has_processes else None
    cores = usable_cores()
    launches = [launch(service, stage, guard, usable_cores=cores, site=site) for stage in range(len(service.stages))]
    rosters = [new_roster(stage.least_workers) for stage in service.stages]
    has_keys = any(stage.key is not None for stage in service.stages)
    crews = [_crew(service, stage, has_keys) for stage in service.stages]
    crew_of = {id(stage): crew for stage, crew in zip(service.stages, crews, strict=True)}
    content = Payloads(service.takes.input_type)
    graph = declared(service.graph, crew_of)
    core = Core(crews, graph, slo_s=service.slo_s, content=content, journal=journal)
    for node, spot in zip(core.flow.graph.nodes, spots_of(service.graph, service.gives)[1], strict=True):
        node.spot = spot
    singles = [isinstance(crew.lobby.policy, OneByOne) for crew in crews]
    last = crew_of.get(id(service.graph[-1]))
    streams = StreamStats(last, service.slo_s, service.part_slo_s) if isinstance(last, Stepper) else None
    stats = Stats(service.name, core, rosters, singles, service.slo_s, streams)
    driver = Driver(core, stats)
    most_starts = max(_LEAST_STARTS, available_cores())
    if site is not None:  # workers that wait for room are the demand by which a cluster grows
        most_starts = sum(stage.most_workers for stage in service.stages)
    starts = Starts(rosters, service.max_parallel_starts or most_starts)
    pools = [
        _pool_class(service.stages[stage])(stage, launch, driver, roster, starts, output)
        for stage, (launch, roster) in enumerate(zip(launches, rosters, strict=True))
    ]
    shares = None
    if site is None and any(stage.run_in == "process" for stage in service.stages):
        shares = CoreShares(_processes_of(service), partial(_environments_of, service, cores))
    changes = Changes(driver, pools, shares)
    upkeep = Upkeep(driver, [_upkeep(*each, driver, changes) for each in zip(service.stages, pools, strict=True)])
    return Assembly(driver, pools, guard, changes, upkeep)


def _upkeep(stage: Stage, pool: WorkerPool, driver: Driver, changes: Changes) -> StageUpkeep:
    limits = (stage.max_calls, stage.max_memory_mb, stage.max_age_s)
    recycling = None
    if any(limit is not None for limit in limits):
        recycling = Recycling(*[inf if limit is None else limit for limit in limits])
    upkeep = StageUpkeep(pool, driver, changes, recycling)
    if isinstance(stage.workers, tuple):
        upkeep.scale_between(*stage.workers)
    return upkeep


def _pool_class(stage: Stage) -> type[WorkerPool]:
    return StepPool if stage.traits.in_parts else BatchPool


def _crew(service: Declaration, stage: Stage, has_keys: bool) -> Crew:
    if stage.traits.in_parts:
        return _stepper(service, stage, has_keys)
    weigher = weigher_of(stage, has_keys)
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
    if stage.length is None:
        return None if stage.key is None else BY_KEY
    return BY_LENGTH if stage.allowed_lengths is None else by_allowed_lengths(stage.allowed_lengths)


def _stepper(service: Declaration, stage: Stage, has_keys: bool) -> Stepper:
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
        measure=size_of,
    )
    weigher = weigher_of(stage, has_keys)
    if weigher is not None:
        stepper.lobby.weigh = weigher.weigh_encoded
    return stepper


def launch(
    service: Declaration, index: int, guard: Guard | None, usable_cores: int, site: Site | None = None
) -> Launch:
    """Return the launch of the workers of one stage.

    Args:
        index: The position of the stage in the service.
        usable_cores: How many cores there are for all workers together.
    """
    stage = service.stages[index]
    in_processes = stage.run_in == "process"
    warm_up = warm_up_sizes(stage)
    shapes = warm_up_shapes(stage)
    setup = _setup(service, index, warm_up, shapes, is_elsewhere=site is not None)
    if in_processes and site is not None:
        env = _named(stage, stage.env)
        nothing = (None,) * stage.most_workers
        own = setup, stage.model, stage.kwargs, (), ()
        return Launch("process", *own, nothing, env, warm_up, None, stage.idempotent, site.hire, shapes)
    # A worker process always sets its affinity, even to all the cores that this process may use
    # now: otherwise it would inherit that of a coordinator that has been pinned meanwhile.
    cores = stage.cpus or (current_cores() if in_processes else None,) * stage.most_workers
    env = _environments(service, stage, usable_cores) if in_processes else ()
    adapters = adapters_of(service.routes) if stage is service.graph[0] else ()
    model = stage.model, stage.kwargs, adapters, spots_of(service.graph, service.gives)[0][index]
    return Launch(stage.run_in, setup, *model, cores, env, warm_up, guard, stage.idempotent, None, shapes)


def _setup(
    service: Declaration, index: int, warm_up: Mapping[int, int], shapes: Sequence[WarmUpShape], *, is_elsewhere: bool
) -> Setup:
    """Return the `Setup` of a stage's workers; for each of them, place and cores are filled in."""
    stage = service.stages[index]
    root = logging.getLogger()
    adapters = adapters_of(service.routes) if stage is service.graph[0] else ()
    described = program.describe()
    if is_elsewhere:  # where the file of the main program need not be
        described = msgspec.structs.replace(described, main_name=None, main_file=None)
    packed = b""
    if _is_sent(stage):
        spots = spots_of(service.graph, service.gives)[0][index]
        packed = program.pack_model(stage.model, stage.kwargs, adapters, spots, has_main=not is_elsewhere)
    return Setup(
        program=described,
        model=packed,
        stage=stage.name,
        place=0,
        batched=stage.max_batch_size is not None,
        allowed_batch_sizes=_allowed_sizes(stage),
        warm_up=tuple(warm_up),
        is_first=any(stage is first for first in firsts_of(service.graph)),
        is_last=stage is service.graph[-1],
        isolate_errors=stage.isolate_errors,
        retry_on_oom=stage.idempotent or stage.isolate_errors,
        oom_errors=stage.oom_errors,
        cores=None,
        log_level=root.level if root.handlers else None,
        most_examples=stage.rows if stage.size is None else 1,
        warm_up_shapes=tuple((shape.example, shape.n) for shape in shapes),
    )


def _is_sent(stage: Stage) -> bool:
    return stage.run_in == "process" and stage.most_workers > 0


def _allowed_sizes(stage: Stage) -> tuple[int, ...] | None:
    sizes = None if stage.traits.in_parts else stage.new_policy().allowed_batch_sizes
    return tuple(sizes) if sizes else None


def _environments(
    service: Declaration, stage: Stage, usable_cores: int, all_workers: int | None = None
) -> tuple[Mapping[str, str], ...]:
    """Return the variables that each worker of a stage gets besides those of this process."""
    threads = [
        decide_threads(
            stage.name,
            os.environ,
            env,
            workers=stage.most_workers,
            pinned=None if stage.cpus is None else [len(cores) for cores in stage.cpus],
            cores=usable_cores,
            all_workers=all_workers or sum(_processes_of(service)),
            limit=core_limit(),
        )
        for env in stage.env
    ]
    for why in dict.fromkeys(each.why for each in threads):
        logger.info("%s", why, extra={"model": service.name, "stage": stage.name})
    visible = _visible_devices(service, stage)
    own = zip(threads, stage.env, strict=True)
    return _named(stage, [{**each.variables[place], **env, **visible[place]} for place, (each, env) in enumerate(own)])


def _environments_of(service: Declaration, cores: int, stage: int, all_workers: int) -> tuple[Mapping[str, str], ...]:
    return _environments(service, service.stages[stage], cores, all_workers)


def _processes_of(service: Declaration) -> list[int]:
    return [stage.most_workers if stage.run_in == "process" else 0 for stage in service.stages]


def _named(stage: Stage, variables: Sequence[Mapping[str, str]]) -> tuple[Mapping[str, str], ...]:
    count = {COUNT_VARIABLE: str(stage.most_workers)}
    return tuple({**each, INDEX_VARIABLE: str(place), **count} for place, each in enumerate(variables))


def _visible_devices(service: Declaration, stage: Stage) -> tuple[Mapping[str, str], ...]:
    """Return the variables that make each worker of a stage see its devices and no others.

    Raises:
        StartupError: This process does not see one of them.
    """
    if stage.devices is None:
        return ({},) * stage.most_workers
    try:
        names = among_visible(stage.devices, os.environ.get(VISIBLE_DEVICES))
    except ValueError as error:
        raise StartupError(f"stage {stage.name}: {error}") from None
    text, about = "workers 0 to %d of stage %s see the devices %s", {"model": service.name, "stage": stage.name}
    logger.info(text, stage.most_workers - 1, stage.name, " | ".join(names), extra=about)
    return tuple({VISIBLE_DEVICES: each} for each in names)


_SHARES = (4, 2, 1)  # warm up with a quarter, half and all of a full batch, besides a single item


def warm_up_sizes(stage: Stage) -> dict[int, int]:
    """Return the numbers of examples to run at a time, rising, each with the sum of their sizes.

    They are one, a quarter, half and all of a full batch, or the stage's allowed batch sizes. There
    are none if the model has no examples or answers in parts, or the stage has no batches.

    Raises:
        StartupError: An example cannot be weighed.
    """
    most = stage.max_batch_size
    if most is None or not stage.traits.examples or stage.traits.in_parts:
        return {}
    policy = stage.new_policy()
    if stage.size is not None:
        return _weighed(stage, [1, *[max(1, policy.limit // share) for share in _SHARES]])
    sizes = policy.allowed_batch_sizes or {1, *[max(1, policy.limit // share) for share in _SHARES]}
    if stage.max_padded_size is not None:
        longest = max(_lengths_of_examples(stage))
        sizes = {1, *[n for n in sizes if n * longest <= stage.max_padded_size]}
    return {n: n for n in sorted(sizes)}


def warm_up_shapes(stage: Stage) -> tuple[WarmUpShape, ...]:
    """Return the calls with one example over and over that show what lengths cost.

    They are of the shortest, the middle and the longest example; of a model that pads to certain
    lengths, of one for each of these. There are none without `length=`.

    Raises:
        StartupError: The length of an example cannot be found.
    """
    if stage.length is None or not stage.traits.examples or stage.max_batch_size is None:
        return ()
    lengths: dict[int, int] = {}  # with an example of each
    for at, length in enumerate(_lengths_of_examples(stage)):
        lengths.setdefault(length, at)
    rising = sorted(lengths)
    if stage.allowed_lengths is not None:
        allowed = stage.allowed_lengths
        chosen = sorted({padded(length, allowed): length for length in rising}.values())
    else:
        chosen = sorted({rising[0], rising[len(rising) // 2], rising[-1]})
    counts = stage.allowed_batch_sizes or sorted({1, max(1, stage.max_batch_size // 4), stage.max_batch_size})
    most_padded = stage.max_padded_size or inf
    return tuple(
        WarmUpShape(lengths[length], n, length)
        for length in chosen
        for n in counts
        if n == 1 or n * length <= most_padded
    )


def _lengths_of_examples(stage: Stage) -> list[int]:
    """Return how long each example is. Raises StartupError if that of one cannot be found."""
    weigher = weigher_of(stage)
    assert weigher is not None
    return _of_each_example(stage, weigher.length_of, "the length of example {} cannot be told")


def _weighed(stage: Stage, targets: list[int]) -> dict[int, int]:
    """Return the largest number of examples, but at least one, that fits into each target size."""
    weigher = weigher_of(stage)
    assert weigher is not None
    weights = _of_each_example(stage, weigher.of, "example {} cannot be weighed")
    sums = list(accumulate(islice(cycle(weights), stage.max_queue_size)))
    counts = sorted({max(1, sum(total <= target for total in sums)) for target in targets})
    return {n: sums[n - 1] for n in counts}


def _of_each_example(stage: Stage, measure: Callable[[Any], int], trouble: str) -> list[int]:
    measures = []
    for i, example in enumerate(stage.traits.examples, 1):
        try:
            measures.append(measure(example))
        except CarpoolError as error:
            raise StartupError(f"stage {stage.name} could not start: {trouble.format(i)}: {error}") from error
    return measures
