"""`/v1/models`, which KServe V1, TF Serving and OpenAI have: one answer with the keys of all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from carpool.http.exchange import HttpResponse
from carpool.http.protocols.base import ModelOfApp, ProtocolRequest, ProtocolRoute
from carpool.http.protocols.wording import as_response, versions_of

_CREATED: Final = 0  # OpenAI's clients want the time at which a model was made, which nobody knows


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
    """What is told of one model."""

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
