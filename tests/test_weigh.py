"""What `size=` says of an item: in every form that an item can come in, and whatever the user's function does."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from carpool import Stage
from carpool.errors import CarpoolError, InvalidRequest, ModelError, ValidationError
from carpool.service.weigh import Weigher, units, weigher_of
from carpool.wire.payload import JSON, MSGPACK, RAW, dump
from tests import models


def word_count(text: str) -> int:
    """The size of a text in these tests."""
    return len(text.split())


def weigher(size: Any = word_count, input_type: Any = str) -> Weigher:
    return Weigher(size, "stage s", input_type)


def test_an_item_weighs_the_same_in_every_form() -> None:
    """As an object, as our own bytes, as JSON and as msgpack; raw bytes are the item."""
    text = "one two three"

    assert weigher().of(text) == 3
    assert weigher().of_encoded(dump(text)) == 3
    assert weigher().of_encoded(msgspec.json.encode(text), JSON) == 3
    assert weigher().of_encoded(bytearray(msgspec.msgpack.encode(text)), MSGPACK) == 3
    assert weigher(len, bytes).of_encoded(bytearray(b"12345"), RAW) == 5


def test_an_array_of_another_stage_is_weighed_by_its_rows() -> None:
    """Large buffers travel beside the pickle; they are looked at where they are."""
    assert weigher(len, Any).of_encoded(dump(np.zeros((7, 20_000)))) == 7


@pytest.mark.parametrize(("returned", "size"), [(3, 3), (1, 1), (0, 1), (np.int64(5), 5), (True, 1)])
def test_whole_numbers_are_sizes(returned: Any, size: int) -> None:
    """Also numpy's; an empty item takes a place all the same."""
    assert units(returned, "f") == size


@pytest.mark.parametrize(
    "returned", [-1, 2.0, "3", None, [1], "x" * 1000, 2**53 + 1, pytest.param(10**5000, id="vast")]
)
def test_anything_else_is_the_model_s_fault(returned: Any) -> None:
    """Said with what was returned and what would do."""
    with pytest.raises(ModelError, match=r"size= of f returned .*: it must return a whole number") as caught:
        units(returned, "f")

    assert caught.value.code == "bad_result"
    assert len(str(caught.value)) < 200


def test_a_size_function_that_raises_is_the_model_s_fault() -> None:
    """With its type's name and its traceback."""
    with pytest.raises(ModelError, match="size= of stage s raised KeyError: 'tokens'") as caught:
        weigher(lambda item: item["tokens"], dict).of({})

    assert (caught.value.type_name, "KeyError" in caught.value.traceback) == ("KeyError", True)


class Unspeakable(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


KINDS = [
    StopIteration,
    StopAsyncIteration,
    GeneratorExit,
    asyncio.CancelledError,
    KeyboardInterrupt,
    SystemExit,
    MemoryError,
    RecursionError,
    Unspeakable,
]


class Index:
    """A number that cannot be had."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __index__(self) -> int:
        raise self.kind

    def __repr__(self) -> str:
        raise self.kind


class Trap:
    """A type whose values cannot be read."""

    kind: type[BaseException]

    @classmethod
    def model_validate(cls, value: Any) -> Any:
        raise cls.kind

    @classmethod
    def model_validate_json(cls, value: Any) -> Any:
        raise cls.kind


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_foreign_code_raises_is_an_error_of_the_item(kind: type[BaseException]) -> None:
    """Regression: of a size function, a number or a type that raised unusually nobody was told, or the loop ended."""

    def size(x: Any) -> int:
        raise kind

    trap = type("T", (Trap,), {"kind": kind})
    for weigh in (
        lambda: weigher(size).of("x"),
        lambda: weigher(lambda x: Index(kind)).of("x"),
        lambda: weigher(input_type=trap).of_encoded(b"1", JSON),
        lambda: weigher(input_type=trap).of_encoded(b"1", MSGPACK),
    ):
        with pytest.raises(CarpoolError) as caught:
            weigh()
        assert caught.value.status in (500, 400)
        assert (caught.value.status == 400) <= (kind is RecursionError)


def test_a_result_that_cannot_be_shown() -> None:
    """No number, and no text either."""
    nothing = type("Nothing", (), {"__repr__": Index(SystemExit).__repr__, "kind": SystemExit})
    with pytest.raises(ModelError, match="returned an object of type Nothing: it must"):
        units(nothing(), "f")


def test_a_size_function_may_refuse_an_item() -> None:
    """Its own validation error stays one."""

    def strict(text: str) -> int:
        raise ValidationError("too long")

    with pytest.raises(ValidationError, match="too long"):
        weigher(strict).of("x")


def test_a_body_that_does_not_fit_is_the_caller_s_fault() -> None:
    """As when a worker reads it: malformed, or of another type."""
    with pytest.raises(InvalidRequest, match="the body is not valid JSON"):
        weigher().of_encoded(b'"abc', JSON)
    with pytest.raises(InvalidRequest, match="the body is not valid msgpack"):
        weigher().of_encoded(b"\xc1", MSGPACK)
    with pytest.raises(ValidationError, match="Expected `str`"):
        weigher().of_encoded(b"1", JSON)


def test_a_result_that_cannot_be_read_is_the_model_s_fault() -> None:
    """No caller has sent it."""
    with pytest.raises(ModelError, match="cannot be read for its size="):
        weigher().of_encoded(b"\x80nonsense")


def test_most_stages_weigh_nothing() -> None:
    """Only `size=` makes a weigher."""
    assert weigher_of(Stage(models.scale, max_batch_size=8)) is None
    sized = weigher_of(Stage(models.scale, max_batch_size=8, size=abs))
    assert sized is not None
    assert sized.of(-3) == 3
