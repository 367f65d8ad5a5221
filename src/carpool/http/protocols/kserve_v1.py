"""The REST protocol of TF Serving, which is KServe's V1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

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
)
from carpool.http.protocols.instances import as_columns, of_inputs, of_instances
from carpool.http.protocols.wording import members_of, routes_of_list, versions_of, without_details

_SIGNATURE = b'"serving_default"'


class KServeV1(HttpProtocol):
    """`POST /v1/models/NAME:predict`, with instances or with columns of inputs."""

    name = "kserve-v1"
    prefixes = ("/v1/models",)

    def routes(self, models: Sequence[ModelOfApp]) -> Iterator[ProtocolRoute]:
        yield from routes_of_list(models)
        for model in models:
            answer = _Predict(model).answer
            predict = partial(ProtocolRoute, "POST", answer=answer, model=model, sent_as=JSON, wanted_as=JSON)
            for i, name in enumerate(versions_of(model.name)):
                summary = f"Ask {model.name} for predictions of instances"
                yield predict(path=f"/v1/models/{name}:predict", summary=summary, is_alias=i > 0)
                yield predict(path=f"/v1/models/{name}/versions/1:predict", is_alias=True)

    def error(self, error: ShownError) -> HttpResponse:
        return without_details(error)


class _Predict:
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
