"""Graphs that run in threads, in tasks and in processes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import carpool
from carpool import Done, ForEach, Parallel, Route, Service, Stage
from carpool.errors import DeadlineExceeded, ModelError, Overloaded, Unavailable
from tests.graphs.models import (
    Hangs,
    Lethal,
    add_up,
    add_up_async,
    as_it_is,
    fails,
    fails_on_seven,
    parity,
    plus_one,
    plus_one_async,
    slow,
    small,
    small_async,
    times_ten,
    to_branch,
    total,
    up_to,
)

GRAPHS: dict[str, tuple[Callable[[Any], list[Any]], list[tuple[Any, Any]]]] = {
    "a tuple": (lambda s: [Parallel(s(plus_one), s(times_ten))], [(3, (4, 30))]),
    "a dict": (lambda s: [Parallel({"a": s(plus_one), "b": [s(times_ten), s(as_it_is)]})], [(3, {"a": 4, "b": 30})]),
    "the item beside": (lambda s: [Parallel([], s(plus_one))], [(3, (3, 4))]),
    "a join in the midst": (lambda s: [Parallel(s(plus_one), s(times_ten)), s(total, max_batch_size=4)], [(3, 34)]),
    "nested": (
        lambda s: [Parallel({"a": Parallel(s(plus_one), []), "b": [s(up_to), ForEach(s(times_ten))]}), s(as_it_is)],
        [(2, {"a": (3, 2), "b": [0, 10]})],
    ),
    "a list": (lambda s: [s(up_to), ForEach(s(plus_one), s(times_ten))], [(3, [10, 20, 30]), (0, [])]),
    "a list in a list": (
        lambda s: [s(up_to), ForEach(s(up_to, name="again"), ForEach(s(plus_one))), s(len, name="length")],
        [(3, 3)],
    ),
    "a list that is added up": (lambda s: [s(up_to), ForEach(s(times_ten)), s(add_up)], [(4, 60)]),
    "a list of the caller's": (lambda s: [ForEach(s(plus_one))], [([1, 2], [2, 3]), ([], [])]),
    "a route by a function": (
        lambda s: [s(plus_one), Route({"even": s(times_ten), "odd": []}, choose=parity)],
        [(3, 40), (4, 5)],
    ),
    "a route at the beginning": (
        lambda s: [Route({"even": s(times_ten), "odd": []}, choose=parity)],
        [(3, 3), (4, 40)],
    ),
    "a route behind a join": (
        lambda s: [
            Parallel([], s(plus_one)),
            Route({"short": s(max, name="larger"), "long": []}, choose=_by_length),
            s(as_it_is),
        ],
        [(3, 4)],
    ),
    "a route by results": (
        lambda s: [s(to_branch), Route({"small": s(plus_one), "large": [s(times_ten), s(as_it_is)]})],
        [(3, 4), (7, 70)],
    ),
    "a cascade": (lambda s: [s(small, max_batch_size=4), s(times_ten)], [(3, -3), (4, 40)]),
    "an early answer in a branch": (
        lambda s: [Parallel(s(small, max_batch_size=4), s(plus_one)), s(total, max_batch_size=2)],
        [(3, -3), (4, 9)],
    ),
    "an early answer in a list": (
        lambda s: [s(up_to), ForEach(s(small, max_batch_size=4)), s(add_up)],
        [(1, 0), (2, -1)],
    ),
    "errors are values": (
        lambda s: [Parallel(s(fails), s(plus_one), errors="values"), s(_kinds)],
        [(3, ["ModelError", "int"])],
    ),
    "one pool at three places": (
        lambda s: (lambda a: [a, Parallel(a, [s(times_ten), a])])(s(plus_one)),
        [(3, (5, 41))],
    ),
}


def _by_length(pair: tuple[int, int]) -> str:
    return "short" if len(pair) == 2 else "long"


def _kinds(pair: tuple[Any, Any]) -> list[str]:
    return [type(each).__name__ for each in pair]


@pytest.mark.parametrize("run_in", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_graphs_answer(run_in: Any) -> None:
    """All in one service, so that its workers are started once."""
    for name, (elements, cases) in GRAPHS.items():

        def stage(model: Any, **settings: Any) -> Stage:
            return Stage(model, run_in=run_in, **settings)

        with Service(*elements(stage)).run() as s:
            for item, expected in cases * 2:
                assert s.predict(item) == expected, name
            items = [item for item, _ in cases] * 20
            assert list(s.stream(items)) == [expected for _, expected in cases] * 20, name


def test_tasks_of_the_loop_answer() -> None:
    async def main() -> None:
        service = Service(
            Stage(plus_one_async, run_in="loop"),
            Parallel(Stage(small_async, run_in="loop"), Stage(plus_one_async, name="more", run_in="loop")),
            Stage(add_up_async, run_in="loop"),
        )
        async with service.run_async() as s:
            assert await asyncio.gather(*[s.predict(x) for x in range(4)]) == [-1, 5, -3, 9]

    asyncio.run(main())


def test_arrays_go_through_joins() -> None:
    """Small ones and large ones, each in memory of its own."""
    with Service(Parallel({"a": [], "b": Stage(as_it_is, run_in="process")})).run() as s:
        for n in (3, 100_000):
            x = np.arange(float(n))
            found = s.predict(x)
            assert (found["a"] == x).all() and (found["b"] == x).all() and found["b"].flags.writeable
            found["b"][0] = 7
            assert found["a"][0] == 0 == x[0]


def test_the_first_error_fails_the_request_and_no_other() -> None:
    with Service(Parallel(Stage(fails_on_seven, max_batch_size=8, run_in="thread"), [])).run() as s:
        found = list(s.stream(range(20), return_exceptions=True))
    assert [x for x, y in enumerate(found) if isinstance(y, ModelError)] == [7]
    assert [y for x, y in enumerate(found) if x != 7] == [(x + 1, x) for x in range(20) if x != 7]


@pytest.mark.parametrize(
    ("elements", "item", "text"),
    [
        ([to_branch, Route({"little": plus_one})], 3, "there is no branch 'small'; there are 'little'"),
        ([plus_one, Route({"a": times_ten}, choose=str)], 3, "there is no branch '4'; there are 'a'"),
        ([Route({"a": times_ten}, choose=str)], 3, "there is no branch '3'; there are 'a'"),
        (
            [as_it_is, Route({"a": times_ten, "b": []}, choose=fails)],
            3,
            "the Route to 'a', 'b' raised ValueError: no 3",
        ),
        ([Route({"a": times_ten}, choose=fails)], 3, "choose= of the Route to 'a' raised ValueError: no 3"),
        ([as_it_is, Route({"a": times_ten})], 3, "no branch was named"),
        ([to_branch, times_ten], 3, "names 'small' as its branch, and no Route follows"),
        ([as_it_is, ForEach(plus_one)], 3, "ForEach takes a list, and has been given int"),
        ([ForEach(plus_one)], 3, "ForEach takes a list, and has been given int"),
        ([up_to, ForEach(plus_one, max_items=3)], 4, "has 4 items, and max_items is 3"),
    ],
)
def test_what_goes_nowhere_fails_alone(elements: list[Any], item: Any, text: str) -> None:
    from tests.graphs.models import service_of

    made = [_in_threads(each) for each in elements]
    with service_of(*made).run() as s, pytest.raises(ModelError, match=text.replace("(", r"\(")):
        s.predict(item)


def _in_threads(element: Any) -> Any:
    if isinstance(element, Route):
        branches = {
            name: [Stage(each.model, run_in="thread") for each in line] for name, line in element.branches.items()
        }  # type: ignore[union-attr]
        return Route(branches, choose=element.choose)  # type: ignore[arg-type]
    if isinstance(element, ForEach):
        body = [Stage(each.model, run_in="thread") for each in element.body]  # type: ignore[union-attr]
        return ForEach(*body, max_items=element.max_items)
    return element


def test_a_lost_worker_repeats_only_its_branch(tmp_path: Path) -> None:
    """The other branch's model is called once for each item."""
    counted = Stage(_Counting, kwargs={"file": str(tmp_path / "calls")})
    lethal = Stage(Lethal, kwargs={"folder": str(tmp_path)})
    with Service(Parallel(lethal, counted)).run() as s:
        assert list(s.stream([1, 13, 2])) == [(2, 1), (14, 13), (3, 2)]
    assert (tmp_path / "killed").exists()
    assert sorted((tmp_path / "calls").read_text().split()) == ["1", "13", "2"]


class _Counting(carpool.Model):
    def __init__(self, file: str) -> None:
        self.file = file

    def predict(self, x: int) -> int:
        with open(self.file, "a") as file:
            file.write(f"{x}\n")
        return x


def test_poison_is_found_in_its_branch() -> None:
    with Service(Parallel(Stage(Lethal), Stage(as_it_is))).run() as s:
        found = list(s.stream([1, 13, 2], return_exceptions=True))
    assert found[0] == (2, 1) and found[2] == (3, 2)
    assert isinstance(found[1], ModelError) and found[1].code == "request_crashed_worker"


def test_a_lost_worker_is_a_value() -> None:
    with Service(Parallel(Stage(Lethal, idempotent=False), Stage(as_it_is), errors="values")).run() as s:
        lost, item = s.predict(13)
        assert item == 13
        assert isinstance(lost, Unavailable) and lost.code == "worker_lost"


def test_an_item_for_which_two_workers_hang_is_a_value() -> None:
    """The request's own deadline is far away, so its other branch is answered."""
    hangs = Stage(Hangs, max_batch_time_s=0.3)
    with Service(Parallel(hangs, Stage(as_it_is, run_in="thread"), errors="values")).run() as s:
        lost, item = s.predict(13)
        assert item == 13
        assert isinstance(lost, DeadlineExceeded) and "given up" in str(lost)
        assert s.predict(3) == (3, 3)


@pytest.mark.parametrize("run_in", ["thread", "process"])
def test_an_error_that_is_a_value_has_its_cause(run_in: Any) -> None:
    with Service(Parallel(Stage(fails, run_in=run_in), errors="values")).run() as s:
        (error,) = s.predict(3)
    assert isinstance(error, ModelError) and error.type_name == "ValueError"
    assert isinstance(error.__cause__, ValueError) and str(error.__cause__) == "no 3"


def test_a_deadline_ends_the_request_although_errors_are_values() -> None:
    branches = Parallel(Stage(slow, run_in="thread"), [], errors="values")
    with Service(branches).run() as s, pytest.raises(DeadlineExceeded):
        s.predict(3, timeout_s=0.001)


@pytest.fixture
def flooded() -> Iterator[Any]:
    """A service whose route refuses what its slow branch, with one place, has no room for."""
    route = Route(
        {"odd": Stage(slow, max_queue_size=1, run_in="thread"), "even": Stage(plus_one, run_in="thread")},
        choose=parity,
        when_full="refuse",
    )
    with Service(Stage(as_it_is, max_batch_size=32, run_in="thread"), route).run() as s:
        yield s


def test_a_flooded_branch_refuses_its_own_items(flooded: Any) -> None:
    found = list(flooded.stream(range(64), return_exceptions=True))
    assert [y for x, y in enumerate(found) if x % 2 == 0] == [x + 1 for x in range(0, 64, 2)]
    odd = {type(y) for x, y in enumerate(found) if x % 2}
    assert odd == {int, Overloaded}


def test_the_story_of_a_request_has_its_branches() -> None:
    service = Service(Parallel(Stage(plus_one, run_in="thread"), Stage(times_ten, run_in="thread")))
    with service.run(journal_size=100) as s:
        assert s.predict(3) == (4, 30)
        assert s.predict(4) == (5, 40)
        for story in (s.story(1), s.story(2), s.story()):
            assert sorted(entry.stage for entry in story if entry.event == "runs") == ["plus_one", "times_ten"]
            assert story[-1].event == "answered"


def test_workers_are_scaled_and_replaced_under_load() -> None:
    async def main() -> None:
        shared = Stage(slow, run_in="thread")
        service = Service(Parallel(shared, [Stage(plus_one, run_in="thread"), shared]))
        async with service.run_async() as s:
            calls = [asyncio.ensure_future(s.predict(x)) for x in range(40)]
            await s.scale("slow", 3)
            await s.reload()
            assert await asyncio.gather(*calls) == [(x, x + 1) for x in range(40)]
            assert await s.predict(1) == (1, 2)

    asyncio.run(main())


def test_an_early_answer_may_be_the_last_stages() -> None:
    def last(x: int) -> Done[int]:
        return Done(x + 1)

    with Service(Stage(last, run_in="thread")).run() as s:
        assert s.predict(1) == 2
