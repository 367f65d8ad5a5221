"""Which rows there are for each document, and how one side of one of them is measured.

    python -m bench.documents.rows DOCUMENT ROW SIDE SECONDS

measures one and prints its figures as JSON.
"""

from __future__ import annotations

import asyncio
import functools
import json
import operator
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

import carpool
from bench.documents import clocks, models
from bench.documents.batched_service import BatchedService
from bench.documents.cooperative_queue import CooperativeQueue
from bench.documents.load import WARM_UP_S, Ask, Same, in_tasks, in_threads
from bench.documents.model_service import ModelService
from bench.tools.figures import Facts

Side = Literal["document", "carpool"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
CALLERS = 256
MAX_BATCH_SIZE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table.

    Attributes:
        title: What it is called there.
        document: Measures the document's design for so many seconds; carpool: measures carpool.
        env: What both sides have in their environment. No other number of BLAS or OpenMP threads is
            in it.
    """

    title: str
    document: Callable[[float], Facts]
    carpool: Callable[[float], Facts]
    env: Mapping[str, str] = field(default_factory=dict)


# -- what is asked


def floats(callers: int = CALLERS) -> tuple[list[Ask], Same]:
    return [Ask(float(i), 2.0 * i) for i in range(callers)], operator.eq


def integers(right: Callable[[int], int], callers: int = CALLERS) -> tuple[list[Ask], Same]:
    return [Ask(i, right(i)) for i in range(callers)], operator.eq


def arrays(right: Callable[[models.Array], models.Array]) -> tuple[list[Ask], Same]:
    """Each caller has its own; an answer is known by its first element."""
    xs = np.random.default_rng(2).standard_normal((CALLERS, models.WIDTH)).astype(np.float32)
    ys = right(xs)
    return [Ask(x, float(y[0])) for x, y in zip(xs, ys, strict=True)], lambda y, first: bool(abs(y[0] - first) < 1e-3)


def arrays_for_means() -> tuple[list[Ask], Same]:
    asks, _ = arrays(lambda xs: 2 * xs.mean(axis=1, keepdims=True))
    return asks, lambda y, mean: bool(abs(y - mean) < 1e-4)


# -- document 1: one worker process, batches of 100


def one(
    title: str, model: type[Any], ask: Callable[[], tuple[list[Ask], Same]], *, workers: int = 1, exported: bool = True
) -> Row:
    """The document's design always has one worker."""

    def make() -> Callable[[list[Any]], Any]:
        made = model()
        made.setup()
        predict: Callable[[list[Any]], Any] = made.predict
        return predict

    async def document(seconds: float) -> Facts:
        service = BatchedService(MAX_BATCH_SIZE)
        service.start(make)
        try:
            return await in_tasks(service.do_one, *ask(), WARM_UP_S, seconds)
        finally:
            service.stop()

    async def ours(seconds: float) -> Facts:
        declared = carpool.Service(carpool.Stage(model, max_batch_size=MAX_BATCH_SIZE, workers=workers))
        async with declared.run_async() as service:
            return await in_tasks(service.predict, *ask(), WARM_UP_S, seconds)

    return Row(
        title=title,
        document=lambda seconds: asyncio.run(document(seconds)),
        carpool=lambda seconds: asyncio.run(ours(seconds)),
        env=ONE_THREAD if exported else {},
    )


def net_arrays() -> tuple[list[Ask], Same]:
    layers = models.weights()
    return arrays(lambda xs: models.through(layers, xs))


def doubled_arrays() -> tuple[list[Ask], Same]:
    return arrays(lambda xs: 2 * xs)


# -- document 2: rows of components


@dataclass(frozen=True, slots=True)
class Component:
    function: Callable[[Any], Any]
    workers: int = 1
    batch_size: int = 0


def itself(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return function


def two(title: str, components: Sequence[Component], ask: Callable[[], tuple[list[Ask], Same]]) -> Row:
    async def document(seconds: float) -> Facts:
        service = ModelService()
        for part in components:
            service.add(functools.partial(itself, part.function), workers=part.workers, batch_size=part.batch_size)
        service.start()
        try:
            return await in_tasks(service.predict, *ask(), WARM_UP_S, seconds)
        finally:
            service.stop()

    async def ours(seconds: float) -> Facts:
        stages = [
            carpool.Stage(part.function, workers=part.workers, max_batch_size=part.batch_size or None)
            for part in components
        ]
        async with carpool.Service(*stages).run_async() as service:
            return await in_tasks(service.predict, *ask(), WARM_UP_S, seconds)

    return Row(
        title=title,
        document=lambda seconds: asyncio.run(document(seconds)),
        carpool=lambda seconds: asyncio.run(ours(seconds)),
    )


# -- document 3: threads


def three(title: str, callers: int, call_s: float = 0.0, item_s: float = 0.0) -> Row:
    def function(xs: list[int]) -> list[int]:
        if call_s or item_s:
            time.sleep(call_s + item_s * len(xs))
        return [x + 1 for x in xs]

    def measured(ask: Callable[[Any], Any], seconds: float) -> Facts:
        return in_threads(ask, *integers(lambda x: x + 1, callers), WARM_UP_S, seconds)

    return Row(
        title=title,
        document=lambda seconds: measured(CooperativeQueue(function), seconds),
        carpool=lambda seconds: measured(carpool.batch(function), seconds),
    )


SCALE_AND_SHIFT = (Component(models.scale), Component(models.shift))

ROWS: dict[str, dict[str, Row]] = {
    "1": {
        "net": one("four layers, arrays; one BLAS thread exported", models.Net, net_arrays),
        "net_free": one("four layers, arrays; nothing exported", models.Net, net_arrays, exported=False),
        "net_two": one("four layers, arrays; two of our workers, one exported", models.Net, net_arrays, workers=2),
        "net_two_free": one(
            "four layers, arrays; two of our workers, nothing exported",
            models.Net,
            net_arrays,
            workers=2,
            exported=False,
        ),
        "sleep_arrays": one("5 ms of sleep, arrays", models.SleepOnArrays, doubled_arrays),
        "sleep_floats": one("5 ms of sleep, floats", models.SleepOnFloats, floats),
        "floats": one("no work, floats", models.Floats, floats),
    },
    "2": {
        "scale_shift": two("Scale, Shift", SCALE_AND_SHIFT, lambda: integers(lambda x: 2 * x + 3)),
        "alone": two("Scale, Shift; one caller", SCALE_AND_SHIFT, lambda: integers(lambda x: 2 * x + 3, 1)),
        "arrays": two(
            "arrays one by one, then in batches of 100",
            (Component(models.scale_array), Component(models.means, batch_size=MAX_BATCH_SIZE)),
            arrays_for_means,
        ),
        "burn": two(
            "2 ms of Python, two workers",
            (Component(models.burn, workers=2),),
            lambda: integers(lambda x: x + models.BURN // 2),
        ),
    },
    "3": {
        "free": three("free function, 20 threads", 20),
        "alone": three("free function, one caller", 1),
        "call": three("2 ms a call, 20 threads", 20, call_s=2e-3),
        "call_and_item": three("2 ms a call and 50 µs an item, 20 threads", 20, call_s=2e-3, item_s=50e-6),
        "item": three("50 µs an item, 20 threads", 20, item_s=50e-6),
    },
}


def main(document: str, row: str, side: Side, seconds: float) -> None:
    measured = ROWS[document][row]
    with tempfile.TemporaryDirectory(prefix="cb-clocks-") as folder:
        os.environ[clocks.FOLDER] = folder
        print(json.dumps((measured.document if side == "document" else measured.carpool)(seconds)))


if __name__ == "__main__":
    _, document, row, side, seconds = sys.argv
    main(document, row, "document" if side == "document" else "carpool", float(seconds))
