"""One model class, unchanged, in every way there is to run it: the same answers and the same errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import carpool
from tests.support.http.net import Client, serving

Ask = Callable[[list[Any]], list[Any]]
"""Items in, answers out; an error stands for an answer as its kind, and its text where users are told it."""


class Roots(carpool.Model):
    """Square roots, with everything that a model may have."""

    def __init__(self) -> None:
        self.ready = False

    def setup(self) -> None:
        self.ready = True

    def preprocess(self, x: float) -> float:
        if x < 0:
            raise carpool.ValidationError(f"{x} has no real root")
        return x

    def predict(self, xs: list[float]) -> list[float]:
        assert self.ready
        if any(x == 13 for x in xs):
            raise ArithmeticError("thirteen is not served")
        return [x**0.5 for x in xs]

    def postprocess(self, y: float, x: float) -> dict[str, float]:
        return {"root": y, "of": x}


ITEMS = [4.0, -1.0, 9.0, 13.0, 0.25, 16.0]
EXPECTED = [
    {"root": 2.0, "of": 4.0},
    ("refused", "-1.0 has no real root"),
    {"root": 3.0, "of": 9.0},
    ("failed", "thirteen is not served"),
    {"root": 0.5, "of": 0.25},
    {"root": 4.0, "of": 16.0},
]


def _kind(answer: Any) -> Any:
    """An answer, or what became of it. A program gets the model's own exception, others our ModelError."""
    if isinstance(answer, carpool.ValidationError):
        return "refused", str(answer)
    if isinstance(answer, ArithmeticError | carpool.ModelError):
        return "failed", str(answer)
    return answer


@contextmanager
def in_threads() -> Iterator[Ask]:
    batched = carpool.batch(isolate_errors=True)(Roots)

    def ask(items: list[Any]) -> list[Any]:
        answers = []
        for ticket in [batched.submit(item) for item in items]:
            try:
                answers.append(ticket.result())
            except Exception as error:
                answers.append(_kind(error))
        return answers

    yield ask


@contextmanager
def in_tasks() -> Iterator[Ask]:
    """Threads of workers, awaited: a plain model has no place on the loop itself."""
    yield lambda items: asyncio.run(_in_tasks(items))


async def _in_tasks(items: list[Any]) -> list[Any]:
    async with _service("thread").run_async() as handle:
        answers = await asyncio.gather(*[handle.predict(item) for item in items], return_exceptions=True)
    return [_kind(answer) for answer in answers]


@contextmanager
def in_processes() -> Iterator[Ask]:
    with _service("process").run() as handle:
        yield lambda items: [_kind(answer) for answer in handle.stream(items, return_exceptions=True)]


@contextmanager
def over_http() -> Iterator[Ask]:
    with serving(carpool.http.App(_service("process"), debug=True)) as running, Client(running.port) as client:

        def ask(items: list[Any]) -> list[Any]:
            answers = []
            for item in items:
                body = json.dumps(item).encode()
                head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                answer = client.ask(head.encode() + body)
                found = json.loads(answer.body)
                kinds = {200: None, 422: "refused", 500: "failed"}
                kind = kinds[answer.status]
                answers.append(found if kind is None else (kind, found["error"]["message"]))
            return answers

        yield ask


def _service(run_in: Any) -> carpool.Service:
    return carpool.Service(carpool.Stage(Roots, run_in=run_in, max_batch_size=8))


WAYS = [in_threads, in_tasks, in_processes, over_http]


@pytest.mark.fault("F37")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_same_model_the_same_answers_the_same_errors(way: Callable[[], Any]) -> None:
    """Hooks, types and errors per item mean the same by each of the four ways to run a model."""
    with way() as ask:
        answers = ask(ITEMS)

    for answer, expected in zip(answers, EXPECTED, strict=True):
        if isinstance(expected, tuple):
            assert answer[0] == expected[0]
            assert expected[1] in answer[1]
        else:
            assert answer == expected
