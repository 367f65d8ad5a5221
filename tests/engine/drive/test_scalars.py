"""Scalars through stages of every kind: each caller gets its own, as it was, whatever else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest

import carpool
from carpool import Service, Stage
from tests.effort import slow_where
from tests.engine.drive.full_batches import stage, together
from tests.engine.drive.scalar_models import Told, ToldLater

SCALARS: list[Any] = [0.5, -0.0, 7, 2**63, 2**70, True, False, None, "", "text", "é", "\ud83d", "x" * 70_000]


def is_it(answer: Any, item: Any) -> bool:
    return (type(answer), repr(answer)) == (type(item), repr(item))


@slow_where(lambda run_in, items: run_in == "process" and items not in (SCALARS, [1, 2, 3]))
@pytest.mark.parametrize(("model", "run_in"), [(Told, "process"), (Told, "thread"), (ToldLater, "loop")])
@pytest.mark.parametrize(
    "items", [[0.5, 1.5, -0.0], [1, 2, 3], ["a", "b", ""], SCALARS, [*SCALARS, [1], {"a": 2}]], ids=len
)
def test_they_come_back(model: Any, run_in: str, items: list[Any]) -> None:
    """Through two stages, with their types, in batches of scalars only and among others."""
    n = len(items)
    stages = [stage(model, n, run_in=run_in, name=name) for name in ("one", "two")]
    with Service(*stages, timeout_s=60).run() as service:
        answers = together(service, items)

    assert all(is_it(answer, item) for answer, item in zip(answers, items, strict=True))


@pytest.mark.parametrize("run_in", ["process", "thread"])
def test_one_that_fails_takes_nothing_from_the_others(run_in: str) -> None:
    """Reports and scalars share a reply."""
    with Service(stage(Told, 4, run_in=run_in)).run() as service:
        answers = together(service, [0.5, "refuse", 7, None])

    assert [answers[i] for i in (0, 2, 3)] == [0.5, 7, None]
    assert isinstance(answers[1], carpool.ModelError)


def test_they_are_weighed() -> None:
    """Before each stage, and between the two."""
    seen: list[Any] = []

    def size(x: Any) -> int:
        seen.append(x)
        return 1

    with Service(*[Stage(Told, name=name, max_batch_size=4, size=size) for name in ("one", "two")]).run() as service:
        assert service.predict(0.5) == 0.5
    assert seen == [0.5, 0.5]
