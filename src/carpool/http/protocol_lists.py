"""What the OpenAPI document and the page at `/` say of the addresses of protocols."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from carpool.http.protocols.base import ProtocolRoute

_NO_NAME = re.compile(r"[^A-Za-z0-9]+")
_ERRORS = {
    "400": "The request is not what it must be.",
    "404": "There is no such model, or it does not fit.",
    "406": "The model does not write what is accepted, or what the protocol needs.",
    "413": "The body is too large, or has more items than the queue holds.",
    "415": "The content type or coding is not read.",
    "429": "The queue is full.",
    "500": "The model has failed.",
    "503": "The service starts, stops, or cannot answer.",
}
_ERRORS_OF_PAGES = {"503": _ERRORS["503"]}


class ShownRoute(NamedTuple):
    """An address that is listed.

    Attributes:
        protocol: The name of its protocol.
        route: The address.
    """

    protocol: str
    route: ProtocolRoute


def operations_of(shown: Sequence[ShownRoute], parameters: Sequence[Any], timeout_status: int) -> dict[str, Any]:
    """Return the addresses as the paths of an OpenAPI document.

    Args:
        shown: The addresses.
        parameters: The headers that all requests may have.
        timeout_status: Status of a missed deadline.
    """
    paths: dict[str, Any] = {}
    for protocol, route in shown:
        operation: dict[str, Any] = {
            "operationId": _NO_NAME.sub("_", f"{protocol}_{route.method.lower()}{route.path}").strip("_"),
            "summary": route.summary or f"An address of the protocol {protocol}",
            "tags": [protocol],
            "responses": _responses(route, timeout_status),
        }
        if route.method == "POST":
            operation["parameters"] = parameters
            operation["requestBody"] = {"required": True, "content": {kind: {} for kind in route.reads}}
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return paths


def _responses(route: ProtocolRoute, timeout_status: int) -> Mapping[str, Any]:
    is_asked = route.method == "POST"
    errors = {**_ERRORS, str(timeout_status): "The time is over."} if is_asked else _ERRORS_OF_PAGES
    good = {"description": "The answer, as the protocol has it.", "content": {kind: {} for kind in route.writes}}
    bad = {status: {"description": text, "content": {"application/json": {}}} for status, text in errors.items()}
    return dict(sorted({"200": good, **bad}.items()))


def lines_of(shown: Sequence[ShownRoute]) -> Iterator[str]:
    """Yield what a page for people says: each protocol with its addresses."""
    for name in dict.fromkeys(each.protocol for each in shown):
        routes = [each.route for each in shown if each.protocol == name]
        yield f"protocol {name}:"
        for method in ("POST", "GET"):
            paths = [route.path for route in routes if route.method == method]
            if paths:
                yield f"  {method} {' '.join(paths)}"
