"""How many examples a warm-up runs at a time."""

from __future__ import annotations

from typing import Any

import pytest

from carpool import Model, Service, Stage, StartupError, Static
from carpool.service.assemble import warm_up_shapes, warm_up_sizes


class Text(Model):
    examples = ("abc", "de")

    def predict(self, text: str) -> int:
        return len(text)


class Texts(Model):
    examples = ("abc", "de", "fghij")

    def predict(self, texts: list[str]) -> list[int]:
        return [len(text) for text in texts]


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"max_batch_size": 64}, [1, 16, 32, 64]),
        ({"max_batch_size": 3}, [1, 3]),
        ({"max_batch_size": 1}, [1]),
        ({"max_batch_size": 64, "policy": Static(max_batch_size=8)}, [1, 2, 4, 8]),
        ({"max_batch_size": 24, "allowed_batch_sizes": [3, 8, 24]}, [3, 8, 24]),
    ],
)
def test_from_one_to_a_full_batch(settings: dict[str, Any], sizes: list[int]) -> None:
    """A warm-up runs what the policy may ask for, from one to a full batch, and all allowed sizes."""
    assert warm_up_sizes(Stage(Texts, **settings)) == {n: n for n in sizes}


def test_single_items_are_not_timed() -> None:
    """A stage without batches runs its examples and times no sizes."""
    assert warm_up_sizes(Stage(Text)) == {}


def test_sizes_are_sums() -> None:
    """Where batches are limited by size, as many examples in turn go as fit into a quarter, a half
    and a whole batch, and never more than may wait.
    """
    assert warm_up_sizes(Stage(Texts, max_batch_size=20, size=len)) == {1: 3, 2: 5, 3: 10, 6: 20}
    assert warm_up_sizes(Stage(Texts, max_batch_size=1000, size=len, max_queue_size=4)) == {1: 3, 4: 13}


def test_examples_larger_than_a_batch_go_alone() -> None:
    """Examples that are larger than a batch go alone, as requests would."""
    assert warm_up_sizes(Stage(Texts, max_batch_size=2, size=len)) == {1: 3}


class Labels(Model):
    """Is written for one item: the answer is its number of labels, which is 1 for the example."""

    examples = (1,)

    def predict(self, ns: list[int]) -> list[str]:
        return ["label"] * ns[0]


@pytest.mark.parametrize("limit", [2, 3, 4, 64])
@pytest.mark.parametrize("examples", [(1,), (2,), (5,), (1, 2), (3, 1, 2)])
def test_a_model_written_for_one_item_is_found_by_examples(
    limit: int, examples: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of results for one item that happens to fit one size of the warm-up does not fit another one, so the
    service does not start, and says which number would be right.
    """
    monkeypatch.setattr(Labels, "examples", examples)
    service = Service(Stage(Labels, max_batch_size=limit, run_in="thread"))
    with pytest.raises(StartupError, match=r"but the model returned \d: did you mean"), service.run():
        pass


def test_a_model_without_examples_has_no_warm_up() -> None:
    """A model without examples has no warm-up, and a function has none either."""
    assert warm_up_sizes(Stage(len, max_batch_size=8)) == {}


def test_an_example_that_cannot_be_weighed_ends_the_start() -> None:
    """An example that cannot be weighed ends the start, with its number and what the size function
    raised.
    """

    def size(text: str) -> int:
        return 1 // (5 - len(text))

    with pytest.raises(StartupError, match="example 3 cannot be weighed: size= of stage Texts raised ZeroDivision"):
        warm_up_sizes(Stage(Texts, max_batch_size=8, size=size))


@pytest.mark.parametrize(
    ("settings", "shapes"),
    [
        pytest.param(
            {},
            [(1, 1, 2), (1, 2, 2), (1, 8, 2), (0, 1, 3), (0, 2, 3), (0, 8, 3), (2, 1, 5), (2, 2, 5), (2, 8, 5)],
            id="all",
        ),
        pytest.param(
            {"max_padded_size": 12}, [(1, 1, 2), (1, 2, 2), (0, 1, 3), (0, 2, 3), (2, 1, 5), (2, 2, 5)], id="padded"
        ),
        pytest.param(
            {"allowed_lengths": [4, 8], "allowed_batch_sizes": [4, 8]},
            [(0, 4, 3), (0, 8, 3), (2, 4, 5), (2, 8, 5)],
            id="allowed",
        ),
    ],
)
def test_lengths_are_warmed_up_one_by_one(settings: dict[str, Any], shapes: list[tuple[int, int, int]]) -> None:
    """With `length=` a warm-up also runs the shortest, the middle and the longest example in batches
    of their own, as large as may be; with `allowed_lengths`, one example of each.
    """
    assert list(warm_up_shapes(Stage(Texts, max_batch_size=8, length=len, **settings))) == shapes
    assert not warm_up_shapes(Stage(Texts, max_batch_size=8))


def test_an_example_without_a_length_ends_the_start() -> None:
    """An example of which `length=` cannot tell the length ends the start, with its number."""
    stage = Stage(Texts, max_batch_size=8, length=lambda text: 1 // (len(text) - 2))
    with pytest.raises(
        StartupError, match="the length of example 2 cannot be told: length= of stage Texts raised Zero"
    ):
        warm_up_shapes(stage)


def test_the_warm_up_teaches_what_lengths_cost() -> None:
    """When a service is there, its policy has learned from examples of each length."""
    with Service(Stage(Texts, max_batch_size=8, length=len, run_in="thread")).run() as s:
        (stage,) = s.stats().stages
    assert set(stage.policy["cost_by_length_s"]) >= {"1 x 1", "1 x 5", "8 x 5"}
