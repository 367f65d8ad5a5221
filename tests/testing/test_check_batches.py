"""`check_batches` lets right models pass, and finds each way in which items that share a call get mixed up."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import carpool
from carpool.testing import BatchesError, check_batches
from carpool.testing.batches import _are_equal

WEIGHTS = np.random.default_rng(5).normal(size=(300, 64)).astype(np.float32)
ITEMS = [[1.0, 2.0, 3.0, 4.0], [5.0], [2.0, 2.0], [9.0, 1.0, 1.0]]
ROWS = [np.random.default_rng(n).normal(size=300).astype(np.float32) for n in range(5)]


def padded(xs: list[list[float]]) -> NDArray[np.float64]:
    longest = max(map(len, xs))
    return np.array([[*x, *[0.0] * (longest - len(x))] for x in xs])


def mean_over_padding(xs: list[list[float]]) -> list[float]:
    means: list[float] = padded(xs).mean(axis=1).tolist()
    return means


def mean(xs: list[list[float]]) -> list[float]:
    means: list[float] = (padded(xs).sum(axis=1) / [len(x) for x in xs]).tolist()
    return means


def project(xs: NDArray[np.float32]) -> NDArray[np.float32]:
    projected: NDArray[np.float32] = xs @ WEIGHTS  # rounds differently in other numbers of rows
    return projected


class Norm(carpool.Model):
    """Batch norm, in training mode unless it is told."""

    def __init__(self, training: bool = True) -> None:
        self.training = training
        self.is_set_up = False

    def setup(self) -> None:
        self.is_set_up = True

    def predict(self, xs: list[float]) -> list[float]:
        assert self.is_set_up
        batch = np.array(xs)
        centre, width = (batch.mean(), batch.std() + 1e-5) if self.training else (1.0, 2.0)
        normed: list[float] = ((batch - centre) / width).tolist()
        return normed


class Strict(Norm):
    """One that refuses a batch of one, as torch's does in training mode."""

    def predict(self, xs: list[float]) -> list[float]:
        if len(xs) == 1:
            raise ValueError("expected more than 1 value per channel when training")
        return super().predict(xs)


def ready(training: bool) -> Norm:
    model = Norm(training)
    model.setup()
    return model


def factory() -> Norm:
    return Norm(training=False)


async def later(xs: list[float]) -> list[float]:
    await asyncio.sleep(0)
    return [2 * x for x in xs]


class Spelled(carpool.Model):
    """A model with hooks, the second of which takes the item as well."""

    def preprocess(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def predict(self, xs: list[list[int]]) -> list[int]:
        return [sum(x) for x in xs]

    def postprocess(self, y: int, x: list[int]) -> str:
        return f"{y} of {len(x)}"


@pytest.mark.parametrize(
    ("model", "items"),
    [
        (mean, ITEMS),
        (project, ROWS),
        (partial(Norm, training=False), [1.0, 2.0]),
        (ready(False), [1.0, 2.0]),
        (factory, [1.0, 2.0]),
        (later, [1.0, 2.0]),
        (Spelled, ["a", "bc"]),
        (lambda xs: [{"a": [x], "b": "c", "d": None} for x in xs], [1]),
    ],
)
def test_right_models_pass(model: Any, items: list[Any]) -> None:
    """Functions, classes, partials, instances and factories pass that give each item its own answer, also where
    another number of rows rounds differently.
    """
    check_batches(model, items)
    check_batches(model, items, seed=3, rounds=7, max_batch_size=2)


def reversed_order(xs: list[int]) -> list[int]:
    return xs[::-1]


def of_the_batch(xs: list[int]) -> list[int]:
    return [x + len(xs) for x in xs]


def of_one_shape(xs: list[list[float]]) -> list[float]:
    if len(set(map(len, xs))) > 1:
        raise ValueError("setting an array element with a sequence")
    return [sum(x) for x in xs]


def leaky(xs: list[Any]) -> list[float]:
    total = 0.0
    answers = []
    for x in xs:
        total += sum(x)
        answers.append(total)
    return answers


def half(xs: list[float]) -> list[Any]:
    return [np.float16(x if len(xs) == 1 else x * 1.1) for x in xs]


@pytest.mark.parametrize(
    ("model", "items", "said"),
    [
        (
            mean_over_padding,
            ITEMS,
            r"item \d \(\[.*\) gets .* beside item \d \(\[.*; alone it gets .* \(seed 0\)",
        ),
        (Norm, [1.0, 2.0, 4.0], r"item \d \(.*\) gets .* beside item \d"),
        (ready(True), [1.0, 2.0, 4.0], r"beside item \d"),
        (Strict, [1.0, 2.0], r"item 0 \(1.0\) fails alone with ValueError: expected more .*; beside itself it gets"),
        (reversed_order, [1, 2, 3], r"beside item \d"),
        (of_the_batch, [1], r"item 0 \(1\) gets \d beside item 0 \(1\); alone it gets 2"),
        (of_one_shape, ITEMS, r"fails with ValueError: setting an array element with a sequence beside item \d"),
        (leaky, ITEMS, r"beside item \d"),
        (half, [1.0, 2.0], r"beside item \d"),
        (lambda xs: [random.random() for x in xs], [1, 2], r"depends on chance or on earlier calls"),
        (lambda xs: [x if x < 2 else 1 / 0 for x in xs], [1, 2], r"item 1 \(2\) fails alone with ZeroDivisionError"),
    ],
)
def test_what_mixes_items_up_is_found(model: Any, items: list[Any], said: str) -> None:
    """The error names the item, its company, both answers and the seed."""
    with pytest.raises(BatchesError, match=said):
        check_batches(model, items)


def test_items_and_answers_are_the_checks_own() -> None:
    """A model may write to its items, and use one buffer for all its answers."""
    buffer = np.zeros(100)

    def reusing(xs: list[list[float]]) -> list[Any]:
        for at, x in enumerate(xs):
            buffer[at] = sum(x)
            x.clear()
        return [buffer[at : at + 1] for at in range(len(xs))]

    check_batches(reusing, [[1.0], [2.0, 3.0]])


def test_equal_may_be_anybodys() -> None:
    """`equal` decides, with the answer in company first."""
    check_batches(of_the_batch, [1, 2], equal=lambda one, other: one >= other)
    with pytest.raises(BatchesError):
        check_batches(mean, ITEMS, equal=lambda one, other: False)


def test_it_runs_where_a_loop_runs() -> None:
    """A test that is a coroutine can check an async model, too."""

    async def main() -> None:
        check_batches(later, [1.0, 2.0], rounds=3)

    asyncio.run(main())


def parts(xs: list[int]) -> Any:
    yield xs


@pytest.mark.parametrize(
    ("model", "items", "settings", "error", "said"),
    [
        (mean, [], {}, ValueError, "at least one item"),
        (mean, ITEMS, {"max_batch_size": 1}, ValueError, "max_batch_size must be at least 2"),
        (mean, ITEMS, {"rounds": 0}, ValueError, "rounds at least 1"),
        (parts, [1], {}, TypeError, "answers in parts: check_steps"),
    ],
)
def test_what_cannot_be_checked_is_refused(
    model: Any, items: list[Any], settings: dict[str, int], error: type[Exception], said: str
) -> None:
    """The error says what to change."""
    with pytest.raises(error, match=said):
        check_batches(model, items, **settings)


@dataclass
class Scored:
    score: float
    label: str


class Opaque:
    pass


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (1.0, 1.00001, True),
        (1.0, 1.001, False),
        (0.0, 1e-7, True),
        ([100.0, 1e-3], [100.0, 2e-3], True),
        ([1.0, 1e-3], [1.0, 2e-3], False),
        ([np.float32(100), np.float32(1e-3)], [np.float32(100), np.float32(2e-3)], True),
        (np.float32(1), np.float32(1.00001), True),
        (np.array([1.0, np.nan, np.inf]), np.array([1.00001, np.nan, np.inf]), True),
        (np.array([1.0, np.inf]), np.array([1.0, -np.inf]), False),
        (np.array([1.0, 2.0]), np.array([1.0, np.nan]), False),
        (np.float16([1, 2]), np.float16([1.005, 2]), True),
        (np.float16([1, 2]), np.float32([1, 2]), False),
        (np.array([1, 2]), np.array([1, 3]), False),
        (np.zeros(2), np.zeros(3), False),
        (1, 2, False),
        (1, 1.0, False),
        (True, 1, False),
        ("a", "a", True),
        ({"a": 1.0, "b": "x"}, {"a": 1.00001, "b": "x"}, True),
        ({"a": 1.0}, {"b": 1.0}, False),
        ([1, 0.5, "x"], [1, 0.500001, "x"], True),
        ([1.0], [1.0, 2.0], False),
        (Scored(0.5, "x"), Scored(0.5000001, "x"), True),
        (Scored(0.5, "x"), Scored(0.5, "y"), False),
        (Opaque(), Opaque(), False),
    ],
)
def test_when_answers_are_the_same(one: Any, other: Any, is_same: bool) -> None:
    """Rounding is passed over, at the scale of the list or array that a number is in; nothing else is."""
    assert _are_equal(one, other) is is_same


def test_modules_of_torch() -> None:
    """A module in training mode is found, and one in evaluation passes: batch norm, and dropout."""
    torch = pytest.importorskip("torch")

    def answers(*layers: Any) -> Any:
        module = torch.nn.Sequential(*layers)
        return module, lambda xs: list(module(torch.stack(xs)))

    items = list(torch.randn(4, 8, generator=torch.Generator().manual_seed(1)))
    for layer in (torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5)):
        module, predict = answers(torch.nn.Linear(8, 8), layer)
        with pytest.raises(BatchesError, match=r"more than 1 value per channel|depends on chance"):
            check_batches(lambda xs, predict=predict: predict(xs), items)
        module.eval()
        check_batches(lambda xs, predict=predict: predict(xs), items)


def names_one_branch(xs: list[float]) -> list[carpool.To[float] | carpool.Done[int]]:
    """What the last one is named depends on the others."""
    return [carpool.To("a" if len(xs) < 2 else "b", x) if x else carpool.Done(3) for x in xs]


def goes_elsewhere(xs: list[float]) -> list[carpool.To[float] | carpool.Done[int]]:
    return [carpool.To("a", x) if x > 1 else carpool.Done(3) for x in xs]


def counts_early(xs: list[float]) -> list[carpool.Done[int]]:
    return [carpool.Done(len(xs)) for _ in xs]


def test_results_that_say_where_they_go_are_compared_with_what_they_hold() -> None:
    check_batches(goes_elsewhere, [0.0, 1.0, 2.0])
    for wrong in (names_one_branch, counts_early):
        with pytest.raises(BatchesError):
            check_batches(wrong, [1.0, 2.0, 3.0])
