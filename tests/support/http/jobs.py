"""Requests to the model that waits at a gate, and what has become of them."""

from __future__ import annotations

import json

from carpool import Service, Stage
from tests.support.http import models
from tests.support.http.front import post
from tests.support.http.net import Gate, code_of
from tests.support.http.wire import Answer

GATED = "/models/gated/predict"


def job(value: int, gate: Gate | None = None, *headers: str, path: str = GATED) -> bytes:
    """A request to `models.Gated`."""
    return post(json.dumps({"value": value, "gate": gate.path if gate else ""}).encode(), path, *headers)


def outcome(answer: Answer) -> tuple[int, str]:
    """The status and the error code of an answer."""
    return answer.status, code_of(answer)


def small_queue(**settings: object) -> Service:
    """One worker, batches of one, room for two."""
    return Service(Stage(models.Gated, max_batch_size=1, max_queue_size=2), name="gated", **settings)  # type: ignore[arg-type]
