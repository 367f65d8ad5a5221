"""Vertex AI: the container contract. It names port and paths in variables of the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

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
from carpool.http.protocols.instances import of_instances
from carpool.http.protocols.wording import as_response, members_of, without_details
from carpool.service.settings import UsualNumber, UsualText

HEALTH_ROUTE: Final = "AIP_HEALTH_ROUTE"
PREDICT_ROUTE: Final = "AIP_PREDICT_ROUTE"
HTTP_PORT: Final = "AIP_HTTP_PORT"
DEFAULT_PORT: Final = 8080
_DEFAULTS = {HEALTH_ROUTE: "/health", PREDICT_ROUTE: "/predict"}


class Vertex(HttpProtocol):
    """Answers at the paths that Vertex AI has chosen, if it has; the model is the first one.

    Args:
        environ: The variables; those of the process by default.
        always: Whether it answers at the usual paths where no variable names them.
    """

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

        Args:
            host: As the user gives it, or the usual one.
            port: As the user gives it, or the usual one.

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
            nobody_is_first(models) if model is None else _Predict(model).answer,
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


class _Predict:
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
