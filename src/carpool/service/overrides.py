"""Services with settings changed from outside, by a file, the environment or a flag."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import inf
from typing import Any

from carpool.service.service import Service
from carpool.service.stage import Stage

OF_A_STAGE = (
    "workers",
    "cpus",
    "devices",
    "env",
    "max_batch_size",
    "max_rows",
    "allowed_batch_sizes",
    "policy",
    "max_queue_delay_s",
    "max_queue_size",
    "max_queue_bytes",
    "max_batch_time_s",
    "idempotent",
    "isolate_errors",
)
"""The settings of a stage that can be changed from outside; the others need code."""

OF_A_SERVICE = (
    "timeout_s",
    "slo_s",
    "part_slo_s",
    "max_stream_s",
    "overload",
    "share",
    "max_parallel_starts",
)
"""The settings of a service that can be changed from outside."""

_FOR_EACH_WORKER = ("cpus", "devices", "env")

_NONE = "none"  # TOML has no word for it

Changes = Mapping[str, Mapping[str, Any]]
"""Values by setting, by the name of a stage or service."""


def changed(services: Sequence[Service], of_services: Changes, of_stages: Changes) -> list[Service]:
    """Return the services with some settings changed; those that nothing changes stay as they are.

    Args:
        services: As they are declared.
        of_services: The settings of each service.
        of_stages: The settings of each stage, by its name or as SERVICE/STAGE.

    Raises:
        ValueError: There is no such service, stage or setting, or a value is out of range.
        TypeError: A value is of the wrong kind.
    """
    stages = {name for service in services for stage in service.stages for name in _names(service, stage)}
    for kind, changes, known, settings in (
        ("service", of_services, {service.name for service in services}, OF_A_SERVICE),
        ("stage", of_stages, stages, OF_A_STAGE),
    ):
        for name, values in changes.items():
            if name not in known:
                raise ValueError(f"there is no {kind} {name!r}{nearest(name, known)}")
            for setting in values:
                if setting not in settings:
                    raise ValueError(f"a {kind} has no setting {setting!r}{nearest(setting, settings)}")
    of_services = {name: _read(values) for name, values in of_services.items()}
    of_stages = {name: _read(values) for name, values in of_stages.items()}
    return [_service(service, of_services.get(service.name, {}), of_stages) for service in services]


def _read(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of settings, with None for the text that means it."""
    return {setting: None if value == _NONE else value for setting, value in values.items()}


def nearest(name: str, known: Sequence[str] | set[str]) -> str:
    """Return the end of an error about a name that there is not: the nearest that there is."""
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else f"; there are {', '.join(sorted(known))}"


def _names(service: Service, stage: Stage) -> tuple[str, str]:
    """Return how a stage can be named."""
    return stage.name, f"{service.name}/{stage.name}"


def _service(service: Service, changes: Mapping[str, Any], of_stages: Changes) -> Service:
    """Return a service with its settings changed, and those of its stages."""
    stages = []
    for stage in service.stages:
        short, long = _names(service, stage)
        of_stage = {**of_stages.get(short, {}), **of_stages.get(long, {})}
        stages.append(_stage(stage, of_stage) if of_stage else stage)
    if not changes and all(new is old for new, old in zip(stages, service.stages, strict=True)):
        return service
    settings: dict[str, Any] = {
        each.name: getattr(service, each.name) for each in fields(service) if each.name not in ("stages", "routes")
    }
    settings["routes"] = {route.path: route.adapter for route in service.routes}
    for name in ("timeout_s", "max_stream_s"):
        settings[name] = None if settings[name] == inf else settings[name]
    return Service(*stages, **{**settings, **changes})


def _stage(stage: Stage, changes: Mapping[str, Any]) -> Stage:
    """Return a stage with its settings changed. Raises ValueError where its model would get single
    items in the place of lists.
    """
    if stage.max_batch_size is not None and changes.get("max_batch_size", 1) is None:
        raise ValueError(
            f"max_batch_size of stage {stage.name} cannot be none: its model takes lists. One for single items is in a"
            " stage that the code gives no max_batch_size"
        )
    settings: dict[str, Any] = {
        each.name: getattr(stage, each.name) for each in fields(stage) if each.name not in ("model", "traits")
    }
    settings["env"] = settings["env"] if any(settings["env"]) else None
    if "workers" in changes and changes["workers"] != stage.workers:
        _share_anew(stage, settings, changes)
    elif not any(name in changes for name in _FOR_EACH_WORKER):
        settings["workers"] = stage.workers
    return Stage(stage.model, **{**settings, **changes})


def _share_anew(stage: Stage, settings: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Give another number of workers the devices and the environment that the workers have.

    Raises ValueError where each worker has its own.
    """
    env = stage.env
    if settings["env"] is not None and "env" not in changes:
        if any(each != env[0] for each in env):
            raise ValueError(f"the workers of stage {stage.name} have different env: change env with workers")
        settings["env"] = env[0]
    if stage.devices is not None and "devices" not in changes:
        settings["devices"] = list(dict.fromkeys(stage.devices))
    if stage.cpus is not None and "cpus" not in changes:
        raise ValueError(f"each worker of stage {stage.name} has its cpus: change cpus with workers")
