"""Services as operators have them: found by their names, and with settings changed from outside.

A name is `module:attribute`. Settings come from a file, the environment or a flag.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from inspect import signature
from math import inf
from pathlib import Path
from typing import Any

from carpool.service.checks import from_outside
from carpool.service.graph import with_stages
from carpool.service.service import Service
from carpool.service.stage import Stage

OF_A_STAGE = from_outside(Stage)
"""The settings of a stage that can be changed from outside; the others need code."""

_MADE = frozenset({"graph", "stages", "takes", "gives", "routes"})
"""Fields of a service that are no settings."""

OF_A_SERVICE = from_outside(Service)
"""The settings of a service that can be changed from outside."""

_FOR_EACH_WORKER = ("cpus", "env")  # a list of these says how many workers there are
_ENDLESS = ("timeout_s", "max_stream_s")  # infinity where code says None
_NONE = "none"  # which TOML has no word for

Changes = Mapping[str, Mapping[str, Any]]
"""Values by setting, by the name of a stage or service."""


def changed(services: Sequence[Service], of_services: Changes, of_stages: Changes) -> list[Service]:
    """Return the services with some settings changed; those that nothing changes stay as they are.

    The text "none" stands for None where code may say None, and "1-8" for a range of workers.

    Args:
        of_stages: The settings of each stage, by its name or as SERVICE/STAGE.

    Raises:
        ValueError: There is no such service, stage or setting, or a value is out of range. Where it
            is one setting's, the text begins with its name, such as `stages.Digits.workers: `.
        TypeError: A value is of the wrong kind; as above.
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
    return [_service(service, of_services.get(service.name, {}), of_stages) for service in services]


def as_written(of: Service | Stage, setting: str) -> Any:
    """Return a setting as it is written outside of code; a policy that is an object stays one."""
    value = getattr(of, setting)
    if setting == "cpus" and value is not None:
        return [sorted(cores) for cores in value]
    if setting == "env":
        return [dict(each) for each in value] if any(value) else None
    return None if setting in _ENDLESS and value == inf else value


def workers_in(text: str) -> int | tuple[int, int] | None:
    """Return the number of workers that a text such as 4 has, or the range of 1-8; or None."""
    numbers = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", text, re.ASCII)
    if numbers is None:
        return None
    return int(numbers[1]) if numbers[2] is None else (int(numbers[1]), int(numbers[2]))


def nearest(name: str, known: Sequence[str] | set[str]) -> str:
    """Return the end of an error about a name that there is not: the nearest that there is."""
    found = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else f"; there are {', '.join(sorted(known))}"


def _names(service: Service, stage: Stage) -> tuple[str, str]:
    return stage.name, f"{service.name}/{stage.name}"


def _service(service: Service, changes: Mapping[str, Any], of_stages: Changes) -> Service:
    stages = []
    for stage in service.stages:
        short, long = _names(service, stage)
        of_stage = {**of_stages.get(short, {}), **of_stages.get(long, {})}
        names = {setting: long if setting in of_stages.get(long, {}) else short for setting in of_stage}
        with _by_name("stages", names):
            stages.append(_stage(stage, _as_in_code(Stage, of_stage)) if of_stage else stage)
    if not changes and all(new is old for new, old in zip(stages, service.stages, strict=True)):
        return service
    settings: dict[str, Any] = {
        each.name: getattr(service, each.name) for each in fields(service) if each.name not in _MADE
    }
    settings["routes"] = {route.path: route.adapter for route in service.routes}
    for name in _ENDLESS:
        settings[name] = as_written(service, name)
    with _by_name("services", dict.fromkeys(changes, service.name)):
        graph = with_stages(service.graph, {id(old): new for old, new in zip(service.stages, stages, strict=True)})
        return Service(*graph, **{**settings, **_as_in_code(Service, changes)})


def _as_in_code(kind: type, changes: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(changes)
    for setting, value in changes.items():
        if not isinstance(value, str):
            continue
        may_be_none = str(signature(kind).parameters[setting].annotation).endswith("None")
        if value.lower() == _NONE and may_be_none:
            found[setting] = None
        elif setting == "workers":
            found[setting] = workers_in(value) or value
    return found


@contextlib.contextmanager
def _by_name(kind: str, names: Mapping[str, str]) -> Iterator[None]:
    """Have an error about a changed setting begin with the setting's whole name."""
    try:
        yield
    except (ValueError, TypeError) as error:
        text = str(error)
        words = {word.partition("=")[0].strip(".,:;()'") for word in text.split()}
        about = next((setting for setting in names if setting in words), None)
        if about is None:
            raise
        as_before = TypeError if isinstance(error, TypeError) else ValueError
        raise as_before(f"{kind}.{names[about]}.{about}: {text}") from None


def _stage(stage: Stage, changes: Mapping[str, Any]) -> Stage:
    if stage.max_batch_size is not None and changes.get("max_batch_size", 1) is None:
        raise ValueError(f"max_batch_size cannot be none: {stage.traits.name} takes batches")
    settings: dict[str, Any] = {
        each.name: getattr(stage, each.name) for each in fields(stage) if each.name not in ("model", "traits")
    }
    settings["env"] = settings["env"] if any(settings["env"]) else None
    numbers = [len(changes[name]) for name in _FOR_EACH_WORKER if isinstance(changes.get(name), list)]
    if "workers" not in changes and numbers and numbers[0] != stage.most_workers:
        changes = {**changes, "workers": numbers[0]}
    if "workers" in changes and changes["workers"] != stage.workers:
        _share_anew(stage, settings, changes)
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


class NotFound(ValueError):
    """There is no such service; the text names those that there are."""


class BrokenModule(ValueError):
    """A module raised when it was imported."""

    def __init__(self, module_name: str, error: BaseException) -> None:
        super().__init__(f"module {module_name!r} cannot be imported")
        self.error = error


def service_named(target: str) -> Service:
    """Return the service at `module:attribute`; its module is imported if it has not been yet.

    Raises:
        NotFound: There is none.
        BrokenModule: The module, or one that it imports, raised.
    """
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute:
        module_name = "program" if colon or not target else target.removesuffix(".py").replace("/", ".")
        raise NotFound(f"{target!r} does not name a service: write module:attribute, for example {module_name}:service")
    if module_name.startswith((".", "/")):
        path = Path(module_name)
        there = "write" if path.parent == Path() else f"go to its folder (cd {path.parent}) and write"
        name = path.name.strip(".").removesuffix(".py") or "program"
        raise NotFound(f"{module_name!r} is a path, and modules have names: {there} {name}:{attribute}")
    importlib.invalidate_caches()  # its file may have been written a moment ago
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise BrokenModule(module_name, error) from error
        hint = " (write the name of the module, not that of its file)" if Path(module_name).suffix == ".py" else ""
        raise NotFound(f"there is no module {error.name!r} in {os.getcwd()} or on the Python path{hint}") from None
    except Exception as error:
        raise BrokenModule(module_name, error) from error
    found: Any = getattr(module, attribute, None)
    if isinstance(found, Service):
        return found
    services = [name for name, value in vars(module).items() if isinstance(value, Service)]
    known = f"it has {', '.join(services) or 'no carpool.Service: write service = carpool.Service(...)'}"
    if found is None:
        raise NotFound(f"module {module_name!r} has no attribute {attribute!r}; {known}")
    raise NotFound(f"{target} is of type {type(found).__name__}, not a carpool.Service; {known}")
