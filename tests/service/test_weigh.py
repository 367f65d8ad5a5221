"""What `size=` says of an item: in every form that an item can come in, and whatever the user's function does."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from math import inf
from typing import Any

import msgspec
import numpy as np
import pytest

from carpool import Stage
from carpool.engine.request import Request
from carpool.engine.wire.payload import JSON, MSGPACK, OBJECT, RAW, dump
from carpool.errors import CarpoolError, InvalidRequest, ModelError, ValidationError
from carpool.service.weigh import Weigher, units, weigher_of
from tests.support import models
from tests.support.kinds import UNUSUAL


def word_count(text: str) -> int:
    """The size of a text in these tests."""
    return len(text.split())


def weigher(size: Any = word_count, input_type: Any = str) -> Weigher:
    return Weigher(size, "stage s", input_type)


def size_of_encoded(weigher: Weigher, item: Any, format: int = OBJECT) -> int:
    """The size that is written on a request whose item is still encoded."""
    request = Request(item, inf)
    weigher.weigh_encoded(request, item, format)
    return request.size


def test_an_item_weighs_the_same_in_every_form() -> None:
    """An item weighs the same as an object, as our own bytes, as JSON and as msgpack; of raw bytes
    these are the item.
    """
    text = "one two three"

    assert weigher().of(text) == 3
    assert size_of_encoded(weigher(), dump(text)) == 3
    assert size_of_encoded(weigher(), msgspec.json.encode(text), JSON) == 3
    assert size_of_encoded(weigher(), bytearray(msgspec.msgpack.encode(text)), MSGPACK) == 3
    assert size_of_encoded(weigher(len, bytes), bytearray(b"12345"), RAW) == 5


def test_an_array_of_another_stage_is_weighed_by_its_rows() -> None:
    """An array from another stage, which travels beside its pickle, is weighed by its rows where it
    is.
    """
    assert size_of_encoded(weigher(len, Any), dump(np.zeros((7, 20_000)))) == 7


@pytest.mark.parametrize(("returned", "size"), [(3, 3), (1, 1), (0, 1), (np.int64(5), 5), (True, 1)])
def test_whole_numbers_are_sizes(returned: Any, size: int) -> None:
    """Whole numbers are sizes, numpy's too, and an empty item takes a place all the same."""
    assert units(returned, "f") == size


@pytest.mark.parametrize(
    "returned", [-1, 2.0, "3", None, [1], "x" * 1000, 2**53 + 1, pytest.param(10**5000, id="vast")]
)
def test_anything_else_is_the_model_s_fault(returned: Any) -> None:
    """A size that is no whole number is the model's fault, and the error says what was returned and
    what would do.
    """
    with pytest.raises(ModelError, match=r"size= of f returned .*: it must return a whole number") as caught:
        units(returned, "f")

    assert caught.value.code == "bad_result"
    assert len(str(caught.value)) < 200


def test_a_size_function_that_raises_is_the_model_s_fault() -> None:
    """If a size function raises that is the model's fault, and the error has the type's name and
    the traceback.
    """
    with pytest.raises(ModelError, match="size= of stage s raised KeyError: 'tokens'") as caught:
        weigher(lambda item: item["tokens"], dict).of({})

    assert (caught.value.type_name, "KeyError" in caught.value.traceback) == ("KeyError", True)


class Index:
    """A number that raises when it is asked for its value."""

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


@pytest.mark.fault("F62")
@pytest.mark.parametrize("kind", UNUSUAL)
def test_whatever_foreign_code_raises_is_an_error_of_the_item(kind: type[BaseException]) -> None:
    """Regression: of a size function, a number or a type that raised unusually nobody was told, or the loop ended."""

    def size(x: Any) -> int:
        raise kind

    trap = type("T", (Trap,), {"kind": kind})
    for weigh in (
        lambda: weigher(size).of("x"),
        lambda: weigher(lambda x: Index(kind)).of("x"),
        lambda: size_of_encoded(weigher(input_type=trap), b"1", JSON),
        lambda: size_of_encoded(weigher(input_type=trap), b"1", MSGPACK),
    ):
        with pytest.raises(CarpoolError) as caught:
            weigh()
        assert caught.value.status in (500, 400)
        assert (caught.value.status == 400) <= (kind is RecursionError)


@pytest.mark.fault("F62")
def test_a_result_that_cannot_be_shown() -> None:
    """If `size` returns an object that is no number and cannot be shown either, the error says so
    without it.
    """
    nothing = type("Nothing", (), {"__repr__": Index(SystemExit).__repr__, "kind": SystemExit})
    with pytest.raises(ModelError, match="returned an object of type Nothing: it must"):
        units(nothing(), "f")


def test_a_size_function_may_refuse_an_item() -> None:
    """A `ValidationError` that a size function raises reaches the caller as it is."""

    def strict(text: str) -> int:
        raise ValidationError("too long")

    with pytest.raises(ValidationError, match="too long"):
        weigher(strict).of("x")


def test_a_body_that_does_not_fit_is_the_caller_s_fault() -> None:
    """A body that is malformed or of another type is the caller's fault, as when a worker reads it."""
    with pytest.raises(InvalidRequest, match="the body is not valid JSON"):
        size_of_encoded(weigher(), b'"abc', JSON)
    with pytest.raises(InvalidRequest, match="the body is not valid msgpack"):
        size_of_encoded(weigher(), b"\xc1", MSGPACK)
    with pytest.raises(ValidationError, match="Expected `str`"):
        size_of_encoded(weigher(), b"1", JSON)


def test_a_result_that_cannot_be_read_is_the_model_s_fault() -> None:
    """A result of the stage before that cannot be read is the model's fault, since no caller has
    sent it.
    """
    with pytest.raises(ModelError, match="cannot be read for its size="):
        size_of_encoded(weigher(), b"\x80nonsense")


def test_most_stages_weigh_nothing() -> None:
    """A stage without `size=` has no weigher."""
    assert weigher_of(Stage(models.scale, max_batch_size=8)) is None
    sized = weigher_of(Stage(models.scale, max_batch_size=8, size=abs))
    assert sized is not None
    assert sized.of(-3) == 3


def test_one_thread_at_a_time_asks_for_a_size() -> None:
    """Functions of users, such as tokenizers, need not bear several threads, in which large bodies are read."""
    inside, most = 0, 0

    def size(x: int) -> int:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.001)
        inside -= 1
        return x

    weigher = Weigher(size, "stage f", int)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(weigher.of, range(1, 21))) == [*range(1, 21)]
    assert most == 1
