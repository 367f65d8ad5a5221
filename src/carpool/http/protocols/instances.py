"""Requests that list instances and answers that list predictions: TF Serving, KServe V1, Vertex AI,
MLflow and SageMaker share this form.

An instance is an item, as JSON. It goes to the worker as it was written, which checks it; bytes may
come as `{"b64": ...}` in it.

Two protocols stand here that are little more: `KServeV1`, the REST protocol of TF Serving, and
`Vertex`, the container contract of Vertex AI, which names port and paths in variables of the
environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, Final

import msgspec

from carpool.engine.allowance import Allowance
from carpool.engine.wire.payload import JSON
from carpool.errors import InvalidRequest
from carpool.http.exchange import HttpResponse
from carpool.http.protocols.base import (
    HttpProtocol,
    ModelOfApp,
    ProtocolRequest,
    ProtocolRoute,
    ShownError,
    Submission,
    first_of,
    nobody_is_first,
)
from carpool.http.protocols.wording import (
    as_item,
    as_response,
    listed_in,
    members_of,
    routes_of_list,
    value_in,
    versions_of,
    without_details,
)
from carpool.service.settings import UsualNumber, UsualText

_WRONG_INPUTS = "inputs must be a list of items, or an object with a list for each field of them"
_encode = as_item
_decode = msgspec.json.Decoder().decode


def of_instances(model: ModelOfApp, instances: bytes, key: str = "predictions") -> Submission:
    """Submit a JSON list of items; the answer is `{"predictions": [...]}`.

    Args:
        key: The name of the list of results in the answer.

    Raises:
        InvalidRequest: It is no list.
    """
    return of_items(model, listed_in(instances, allowance_of(model, instances)), partial(as_list, key))


def allowance_of(model: ModelOfApp, body: bytes | bytearray) -> Allowance:
    """Return the limits of a body that lists items: of a model of tables they are the rows of
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
        inputs: The list or object.
        key: The name of the list of results in the answer.
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


_SIGNATURE = b'"serving_default"'


class KServeV1(HttpProtocol):
    """`POST /v1/models/NAME:predict`, with instances or with columns of inputs."""

    name = "kserve-v1"
    prefixes = ("/v1/models",)

    def routes(self, models: Sequence[ModelOfApp]) -> Iterator[ProtocolRoute]:
        yield from routes_of_list(models)
        for model in models:
            answer = _KServePredict(model).answer
            predict = partial(ProtocolRoute, "POST", answer=answer, model=model, sent_as=JSON, wanted_as=JSON)
            for i, name in enumerate(versions_of(model.name)):
                summary = f"Ask {model.name} for predictions of instances"
                yield predict(path=f"/v1/models/{name}:predict", summary=summary, is_alias=i > 0)
                yield predict(path=f"/v1/models/{name}/versions/1:predict", is_alias=True)

    def error(self, error: ShownError) -> HttpResponse:
        return without_details(error)


class _KServePredict:
    """The route of one model."""

    def __init__(self, model: ModelOfApp) -> None:
        self._model = model

    def answer(self, request: ProtocolRequest) -> Submission:
        members = members_of(request.body)
        if members.get("signature_name", _SIGNATURE) not in (_SIGNATURE, b'""'):
            raise InvalidRequest('the model has no such signature: "signature_name" is "serving_default", or left out')
        if ("instances" in members) == ("inputs" in members):
            raise InvalidRequest('the body must be an object with either "instances" or "inputs"')
        if "instances" in members:
            return of_instances(self._model, members["instances"])
        return of_inputs(self._model, members["inputs"], "outputs", as_columns)


HEALTH_ROUTE: Final = "AIP_HEALTH_ROUTE"
PREDICT_ROUTE: Final = "AIP_PREDICT_ROUTE"
HTTP_PORT: Final = "AIP_HTTP_PORT"
DEFAULT_PORT: Final = 8080
_DEFAULTS = {HEALTH_ROUTE: "/health", PREDICT_ROUTE: "/predict"}


class Vertex(HttpProtocol):
    """Answers at the paths that Vertex AI has chosen, if it has; the model is the first one."""

    name = "vertex"

    def __init__(self, environ: Mapping[str, str] | None = None, *, always: bool = False) -> None:
        self._environ = os.environ if environ is None else environ
        self._always = always

    @property
    def is_wanted(self) -> bool:
        """Whether there is anything to answer at."""
        return self._always or PREDICT_ROUTE in self._environ

    @staticmethod
    def address(host: str, port: int) -> tuple[str, int]:
        """Return where a container of Vertex AI listens, unless the user says otherwise.

        Raises:
            ValueError: The variable holds no port.
        """
        given = os.environ.get(HTTP_PORT) or str(DEFAULT_PORT)
        if not given.isdigit():
            raise ValueError(f"{HTTP_PORT} is {given!r}, which is no port")
        return (
            "0.0.0.0" if isinstance(host, UsualText) else host,
            int(given) if isinstance(port, UsualNumber) else port,
        )

    def routes(self, models: Sequence[ModelOfApp]) -> Iterator[ProtocolRoute]:
        if not self.is_wanted:
            return
        paths = {name: self._environ.get(name) or default for name, default in _DEFAULTS.items()}
        yield ProtocolRoute("GET", paths[HEALTH_ROUTE], _health, replaces=True, summary="Readiness")
        model = first_of(models)
        yield ProtocolRoute(
            "POST",
            paths[PREDICT_ROUTE],
            nobody_is_first(models) if model is None else _VertexPredict(model).answer,
            model,
            replaces=True,
            summary="" if model is None else f"Ask {model.name} for predictions of instances",
            sent_as=JSON,
            wanted_as=JSON,
            fits=lambda: model is not None,
        )

    def error(self, error: ShownError) -> HttpResponse:
        return without_details(error)


def _health(request: ProtocolRequest) -> HttpResponse:
    if request.problem is not None:
        return as_response({"error": request.problem}, status=503)
    return as_response({"status": "Healthy"})


class _VertexPredict:
    """The route of the model."""

    def __init__(self, model: ModelOfApp) -> None:
        self._model = model

    def answer(self, request: ProtocolRequest) -> Submission:
        members = members_of(request.body)
        if "instances" not in members:
            raise InvalidRequest('the body must be an object with "instances", a list of items')
        if members.get("parameters", b"{}") != b"{}":
            raise InvalidRequest('the model takes no "parameters": put what it needs into the instances')
        return of_instances(self._model, members["instances"])
