"""A program's subject, made real: services, apps and batched functions with the settings that it says."""

from __future__ import annotations

import asyncio
from typing import Any

import carpool
from carpool.engine.observe.log import LineSink
from carpool.http import App
from tests.fuzz import models
from tests.fuzz.front import Front
from tests.fuzz.program import IN_PARTS, Batch, Program, Service, Stage
from tests.fuzz.served import Served, ServedAsync, Serving


def new_handle(program: Program, sink: LineSink) -> Any:
    """A handle, or what looks like one; started already where its way is "start"."""
    subject = program.subject
    assert isinstance(subject, Service)
    service = carpool.Service(
        *_elements(subject.graph, [_stage(i, stage) for i, stage in enumerate(subject.stages)]),
        timeout_s=subject.timeout_s,
        slo_s=subject.slo_s,
    )
    if subject.way == "app":
        return Front(App(service))
    if program.has_client:
        kind = ServedAsync if program.in_tasks else Served
        return kind(Serving(service, _new_loop(subject)), program.client_s)
    if subject.way == "run_async":
        return service.run_async(output=sink)
    return service.run(output=sink) if subject.way == "run" else service.start(output=sink)


def _elements(graph: str, stages: list[carpool.Stage]) -> list[Any]:
    """What a service consists of; see `program.GRAPHS`."""
    match graph:
        case "parallel":
            return [carpool.Parallel(*stages)]
        case "values":
            return [carpool.Parallel({str(i): stage for i, stage in enumerate(stages)}, errors="values")]
        case "route":
            branches: dict[str, Any] = {str(i): stage for i, stage in enumerate([*stages, []])}
            return [carpool.Route(branches, choose=models.Branch(len(stages)))]
        case "each":
            return [carpool.Stage(models.spread, run_in="thread", name="spread"), carpool.ForEach(*stages)]
        case "early":
            return [carpool.Stage(models.early, run_in="thread", name="early"), *stages]
        case "shared":
            return [carpool.Parallel(stages[0], stages)]
    return list(stages)


def _new_loop(subject: Service) -> asyncio.AbstractEventLoop:
    if subject.loop == "uvloop":
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()


def new_function(subject: Batch) -> tuple[Any, Any]:
    """A batched function, and the object whose method it is, which has to be kept."""
    settings: dict[str, Any] = {
        "max_batch_size": subject.max_batch_size,
        "max_queue_size": max(subject.max_queue_size, subject.max_batch_size or 1),
        "max_in_flight_batches": subject.max_in_flight_batches,
        "policy": models.policy(subject.policy),
        "max_queue_delay_s": subject.max_queue_delay_s,
        "timeout_s": subject.timeout_s,
        "slo_s": subject.slo_s,
        "isolate_errors": subject.isolate_errors,
    }
    if subject.size and subject.over not in ("merge", "arrays"):
        settings["size"] = models.size
    if subject.lock:
        settings["execution_lock"] = asyncio.Lock() if subject.tasks else carpool.Lock()
    if subject.over in ("merge", "arrays"):
        settings["merge"] = True
    batch = carpool.batch(**settings)
    if subject.over == "method":
        owner = _with_method(batch, subject.tasks)
        return owner.predict, owner
    return batch(_function(subject)), None


def _function(subject: Batch) -> Any:
    match subject.over:
        case "arrays":
            return models.doubled_async if subject.tasks else models.doubled
        case "merge":
            return models.merged_async if subject.tasks else models.merged
        case "class":
            return _with_faults(models.HookedAsync if subject.tasks else models.Hooked, subject)
        case _:
            return models.predict_async if subject.tasks else models.predict


def _stage(number: int, stage: Stage) -> carpool.Stage:
    asynchronous = stage.run_in == "loop"
    batched = stage.max_batch_size is not None
    model: Any
    kwargs: dict[str, Any] = {}
    if stage.model in IN_PARTS:
        return carpool.Stage(
            models.PARTED[stage.model][asynchronous],
            name=f"stage{number}",
            run_in=stage.run_in,  # type: ignore[arg-type]
            workers=stage.workers,
            max_batch_size=None if stage.model == "generator" else stage.max_batch_size,
            max_rows=stage.max_batch_size if stage.model == "generator" else None,
            max_queue_size=stage.max_queue_size,
            policy=stage.policy,
            max_batch_time_s=stage.max_batch_time_s,
            isolate_errors=stage.isolate_errors,
        )
    if stage.model == "class":
        model = models.with_examples(models.HookedAsync if asynchronous else models.Hooked, stage.examples)
        kwargs = {"batched": batched, "setup_raises": stage.setup, "teardown_raises": stage.teardown}
    elif batched:
        model = models.predict_async if asynchronous else models.predict
    else:
        model = models.predict_one_async if asynchronous else models.predict_one
    return carpool.Stage(
        model,
        name=f"stage{number}",
        kwargs=kwargs,
        run_in=stage.run_in,  # type: ignore[arg-type]
        workers=stage.workers,
        max_batch_size=stage.max_batch_size,
        max_queue_size=stage.max_queue_size,
        policy=models.policy(stage.policy) if batched else None,
        max_queue_delay_s=stage.max_queue_delay_s,
        max_batch_time_s=stage.max_batch_time_s,
        size=models.size if stage.size and batched else None,
        length=models.length if stage.shapes and not stage.size else None,
        key=models.key if stage.shapes else None,
        allowed_batch_sizes=(1, stage.max_batch_size) if stage.allowed and stage.max_batch_size else None,
        isolate_errors=stage.isolate_errors,
    )


def _with_faults(model: Any, subject: Batch) -> Any:
    """The class, constructed without arguments as `batch` does."""

    class Faulty(model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(True, subject.setup, subject.teardown)

    return Faulty


def _with_method(batch: Any, tasks: bool) -> Any:
    class Owner:
        if tasks:

            @batch
            async def predict(self, xs: list[Any]) -> list[Any]:
                return await models.predict_async(xs)
        else:

            @batch
            def predict(self, xs: list[Any]) -> list[Any]:
                return models.predict(xs)

    return Owner()
