"""`size=` over HTTP: bodies are read by the model's types before they wait, and batches hold so much and no more."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest

from carpool import Service, Stage
from carpool.http.app import App
from tests.support.http import models
from tests.support.http.front import post
from tests.support.http.jobs import job
from tests.support.http.net import Client, Gate, RunningServer, code_of, serving


def weight(job: models.Job) -> int:
    """A job weighs its value; the heaviest break the scales."""
    if job.value > 1000:
        raise OverflowError("the secret is 1234")
    return job.value


def sized(**settings: int) -> Service:
    return Service(Stage(models.Gated, max_batch_size=10, size=weight, **settings), name="sized")


def waiting(running: RunningServer) -> tuple[int, int]:
    """How many wait in the first queue, and the sum of their sizes."""
    queue = running.app.endpoints[0].driver.core.crews[0].queue  # type: ignore[union-attr]
    return len(queue), queue.size


def test_batches_hold_no_more_than_the_limit() -> None:
    """As many of the waiting requests go together as the limit on their sizes allows, and one over
    the limit goes alone; the queue counts requests.
    """
    with serving(App(sized())) as running, Gate() as gate, ExitStack() as stack:
        clients = [stack.enter_context(Client(running.port)) for _ in range(7)]
        clients[0].send(job(1, gate, path="/predict"))
        gate.knocked()
        for n, (client, value) in enumerate(zip(clients[1:], (4, 6, 5, 500, 9, 1), strict=True), 1):
            client.send(job(value, path="/predict"))
            running.wait_until(lambda n=n: waiting(running)[0] == n)  # type: ignore[misc]
        seen = running.call(lambda: waiting(running))
        gate.open()
        answers = [json.loads(client.answer().body) for client in clients]

    assert seen == (6, 525)
    assert [(answer["value"], answer["batch"]) for answer in answers[1:]] == [
        (4, 2),
        (6, 2),
        (5, 1),
        (500, 1),
        (9, 2),
        (1, 2),
    ]


@pytest.mark.parametrize(
    ("body", "outcome"),
    [
        (b'{"value": 3}', (200, "")),
        (b'{"value": "x"}', (422, "invalid_item")),
        (b'{"value": 3', (400, "invalid_request")),
        (b'{"value": 1001}', (500, "model_error")),
        (b'{"value": -1}', (500, "bad_result")),
    ],
)
def test_what_cannot_be_weighed_is_answered_at_once(body: bytes, outcome: tuple[int, str]) -> None:
    """An item that cannot be weighed is answered at once with the status that it would have had
    from the worker, is counted, and does not show the text of the exception.
    """
    service = Service(Stage(models.Gated, max_batch_size=10, size=weight, run_in="thread"), name="sized")
    with serving(App(service)) as running, Client(running.port) as client:
        answer = client.ask(post(body))
        again = client.ask(post(b'{"value": 3}'))
        counted = running.outcomes()

    assert (answer.status, code_of(answer) if answer.status != 200 else "") == outcome
    assert b"secret" not in answer.body
    assert again.status == 200
    assert sum(counted.values()) == 2
