"""Whether services can be served over HTTP together: their names, and the types of their items."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from carpool.engine.hints import schema

if TYPE_CHECKING:
    from carpool.service.service import Service


def check_services(services: tuple[Service, ...]) -> None:
    """Raise ValueError or TypeError unless the services have different names, no stage in common,
    and items for HTTP.
    """
    if not services:
        raise ValueError("App needs at least one service")
    for service in services:
        if not hasattr(service, "stages"):
            raise TypeError(f"App takes services, not {service!r}: wrap a model as App(Service(model))")
    names = [service.name for service in services]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"two services are called {twice.pop()!r}: give one of them another name with name=")
    for service in services:
        _check_types(service)
    for a, b in itertools.combinations(services, 2):
        for stage in a.stages:
            if any(stage is other for other in b.stages):
                raise ValueError(
                    f"services {a.name} and {b.name} share stage {stage.name}, and a stage cannot belong to several"
                    " services yet: give each of them a Stage object of its own"
                )


def _check_types(service: Service) -> None:
    """Raise TypeError if JSON cannot express the items, and the model names no format for them."""
    first, last = service.takes, service.gives
    if not first.accepts:
        _check_hint(f"{first.name} takes", first.input_type, schema.why_unreadable(first.input_type), "accepts")
    if not last.produces:
        _check_hint(f"{last.name} returns", last.output_type, schema.why_unwritable(last.output_type), "produces")


def _check_hint(use: str, hint: Any, problem: str | None, attribute: str) -> None:
    if problem is not None:
        raise TypeError(
            f"model {use} {schema.type_name(hint)} by its hint, which cannot be checked over HTTP: {problem}. Give a"
            " hint that can be (of a union only one such type, or msgspec.Structs with tags), leave the hint out, or"
            f" name a format of the model's own with {attribute}. Python callers need none of this"
        )
