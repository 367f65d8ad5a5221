"""Requests that list instances and answers that list predictions: TF Serving, KServe V1, Vertex AI,
MLflow and SageMaker share this form.

An instance is an item, as JSON. It goes to the worker as it was written, which checks it; bytes may
come as `{"b64": ...}` in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Any

import msgspec

from carpool.engine.allowance import Allowance
from carpool.engine.wire.payload import JSON
from carpool.errors import InvalidRequest
from carpool.http.exchange import HttpResponse
from carpool.http.protocols.base import ModelOfApp, Submission
from carpool.http.protocols.wording import as_item, as_response, listed_in, members_of, value_in

_WRONG_INPUTS = "inputs must be a list of items, or an object with a list for each field of them"
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
    return of_items(model, listed_in(instances, allowance_of(model, instances)), partial(as_list, key))


def allowance_of(model: ModelOfApp, body: bytes | bytearray) -> Allowance:
    """Return what may be made of a body that lists items: of a model of tables they are the rows of
    one table, which is one item.
    """
    allowance = model.allowance(len(body))
    if _takes_tables(model):
        allowance.items = inf
    return allowance


def _takes_tables(model: ModelOfApp) -> bool:
    return getattr(getattr(model.service.first, "model", None), "is_table", False)


def of_items(model: ModelOfApp, items: Sequence[bytes], respond: Callable[[list[Any]], HttpResponse]) -> Submission:
    """Submit items that are JSON each; of a model of tables they are the rows of one table.

    Args:
        model: Gets the items.
        items: Each as JSON.
        respond: Makes the response of the results, each as JSON.
    """
    plain = [without_b64(item) for item in items]
    if _takes_tables(model):
        body = b"[%b]" % b",".join(plain)
        rows = Allowance(0)  # without a limit: they are the answers of our own worker
        return Submission(model, [body], lambda results: respond(listed_in(results[0], rows)), JSON, JSON)
    return Submission(model, plain, respond, JSON, JSON)


def of_inputs(
    model: ModelOfApp, inputs: bytes, key: str, respond: Callable[[list[Any]], HttpResponse] | None = None
) -> Submission:
    """Submit items that are a list, or are given column by column: an object of lists.

    Args:
        model: Gets the items.
        inputs: The list or object.
        key: What the answer calls the list of results.
        respond: Makes the response of the results of columns; None for a list of them.

    Raises:
        InvalidRequest: It is something else, or the columns have different lengths.
    """
    if inputs.lstrip()[:1] == b"[":
        return of_instances(model, inputs, key)
    if inputs.lstrip()[:1] != b"{":
        raise InvalidRequest(_WRONG_INPUTS)
    allowance = allowance_of(model, inputs)
    columns = members_of(inputs)
    if not columns or not all(each.lstrip()[:1] == b"[" for each in columns.values()):
        raise InvalidRequest(_WRONG_INPUTS)
    lists = [listed_in(each, allowance) for each in columns.values()]
    if len(set(map(len, lists))) != 1:
        raise InvalidRequest("the lists in inputs have different lengths")
    items = records_of(list(columns), [[*map(msgspec.Raw, row)] for row in zip(*lists, strict=True)], allowance)
    return of_items(model, items, respond or partial(as_list, key))


def records_of(names: Sequence[str], rows: Sequence[Sequence[Any]], allowance: Allowance) -> list[bytes]:
    """Return rows as JSON objects, each with all names.

    Args:
        names: Of the fields.
        rows: The values of each, in the order of the names.
        allowance: What may be made of the body in which each name stands once.

    Raises:
        InvalidRequest: The objects would be out of proportion to the body (413).
    """
    repeated = sum(len(_encode(name)) for name in names) * len(rows)
    allowance.take_bytes(repeated, "the names of the columns, once in each row,", "give them shorter names")
    return [_encode(dict(zip(names, row, strict=True))) for row in rows]


def as_list(key: str, results: list[bytes]) -> HttpResponse:
    """Return the response that lists results."""
    return HttpResponse(200, b'{"%b": [%b]}' % (key.encode(), b", ".join(results)))


def as_columns(results: list[bytes]) -> HttpResponse:
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
