"""Writes the OpenAPI 3.1 document of an app from the models' type hints and examples.

`overview` writes the page at `/`, for people who look at a server for the first time.
"""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from carpool.engine.hints import schema
from carpool.errors import OVERLOAD_REASONS
from carpool.http.codec import MESSAGES, as_json
from carpool.http.endpoint import MANY, Address, predict_path, ready_path
from carpool.http.protocols.base import ProtocolRoute, ShownRoute
from carpool.service.graph import in_short
from carpool.version import __version__

if TYPE_CHECKING:
    from carpool.http.endpoint import Endpoint
    from carpool.service.service import Service

_ERRORS = {
    "400": "invalid_request",
    "413": "too_large",
    "415": "unsupported_media_type",
    "422": "invalid_item",
    "429": "overloaded",
    "500": "model_error",
    "503": "unavailable",
}
API_VERSION = "1"
"""The version of what is described, as protocols call the one version of each model."""

_MOST_EXAMPLES = 3
_COMPONENT = "#/components/schemas/"
_RETRY = {"Retry-After": {"description": "Seconds to wait before trying again.", "schema": {"type": "integer"}}}
_PARAMETERS = [
    {
        "name": "X-Request-Timeout-Ms",
        "in": "header",
        "description": "Milliseconds after which the answer is of no use. It can only shorten the service's own.",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    },
    {
        "name": "X-Request-Priority",
        "in": "header",
        "description": "Requests with a larger number go first.",
        "schema": {"type": "integer", "minimum": -100, "maximum": 100, "default": 0},
    },
    {
        "name": "X-Request-Id",
        "in": "header",
        "description": "Is repeated in the response.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
    },
]


_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}


def document(
    endpoints: Sequence[Endpoint],
    timeout_status: int,
    max_body_bytes: int,
    root_path: str = "",
    *,
    needs_key: bool = False,
    of_protocols: Sequence[ShownRoute] = (),
) -> dict[str, Any]:
    """Return the OpenAPI document of an app.

    Args:
        needs_key: Whether a key has to be sent.
    """
    addresses = [
        (endpoint.service, address)
        for endpoint in endpoints
        for address in endpoint.addresses
        if address.formats.is_open
    ]
    types: list[Any] = []
    for service, address in addresses:
        last = service.gives
        types += [_taken(service, address), last.output_type, last.part_type]
    found, components = schema.json_schema(types, _COMPONENT + "{name}")
    for of_results in (slice(1, None, 3), slice(2, None, 3)):
        results = zip(types[of_results], found[of_results], strict=True)
        found[of_results] = [schema.result_schema(kind, each) for kind, each in results]
    schemas = _Definitions(components).moved_out_of(found)
    paths: dict[str, Any] = {}
    for i, (service, address) in enumerate(addresses):
        takes, gives, part = schemas[3 * i : 3 * i + 3]
        operation = _predict(service, address, takes, gives, part, timeout_status, max_body_bytes)
        paths[address.path] = {"post": operation}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": ", ".join(endpoint.name for endpoint in endpoints),
            "version": API_VERSION,
            "description": f"Requests are batched by the server, carpool {__version__}; the request body is the item.",
        },
        **({"servers": [{"url": root_path}]} if root_path else {}),
        **({"security": [{"bearer": []}, {"key": []}]} if needs_key else {}),
        "paths": {**paths, **_operations(endpoints), **operations_of(of_protocols, _PARAMETERS, timeout_status)},
        "components": {
            **({"securitySchemes": _SECURITY} if needs_key else {}),
            "schemas": {
                **components,
                "CarpoolError": _error_schema(),
                "CarpoolItemError": _error_schema(status={"type": "integer"}),
            },
        },
    }


class _Definitions:
    """Moves definitions out of schemas, where pydantic puts them, to the document's components."""

    _INSIDE = "#/$defs/"

    def __init__(self, components: dict[str, Any]) -> None:
        self._components = components
        self._moved: dict[str, Any] = {}  # definitions by new name, as they were
        for name in list(components):
            components[name] = self._mend(components[name], {})

    def moved_out_of(self, schemas: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [self._mend(each, {}) for each in schemas]

    def _mend(self, part: Any, names: dict[str, str]) -> Any:
        if isinstance(part, list):
            return [self._mend(each, names) for each in part]
        if not isinstance(part, dict):
            return part
        inside = part.get("$defs", {})
        names = {**names, **{name: self._new_name(name, definition) for name, definition in inside.items()}}
        for name, definition in inside.items():
            self._components[names[name]] = self._mend(definition, names)
        mended = {key: self._mend(each, names) for key, each in part.items() if key != "$defs"}
        target = mended.get("$ref")
        if isinstance(target, str) and target.startswith(self._INSIDE):
            mended["$ref"] = _COMPONENT + names[target.removeprefix(self._INSIDE)]
        return mended

    def _new_name(self, name: str, definition: Any) -> str:
        """Return a component name that is free: the definition's own, or that with a number."""
        new, n = name, 1
        while new in self._components and self._moved.get(new) != definition:
            n += 1
            new = f"{name}_{n}"
        self._components.setdefault(new, {})
        self._moved[new] = definition
        return new


def _predict(
    service: Service,
    address: Address,
    takes: Mapping[str, Any],
    gives: Mapping[str, Any],
    part: Mapping[str, Any],
    timeout_status: int,
    max_body_bytes: int,
) -> dict[str, Any]:
    examples = examples_of(service) if address.adapter is None else []
    if address.formats.owns_input and not _says_bodies(service):
        takes, examples = {}, []  # what `decode` makes of a body says nothing of the body
    if address.formats.owns_output:
        gives = {}
    summary, description = f"Ask {service.name}", "The model's answer."
    if address.is_list:
        summary, description = f"Ask {service.name} for each item of a list", "The answers, in the order of the list."
        takes = {"type": "array", "items": takes}
        gives = {"type": "array", "items": {"anyOf": [gives, {"$ref": _COMPONENT + "CarpoolItemError"}]}}
        examples = [examples] if examples else []
    responses: dict[str, Any] = {
        "200": {"description": description, "content": _contents(address.formats.writable, gives, [])}
    }
    if service.gives.in_parts and not address.is_list and not address.formats.owns_output:
        responses["200"]["content"].update(_in_parts(part))
    for status, code in _ERRORS.items():
        responses[status] = _error(code, retry=status in ("429", "503"))
    if address.formats.owns_output:
        responses["406"] = _error("not_acceptable")
    responses[str(timeout_status)] = _error("deadline_exceeded")
    return {
        "operationId": _operation_id(service.name, address),
        "summary": summary,
        "description": f"Bodies of up to {max_body_bytes} bytes.",
        "parameters": _PARAMETERS,
        "requestBody": {
            "required": True,
            "content": _contents(address.formats.readable, takes, examples),
        },
        "responses": dict(sorted(responses.items())),
    }


def _says_bodies(service: Service) -> bool:
    """Report whether a model says what a `decode` of its own reads in JSON and msgpack."""
    return hasattr(getattr(service.first, "model", None), "body_type")


def _taken(service: Service, address: Address) -> Any:
    return service.first.model.body_type if _says_bodies(service) else address.takes  # type: ignore[union-attr]


def _operation_id(name: str, address: Address) -> str:
    path = address.path.removesuffix(MANY)
    own = "" if path == predict_path(name) else path.replace("/", "_")
    stem = "predict" if path == "/predict" else f"predict_{name}{own}"
    return stem + ("_many" if address.is_list else "")


def _in_parts(part: Mapping[str, Any]) -> dict[str, Any]:
    n = {"type": "object", "properties": {"parts": {"type": "integer"}}, "required": ["parts"]}
    failed = {"$ref": _COMPONENT + "CarpoolError"}
    lines = [{"type": "object", "properties": {"part": part}, "required": ["part"]}]
    lines.append({"type": "object", "properties": {"end": n}, "required": ["end"]})
    events = "`data:` for each part; then `event: end` with how many there were, or `event: error`."
    return {
        "text/event-stream": {"schema": {"type": "string", "description": events, "contentSchema": part}},
        "application/x-ndjson": {"schema": {"oneOf": [*lines, failed]}},
    }


def _contents(types: list[str], item: Mapping[str, Any], examples: list[Any]) -> dict[str, Any]:
    """Return the media types of a body; JSON and msgpack have the item's schema, others none."""
    contents: dict[str, Any] = {}
    for kind in types:
        if kind in ("application/json", "application/msgpack"):
            contents[kind] = {"schema": item}
            if kind == "application/json" and examples:
                contents[kind]["examples"] = {f"example_{n}": {"value": x} for n, x in enumerate(examples, 1)}
        else:
            contents[kind] = {}
    return contents


def examples_of(service: Service) -> list[Any]:
    """Return the first few of the model's examples that JSON can express."""
    found = []
    for example in service.takes.examples:
        with contextlib.suppress(BaseException):  # they are the user's objects, with code of their own
            found.append(msgspec.json.decode(as_json(schema.as_example(example))))
        if len(found) == _MOST_EXAMPLES:
            break
    return found


def _error(code: str, retry: bool = False) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "description": MESSAGES[code],
        "content": {"application/json": {"schema": {"$ref": _COMPONENT + "CarpoolError"}}},
    }
    if retry:
        answer["headers"] = _RETRY
    return answer


def _error_schema(**more: dict[str, str]) -> dict[str, Any]:
    strings = {name: {"type": "string"} for name in ("code", "message", "request_id")}
    step = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
    parts = {"loc": {"type": "array", "items": step}, "msg": {"type": "string"}, "type": {"type": "string"}}
    details = {
        "type": "array",
        "items": {"type": "object", "properties": parts, "required": list(parts)},
        "description": "Every fault of the item, with status 422.",
    }
    reason = {"enum": list(OVERLOAD_REASONS), "description": "Why the request was refused, with status 429."}
    models = {
        "type": "object",
        "additionalProperties": {"type": "string"},
        "description": "What keeps each model that is not ready from answering, at /readyz.",
    }
    error = {
        "type": "object",
        "properties": {**strings, **more, "reason": reason, "details": details, "models": models},
        "required": [*strings, *more],
    }
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}


def _operations(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    plain = {"text/plain": {"schema": {"type": "string"}}}
    live = {"200": {"description": "The process is up.", "content": plain}}
    ready, ready_model = [
        {"200": {"description": f"{what} answers.", "content": plain}, "503": _error("not_ready", retry=True)}
        for what in ("A model", "The model")
    ]
    of_models = [
        (ready_path(each.name), f"ready_{each.name}", f"Readiness of {each.name}", ready_model) for each in endpoints
    ]
    metrics = {"200": {"description": "Metrics for Prometheus.", "content": plain}}
    about = {"200": {"description": "Addresses, for people.", "content": plain}}
    itself = {"200": {"description": "This document.", "content": {"application/json": {}}}}
    return {
        path: {"get": {"operationId": name, "summary": summary, "responses": responses}}
        for path, name, summary, responses in (
            ("/", "overview", "What is served here", about),
            ("/livez", "livez", "Liveness", live),
            ("/readyz", "readyz", "Readiness", ready),
            *of_models,
            ("/metrics", "metrics", "Metrics", metrics),
            ("/openapi.json", "openapi", "OpenAPI document", itself),
        )
    }


_LONGEST_EXAMPLE = 200  # characters; a longer one is no line to type
_HOST: Final = re.compile(r"[A-Za-z0-9._-]{1,253}(:\d{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:\d{1,5})?")
_SAMPLES: Final = {float: "1.0", int: "1", str: '"text"', bool: "true"}
_EVENTS: Final = "-N -H 'Accept: text/event-stream' "
_KEY: Final = '-H "Authorization: Bearer $CARPOOL_KEY" '


def overview(
    endpoints: Sequence[Endpoint],
    pages: Sequence[str],
    of_protocols: Sequence[ShownRoute] = (),
    *,
    host: bytes = b"",
    root_path: str = "",
    is_tls: bool = False,
    needs_key: bool = False,
) -> str:
    """Return the page.

    Args:
        host: Under which name and port the client has asked; empty if it has not said.
    """
    found = host.decode("latin-1")
    base = f"{'https://' if is_tls else ''}{found if _HOST.fullmatch(found) else 'HOST:PORT'}{root_path}"
    lines = list(_lines(endpoints, base, _KEY if needs_key else ""))
    lines += [f"GET {' '.join(pages)}", *lines_of(of_protocols)]
    return "\n".join([f"carpool {__version__}", "", *lines, ""])


def _lines(endpoints: Sequence[Endpoint], base: str, key: str) -> Iterator[str]:
    for endpoint in endpoints:
        yield f"{endpoint.name}: {in_short(endpoint.service.graph)}"
        formats = endpoint.formats
        for address in endpoint.addresses:
            if not address.formats.is_open:
                continue
            yield f"  POST {address.path}{'  (a list of items)' if address.is_list else ''}"
        yield f"  GET {ready_path(endpoint.name)}"
        url, body = f"{base}{endpoint.addresses[0].path}", _body(endpoint.service, formats.readable)
        yield f"  curl {key}{body} {url}"
        if endpoint.service.gives.in_parts and not formats.owns_output:
            yield f"  curl {key}{_EVENTS}{body} {url}"
        yield ""


def _body(service: Service, readable: Sequence[str]) -> str:
    """Return the options of curl that send an item: an example, or one of the type, or a file."""
    item = next((as_json(example).decode() for example in examples_of(service)), None)
    takes = service.takes.input_type
    if "application/json" not in readable:
        return f"-H {shlex.quote(f'Content-Type: {readable[0]}')} --data-binary @FILE"
    if takes is bytes:
        return "-H 'Content-Type: application/octet-stream' --data-binary @FILE"
    if item is None:
        item = _SAMPLES.get(takes) if isinstance(takes, type) else None
    if item is None or len(item) > _LONGEST_EXAMPLE:
        return "--json @item.json"
    return f"--json {shlex.quote(item)}"


_NO_NAME = re.compile(r"[^A-Za-z0-9]+")
_ERRORS_OF_PROTOCOLS = {
    "400": "The request is not what it must be.",
    "404": "There is no such model, or it does not fit.",
    "406": "The model does not write what is accepted, or what the protocol needs.",
    "413": "The body is too large, or has more items than the queue holds.",
    "415": "The content type or coding is not read.",
    "429": "The queue is full.",
    "500": "The model has failed.",
    "503": "The service starts, stops, or cannot answer.",
}
_ERRORS_OF_PAGES = {"503": _ERRORS_OF_PROTOCOLS["503"]}


def operations_of(shown: Sequence[ShownRoute], parameters: Sequence[Any], timeout_status: int) -> dict[str, Any]:
    """Return the addresses as the paths of an OpenAPI document.

    Args:
        parameters: The headers that all requests may have.
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
    errors = {**_ERRORS_OF_PROTOCOLS, str(timeout_status): "The time is over."} if is_asked else _ERRORS_OF_PAGES
    good = {"description": "The answer, as the protocol has it.", "content": {kind: {} for kind in route.writes}}
    bad = {status: {"description": text, "content": {"application/json": {}}} for status, text in errors.items()}
    return dict(sorted({"200": good, **bad}.items()))


def lines_of(shown: Sequence[ShownRoute]) -> Iterator[str]:
    """Yield each protocol with its addresses."""
    for name in dict.fromkeys(each.protocol for each in shown):
        routes = [each.route for each in shown if each.protocol == name]
        yield f"protocol {name}:"
        for method in ("POST", "GET"):
            paths = [route.path for route in routes if route.method == method]
            if paths:
                yield f"  {method} {' '.join(paths)}"
