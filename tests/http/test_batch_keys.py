"""`key=` and `length=` over HTTP: what shares a batch, by a header, by a field and by length."""

from __future__ import annotations

import json
import socket
from contextlib import ExitStack
from typing import Any

import pytest

from carpool import Model, Service, Stage
from carpool.http.app import App
from tests.http.streamed import Reply
from tests.support.http import models
from tests.support.http.front import post
from tests.support.http.jobs import job
from tests.support.http.net import Client, Gate, serving
from tests.support.http.served import ask
from tests.support.waiting import PATIENCE_S


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
        queue = running.app.endpoints[0].driver.core.crews[0].queue  # type: ignore[union-attr]
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


class Together(Model):
    """Says with which others each number shared its batch."""

    def predict(self, numbers: list[int]) -> list[list[int]]:
        return [sorted(numbers)] * len(numbers)


NUMBERS = list(range(1, 61))


def by_lines(port: int) -> Any:
    body = b"".join(b"%d\n" % number for number in NUMBERS)
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
        sock.sendall(post(body, "/predict", "Content-Type: application/x-ndjson"))
        return [json.loads(line) for line in Reply(sock).lines()]


def by_list(port: int) -> Any:
    return json.loads(ask(port, "/predict/many", NUMBERS).body)


def by_instances(port: int) -> Any:
    return json.loads(ask(port, "/v1/models/together:predict", {"instances": NUMBERS}).body)["predictions"]


@pytest.mark.parametrize("sent", [by_lines, by_list, by_instances])
@pytest.mark.parametrize("settings", ["key", "length"])
def test_each_item_of_a_request_has_its_own_key_and_length(settings: str, sent: Any) -> None:
    """Items that come in one request, as lines, as a list or by a protocol, are put into batches by
    `key=` and `length=` as those that come alone.
    """
    given: dict[str, Any] = {"key": lambda n: n % 3} if settings == "key" else {"length": abs, "max_padded_size": 120}
    stage = Stage(Together, max_batch_size=8, run_in="thread", workers=1, **given)
    with serving(App(Service(stage, name="together"))) as running:
        batches_of = sent(running.port)
    for number, batch in zip(NUMBERS, batches_of, strict=True):
        assert number in batch
        if settings == "key":
            assert {other % 3 for other in batch} == {number % 3}
        else:
            assert len(batch) * max(batch) <= 120


def test_a_header_is_the_key_at_addresses_of_protocols_too() -> None:
    """Requests with different headers share no batch, also where a protocol says the priority."""
    stage = Stage(Together, max_batch_size=64, run_in="thread", workers=1, key="header:x-adapter")
    keys: list[Any] = []
    with serving(App(Service(stage, name="together"))) as running:
        driver = running.app.endpoints[0].driver
        assert driver is not None
        submit = driver.submit_all
        driver.submit_all = lambda requests: (keys.extend(each.lane.key for each in requests), submit(requests))  # type: ignore[method-assign,assignment,func-returns-value]
        tensor = {"name": "input", "datatype": "INT64", "shape": [1], "data": [1]}
        asked = {"inputs": [tensor], "parameters": {"priority": 1}}
        assert ask(running.port, "/v2/models/together/infer", asked, "X-Adapter: a").status == 200
        assert ask(running.port, "/v1/models/together:predict", {"instances": [1, 2]}, "X-Adapter: b").status == 200
        assert ask(running.port, "/v1/models/together:predict", {"instances": [1]}).status == 200
    assert keys == ["a", "b", "b", None]
