"""Requests that list instances and answers that list predictions: TF Serving, KServe V1, Vertex AI,
MLflow and SageMaker share this form.

An instance is an item, as JSON. It goes to the worker as it was written, which checks it; bytes may
come as `{"b64": ...}` in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from carpool.errors import InvalidRequest
from carpool.http.exchange import JSON_TYPE, HttpResponse
from carpool.http.protocols.base import ModelOfApp, Submission
from carpool.http.protocols.wording import as_item, as_response, listed_in, value_in
from carpool.http_request import pack_head
from carpool.wire.payload import CUSTOM

_encode = as_item
_decode = msgspec.json.Decoder().decode


def of_instances(model: ModelOfApp, instances: bytes, key: str = "predictions") -> Submission:
    """Submit a JSON list of items; the answer is `{"predictions": [...]}`.

    Args:
        model: Gets the items.
        instances: The list.
        key: What the answer calls the list of results.

    Raises:
        InvalidRequest: It is no list.
    """
    return of_items(model, listed_in(instances), partial(as_list, key))


def of_items(model: ModelOfApp, items: Sequence[bytes], respond: Callable[[list[Any]], HttpResponse]) -> Submission:
    """Submit items that are JSON each; of a model of tables they are the rows of one table.

    Args:
        model: Gets the items.
        items: Each as JSON.
        respond: Makes the response of the results, each as JSON.
    """
    sent_as, wanted_as = model.formats.choose(JSON_TYPE, JSON_TYPE)
    plain = [without_b64(item) for item in items]
    if getattr(model.service.stages[0].model, "is_table", False):
        body = as_body(model, b"[%b]" % b",".join(plain), sent_as)
        return Submission(model, [body], lambda results: respond(listed_in(results[0])), sent_as, wanted_as)
    return Submission(model, [as_body(model, item, sent_as) for item in plain], respond, sent_as, wanted_as)


def as_body(model: ModelOfApp, body: bytes | bytearray, format: int, content_type: bytes = JSON_TYPE) -> Any:
    """Return a body as an item: with a head, if the model's own `decode` asks for whole requests.

    Args:
        model: Gets it.
        body: As a client of the model's own address would send it.
        format: How it is to be read.
        content_type: What it is.
    """
    if format != CUSTOM or not model.takes.decodes_requests:
        return body
    return [pack_head(b"/predict", b"", [(b"content-type", content_type)]), body]


def of_columns(model: ModelOfApp, inputs: bytes) -> Submission:
    """Submit items that are given column by column: an object of lists, or a list; the answer is
    `{"outputs": ...}` in the same form.

    Raises:
        InvalidRequest: It is something else, or the columns have different lengths.
    """
    columns = value_in(inputs)
    if isinstance(columns, list):
        return of_items(model, listed_in(inputs), partial(as_list, "outputs"))
    if not isinstance(columns, dict) or not columns or not all(isinstance(each, list) for each in columns.values()):
        raise InvalidRequest("inputs must be a list of items, or an object with a list for each field of them")
    if len({len(each) for each in columns.values()}) != 1:
        raise InvalidRequest("the lists in inputs have different lengths")
    rows = [_encode(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    return of_items(model, rows, _as_columns)


def as_list(key: str, results: list[bytes]) -> HttpResponse:
    """Return the response that lists results."""
    return HttpResponse(200, b'{"%b": [%b]}' % (key.encode(), b", ".join(results)))


def _as_columns(results: list[bytes]) -> HttpResponse:
    """Return results by field if they are objects of the same fields; else as a list."""
    values = [_decode(result) for result in results]
    if values and all(isinstance(value, dict) and value.keys() == values[0].keys() for value in values):
        return as_response({"outputs": {name: [value[name] for value in values] for name in values[0]}})
    return as_response({"outputs": values})


def without_b64(item: bytes) -> bytes:
    """Return an item in which texts stand for objects that are `{"b64": TEXT}`.

    Raises:
        InvalidRequest: It cannot be read.
    """
    if b'"b64"' not in item:
        return item
    return _encode(_unwrapped(value_in(item)))


def _unwrapped(value: Any) -> Any:
    if isinstance(value, list):
        return [_unwrapped(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"b64"} and isinstance(value["b64"], str):
        return value["b64"]
    return {name: _unwrapped(each) for name, each in value.items()}
