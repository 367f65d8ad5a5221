"""Readers and writers of items by their types: pydantic's own JSON both ways, no NaN in JSON, arrays in range."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pydantic
import pytest
from numpy.typing import NDArray

from carpool.engine.hints import schema
from carpool.engine.type_hints import meant
from carpool.errors import ModelError, ValidationError
from tests.support.http.typed import Person, Tree

NAN, INFINITY = float("nan"), float("inf")


class Account(pydantic.BaseModel):
    """Writes other fields than it reads, and reads none but its own."""

    model_config = pydantic.ConfigDict(extra="forbid")

    number: int = pydantic.Field(alias="no")
    owner: str = pydantic.Field(default="Ann", serialization_alias="ownerName")
    secret: pydantic.SecretStr = pydantic.SecretStr("12345")
    hidden: int = pydantic.Field(default=1, exclude=True)

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def digits(self) -> int:
        return len(str(self.number))


class Strict(pydantic.BaseModel):
    """Takes dates as text from JSON, but from Python only dates."""

    model_config = pydantic.ConfigDict(strict=True)

    when: datetime.datetime


class Holder(pydantic.BaseModel):
    """Holds what pydantic cannot write."""

    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)

    vector: Any


class Score(pydantic.BaseModel):
    """Has a number, and something that is null."""

    score: float
    note: str | None = None


@dataclass
class Page:
    """A dataclass around pydantic models and arrays."""

    accounts: list[Account]
    vector: NDArray[np.float32]


def arrays(scalar: type) -> Any:
    """The hint of arrays, as it is read."""
    return meant(NDArray[scalar])  # type: ignore[valid-type]


ACCOUNT = Account(no=17)
WRITTEN = {"no": 17, "ownerName": "Ann", "secret": "**********", "digits": 2}
PAGE = Page([ACCOUNT], np.ones(2, dtype=np.float32))


@pytest.mark.parametrize(
    ("kind", "value", "written"),
    [
        (Account, ACCOUNT, WRITTEN),
        (Any, ACCOUNT, WRITTEN),
        (Account | None, ACCOUNT, WRITTEN),
        (list[Account], [ACCOUNT, ACCOUNT], [WRITTEN, WRITTEN]),
        (dict[str, Account], {"a": ACCOUNT}, {"a": WRITTEN}),
        (Page, PAGE, {"accounts": [WRITTEN], "vector": [1.0, 1.0]}),
        (list[Page], [PAGE], [{"accounts": [WRITTEN], "vector": [1.0, 1.0]}]),
        (Person, {"name": "Ann", "age": "3", "address": {"city": "Bonn"}}, None),
        (Strict, Strict(when=datetime.datetime(2026, 1, 2, 3)), {"when": "2026-01-02T03:00:00"}),
        (Holder, Holder(vector=np.ones(2)), {"vector": [1.0, 1.0]}),
        (list[arrays(np.float32)], [np.ones(1), [2]], [[1.0], [2]]),
        (list[int], np.arange(2), [0, 1]),
        (dict[str, float], {"a": np.float64(2)}, {"a": 2.0}),
    ],
)
def test_a_result_that_is_what_the_hint_says_is_written(kind: Any, value: Any, written: Any) -> None:
    """A result that is what its hint says is written, a pydantic model as its own JSON form, by
    alias; what its library has checked is not read back.
    """
    expected = value if written is None else written
    assert json.loads(schema.json_writer(kind)(value)) == expected
    assert msgspec.msgpack.decode(schema.msgpack_writer(kind)(value)) == expected


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Account, Tree()),
        (Account, {"number": 17}),
        (list[Account], [ACCOUNT, {"no": "x"}]),
        (list[Account], ACCOUNT),
        (Page, Page([ACCOUNT, 3], np.ones(2))),  # type: ignore[list-item]
        (arrays(np.int64), np.ones(2) / 2),
        (arrays(np.float32), np.array([1e300])),
        (complex, "x"),
    ],
)
@pytest.mark.parametrize("writer", [schema.json_writer, schema.msgpack_writer])
def test_a_result_that_is_something_else_is_not(writer: Callable[[Any], Any], kind: Any, value: Any) -> None:
    """A result that is something else than its hint says is refused, also where it is inside
    something that fits.
    """
    with pytest.raises(ModelError, match="does not fit") as caught:
        writer(kind)(value)
    assert caught.value.code == "bad_result"


@pytest.mark.parametrize("number", [NAN, INFINITY, -INFINITY])
@pytest.mark.parametrize(
    ("kind", "of"),
    [
        (float, float),
        (float | None, float),
        (Any, float),
        (Any, lambda n: {"a": [None, n]}),
        (list[float], lambda n: [1.0, n]),
        (dict[str, float], lambda n: {"a": n}),
        (arrays(np.float32), lambda n: np.array([1, n], dtype=np.float32)),
        (np.ndarray, lambda n: np.array([[n]])),
        (list[arrays(np.float64)], lambda n: [np.array([n])]),
        (Score, lambda n: Score(score=n)),
    ],
)
def test_json_has_no_words_for_nan(kind: Any, of: Callable[[float], Any], number: float) -> None:
    """In JSON NaN and infinities fit no type, with a hint or without, in an array or as a number;
    msgpack has them.
    """
    with pytest.raises(ModelError, match="NaN and infinities cannot be written as JSON") as caught:
        schema.json_writer(kind)(of(number))
    assert caught.value.code == "bad_result"
    assert repr(number) in repr(msgspec.msgpack.decode(schema.msgpack_writer(kind)(of(number))))


def test_nulls_that_are_meant_are_written() -> None:
    """A null, the word null, and bytes that look like a NaN in msgpack are written as what they
    are.
    """
    for value in (None, {"a": None, "b": "null"}, [None, b"\xcb\x7f\xf8null"], {1: None, "x": 1e308}, [None, 10**30]):
        schema.json_writer(Any)(value)


def test_strict_dates_are_read_from_json() -> None:
    """Strict dates are read from JSON as text, as pydantic does, alone or inside other types; in
    msgpack they are timestamps.
    """
    when = datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC)
    text = {"when": "2026-01-02T03:00:00Z"}
    assert schema.json_reader(Strict)(json.dumps(text).encode()) == Strict(when=when)
    assert schema.json_reader(dict[str, list[Strict]])(json.dumps({"a": [text]}).encode())["a"] == [Strict(when=when)]
    assert schema.msgpack_reader(Strict)(msgspec.msgpack.encode({"when": when})) == Strict(when=when)


@pytest.mark.parametrize(
    ("body", "told", "status"),
    [
        (b'{"when": "soon"}', "at `$.when`", 422),
        (b'{"when": 3.5}', "at `$.when`", 422),
        (b"[]", "at `$`", 422),
        (b'{"when": NaN}', "not valid JSON", 400),
        (b'{"when": ', "not valid JSON", 400),
        (b'{"when": "\xff"}', "not valid JSON", 400),
        (b"", "not valid JSON", 400),
    ],
)
def test_what_is_no_json_is_told_from_what_does_not_fit(body: bytes, told: str, status: int) -> None:
    """msgspec says what is not JSON, for pydantic's models too; of what does not fit the field is
    named.
    """
    with pytest.raises(Exception) as caught:
        schema.json_reader(Strict)(body)
    error = schema.as_our_error(caught.value, "JSON")
    assert told in str(error)
    assert getattr(error, "status", None) == status


def test_a_deep_item_is_read_as_deep_as_pydantic_can() -> None:
    """JSON as deep as pydantic's validation can take is read, although its own parser gives up
    before that.
    """
    depth = 150
    item = schema.json_reader(Tree)(b'{"branches":[' * depth + b"{}" + b"]}" * depth)
    for _ in range(depth):
        (item,) = item.branches
    assert item == Tree()


@pytest.mark.parametrize(
    ("kind", "item", "told"),
    [
        (arrays(np.float32), [1e300], "Expected an array of float32, got numbers out of its range"),
        (arrays(np.float32), [[0, -1e39]], "got numbers out of its range"),
        (arrays(np.float16), [70_000], "Expected an array of float16, got numbers out of its range"),
        (arrays(np.int8), [200], "Expected an array of int8, got numbers out of its range"),
        (arrays(np.int64), [0.5], "got decimal numbers"),
    ],
)
def test_a_number_out_of_range_does_not_fit(kind: Any, item: Any, told: str) -> None:
    """A number out of range does not fit, and silently becomes neither infinity nor another number."""
    for read, body in (
        (schema.json_reader(kind), msgspec.json.encode(item)),
        (schema.msgpack_reader(kind), msgspec.msgpack.encode(item)),
    ):
        with pytest.raises(msgspec.ValidationError, match=told):
            read(body)


def test_infinity_that_was_sent_stays() -> None:
    """Infinity that was sent in msgpack, which has it, stays so."""
    array = schema.msgpack_reader(arrays(np.float32))(msgspec.msgpack.encode([INFINITY, 1.0]))
    assert (array.dtype, array.tolist()) == (np.float32, [INFINITY, 1.0])


@pytest.mark.fault("F77")
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (str | bytes, "more than one str-like type"),
        (list[np.ndarray | list[float]], "unions containing a custom type"),
        (Account | Tree, "more than one custom type"),
        (complex, "no JSON value can be read as complex"),
        (Account | None, None),
        (list[float] | None, None),
        (np.ndarray, None),
        (object, None),
        (Any, None),
        (None, None),
        (dict[tuple[int, int], str], None),
    ],
)
def test_types_that_cannot_be_read(kind: Any, why: str | None) -> None:
    """Types that cannot be read are known beforehand, with the reason, and the OpenAPI document
    says that anything goes.
    """
    found = schema.why_unreadable(kind)
    assert why in found if why is not None and found is not None else found is why
    if why is not None and "union" in why:
        assert schema.json_schema([kind], "#/{name}")[0] == [{}]


def test_a_reader_is_made_when_it_is_needed() -> None:
    """A reader is made once, and not before it is needed."""
    made: list[int] = []
    readers = schema.MadeWhenNeeded({0: bytes}, {1: lambda: made.append(1) or bytes})  # type: ignore[func-returns-value]
    assert (readers[0], made) == (bytes, [])
    assert (readers[1], readers[1], made) == (bytes, bytes, [1])


def test_pydantics_first_complaint_is_told() -> None:
    """pydantic's first complaint is told with the path to the field, inside other types too."""
    with pytest.raises(ValidationError, match=r"at `\$.no`"):
        schema.json_reader(Account)(b'{"no": "x"}')


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (rb'"\ud83d"', r"a text has half of a character, \ud83d"),
        (rb'{"a": ["b", "\ud83d"]}', r"a text has half of a character, \ud83d"),
        (rb'"\ud83d\ude00', "Input data was truncated"),
        (rb'["\\ud83dx"', "Input data was truncated"),
        (b"[1,", "Input data was truncated"),
    ],
)
def test_half_a_character_of_a_client_is_named(body: bytes, text: str) -> None:
    """Half of a character is told apart from a body that is cut short."""
    with pytest.raises(msgspec.DecodeError) as caught:
        schema.json_reader(Any)(body)
    assert str(schema.as_our_error(caught.value, "JSON", Any, body)).endswith(text)
