"""Who owns a value: each way to run a model, with each kind of value, by each way to ask.

The models (`support/owning.py`) write over their items and fill one memory again and again. The callers write over
what they have given once that is allowed, and over every second answer. Yet each answer is right, stays as it was, and
is its caller's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import carpool
from carpool import Service, Stage
from tests.effort import slow_where
from tests.support import owning
from tests.support.owning import BAD, KINDS, LARGE, PARTS, fill, make, numbers

N = 16
"""Items; a batch has eight of them at most."""
MINE = 1000.0
"""What a caller writes over what is its own."""


@dataclass(frozen=True)
class Way:
    """A way to run a model.

    Attributes:
        models: The name of the model of each stage.
        settings: Of each stage.
        kwargs: Of each model.
        answer: "whole", "parts" (a list of them), "sum" (of the parts) or "array".
        kinds: Of the items.
    """

    models: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=lambda: dict(BATCHED))
    kwargs: dict[str, Any] = field(default_factory=dict)
    answer: str = "whole"
    kinds: tuple[str, ...] = KINDS


BATCHED = {"max_batch_size": 8, "policy": "static", "max_queue_delay_s": 0.1}
ROWS = {"max_batch_size": 8}
WAYS = {
    "a batch": Way(("Batch",)),
    "single items": Way(("Single",), {}),
    "two stages": Way(("Passes", "Batch")),
    "hooks": Way(("HookedBatch",)),
    "hooks of single items": Way(("HookedSingle",), {}),
    "a bad item": Way(("Batch",), kwargs={"bad": True}),
    "a bad single item": Way(("Single",), {}, {"bad": True}),
    "a bad item behind a hook": Way(("HookedBatch",), kwargs={"bad": True}),
    "memory for three": Way(("Batch",), kwargs={"most": 3}),
    "memory for three behind a hook": Way(("HookedBatch",), kwargs={"most": 3}),
    "padding": Way(("Batch",), {**BATCHED, "allowed_batch_sizes": [8]}),
    "padding after a failure": Way(("Batch",), {**BATCHED, "allowed_batch_sizes": [3, 8]}, {"bad": True}),
    "padding behind a hook": Way(("HookedBatch",), {**BATCHED, "allowed_batch_sizes": [8]}),
    "arrays of two kinds": Way(("Arrays",), answer="array", kinds=("small", "large")),
    "arrays of one kind": Way(("Arrays",), answer="array", kinds=("small",)),
    "arrays of two kinds with a bad one": Way(("Arrays",), BATCHED, {"bad": True}, "array", ("small", "large")),
    "arrays of one kind with a bad one": Way(("Arrays",), BATCHED, {"bad": True}, "array", ("small",)),
    "a generator": Way(("Yields",), {"max_rows": 8}, answer="parts"),
    "a generator behind a hook": Way(("HookedYields",), {"max_rows": 8}, answer="parts"),
    "a generator of lists": Way(("YieldsLists",), ROWS, answer="parts"),
    "steps": Way(("Steps",), ROWS, answer="parts"),
    "steps that start in halves": Way(("Steps",), ROWS, {"most": 3}, "parts"),
    "steps with a bad item": Way(("Steps",), ROWS, {"bad": True}, "parts"),
    "steps with a bad item behind a hook": Way(("HookedSteps",), ROWS, {"bad": True}, "parts"),
    "steps that collect": Way(("Collects",), ROWS, answer="sum"),
    "a batch before steps": Way(("Passes", "Steps"), ROWS, answer="parts"),
    "examples": Way(("BatchOfExamples",)),
    "examples of single items": Way(("SingleOfExamples",), {}),
    "examples of steps": Way(("StepsOfExamples",), ROWS, answer="parts"),
}
QUICK = {"single items", "a bad item", "steps with a bad item", "hooks"}
"""Ways that a quick run tries in worker processes and on the loop, too."""


def service(way: Way, run_in: Any) -> Service:
    stages = []
    for name in way.models:
        model = getattr(owning, name + ("Async" if run_in == "loop" else ""))
        settings = BATCHED if name == "Passes" else way.settings
        stages.append(Stage(model, name=name, run_in=run_in, kwargs=way.kwargs, **settings))
    return Service(*stages)


def items(way: Way) -> list[tuple[str, float]]:
    """The kinds and numbers of the items, two of a kind after each other."""
    return [(way.kinds[i // 2 % len(way.kinds)], float(i)) for i in range(N)]


def given(way: Way, kind: str, x: float) -> Any:
    return make(kind, x) if way.answer == "array" else (kind, make(kind, x))


def overwrite(way: Way, item: Any) -> None:
    fill(item if way.answer == "array" else item[1], MINE)


def expected(way: Way, x: float) -> Any:
    """The numbers in the answer to an item; None for one that fails."""
    if way.kwargs.get("bad") and x == BAD:
        return None
    parts = [2 * x + j for j in range(PARTS)]
    return {"parts": [{part} for part in parts], "sum": {sum(parts)}}.get(way.answer, {2 * x})


def found(way: Way, answer: Any) -> Any:
    if isinstance(answer, carpool.ModelError):
        if isinstance(answer.__cause__, owning.Wrote):
            assert numbers(answer.__cause__.args[0]) == {BAD}, "the error shows what a later call has written"
        return None
    return [numbers(part) for part in answer] if way.answer == "parts" else numbers(answer)


class Kept:
    """Answers that their callers keep, and of which they write over every second one."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._answers: list[Any] = []

    def add(self, x: float, answer: Any) -> None:
        assert found(self._way, answer) == expected(self._way, x), x
        if isinstance(answer, carpool.ModelError):
            return
        if int(x) % 2:
            for part in answer if self._way.answer == "parts" else [answer]:
                fill(part, MINE)
        self._answers.append((x, answer))

    def check(self) -> None:
        """Nobody else has changed them since."""
        for x, answer in self._answers:
            now = found(self._way, answer)
            if int(x) % 2:
                assert now == ([{MINE}] * PARTS if self._way.answer == "parts" else {MINE}), x
            else:
                assert now == expected(self._way, x), x


def answer_or_error(ask: Any, item: Any) -> Any:
    try:
        return ask(item)
    except carpool.ModelError as error:
        return error


@pytest.mark.parametrize("run_in", ["process", "thread", "loop"])
@pytest.mark.parametrize("way", WAYS)
@slow_where(lambda way, run_in: run_in != "thread" and way not in QUICK)
def test_each_owns_what_it_has(way: str, run_in: str) -> None:
    """Whatever a model does to its items and to what it has returned, and a caller to its answer and
    to what it has given, nobody else sees it.
    """
    how = WAYS[way]
    kept = Kept(how)
    with service(how, run_in).run() as handle, ThreadPoolExecutor(N) as threads:
        ask_in_threads(how, handle, threads, kept)
        ask_in_a_stream(how, handle, kept)
        if how.answer in ("parts", "sum"):
            ask_for_parts(how, handle)
        ask_in_threads(how, handle, threads, kept)
        kept.check()


def ask_in_threads(way: Way, handle: Any, threads: ThreadPoolExecutor, kept: Kept) -> None:
    """Each thread has its own item back as it was."""
    own = [given(way, kind, x) for kind, x in items(way)]
    answers = list(threads.map(lambda item: answer_or_error(handle.predict, item), own))
    for (_, x), item, answer in zip(items(way), own, answers, strict=True):
        assert numbers(item if way.answer == "array" else item[1]) == {x}, "a caller's item was changed"
        kept.add(x, answer)


def ask_in_a_stream(way: Way, handle: Any, kept: Kept) -> None:
    """The input uses the same memory for all items."""

    def filled() -> Iterator[Any]:
        buffers = {kind: make(kind, 0.0) for kind in way.kinds}
        for kind, x in items(way):
            fill(buffers[kind], x)
            yield buffers[kind] if way.answer == "array" else (kind, buffers[kind])

    answers = list(handle.stream(filled(), return_exceptions=True))
    for (_, x), answer in zip(items(way), answers, strict=True):
        kept.add(x, answer)


def ask_for_parts(way: Way, handle: Any) -> None:
    """Callers write over the item as soon as they have given it, and over each part that they get."""
    parts_of = {"sum": list, "parts": list}[way.answer]
    for kind, x in items(way)[:8]:
        item = given(way, kind, x)
        if expected(way, x) is None:
            continue
        with handle.predict_stream(item) as parts:
            overwrite(way, item)
            got = []
            for part in parts:
                got.append(numbers(part))
                fill(part, MINE)
        assert parts_of(got) == [{2 * x + j} for j in range(PARTS)], x


@pytest.mark.parametrize("run_in", ["process", "thread", "loop"])
@pytest.mark.parametrize("way", ["a batch", "single items", "steps"])
@slow_where(lambda way, run_in: run_in == "process" and way != "a batch")
def test_a_task_may_change_what_it_has_given(way: str, run_in: str) -> None:
    """A task that has given an item may write over it before the answer is there."""
    how = WAYS[way]

    async def ask() -> list[Any]:
        own = [given(how, kind, x) for kind, x in items(how)]
        async with service(how, run_in).run_async() as handle:
            tasks = [asyncio.ensure_future(handle.predict(item)) for item in own]
            await asyncio.sleep(0)  # they have been given
            for item in own:
                overwrite(how, item)
            return await asyncio.gather(*tasks)

    for (_, x), answer in zip(items(how), asyncio.run(ask()), strict=True):
        assert found(how, answer) == expected(how, x)


def test_one_object_given_many_times_is_many_items() -> None:
    """If many callers give the same array, or a model returns the same one for many, each has its own."""
    item = ("large", np.ones(LARGE))
    for run_in in ("thread", "process"):
        with service(WAYS["a batch"], run_in).run() as handle, ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(handle.predict, [item] * 8))
        assert numbers(item[1]) == {1.0}
        for i, answer in enumerate(answers):
            answer[:] = i
        assert [numbers(answer) for answer in answers] == [{float(i)} for i in range(8)]
