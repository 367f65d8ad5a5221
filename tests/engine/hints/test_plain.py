"""Values of other libraries as builtins: neither a unit of time nor the width of a number changes what they are."""

from __future__ import annotations

import datetime
import itertools
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.call.results import as_results
from carpool.engine.hints import schema
from carpool.engine.hints.plain import to_builtins, with_arrays
from carpool.errors import ModelError
from tests.support.late import Late

pd: Any = Late("pandas")

WITHOUT_UNIT = [] if np.lib.NumpyVersion(np.__version__) >= "2.5.0" else [(np.timedelta64(3), 3)]
"""Durations without a unit, which NumPy 2.5 deprecates."""

UNITS = ("s", "ms", "us", "ns")
SECONDS = {"s": Fraction(1), "ms": Fraction(1, 10**3), "us": Fraction(1, 10**6), "ns": Fraction(1, 10**9)}
WRITERS = [schema.json_writer(Any), schema.msgpack_writer(Any)]
READERS = [msgspec.json.decode, msgspec.msgpack.decode]


def written(value: Any) -> list[Any]:
    """What JSON and msgpack make of a value."""
    return [read(write(value)) for write, read in zip(WRITERS, READERS, strict=True)]


@pytest.mark.parametrize(
    "make", [lambda each: each, lambda each: np.array(each), lambda each: np.array([[each]])[0, 0]]
)
def test_a_moment_is_the_same_text_in_every_unit(make: Any) -> None:
    """A moment is the same text in each unit that holds it, as a scalar and as an array."""
    moments = [make(np.datetime64("2026-01-02T03:04:05", unit)) for unit in UNITS]
    assert [written(each) for each in moments] == [["2026-01-02T03:04:05"] * 2] * 4
    lengths = [make(np.timedelta64(90_061, "s").astype(f"m8[{unit}]")) for unit in UNITS]
    assert len({str(written(each)) for each in lengths}) == 1 and written(lengths[0]) == ["P1DT3661S"] * 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.datetime64("2026-01-02"), "2026-01-02"),
        (np.datetime64("2026-01-02T03:04:05.000000001"), "2026-01-02T03:04:05.000000001"),
        (np.datetime64("2026-01-02T03:04:05.1", "ns"), "2026-01-02T03:04:05.100000"),
        (np.datetime64(1, "ps"), "1970-01-01T00:00:00.000000000001"),
        (np.datetime64("12000-01-01"), "12000-01-01"),
        (np.datetime64("NaT", "ns"), None),
        (np.timedelta64("NaT", "ns"), None),
        (np.timedelta64(-1_500_000_001, "ns"), "-PT1.500000001S"),
        (np.timedelta64(1, "as"), "PT0.000000000000000001S"),
        (np.timedelta64(3, "Y"), "P3Y"),
        (np.timedelta64(-3, "M"), "-P3M"),
        (np.timedelta64(2**62, "s"), "P53375995583650DT27904S"),
        *WITHOUT_UNIT,
        (np.longdouble("1.5"), 1.5),
        (np.array([1, 2], np.longdouble), [1.0, 2.0]),
        (np.array([(1, np.datetime64("2026", "ns"))], [("a", "i4"), ("at", "M8[ns]")]), [[1, "2026-01-01T00:00:00"]]),
        (np.array((1, 2.0), [("a", "i4"), ("b", "f16")]), [1, 2.0]),
        (np.ma.array([1, 2], mask=[0, 1]), [1, None]),
    ],
    ids=str,
)
def test_what_a_value_is_written_as(value: Any, text: Any) -> None:
    """Moments and durations are texts of ISO 8601 however fine they are; wide numbers are numbers."""
    assert written(value) == [text] * 2


@given(st.integers(-(2**62), 2**62), st.sampled_from(["s", "ms", "us", "ns", "ps"]))
def test_a_duration_is_read_as_what_it_was(count: int, unit: str) -> None:
    """The text of a duration has exactly its seconds."""
    (text, _) = written(np.timedelta64(count, unit))
    sign, _, rest = text.partition("P")
    days, _, seconds = rest.rpartition("T") if "T" in rest else (rest, "", "0S")
    found = Fraction(int(days.rstrip("D") or 0)) * 86_400 + Fraction(seconds.rstrip("S"))
    assert (-found if sign else found) == count * (SECONDS | {"ps": Fraction(1, 10**12)})[unit]


def test_moments_of_pandas() -> None:
    """A moment of pandas is written as the same moment of Python, or as its text if it is finer."""
    text = "2026-01-02T03:04:05"
    assert written([pd.Timestamp(text), pd.Timestamp(f"{text}.000000001")])[0] == [text, f"{text}.000000001"]
    assert written(pd.Timestamp(text, tz="UTC"))[0] == f"{text}Z"
    assert written([pd.Timedelta(1, "s"), pd.Timedelta(1, "ns"), pd.NaT])[0] == ["PT1S", "PT0.000000001S", None]


@pytest.mark.parametrize(("unit", "n"), [*itertools.product(["D", *UNITS], [1, 3])])
def test_a_batch_of_moments_stays_one(unit: str, n: int) -> None:
    """An array of moments that a batch call returns is no list of whole numbers, whatever its unit."""
    moments = np.array(["2026-01-02"] * n, f"M8[{unit}]")
    results = as_results(moments, n)
    assert [each == moments[0] for each in results] == [True] * n
    assert {written(each)[0][:10] for each in results} == {"2026-01-02"}


def test_no_hint_of_a_number_takes_a_moment() -> None:
    """A moment is no number, though numpy keeps it as one."""
    for value in (np.datetime64("2026", "ns"), np.timedelta64(1, "ns")):
        with pytest.raises(ModelError, match="Expected `float`, got `str`"):
            schema.json_writer(float)(value)


class Colour(Enum):
    RED = "red"


@dataclass
class Record:
    row: Any
    colour: Colour = Colour.RED


class Renamed(msgspec.Struct, rename="camel"):
    long_name: Any


def test_results_as_builtins_and_arrays() -> None:
    """Records are dicts by the names that JSON has, arrays stay arrays, and all else is as in JSON."""
    row = np.arange(3, dtype=np.float32)
    found = with_arrays(Record([row, Renamed(np.longdouble(1))]))
    assert found["colour"] == "red" and found["row"][0] is row and found["row"][1] == {"longName": 1.0}
    assert with_arrays({"at": np.datetime64("2026-01-02T03", "ns")}) == {"at": "2026-01-02T03:00:00"}
    assert with_arrays(datetime.timedelta(seconds=1)) == "PT1S"
    assert with_arrays(np.ma.array([1, 2], mask=[0, 1])) == [1, None]
    assert with_arrays(np.array(["a", None], object)) == ["a", None]
    assert with_arrays([memoryview(b"ab"), np.str_("c")]) == [b"ab", "c"]
    assert type(with_arrays(np.float32(1))) is np.float32
    with pytest.raises(TypeError):
        with_arrays(object())


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"a": [1, {"b": object()}]}, "type object cannot be written as JSON or msgpack - at `$.a[1].b`"),
        (Record([1j]), "type complex cannot be written as JSON or msgpack - at `$.row[0]`"),
        ({"a": {True: 1}}, "a key of type bool cannot be written - at `$.a.True`"),
        (
            {"a": (1.0, float("nan"))},
            "NaN and infinities cannot be written as JSON (as msgpack they can) - at `$.a[1]`",
        ),
        (object(), "type object cannot be written as JSON or msgpack"),
    ],
)
def test_what_cannot_be_written_is_named(value: Any, why: str) -> None:
    """The error of a result that cannot be written says where in it that is."""
    with pytest.raises(ModelError) as caught:
        schema.json_writer(Any)(value)
    assert str(caught.value).endswith(why)


def test_a_result_that_holds_itself_ends() -> None:
    """A result without an end is an error with a short text."""
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ModelError) as caught:
        schema.json_writer(Any)(value)
    assert len(str(caught.value)) < 200


def test_longdouble_is_a_number_in_builtins() -> None:
    """A scalar whose `tolist` returns itself comes to an end."""
    assert to_builtins(np.longdouble(2)) == 2.0 and type(to_builtins(np.longdouble(2))) is float
