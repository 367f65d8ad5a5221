"""The table of what answers at which path with which method, and how it is put together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from carpool.http.addresses import Address
from carpool.http.codec import allow
from carpool.http.endpoint import Endpoint
from carpool.http.exchange import Exchange, HttpResponse

_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+/?")

Handler = Callable[[Exchange], None]
"""Answers an exchange, now or later."""
Target = tuple[Handler, Endpoint | None, Address | None]
"""What answers at an address; at the address of a model also the model and the `Address`."""
Routes = dict[bytes, dict[bytes, Target]]
"""By path and method, what answers."""


def of_pages(pages: Mapping[bytes, Handler]) -> Routes:
    """Return the entries of pages, which are only read."""
    return {path: {b"GET": (page, None, None), b"HEAD": (page, None, None)} for path, page in pages.items()}


def of_orders(orders: Mapping[bytes, Handler]) -> Routes:
    """Return the entries of what changes the server."""
    return {path: {b"POST": (order, None, None)} for path, order in orders.items()}


def add_models(routes: Routes, endpoints: Sequence[Endpoint], predict: Handler, predict_list: Handler) -> None:
    """Add the addresses of models to a table.

    Args:
        routes: The table.
        endpoints: The models.
        predict: What answers where a body is an item.
        predict_list: What answers where a body is a list of items.

    Raises:
        ValueError: Something else answers at one of the addresses.
    """
    for endpoint in endpoints:
        for address in endpoint.addresses:
            if address.key in routes:
                raise ValueError(f"routes names {address.path} twice: give one of them another path")
            route = predict_list if address.is_list else predict
            routes[address.key] = {b"POST": (route, endpoint, address)}


def add_options(routes: Routes, for_operators: Routes, root_path: str) -> None:
    """Have each address tell its methods, and repeat those for clients below a root path.

    The others are nowhere else, so that a rule of a proxy for their paths keeps all of them.

    Args:
        routes: The table, of addresses for clients.
        for_operators: Those for the ones who run the server, which are added.
        root_path: What a proxy puts before each path; empty for nothing.
    """
    if root_path:
        routes.update({root_path.encode() + path: methods for path, methods in routes.items()})
    for path, methods in for_operators.items():
        if path in routes:
            raise ValueError(f"routes names {path.decode()}, which is an address of the server: choose another path")
        routes[path] = methods
    for methods in routes.values():
        methods[b"OPTIONS"] = (_tell_methods(*[name for name in methods if name != b"OPTIONS"], b"OPTIONS"), None, None)
    # of the server as a whole (RFC 9110, 9.3.7)
    routes[b"*"] = {b"OPTIONS": (_tell_methods(b"GET", b"HEAD", b"POST", b"OPTIONS"), None, None)}


def _tell_methods(*methods: bytes) -> Handler:
    """Make a route that tells which methods an address has."""
    response = HttpResponse(204, b"", headers=allow(name.decode() for name in methods))
    return lambda exchange: exchange.respond(response)


class WhatIsThere(NamedTuple):
    """What a client is told that has asked at an address where nothing is.

    Attributes:
        owner: What has other addresses, with the verb.
        paths: These addresses.
        more: How the sentence goes on.
    """

    owner: str
    paths: list[str]
    more: str = ""


def what_is_there(routes: Routes, root_path: str) -> WhatIsThere:
    """Return what to tell of a table: where models answer, or the pages if it has no models.

    Args:
        routes: The table.
        root_path: What a proxy puts before each path.
    """
    targets = [target for methods in routes.values() for target in methods.values()]
    paths = dict.fromkeys(address.path for _, _, address in targets if address is not None and not address.is_list)
    if not paths:
        return WhatIsThere("There are", [path.decode() for path in routes])
    more = f"; GET {root_path}/ lists all addresses" if b"/" in routes else ""
    return WhatIsThere("Models answer POST requests at", [root_path + path for path in paths], more)


def check_root_path(path: str) -> str:
    """Return what a proxy puts before each path, without a slash at its end. Raises ValueError."""
    if path and (not _ROOT_PATH.fullmatch(path) or path == "/"):
        raise ValueError(f"root_path must begin with a slash, such as /api, not {path!r}")
    return path.rstrip("/")
