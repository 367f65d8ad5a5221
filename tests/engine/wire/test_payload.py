"""Python objects as bytes: whatever is dumped is loaded, and what is large travels beside the pickle."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from carpool.engine.wire import frame as frame_module
from carpool.engine.wire import payload as payload_module
from carpool.engine.wire.frame import Frame, FrameKind, FrameReader
from carpool.engine.wire.payload import LARGE, Payload, dump, load, parts_of, size_of
from tests.support.frames import data_of, receive
from tests.support.properties import PROPERTY


def sent(payload: Payload) -> Payload:
    """The payload as the other process receives it."""
    (frame,) = receive(FrameReader(), data_of(Frame(FrameKind.REPLY, 1, [1], b"\0", payloads=[payload])))
    return frame.payloads[0]


def across(value: Any) -> Any:
    """The value as the other process gets it."""
    return load(sent(dump(value)))


# -- round trips

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(),
    st.text(st.characters(categories=["Cs", "L"])),  # halves of surrogate pairs among letters
)
leaves = st.one_of(scalars, st.binary(), st.complex_numbers(), st.datetimes())
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers()), inner, max_size=4),
    ),
    max_leaves=12,
)


@PROPERTY
@given(scalars)
@example(2**63)
@example(2**64 - 1)
@example(2**64)
@example(-(2**63))
@example(-(2**63) - 1)
@example(-0.0)
@example(float("nan"))
@example(float("-inf"))
@example(sys.float_info.min / 2)
@example("")
@example("\0")
@example("\ud83d")
@example("é\U0001f697")
def test_scalars_come_back(value: object) -> None:
    """Scalars come back with the same type and the same value, to the sign of a zero."""
    back = across(value)

    assert type(back) is type(value)
    assert repr(back) == repr(value)


@PROPERTY
@given(values)
def test_values_come_back(value: object) -> None:
    """Values come back, whatever is nested in what."""
    assert repr(across(value)) == repr(value)


def test_an_integer_of_any_length_comes_back() -> None:
    """An integer of any length comes back, also one of a hundred thousand bits."""
    huge = 3**63_000

    assert across(huge) == huge
    assert across(-huge) == -huge


@pytest.mark.parametrize("character", ["x", "é", "\ud83d"])
def test_a_long_text_comes_back(character: str) -> None:
    """A text that is longer than what counts as large comes back."""
    assert across(character * LARGE * 2) == character * LARGE * 2


@dataclass
class Point:
    """An item of a user's own class."""

    x: float
    tags: set[str]


class Whole(int):
    """A number that is more than a number."""


@pytest.mark.parametrize(
    "value",
    [
        Point(1.5, {"a", "b"}),
        Whole(3),
        frozenset({1, 2}),
        Fraction(1, 3),
        datetime(2024, 2, 29, tzinfo=UTC),
        bytearray(b"abc"),
        range(5),
        ValueError,
    ],
    ids=lambda value: type(value).__name__,
)
def test_objects_come_back_as_what_they_were(value: object) -> None:
    """An instance of another class is not taken for a plain scalar that it resembles."""
    back = across(value)

    assert type(back) is type(value)
    assert back == value


def test_what_cannot_be_pickled_says_so() -> None:
    """What cannot be pickled raises pickle's own error, from `dump`."""
    with pytest.raises((pickle.PicklingError, AttributeError)):
        dump(lambda: None)


def test_a_scalar_is_its_own_payload() -> None:
    """Scalars are packed only when they go somewhere: an integer is a byte, a text its characters and one more."""
    scalars = (7, "abc", True, None, 0.5)
    assert all(dump(value) is value for value in scalars)
    assert [sent(dump(value)) for value in scalars[:4]] == [b"\x07", b"\xa3abc", b"\xc3", b"\xc0"]


@pytest.mark.parametrize("value", ["é", "x" * LARGE, 2**64, -(2**63) - 1, "\ud83d"], ids=repr)
def test_a_scalar_of_which_nobody_knows_how_long_it_is_is_packed_at_once(value: object) -> None:
    """Text that is long or not in ASCII, and integers of more than 64 bits: one buffer, which is then sent as it is."""
    payload = dump(value)

    assert type(payload) is bytes
    assert sent(payload) == payload


# -- bytes


@pytest.mark.parametrize("nbytes", [0, 1, LARGE - 1, LARGE, LARGE + 1, 5 * LARGE])
def test_bytes_come_back_as_bytes(nbytes: int) -> None:
    """Bytes of any length come back as bytes."""
    value = np.random.default_rng(1).bytes(nbytes)
    back = across(value)

    assert type(back) is bytes
    assert back == value


def test_large_bytes_are_not_copied_into_a_pickle() -> None:
    """Bytes from `LARGE` on are handed on as they are, and not copied into a pickle."""
    large = bytes(LARGE)
    payload = dump(large)

    assert isinstance(payload, list)
    assert payload[-1] is large
    assert size_of(payload) == LARGE
    assert not isinstance(dump(large[1:]), list)


# -- arrays

plane = np.arange(300 * 400, dtype=np.float64).reshape(300, 400)
ARRAYS = {
    "small": np.arange(6, dtype=np.int16).reshape(2, 3),
    "large": plane,
    "just large": np.arange(LARGE, dtype=np.uint8),
    "just not large": np.arange(LARGE - 1, dtype=np.uint8),
    "columns first": np.asfortranarray(plane),
    "transposed": plane.T,
    "every other column": plane[:, ::2],
    "backwards": plane[::-1],
    "one value many times": np.broadcast_to(np.float32(2.5), (300, 400)),
    "a row of a large one": plane[7],
    "no dimension": np.array(3.5),
    "no element": np.zeros((0, 3), dtype=np.float32),
    "no element in a large shape": np.zeros((100_000, 0)),
    "other byte order": np.arange(40_000, dtype=">i4"),
    "truth": plane > 1000,
    "complex": plane * 1j,
    "half": (plane / 10).astype(np.float16),
    "text": np.array(["a", "longer", "\u00e9"] * 9000),
    "time": np.arange(20_000).astype("datetime64[s]"),
    "records": np.zeros(9000, dtype=[("id", "<i4"), ("score", "<f8"), ("name", "S3")]),
    "not a number": np.full(10_000, np.nan),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_arrays_come_back(array: np.ndarray[Any, Any]) -> None:
    """Arrays come back with the same shape, type and elements, whatever their layout in memory."""
    back = across(array)

    assert type(back) is np.ndarray
    assert (back.shape, back.dtype) == (array.shape, array.dtype)
    assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
def test_arrays_may_be_changed_where_they_could_be_before(array: np.ndarray[Any, Any]) -> None:
    """A model may work in place on an array that it gets, if the caller's could be written to:
    nobody else sees that memory.
    """
    before = array.tobytes()
    back = across(array)
    assert back.flags.writeable or not array.flags.writeable

    if back.size and back.flags.writeable:
        back[...] = np.zeros((), dtype=back.dtype)
        back[...] = np.ones(back.shape).astype(back.dtype)

    assert array.tobytes() == before


def test_an_array_of_objects_comes_back() -> None:
    """An array of objects is pickled and comes back, and what is large inside travels beside."""
    array = np.empty(3, dtype=object)
    array[:] = [None, {"a": [1, "x"]}, plane]
    payload = dump(array)
    back: Any = load(sent(payload))

    assert (back.dtype, back[0], back[1]) == (array.dtype, None, {"a": [1, "x"]})
    assert np.array_equal(back[2], plane)
    assert [size_of(part) for part in payload[1:]] == [plane.nbytes]


@pytest.mark.parametrize("name", ["large", "just large", "columns first", "transposed", "other byte order", "records"])
def test_a_large_array_is_not_copied_into_the_pickle(name: str) -> None:
    """The payload refers to the array's own memory, and the pickle holds shape and type."""
    array = ARRAYS[name]
    payload = dump(array)

    assert isinstance(payload, list)
    head, *buffers = payload
    assert len(head) < 500
    assert [np.shares_memory(np.frombuffer(buffer, np.uint8), array) for buffer in buffers] == [True]
    assert size_of(payload) == len(head) + array.nbytes


@pytest.mark.parametrize("name", ["no dimension", "no element", "every other column"])
def test_other_arrays_travel_in_the_pickle(name: str) -> None:
    """An array without elements or axes, or a large one whose elements lie scattered, travels in
    the pickle as a single buffer.
    """
    assert isinstance(dump(ARRAYS[name]), bytes)


def test_arrays_in_containers_travel_beside_the_pickle() -> None:
    """Large arrays in containers travel beside the pickle, each once and in order, wherever they
    are; small ones travel inside.
    """
    item = {"image": plane, "mask": plane > 7, "bias": np.ones(3), "again": [plane]}
    payload = dump(item)
    back: Any = load(sent(payload))

    assert [size_of(part) for part in payload[1:]] == [plane.nbytes, plane.size]
    assert back["again"][0] is back["image"]
    assert np.array_equal(back["image"], plane)
    assert np.array_equal(back["mask"], plane > 7)
    assert np.array_equal(back["bias"], np.ones(3))


def test_a_loaded_array_lies_in_what_was_received() -> None:
    """Loading a large array copies nothing: it lies in what was received."""
    payload = sent(dump(plane))

    assert np.shares_memory(load(payload), np.frombuffer(payload[1], np.uint8))


arrays = st.builds(
    lambda shape, dtype, seed: np.random.default_rng(seed).integers(0, 100, shape).astype(dtype),
    st.lists(st.integers(0, 6), min_size=1, max_size=3),
    st.sampled_from(["u1", "<i2", "f2", "f4", "f8", "c16", "?", "S5", "M8[s]", "O"]),
    st.integers(0, 100),
)


@PROPERTY
@given(arrays, st.data())
def test_any_array_in_any_view(array: np.ndarray[Any, Any], data: st.DataObject) -> None:
    """An array of any shape and type, sliced with any step and with its axes in any order, comes
    back, in the pickle and beside it.
    """
    steps = st.sampled_from([1, 1, 2, -1])
    view = array[tuple(slice(None, None, data.draw(steps)) for _ in array.shape)]
    view = view.transpose(data.draw(st.permutations(range(array.ndim))))
    with pytest.MonkeyPatch.context() as patch:
        for module in (payload_module, frame_module):
            patch.setattr(module, "LARGE", 100)
        (back,) = across([view])

    assert (back.shape, back.dtype) == (view.shape, view.dtype)
    assert back.tolist() == view.tolist()


# -- sizes and parts


@pytest.mark.parametrize(
    ("payload", "nbytes"),
    [
        (b"", 0),
        (b"abc", 3),
        (bytearray(5), 5),
        (memoryview(b"abcd"), 4),
        (np.zeros(5).data, 40),
        (np.zeros((2, 3)).data, 48),
        ([b"ab", bytearray(3), np.zeros(2).data], 21),
        (0.5, 16),
        (2**64 - 1, 16),
        (None, 16),
        (True, 16),
        ("", 16),
        ("x" * 100, 116),
    ],
)
def test_sizes_are_in_bytes(payload: Payload, nbytes: int) -> None:
    """Sizes are in bytes over all parts, also of views whose elements are wider than a byte.

    Scalars count for the longest of their kind.
    """
    assert size_of(payload) == nbytes


def test_parts_lie_in_a_row_with_their_counts() -> None:
    """Parts lie in a row, and their counts tell which item each belongs to."""
    assert parts_of([b"a", [b"b", b"c", b"d"], memoryview(b"e"), [b"f", b""]]) == (
        [1, 3, 1, 2],
        [b"a", b"b", b"c", b"d", b"e", b"f", b""],
    )
    assert parts_of([b"a", b"b"]) == ([1, 1], [b"a", b"b"])
    assert parts_of([b"a", 7, [b"b", b"c"]]) == ([1, 1, 2], [b"a", b"\7", b"b", b"c"])
    assert parts_of([]) == ([], [])


def test_finding_the_parts_changes_no_payload() -> None:
    """An item that is sent again, after its worker has died, is the same: finding its parts changes
    no payload.
    """
    payload = dump(plane)
    before = list(payload)

    parts_of([payload, b"x", payload])

    assert list(map(id, payload)) == list(map(id, before))
