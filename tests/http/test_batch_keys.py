"""`key=` and `length=` over HTTP: what shares a batch, by a header, by a field and by length."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import pytest

from carpool import Service, Stage
from carpool.http.app import App
from tests.support.http import models
from tests.support.http.jobs import job
from tests.support.http.net import Client, Gate, serving


def value_of(job: models.Job) -> int:
    """The key of a job, or its length."""
    return job.value


def batches(settings: dict[str, Any], requests: list[tuple[int, str]]) -> list[int]:
    """With how many each request shared its batch, where all wait while another one runs."""
    stage = Stage(models.Gated, max_batch_size=10, policy="greedy", **settings)
    with serving(App(Service(stage, name="keyed"))) as running, Gate() as gate, ExitStack() as stack:
        clients = [stack.enter_context(Client(running.port)) for _ in range(1 + len(requests))]
        clients[0].send(job(1, gate, path="/predict"))
        gate.knocked()
        queue = running.app.endpoints[0].driver.pipeline.batchers[0].queue  # type: ignore[union-attr]
        for n, (client, (value, header)) in enumerate(zip(clients[1:], requests, strict=True), 1):
            client.send(job(value, None, *([f"X-Adapter: {header}"] if header else []), path="/predict"))
            running.wait_until(lambda n=n: len(queue) == n)  # type: ignore[misc]
        gate.open()
        answers = [json.loads(client.answer().body) for client in clients]
    assert [answer["value"] for answer in answers[1:]] == [value for value, _ in requests]
    return [answer["batch"] for answer in answers[1:]]


@pytest.mark.parametrize(
    ("key", "requests", "shared"),
    [
        pytest.param(
            "header:x-adapter", [(1, "a"), (2, "b"), (3, "a"), (4, ""), (5, "a")], [3, 1, 3, 1, 3], id="header"
        ),
        pytest.param("value", [(1, ""), (2, ""), (1, ""), (2, ""), (3, "")], [2, 2, 2, 2, 1], id="field"),
        pytest.param(value_of, [(7, ""), (8, ""), (7, "a")], [2, 1, 2], id="function"),
        pytest.param("no such field", [(1, "a"), (2, "b")], [2, 2], id="no field"),
    ],
)
def test_requests_of_one_key_share_a_batch(key: Any, requests: list[tuple[int, str]], shared: list[int]) -> None:
    """Requests with the same header, or the same field of their items, share a batch with no others."""
    assert batches({"key": key}, requests) == shared


def test_max_padded_size_counts_bodies_by_their_length() -> None:
    """A batch of bodies holds as many as count times longest allows, those of like length first."""
    requests = [(10, ""), (90, ""), (11, ""), (80, ""), (12, "")]
    assert batches({"length": value_of, "max_padded_size": 200}, requests) == [3, 2, 3, 2, 3]
