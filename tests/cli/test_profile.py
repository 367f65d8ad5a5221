"""`carpool profile`: what batches of each size cost, measured with a service's own models."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

import carpool
from carpool.cli.profile_command import profiled, sizes_of
from carpool.simulate.costs import read_costs
from tests.support.prepared import carpool_command

SEEN: list[list[float]] = []


class Shift(carpool.Model):
    examples = (1.0, 2.0)

    def predict(self, x: float) -> float:
        return x + 10


class Sleeper(carpool.Model):
    examples = (1.0, 2.0)

    def predict(self, xs: list[float]) -> list[float]:
        SEEN.append(xs)
        time.sleep(0.002 * len(xs))
        return xs


def test_each_size_is_measured_with_batches_of_just_that_size() -> None:
    """A stage runs batches of each size, of its examples in turn, and the costs are those of its
    worker: at least what the model takes, for all sizes up to the limit.
    """
    SEEN.clear()
    told = []
    service = carpool.Service(carpool.Stage(Sleeper, max_batch_size=6, workers=3, run_in="thread"))
    (found,) = asyncio.run(profiled(service, runs=3, progress=lambda *where: told.append(where)))
    assert (found.stage, found.max_batch_size, list(found.seconds)) == ("Sleeper", 6, [1, 2, 4, 6])
    assert all(0.002 * size <= seconds < 5 for size, seconds in found.seconds.items())
    assert SEEN.count([1.0, 2.0, 1.0, 2.0, 1.0, 2.0]) >= 4
    assert told == [("Sleeper", done, 4) for done in range(5)]


def test_later_stages_get_what_the_one_before_makes_of_the_examples() -> None:
    """In a pipeline the second stage is measured with results of the first, and needs no examples."""
    SEEN.clear()
    stages = [carpool.Stage(Shift, run_in="thread"), carpool.Stage(Sleeper, max_batch_size=2, run_in="thread")]
    first, second = asyncio.run(profiled(carpool.Service(*stages), runs=1))
    assert (first.stage, first.max_batch_size, list(first.seconds)) == ("Shift", 1, [1])
    assert list(second.seconds) == [1, 2]
    assert [11.0, 12.0] in SEEN


def test_sizes_are_those_that_a_stage_can_have() -> None:
    """Sizes are powers of two and the limit, or the allowed ones."""
    assert sizes_of(carpool.Stage(Sleeper, max_batch_size=1)) == [1]
    assert sizes_of(carpool.Stage(Sleeper, max_batch_size=20)) == [1, 2, 4, 8, 16, 20]
    assert sizes_of(carpool.Stage(Sleeper, max_batch_size=16, allowed_batch_sizes=[4, 16])) == [4, 16]


def test_what_cannot_be_measured_is_refused() -> None:
    """A model without examples, or one that answers in parts, is refused with what to do."""

    def plain(x: float) -> float:
        return x

    with pytest.raises(ValueError, match=r"stage plain has no examples to measure it with"):
        asyncio.run(profiled(carpool.Service(plain)))

    class Words(carpool.Model):
        examples = ("a b",)

        def predict(self, text: str):  # type: ignore[no-untyped-def]
            yield from text.split()

    with pytest.raises(ValueError, match=r"answers in parts has no cost of a batch: see carpool simulate --steps"):
        asyncio.run(profiled(carpool.Service(Words)))


PROGRAM = """
import carpool

class Double(carpool.Model):
    examples = (1.0, 2.0)

    def predict(self, xs: list[float]) -> list[float]:
        return [2 * x for x in xs]

service = carpool.Service(carpool.Stage(Double, max_batch_size=4, workers=2))
"""


@pytest.mark.slow
def test_the_capacity_question_takes_two_commands(tmp_path: Path) -> None:
    """`carpool profile` writes a file, names the next command, and that one finds the workers."""
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(*arguments: str) -> str:
        done = carpool_command(*arguments, cwd=tmp_path, timeout=120, COLUMNS="120")
        assert done.returncode == 0, done.stderr
        return done.stdout

    told = run("profile", "program:service", "--out", "costs.json", "--runs", "3")
    assert list(read_costs(tmp_path / "costs.json")[0].seconds) == [1, 2, 4]
    *_, following = told.splitlines()
    assert following == "carpool plan --cost costs.json --arrivals poisson:rate=800 --slo 60ms"
    assert "enough: " in run(*following.split()[1:], "--duration", "2s", "--seeds", "1")


def small(x: float) -> carpool.Done[list[float]] | float:
    return carpool.Done([]) if x > 1.5 else x


def to_left(x: float) -> carpool.To[float]:
    return carpool.To("left", x + 10)


def three(x: float) -> list[float]:
    return [x, x + 1, x + 2]


def at(name: str, model: object, **settings: object) -> carpool.Stage:
    return carpool.Stage(model, name=name, run_in="thread", **settings)  # type: ignore[arg-type]


def a_graph(**ways: object) -> carpool.Service:
    return carpool.Service(
        at("shift", Shift),
        carpool.Parallel({"a": at("sleep", Sleeper, max_batch_size=2), "b": []}),
        at("one", lambda both: both["b"] - 10),
        at("small", small),
        at("turn", to_left),
        carpool.Route({"left": at("left", three), **ways}),  # type: ignore[dict-item]
        carpool.ForEach(at("last", Sleeper, max_batch_size=4)),
        name="graph",
    )


def test_a_graph_is_measured_with_what_comes_to_each_stage() -> None:
    """Examples go through branches, routes and lists; those that are answered early go no further."""
    SEEN.clear()
    found = asyncio.run(profiled(a_graph(), runs=1))
    assert [costs.stage for costs in found] == ["shift", "sleep", "one", "small", "turn", "left", "last"]
    assert [11.0, 12.0] in SEEN
    assert [11.0, 12.0, 13.0, 11.0] in SEEN  # of the first example alone


def test_a_stage_to_which_no_example_comes_is_named() -> None:
    """A branch that no example takes cannot be measured, and the error says so."""
    with pytest.raises(ValueError, match="no example comes to stage right: give the first model one that takes its"):
        asyncio.run(profiled(a_graph(right=at("right", three)), runs=1))
