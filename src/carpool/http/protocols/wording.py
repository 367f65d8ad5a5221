"""The parts that several protocols share: reading JSON, paths of models, errors as a single text,
and `/v1/models`, which KServe V1, TF Serving and OpenAI have: one answer with the keys of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, Final, TypeVar
from urllib.parse import quote

import msgspec

from carpool.engine.allowance import Allowance
from carpool.engine.hints import nesting, schema
from carpool.errors import CarpoolError, InvalidRequest, ModelError
from carpool.http.exchange import HttpResponse
from carpool.http.protocols.base import ModelOfApp, ProtocolRequest, ProtocolRoute, ShownError

T = TypeVar("T")

BAD_REQUEST: Final = 400
UNPROCESSABLE: Final = 422
_PIECE: Final = 10_000  # values
_read_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_read_value = msgspec.json.Decoder().decode
_read_text = msgspec.json.Decoder(str).decode
_read_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


def as_response(value: object, status: int = 200) -> HttpResponse:
    """Return a value of our own making as a JSON response. Raises `ModelError` if results in it
    hold NaN or an infinity.
    """
    return HttpResponse(status, _written(value))


def _written(value: object) -> bytes:
    try:
        return schema.json_bytes(value)
    except ValueError as error:
        raise ModelError(f"the answer cannot be written: {error}", code="bad_result") from error


def as_item(value: object) -> bytes:
    """Return the value of a client as an item in JSON. Raises `InvalidRequest` if it holds NaN or
    an infinity.
    """
    try:
        return schema.json_bytes(value)
    except ValueError as error:
        raise InvalidRequest(f"an item cannot be read: {error}") from error


def check_finite(numbers: Sequence[float]) -> None:
    """Raise `ModelError` if NaN or an infinity is among the numbers that a model has returned."""
    if not isfinite(sum(numbers)) and not all(map(isfinite, numbers)):  # either makes the sum so
        raise ModelError("the model returned NaN or infinity, which the answer cannot express", code="bad_result")


def as_written(values: Any) -> msgspec.Raw:
    """Return a list, or an array of one dimension, as it is written in JSON.

    It is written piece by piece, as no other thread runs while one call writes millions of values.

    Raises:
        ModelError: NaN or an infinity is among the values.
    """
    pieces = [values[at : at + _PIECE] for at in range(0, len(values), _PIECE)]
    written = [_written(piece if isinstance(piece, list) else piece.tolist())[1:-1] for piece in pieces]
    return msgspec.Raw(b"[%b]" % b",".join(written))


def read(decode: Callable[[Any], T], body: bytes | bytearray) -> T:
    """Return the value that a decoder of JSON reads. Raises `InvalidRequest` if it cannot."""
    try:
        result: T = nesting.bounded(decode, nesting.is_deep_json)(body)
        return result
    except BaseException as error:
        ours = schema.as_our_error(error, "JSON", Any, body)
        if isinstance(ours, InvalidRequest):
            raise ours from None
        if isinstance(ours, CarpoolError):
            raise InvalidRequest(str(ours)) from None
        raise


def members_of(body: bytes | bytearray | memoryview) -> dict[str, bytes]:
    """Return the members of a JSON object, each as it was written, without those that are null.

    Clients send null for what their user has not set, so it means the same as to leave it out.

    Raises:
        InvalidRequest: It is no object.
    """
    members = {name: bytes(raw) for name, raw in read(_read_members, bytes(body)).items()}
    return {name: raw for name, raw in members.items() if raw != b"null"}


def struct_of(members: Mapping[str, bytes], kind: type[T]) -> T:
    """Return the members of a JSON object as a struct. Raises `InvalidRequest`."""
    value = {name: value_in(raw) for name, raw in members.items()}
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error)) from None


def name_in(members: Mapping[str, bytes]) -> str | None:
    """Return the name of the model that a request asks, None if it names none.

    Raises:
        InvalidRequest: It is not a text.
    """
    given = members.get("model")
    return None if given is None else read(_read_text, given)


def listed_in(body: bytes, allowance: Allowance) -> list[bytes]:
    """Return the elements of a JSON list, each as it was written. Raises `InvalidRequest`."""
    allowance.check_json_list(body)
    return [bytes(raw) for raw in read(_read_list, body)]


def value_in(body: bytes | bytearray) -> Any:
    """Return the value of a piece of JSON, in builtins. Raises `InvalidRequest`."""
    return read(_read_value, body)


def versions_of(name: str) -> list[str]:
    """Return the ways in which clients write a model's name in a path: some leave slashes in it."""
    return list(dict.fromkeys([quote(name, safe=""), quote(name)]))


def without_details(error: ShownError) -> HttpResponse:
    """Return an error as `{"error": TEXT}`; an item that does not fit is a bad request."""
    status = BAD_REQUEST if error.status == UNPROCESSABLE else error.status
    return as_response({"error": error.message}, status)


_CREATED: Final = 0  # OpenAI's clients want the time at which a model was made, which is unknown


def routes_of_list(models: Sequence[ModelOfApp]) -> Iterator[ProtocolRoute]:
    """Yield the addresses of the list and of each model in it."""

    def listed(request: ProtocolRequest) -> HttpResponse:
        names = [model.name for model in models]
        return as_response({"object": "list", "data": [_entry(model) for model in models], "models": names})

    yield ProtocolRoute("GET", "/v1/models", listed, summary="The models")
    for model in models:
        described, summary = _Described(model).answer, f"The state of {model.name}"
        for i, name in enumerate(versions_of(model.name)):
            yield ProtocolRoute("GET", f"/v1/models/{name}", described, model, summary=summary, is_alias=i > 0)
            yield ProtocolRoute("GET", f"/v1/models/{name}/versions/1", described, model, is_alias=True)


class _Described:
    """The entry of one model."""

    def __init__(self, model: ModelOfApp) -> None:
        self._model = model

    def answer(self, request: ProtocolRequest) -> HttpResponse:
        problem = request.problem or self._model.problem
        state = "AVAILABLE" if problem is None else "LOADING"
        status = {"error_code": "OK" if problem is None else "UNAVAILABLE", "error_message": problem or ""}
        return as_response(
            {
                **_entry(self._model),
                "name": self._model.name,
                "ready": problem is None,
                "model_version_status": [{"version": "1", "state": state, "status": status}],
            },
            status=200 if problem is None else 503,
        )


def _entry(model: ModelOfApp) -> dict[str, Any]:
    return {"id": model.name, "object": "model", "created": _CREATED, "owned_by": "carpool"}
