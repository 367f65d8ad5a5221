"""Addresses of a service's own, each with an adapter that makes an item of what is sent there."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from carpool.engine.call.invoke import is_async
from carpool.engine.hints import schema
from carpool.engine.http_request import HTTPRequest
from carpool.engine.type_hints import signature_of
from carpool.engine.wire.payload import MOST_ADAPTERS
from carpool.model import Adapter, types_of
from carpool.service.checks import header_of, mapping
from carpool.service.stage import Stage

_PATH = re.compile(r"(?:/[A-Za-z0-9._~!$&'()*+,;=:@-]+)+")
_OF_THE_APP = re.compile(r"/(?:livez|readyz|metrics|openapi\.json|docs|dashboard|predict(?:/many)?|models/.*)")


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """One address of a service.

    Attributes:
        path: Where it is.
        adapter: Makes an item of what is sent there; None if that is the item.
        takes: The type of what is sent, by the adapter's hint; `Any` without one.
    """

    path: str
    adapter: Adapter | None
    takes: Any


def routes_of(routes: Any, first: Stage | None) -> tuple[HttpRoute, ...]:
    """Return the routes that a service declares.

    Args:
        routes: As the user gives them: adapters by path, or None.
        first: The stage that gets the items; None if several branches do.

    Raises:
        ValueError: There are several branches, a path is none or belongs to every app, or there are
            too many routes.
        TypeError: An adapter cannot be called with what is sent, or cannot run in the stage.
    """
    if first is None:
        if routes:
            raise ValueError("routes are for services that begin with a stage, which makes the items: put one first")
        return ()
    declared = tuple(_route(path, adapter, first) for path, adapter in mapping("routes", routes).items())
    if len(declared) > MOST_ADAPTERS:
        raise ValueError(f"routes names {len(declared)} addresses: at most {MOST_ADAPTERS} are possible")
    for setting, value in (("size", first.size), ("length", first.length), ("key", first.key)):
        if value is not None and header_of(value) is None and adapters_of(declared):
            raise ValueError(
                f"{setting}= of {first.name} weighs items on arrival, but those of routes are made in the workers:"
                f" leave out {setting}=, or give None for each address instead of a function"
            )
    return declared


def adapters_of(routes: Sequence[HttpRoute]) -> tuple[Adapter, ...]:
    """Return the adapters of some routes, in their order."""
    return tuple(route.adapter for route in routes if route.adapter is not None)


def _route(path: str, adapter: Any, first: Stage) -> HttpRoute:
    """Check one address. Raises ValueError or TypeError."""
    if not _PATH.fullmatch(path) or {".", ".."} & set(path.split("/")):
        raise ValueError(
            f"routes has {path!r}, which is no path: begin it with a slash and use letters, digits and"
            " -._~!$&'()*+,;=:@ only, such as '/classify_url'"
        )
    if _OF_THE_APP.fullmatch(path):
        raise ValueError(f"routes has {path!r}, an address that every app has: choose another one")
    if adapter is None:
        return HttpRoute(path, None, first.traits.input_type)
    if not callable(adapter):
        raise TypeError(
            f"routes gives {adapter!r} for {path}: give a function that makes an item of what is sent there, or None"
            " if that is the item"
        )
    _check_adapter(path, adapter, first)
    takes, _ = types_of(adapter)
    if takes is HTTPRequest:
        raise TypeError(
            f"the function for {path} in routes takes an HTTPRequest, but it gets what is in the body: hint that, or"
            " let a model's `decode` take requests"
        )
    problem = schema.why_unreadable(takes)
    if problem is not None:
        raise TypeError(
            f"the function for {path} in routes takes {schema.type_name(takes)} by its hint, which cannot be checked"
            f" over HTTP: {problem}. Give a hint that can be, or leave it out"
        )
    return HttpRoute(path, adapter, takes)


def _check_adapter(path: str, adapter: Adapter, first: Stage) -> None:
    """Raise TypeError unless an adapter can be called with one value, where the stage runs."""
    function: Any = adapter if inspect.isroutine(adapter) else type(adapter).__call__
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"the function for {path} in routes is a generator: return one item")
    try:
        signature_of(adapter).bind(None)
    except ValueError:  # a builtin without a signature
        pass
    except TypeError as error:
        raise TypeError(
            f"the function for {path} in routes is called with one value, what is in the body: {error}"
        ) from None
    if is_async(adapter) and first.run_in != "loop":
        raise TypeError(
            f'the function for {path} in routes is async, but {first.name} runs with run_in="{first.run_in}": write it'
            " with plain def"
        )
    if not is_async(adapter) and first.run_in == "loop":
        raise TypeError(
            f"the function for {path} in routes is a plain function and would block the loop on which {first.name}"
            " runs: write it with async def"
        )
