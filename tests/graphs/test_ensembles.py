"""What mpservice's own tests ask of its sequential, ensemble and switch servlets, asked of services here."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from carpool import Model, Parallel, Route, Service, Stage
from carpool.errors import DeadlineExceeded, ModelError


def double(x: Any) -> Any:
    return 2 * x


class Shift(Model):
    def __init__(self, step: int = 3) -> None:
        self.step = step

    def predict(self, x: Any) -> Any:
        return x + self.step


class ShiftAll(Shift):
    def predict(self, xs: list[Any]) -> list[Any]:
        return [x + self.step for x in xs]


def square(xs: list[int]) -> list[int]:
    return [x * x for x in xs]


def delay(x: float) -> float:
    time.sleep(x)
    return x


def first(x: str) -> str:
    return x[0]


def last(x: str) -> str:
    return x[-1]


def combined(x: tuple[str, str, int]) -> str:
    return (x[0] + x[1]) * x[2]


def extremes(x: tuple[int, ...]) -> list[int]:
    return [min(x), max(x)]


def mean(x: tuple[float, ...]) -> float:
    return sum(x) / len(x)


class FailsAt(Model):
    def __init__(self, at: int) -> None:
        self.at = at

    def predict(self, x: int) -> int:
        if x == self.at:
            raise LookupError(x)
        return x


def parity(x: int) -> str:
    return "even" if x % 2 == 0 else "odd"


WIDE = Service(
    Parallel(first, Stage(last, run_in="thread"), Stage(len, name="length", run_in="thread")),
    Stage(combined, run_in="thread"),
    name="wide",
)
WORDS = {"abcde": "aeaeaeaeae", "xyz": "xzxzxz", "abc": "acacac", "jk": "jkjk", "opqs": "osososos"}


def test_stages_in_a_row() -> None:
    with Service(Stage(double, workers=2), Shift).run() as s:
        assert [s.predict(x) for x in range(10)] == [2 * x + 3 for x in range(10)]
        with pytest.raises(ModelError, match="TypeError"):
            s.predict("a")


def test_batches_of_one_stage() -> None:
    with Service(Stage(ShiftAll, workers=3, max_batch_size=10, kwargs={"step": 4})).run() as s:
        assert list(s.stream(range(111))) == [x + 4 for x in range(111)]


def test_an_ensemble_in_tasks_and_in_threads() -> None:
    async def main() -> list[str]:
        async with WIDE.run_async() as s:
            return await asyncio.gather(*[s.predict(word) for word in WORDS])

    assert asyncio.run(main()) == [*WORDS.values()]
    with WIDE.run() as s:
        assert [s.predict(word) for word in WORDS] == [*WORDS.values()]


def test_a_slow_branch_is_timed_out() -> None:
    branches = Parallel([], Stage(Shift, run_in="thread"), Stage(delay, run_in="thread"))
    with Service(branches, Stage(mean, run_in="thread")).run() as s, pytest.raises(DeadlineExceeded, match="in delay"):
        s.predict(0.5, timeout_s=0.1)


def test_an_ensemble_of_single_items_and_of_batches() -> None:
    service = Service(
        Parallel(
            Stage(Shift, name="one", kwargs={"step": 1}),
            Stage(ShiftAll, name="three", kwargs={"step": 3}, max_batch_size=1, workers=2, run_in="thread"),
            Stage(ShiftAll, name="five", kwargs={"step": 5}, max_batch_size=4, workers=2),
            Stage(Shift, name="seven", kwargs={"step": 7}, run_in="thread"),
        ),
        Stage(extremes, run_in="thread"),
    )
    with service.run() as s:
        assert list(s.stream(range(100))) == [[x + 1, x + 7] for x in range(100)]


def test_an_ensemble_of_threads_and_processes_in_a_sequence() -> None:
    service = Service(
        Stage(double),
        Stage(square, max_batch_size=4, run_in="thread"),
        Parallel(
            Stage(double, name="again"),
            Stage(Shift, kwargs={"step": 1}, run_in="thread"),
            Stage(square, name="squared", max_batch_size=8, run_in="thread"),
        ),
        Stage(sum, name="sum", run_in="thread"),
    )
    with service.run() as s:
        ys = [4 * x * x for x in range(300)]
        assert list(s.stream(range(300))) == [2 * y + y + 1 + y * y for y in ys]


def test_the_mean_of_threads() -> None:
    service = Service(
        Parallel(
            Stage(Shift, name="one", kwargs={"step": 1}, run_in="thread", workers=3),
            Stage(Shift, name="five", kwargs={"step": 5}, run_in="thread"),
        ),
        Stage(mean, run_in="thread"),
    )
    with service.run() as s:
        assert list(s.stream(range(100))) == [x + 3 for x in range(100)]


def test_each_stage_has_its_errors() -> None:
    stages = [Stage(FailsAt, name=f"at{i}", kwargs={"at": i}, run_in="thread") for i in range(1, 6)]
    with Service(*stages).run() as s:
        for x in range(7):
            if 0 < x < 6:
                with pytest.raises(ModelError, match=f"LookupError: {x}") as caught:
                    s.predict(x)
                assert isinstance(caught.value.__cause__, LookupError)
            else:
                assert s.predict(x) == x


def test_a_switch() -> None:
    service = Service(Route({"even": Stage(double), "odd": [Shift, Stage(square, max_batch_size=4)]}, choose=parity))
    with service.run() as s:
        assert list(s.stream(range(50))) == [2 * x if x % 2 == 0 else (x + 3) ** 2 for x in range(50)]


def test_errors_of_an_ensemble_that_does_not_fail_fast() -> None:
    branches = [Stage(FailsAt, name=f"at{i}", kwargs={"at": i}, run_in="thread") for i in (1, 2)]
    with Service(Parallel(*branches, errors="values")).run() as s:
        found = list(s.stream(range(4)))
    assert [[type(each).__name__ for each in pair] for pair in found] == [
        ["int", "int"],
        ["ModelError", "int"],
        ["int", "ModelError"],
        ["int", "int"],
    ]
