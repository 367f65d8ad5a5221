"""Writes the OpenAPI 3.1 document of an app from the models' type hints and examples."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from carpool.hints import schema
from carpool.http.codec import MESSAGES, Formats, as_json
from carpool.version import __version__

if TYPE_CHECKING:
    from carpool.service.service import Service

_ERRORS = {
    "400": ("InvalidRequest", "invalid_request"),
    "413": ("TooLarge", "too_large"),
    "415": ("UnsupportedMediaType", "unsupported_media_type"),
    "422": ("InvalidItem", "invalid_item"),
    "429": ("Overloaded", "overloaded"),
    "500": ("ModelError", "model_error"),
    "503": ("Unavailable", "unavailable"),
}
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


def document(services: Sequence[Service], timeout_status: int, max_body_bytes: int) -> dict[str, Any]:
    """Return the OpenAPI document of an app.

    Args:
        services: what the app serves; the first service is also at `/predict`.
        timeout_status: status of a missed deadline.
        max_body_bytes: size of the largest request body.
    """
    types: list[Any] = []
    for service in services:
        last = service.stages[-1].traits
        types += [service.stages[0].traits.input_type, last.output_type, last.part_type]
    found, components = schema.json_schema(types, _COMPONENT + "{name}")
    for of_results in (slice(1, None, 3), slice(2, None, 3)):
        results = zip(types[of_results], found[of_results], strict=True)
        found[of_results] = [schema.result_schema(kind, each) for kind, each in results]
    schemas = _Definitions(components).moved_out_of(found)
    paths: dict[str, Any] = {}
    for i, service in enumerate(services):
        takes, gives, part = schemas[3 * i : 3 * i + 3]
        for path in [predict_path(service.name), *(["/predict"] if i == 0 else [])]:
            paths[path] = {"post": _predict(service, path, takes, gives, part, timeout_status, max_body_bytes)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": ", ".join(service.name for service in services),
            "version": __version__,
            "description": "Requests are batched by the server; the request body is the item.",
        },
        "paths": {**paths, **_operations()},
        "components": {"schemas": {**components, "CarpoolError": _error_schema()}},
    }


def predict_path(name: str) -> str:
    """Return the path of a service."""
    return f"/models/{quote(name, safe='')}/predict"


class _Definitions:
    """Moves definitions out of schemas, where pydantic puts them, to the document's components.

    Args:
        components: those of the document; they are extended, and their references mended.
    """

    _INSIDE = "#/$defs/"

    def __init__(self, components: dict[str, Any]) -> None:
        self._components = components
        self._moved: dict[str, Any] = {}  # definitions by new name, as they were
        for name in list(components):
            components[name] = self._mend(components[name], {})

    def moved_out_of(self, schemas: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the schemas without the definitions in them, which become components."""
        return [self._mend(each, {}) for each in schemas]

    def _mend(self, part: Any, names: dict[str, str]) -> Any:
        """Mend part of a schema; `names` maps the definitions around it to their new names."""
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
    path: str,
    takes: dict[str, Any],
    gives: dict[str, Any],
    part: dict[str, Any],
    timeout_status: int,
    max_body_bytes: int,
) -> dict[str, Any]:
    formats = Formats(service.stages[0].traits, service.stages[-1].traits)
    responses: dict[str, Any] = {
        "200": {"description": "The model's answer.", "content": _contents(formats.writable, gives, [])}
    }
    if service.stages[-1].traits.in_parts:
        responses["200"]["content"].update(_in_parts(part))
    for status, (_, code) in _ERRORS.items():
        responses[status] = _error(code, retry=status in ("429", "503"))
    responses[str(timeout_status)] = _error("deadline_exceeded")
    return {
        "operationId": f"predict_{service.name}" if path != "/predict" else "predict",
        "summary": f"Ask {service.name}",
        "description": f"Bodies of up to {max_body_bytes} bytes.",
        "parameters": _PARAMETERS,
        "requestBody": {
            "required": True,
            "content": _contents(formats.readable, takes, _examples(service)),
        },
        "responses": dict(sorted(responses.items())),
    }


def _in_parts(part: dict[str, Any]) -> dict[str, Any]:
    """Return the media types of an answer in parts, with the schemas of what they have."""
    n = {"type": "object", "properties": {"parts": {"type": "integer"}}, "required": ["parts"]}
    failed = {"$ref": _COMPONENT + "CarpoolError"}
    lines = [{"type": "object", "properties": {"part": part}, "required": ["part"]}]
    lines.append({"type": "object", "properties": {"end": n}, "required": ["end"]})
    events = "`data:` for each part; then `event: end` with how many there were, or `event: error`."
    return {
        "text/event-stream": {"schema": {"type": "string", "description": events, "contentSchema": part}},
        "application/x-ndjson": {"schema": {"oneOf": [*lines, failed]}},
    }


def _contents(types: list[str], item: dict[str, Any], examples: list[Any]) -> dict[str, Any]:
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


def _examples(service: Service) -> list[Any]:
    """Return the first few of the model's examples that JSON can express."""
    found = []
    for example in service.stages[0].traits.examples:
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


def _error_schema() -> dict[str, Any]:
    strings = {name: {"type": "string"} for name in ("code", "message", "request_id")}
    step = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
    parts = {"loc": {"type": "array", "items": step}, "msg": {"type": "string"}, "type": {"type": "string"}}
    details = {
        "type": "array",
        "items": {"type": "object", "properties": parts, "required": list(parts)},
        "description": "Every fault of the item, with status 422.",
    }
    error = {"type": "object", "properties": {**strings, "details": details}, "required": list(strings)}
    return {"type": "object", "properties": {"error": error}, "required": ["error"]}


def _operations() -> dict[str, Any]:
    """Return the pages that every app has."""
    plain = {"text/plain": {"schema": {"type": "string"}}}
    live = {"200": {"description": "The process is up.", "content": plain}}
    ready = {"200": {"description": "The models answer.", "content": plain}, "503": _error("not_ready", retry=True)}
    metrics = {"200": {"description": "Metrics for Prometheus.", "content": plain}}
    itself = {"200": {"description": "This document.", "content": {"application/json": {}}}}
    return {
        path: {"get": {"operationId": name, "summary": summary, "responses": responses}}
        for path, name, summary, responses in (
            ("/livez", "livez", "Liveness", live),
            ("/readyz", "readyz", "Readiness", ready),
            ("/metrics", "metrics", "Metrics", metrics),
            ("/openapi.json", "openapi", "OpenAPI document", itself),
        )
    }
