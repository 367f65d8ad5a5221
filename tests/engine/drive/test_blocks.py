"""Arrays of one shape through stages: they travel as one block, and a model that asks for an array gets it whole."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import carpool
from carpool import Service, Stage
from tests.effort import slow_where
from tests.engine.drive.array_models import Array, Fails, Half, Halved, Listed, Refusing, Told, ToldLater
from tests.engine.drive.full_batches import stage, together

WAYS: dict[str, tuple[Any, str]] = {
    "process": (Told, "process"),
    "thread": (Told, "thread"),
    "loop": (ToldLater, "loop"),
}


@pytest.fixture(scope="module", params=WAYS)
def told(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A service whose model tells what it gets, six at a time."""
    model, run_in = WAYS[request.param]
    with Service(stage(model, 6, run_in=run_in)).run() as service:
        yield service


def test_a_model_that_asks_for_an_array_gets_one(told: Any) -> None:
    """A model whose hint is an array gets the items as its rows; it may change them, and callers'
    arrays stay as they are.
    """
    items = [np.full((2, 3), i, np.float32) for i in range(6)]
    answers = together(told, items)

    assert answers == [("ndarray", (6, 2, 3), [[float(i)] * 3] * 2) for i in range(6)]
    assert [item[0, 0] for item in items] == list(range(6))


def test_arrays_of_several_kinds_come_kind_by_kind(told: Any) -> None:
    """Items of each shape and dtype have a call of their own, and those that are no arrays come as
    a list.
    """
    items: list[Any] = [np.zeros(2), np.ones((1, 2)), np.full(2, 2.0), np.float32([3, 3]), 4.5, np.full(2, 5.0)]
    answers = together(told, items)

    assert [answer[:2] for answer in answers] == [
        *[("ndarray", (3, 2)), ("ndarray", (1, 1, 2)), ("ndarray", (3, 2))],
        *[("ndarray", (1, 2)), ("list", None), ("ndarray", (3, 2))],
    ]
    assert [answer[2] for answer in answers] == [
        item.tolist() if isinstance(item, np.ndarray) else item for item in items
    ]


def test_arrays_that_are_pickled_are_stacked_all_the_same(told: Any) -> None:
    """Arrays that travel as pickles are stacked all the same: large ones, those in another byte
    order, and those without axes.
    """
    for item in (np.arange(20_000, dtype=np.float64), np.arange(3, dtype=">f8"), np.array(2.5)):
        answers = together(told, [item] * 6)

        assert [answer[1] for answer in answers] == [(6, *item.shape)] * 6
        assert answers[5][2] == item.tolist()


def test_what_must_not_be_written_to_is_so_as_a_whole(told: Any) -> None:
    """If one row must not be written to, neither may the array of all rows: the model's `+=` would
    raise.
    """
    item = np.ones(3, np.float32)
    item.flags.writeable = False

    assert together(told, [item] * 6) == [("ndarray", (6, 3), [1.0] * 3)] * 6


@slow_where(lambda run_in, rows: run_in == "process" and rows)
@pytest.mark.parametrize("rows", [False, True], ids=["one array", "a list of arrays"])
@pytest.mark.parametrize("run_in", ["process", "thread"])
def test_arrays_go_through_two_stages_and_back(run_in: Any, rows: bool) -> None:
    """Arrays go through two stages and back, and each caller gets one in memory of its own that may
    be written to.
    """
    stages = [Stage(Half, name=name, max_batch_size=8, kwargs={"rows": rows}, run_in=run_in) for name in "ab"]
    items = [np.full(300, i, np.float32) for i in range(50)]
    with Service(*stages).run() as service:
        answers = list(service.stream(items))

    for i, answer in enumerate(answers):
        assert (type(answer), answer.dtype, answer.tolist()) == (np.ndarray, np.float32, [i / 4] * 300)
    for i, answer in enumerate(answers):
        answer[:] = -i
    assert [answer[7] for answer in answers] == [-i for i in range(50)]


@pytest.mark.parametrize("run_in", ["process", "thread"])
def test_who_works_in_place_changes_nothing_of_others(run_in: Any) -> None:
    """A model that works in place changes neither the caller's array nor another answer, also where
    one array was sent many times.
    """
    item = np.zeros(4)
    with Service(stage(Listed, 5, run_in=run_in)).run() as service:
        answers = together(service, [item] * 5)

    assert item.tolist() == [0.0] * 4
    assert [answer.tolist() for answer in answers] == [[1.0] * 4] * 5
    assert not any(np.shares_memory(a, b) for i, a in enumerate(answers) for b in answers[:i])


def test_a_stream_may_fill_one_array_again_and_again() -> None:
    """If a stream fills the same array again and again, each item is what the array held when it
    was read.
    """

    def filled() -> Iterator[Array]:
        buffer = np.zeros(100)
        for i in range(200):
            buffer[:] = i
            yield buffer

    with Service(Stage(Listed, max_batch_size=16)).run() as service:
        assert [answer[99] for answer in service.stream(filled())] == [i + 1.0 for i in range(200)]


@pytest.mark.parametrize("sizes", [None, [4, 8]], ids=["any size", "sizes that are allowed"])
def test_guilty_rows_are_found(sizes: list[int] | None) -> None:
    """A batch of arrays that raises is halved as ever: the model sees arrays of the rest, and the
    guilty rows fail alone.
    """
    items = [np.full(3, x) for x in (1.0, 4.0, -1.0, 9.0, 16.0, 25.0)]
    with Service(stage(Refusing, 6 if sizes is None else 8, allowed_batch_sizes=sizes)).run() as service:
        answers = together(service, items if sizes is None else [*items, items[0], items[0]])

    assert [a.tolist() for i, a in enumerate(answers[:6]) if i != 2] == [[x] * 3 for x in (1.0, 2.0, 3.0, 4.0, 5.0)]
    assert isinstance(answers[2], carpool.ModelError)


def test_hooks_see_items_and_predict_the_array() -> None:
    """What `preprocess` has made of the items is stacked anew for `predict`, and `postprocess` gets
    rows.
    """
    with Service(stage(Halved, 4)).run() as service:
        answers = together(service, [np.full(2, float(i)) for i in range(4)])

    assert [answer.tolist() for answer in answers] == [[-(i / 2 + 4)] * 2 for i in range(4)]


def test_a_batch_of_arrays_that_is_too_large_goes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of arrays that is too large goes in pieces, each of which is a call of its own."""
    monkeypatch.setattr("carpool.engine.wire.frame.MAX_FRAME_BYTES", 10_000)
    items = [np.full(500, i, np.float64) for i in range(6)]  # two to a message
    with Service(stage(Told, 6)).run() as service:
        answers = together(service, items)

    assert [(shape, row[0]) for _, shape, row in answers] == [((2, 500), float(i)) for i in range(6)]


def test_a_program_without_numpy_passes_arrays_on(tmp_path: Path) -> None:
    """The process of the service passes arrays on between its stages without numpy."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, carpool\n"
        "def make(n):\n    import numpy\n    return numpy.full(9, n)\n"
        "def total(xs: list):\n    return [int(x.sum()) for x in xs]\n"
        "if __name__ == '__main__':\n"
        "    with carpool.Service(carpool.Stage(make), carpool.Stage(total, max_batch_size=8)).run() as service:\n"
        "        print(list(service.stream(range(40))) == [9 * n for n in range(40)], 'numpy' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120)

    assert (done.stdout, done.stderr) == ("True False\n", "")


def test_a_batch_function_that_asks_for_an_array_gets_one() -> None:
    """A function in `@carpool.batch` whose hint is an array gets one, as in a service; with
    `merge=` it is the callers who bring the rows.
    """

    @carpool.batch(max_batch_size=4)
    def shapes(xs: NDArray[np.float64]) -> Any:
        return [xs.shape] * len(xs)

    @carpool.batch(merge=True)
    def shape_of_all(xs: NDArray[np.float64]) -> Any:
        return [xs.shape] * len(xs)

    assert shapes.many([np.zeros(3), np.ones(3), np.ones(3)]) == [(3, 3)] * 3
    assert shape_of_all(np.zeros((2, 5))) == [(2, 5)] * 2


@slow_where(lambda how, sizes, run_in: run_in == "process" and (how, sizes) != ("for one", None))
@pytest.mark.parametrize("run_in", ["process", "thread"])
@pytest.mark.parametrize("sizes", [None, [4, 8]], ids=["unpadded", "padded"])
@pytest.mark.parametrize("how", ["at first", "no memory at first", "for one"])
def test_what_is_run_again_is_as_it_was_and_no_more_than_its_part(how: str, sizes: Any, run_in: Any) -> None:
    """What is run again is as it was, although `predict` may have changed its array, and padded
    parts hold no more than their share, although they may be as long as the batch.
    """
    items = [np.full(2, x, np.float32) for x in (1, 2, -3 if how == "for one" else 3, 4)]
    stage = Stage(
        *(Fails,),
        kwargs={"how": how},
        max_batch_size=8,
        allowed_batch_sizes=sizes,
        run_in=run_in,
        policy=carpool.Static(8, 0.05),
    )

    async def main() -> list[Any]:
        async with Service(stage).run_async() as service:
            return await asyncio.gather(*[service.predict(item) for item in items], return_exceptions=True)

    given = [one if isinstance(one, Exception) else one.tolist() for one in asyncio.run(main())]
    for item, one in zip(items, given, strict=True):
        if item[0] < 0:
            assert isinstance(one, carpool.ModelError)
        else:
            assert one == [10 * item[0]] * 2
