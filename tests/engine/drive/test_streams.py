"""Many items from one caller: order, constant memory, errors, early ends; from threads and from asyncio."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

import carpool
from carpool import Service, Stage
from carpool.engine.drive.streams import MOST_WAITING, StreamWindow
from tests.effort import slow_where
from tests.support import models
from tests.support.processes import resident_bytes
from tests.support.waiting import wait_until

Collect = Callable[..., list[Any]]


def from_threads(service: Service, xs: Iterable[Any], **options: Any) -> list[Any]:
    with service.run() as handle:
        return list(handle.stream(xs, **options))


def from_asyncio(service: Service, xs: Iterable[Any], **options: Any) -> list[Any]:
    async def main() -> list[Any]:
        async with service.run_async() as handle:
            return [y async for y in handle.stream(xs, **options)]

    return asyncio.run(main())


@pytest.fixture(params=[from_threads, from_asyncio])
def collect(request: pytest.FixtureRequest) -> Collect:
    function: Collect = request.param
    return function


DOUBLE = Service(Stage(models.scale, max_batch_size=64, workers=2))


def test_a_stream_keeps_order(collect: Collect) -> None:
    """A stream gives its results in the order of its items, whatever order the workers finish in."""
    assert collect(DOUBLE, range(5000)) == [2 * x for x in range(5000)]


@slow_where(lambda collect: collect is from_asyncio)
def test_an_empty_stream_ends(collect: Collect) -> None:
    """A stream of nothing ends at once."""
    assert collect(DOUBLE, []) == []


@slow_where(lambda collect: collect is from_asyncio)
@slow_where(lambda window: window != 3)
@pytest.mark.parametrize("window", [1, 2, 3, 1000])
def test_any_window_works(collect: Collect, window: int) -> None:
    """`max_in_flight` bounds how many items of a stream are inside, down to one at a time."""
    assert collect(DOUBLE, range(300), max_in_flight=window) == [2 * x for x in range(300)]


@slow_where(lambda collect: collect is from_asyncio)
def test_an_error_is_raised_in_its_place(collect: Collect) -> None:
    """A stream raises the error of an item in its place, after the results of the items before it."""
    got: list[Any] = []

    def main() -> None:
        with Service(models.RaisesInPredict).run() as handle:
            for y in handle.stream([1, 2, 0, 4]):
                got.append(y)

    with pytest.raises(carpool.ModelError, match="division by zero"):
        main()

    assert got == [1.0, 0.5]


@slow_where(lambda collect: collect is from_asyncio)
def test_errors_can_be_returned(collect: Collect) -> None:
    """With `return_exceptions=True` a stream gives the error of an item in its place and goes on."""
    answers = collect(Service(models.RaisesInPredict), [1, 0, 2], return_exceptions=True)

    assert [a if isinstance(a, float) else type(a) for a in answers] == [1.0, carpool.ModelError, 0.5]


def test_an_input_that_raises_ends_the_stream_after_what_it_gave(collect: Collect) -> None:
    """If the input of a stream raises, the items that came before are answered first."""
    seen = []

    def items() -> Iterator[int]:
        yield from range(5)
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        collect(DOUBLE, items())

    def consume() -> None:
        with DOUBLE.run() as handle:
            for y in handle.stream(items()):
                seen.append(y)

    with pytest.raises(LookupError):
        consume()
    assert seen == [0, 2, 4, 6, 8]


@slow_where(lambda collect: collect is from_asyncio)
def test_an_item_that_cannot_be_sent_is_an_error(collect: Collect) -> None:
    """An item that cannot be pickled, such as a generator, is an error and no hang."""
    with pytest.raises((TypeError, carpool.CarpoolError)):
        collect(DOUBLE, [1, (x for x in ()), 3])


def test_a_slow_input_holds_nothing_back() -> None:
    """A stream hands out a result as soon as it is there, although the next item is not."""
    more = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        yield 2
        assert more.wait(20)
        yield 3

    with DOUBLE.run() as handle:
        stream = handle.stream(items())
        assert [next(stream), next(stream)] == [2, 4]
        more.set()
        assert list(stream) == [6]


def test_an_asynchronous_input() -> None:
    """An async iterator can be the input of a stream."""

    async def items() -> AsyncIterator[int]:
        for x in range(50):
            await asyncio.sleep(0)
            yield x

    async def main() -> list[Any]:
        async with DOUBLE.run_async() as handle:
            return [y async for y in handle.stream(items())]

    assert asyncio.run(main()) == [2 * x for x in range(50)]


def test_a_stream_that_is_left_early_gives_everything_back() -> None:
    """When a stream is left early its items inside are cancelled, its input's thread ends, and the
    service goes on.
    """
    with Service(Stage(models.scale, max_batch_size=4)).run() as handle:
        before = threading.active_count()
        for y in handle.stream(itertools.count()):
            if y == 200:
                break
        wait_until(lambda: threading.active_count() <= before and not handle.stats().in_flight)
        assert handle.predict(1) == 2


def test_several_streams_at_once_do_not_mix() -> None:
    """Of several streams at once each gets the answers to its own items."""
    results: dict[int, list[Any]] = {}
    with DOUBLE.run() as handle:

        def run(start: int) -> None:
            results[start] = list(handle.stream(range(start, start + 2000)))

        threads = [threading.Thread(target=run, args=(1_000_000 * i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert results == {s: [2 * x for x in range(s, s + 2000)] for s in range(0, 4_000_000, 1_000_000)}


@pytest.mark.slow
def test_a_million_items_in_constant_memory() -> None:
    """A stream of a million items holds its window and not its history, and keeps order throughout."""
    with Service(Stage(models.scale, max_batch_size=64)).run() as handle:
        early = 0
        for x, y in enumerate(handle.stream(iter(range(1_000_000)))):
            assert y == 2 * x
            if x == 100_000:
                early = resident_bytes()
        grown = resident_bytes() - early

    assert grown < 8 * 2**20


def test_max_in_flight_must_be_positive() -> None:
    """A `max_in_flight` below one is refused: such a stream would wait for ever."""
    with DOUBLE.run() as handle, pytest.raises(ValueError, match="max_in_flight must be a whole number of at least 1"):
        handle.stream([1], max_in_flight=0)


def test_few_large_items_are_taken_at_a_time() -> None:
    """The window of a stream narrows for large items before they are taken in, however fast the
    input is.
    """
    taken = 0
    most = 0
    array = np.zeros(750_000)

    def arrays() -> Iterator[Any]:
        nonlocal taken
        for _ in range(60):
            taken += 1
            yield array

    with Service(Stage(models.double, name="arrays")).run() as service:
        for done, y in enumerate(service.stream(arrays())):
            most = max(most, taken - done)
            assert y.shape == array.shape

    assert most <= 12


def test_items_that_do_not_show_their_size_are_taken_slowly_at_first() -> None:
    """A list of arrays shows its size only when it is encoded, so a stream takes such items slowly
    at first.
    """
    taken = 0
    most = 0
    array = np.zeros(250_000)

    def lists() -> Iterator[Any]:
        nonlocal taken
        for _ in range(60):
            taken += 1
            yield [array, array, array]

    with Service(Stage(models.double, name="lists")).run() as service:
        for done, y in enumerate(service.stream(lists())):
            most = max(most, taken - done)
            assert len(y) == 6

    assert most <= 12


def until_quiet(made: list[int], pause: Callable[[], None]) -> int:
    """How many were made when no more are."""
    seen = -1
    while len(made) > seen:
        seen = len(made)
        pause()
    return seen


@slow_where(lambda settings, taken: bool(settings) is (taken == 1))
@pytest.mark.parametrize("taken", [1, 40], ids=["at once", "after some answers"])
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"max_in_flight": 100}, marks=pytest.mark.slow)], ids=["by itself", "as the user says"]
)
@pytest.mark.parametrize("settings", [{}, {"max_batch_size": 4}], ids=["single items", "batches"])
def test_few_large_answers_wait_for_a_consumer_that_pauses(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, int], options: dict[str, int], taken: int
) -> None:
    """Nothing more is let in while as many bytes of answers wait as may, for threads and for tasks; then all is
    answered.
    """
    monkeypatch.setattr("carpool.engine.drive.streams.MOST_WAITING", 10 * 100_000)
    made: list[int] = []

    def big(n: int) -> str:
        made.append(n)
        return "y" * 100_000

    def bigs(ns: list[int]) -> list[str]:
        return [big(n) for n in ns]

    n = 300
    # what may wait and one more, and where nobody says otherwise what is inside besides
    most = (100 if options else 12 + 24) + taken
    service = Service(Stage(bigs if settings else big, run_in="thread", **settings), timeout_s=100)
    with service.run() as s:
        answers = s.stream(range(n), **options)
        for _ in range(taken):
            next(answers)
        assert until_quiet(made, lambda: threading.Event().wait(0.3)) <= most
        assert sum(1 for _ in answers) == n - taken and len(made) == n

    async def test() -> None:
        async with service.run_async() as s:
            answers = s.stream(range(n), **options)
            for _ in range(taken):
                await anext(answers)
            seen = -1
            while len(made) > seen:
                seen = len(made)
                await asyncio.sleep(0.3)
            assert seen <= most
            assert len([y async for y in answers]) == n - taken and len(made) == n

    made.clear()
    asyncio.run(test())


def test_a_window_opens_again_for_small_answers() -> None:
    """It is narrow only as long as answers are large, and never narrower than the workers need."""
    window = StreamWindow(4, 64)
    for _ in range(5):
        window.note_answers(8, 8 * 100)
    assert (window.limit, window.is_wide, window.is_heavy) == (64, True, False)
    window.note_answers(2, 2 * MOST_WAITING // 8)
    assert (window.limit, window.is_heavy) == (8, True)
    window.note_answers(1, MOST_WAITING)
    assert (window.limit, window.is_heavy) == (4, True)
    for _ in range(20):
        window.note_answers(8, 8 * 100)
    assert (window.limit, window.is_heavy) == (64, False)
    window.has_large_items = True
    window.narrow(MOST_WAITING // 16)
    window.note_answers(8, 8 * 100)
    assert window.limit == 16, "small answers to large items let no more in"
