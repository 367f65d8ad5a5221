"""Copies of what user code has made: nothing in them is shared that can change."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from carpool.engine.parts import END, Last
from carpool.engine.worker.own import own, own_part


@dataclass(frozen=True)
class Frozen:
    rows: list[Any]
    row: Any = field(default=None, init=False)


class Slotted(msgspec.Struct, frozen=True):
    rows: list[Any]


class Pair(NamedTuple):
    name: str
    rows: list[Any]


class Plain:
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows


class Locked(Plain):
    """Cannot be pickled, nor copied."""

    def __init__(self, rows: list[Any]) -> None:
        super().__init__(rows)
        self.lock = threading.Lock()


def inner(value: Any) -> Any:
    """The innermost list of a value."""
    while type(value) is not list or (value and type(value[0]) not in (int, float)):
        match value:
            case dict():
                value = next(iter(value.values()))
            case Pair() | Frozen() | Slotted() | Plain():
                value = value.rows
            case _:
                value = value[-1]
    return value


RECORDS: list[Any] = [
    [1.0],
    {"a": [1.0]},
    (1, [1.0]),
    [{"a": ([1.0],)}],
    Pair("x", [1.0]),
    Frozen([1.0]),
    Slotted([[1.0]]),
    {"a": Frozen([[1.0]])},
]


@pytest.mark.parametrize("handed_on", [False, True])
@pytest.mark.parametrize("value", [*RECORDS, Plain([1.0]), [Plain([1.0])]], ids=lambda value: type(value).__name__)
def test_nothing_in_a_copy_is_shared(value: Any, handed_on: bool) -> None:
    """A copy is of the same type and has nothing in common that can change; only from hook to hook
    an object that is no plain data is the same one.
    """
    copy = own(value, handed_on)
    assert type(copy) is type(value) and inner(copy) == [1.0]
    is_plain = "Plain" not in repr(value)
    assert (inner(copy) is not inner(value)) == (is_plain or not handed_on)


@pytest.mark.parametrize("handed_on", [False, True])
@pytest.mark.parametrize("n", [3, 20_000])
def test_arrays_are_copied(n: int, handed_on: bool) -> None:
    """An array, small or large, alone or in an object, is copied with its flags."""
    array, fixed = np.zeros(n), np.zeros(n)
    fixed.flags.writeable = False
    for value in (array, array[1:], fixed):
        for copy in (own(value, handed_on), own({"a": [value]}, handed_on)["a"][0]):
            assert not np.shares_memory(copy, value)
            assert copy.flags.writeable == value.flags.writeable and np.array_equal(copy, value)


def test_bytes_that_can_change_are_copied() -> None:
    """What a bytearray or a memoryview shows is not what its memory holds later."""
    memory = bytearray(b"mine")
    copies = [own(memory), own(memoryview(memory))]
    memory[:] = b"else"
    assert list(map(bytes, copies)) == [b"mine"] * 2


def test_what_stands_in_it_twice_does_so_in_the_copy() -> None:
    """Objects that stand in a value more than once, or in themselves, do so in the copy."""
    row = [1.0]
    first, second = own([row, row])
    assert first is second is not row
    circle: list[Any] = [1]
    circle.append(circle)
    copy = own(circle)
    assert copy[1] is copy is not circle


def test_what_cannot_change_is_not_copied() -> None:
    """Numbers, texts and bytes are returned as they are, and an end and a mark are still what they were."""
    for value in (1, 1.5, "text", b"bytes", None, True, (1, 2), END):
        assert own(value) == value and type(own(value)) is type(value)
    assert own(END) is END
    number = np.float32(1.5)
    assert own(number) is number
    last = Last([1.0])
    assert own_part(last).value == [1.0] and own_part(last).value is not last.value


def test_what_cannot_be_copied_is_as_it_is() -> None:
    """What can neither be pickled nor copied is returned as it is."""
    locked = Locked([1.0])
    assert own(locked) is locked and own([locked])[0] is locked


def test_an_exception_gets_copies_of_its_arguments() -> None:
    """An exception stays the same object, with copies of its small arguments and attributes."""
    small, large = np.zeros(3), np.zeros(20_000)
    error = ValueError("text", small, large)
    error.row = small  # type: ignore[attr-defined]
    assert own(error) is error
    text, argument, other = error.args
    assert text == "text" and other is large
    for copy in (argument, error.row):  # type: ignore[attr-defined]
        assert not np.shares_memory(copy, small) and copy.tolist() == [0.0] * 3
