"""Small numpy arrays as bytes, without a pickle; arrays that are alike form one block, which is
opened as one array.

An array is `[head, elements]`. The head describes it, and arrays are alike if their heads are
equal:

    1, whether it is writable, the dtype's character, the number of axes    (a byte each)
    the length of each axis                                                 (u32, little endian)

The elements are a copy in C order, in the machine's byte order. Arrays that would not come back the
same (other dtypes and byte orders, subclasses, another order of the axes, no axes or no elements)
are left to pickle. numpy is not imported here before there is an array to be made.

Packing copies the elements, so the caller may change the array afterwards. A batch of payloads with
one head is one block in its frame, and the worker opens it as one array (`rows.ArrayRows`). The
coordinator cuts blocks into payloads again, because a caller that keeps one result must not keep
all. Rejected: lists of numbers (to check that one holds nothing but plain floats takes longer than
msgspec saves), dicts of scalars (0.8 µs an item, as with pickle), dataclasses (2.6 µs beside 2.8)
and Structs (1.7 µs beside 1.9).
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any, Final, NamedTuple, overload

MARK: Final = 1
"""The first byte of every head; no pickle starts with it."""

MOST_AXES: Final = 32
LONGEST_HEAD: Final = 4 + 4 * MOST_AXES

_ITEM_BYTES: Final = {ord(char): struct.calcsize(char) for char in "?bBhHiIlLqQefd"} | {ord("F"): 8, ord("D"): 16}
_LONGEST_AXIS: Final = 2**32 - 1
_MOST_HEADS: Final = 4096

Array = Any
Part = bytes | bytearray | memoryview

_ndarray: type | None = None
# dtypes' characters by id, for numpy's own dtypes, which live as long as numpy does
_chars: dict[int, int] = {}
_heads: dict[tuple[int, tuple[int, ...], bool], bytes] = {}


def array_type() -> type | None:
    global _ndarray
    if _ndarray is not None:
        return _ndarray
    numpy = sys.modules.get("numpy")
    kind = getattr(numpy, "ndarray", None)
    if type(kind) is type and hasattr(numpy, "dtype"):
        _chars.update({id(numpy.dtype(chr(char))): char for char in _ITEM_BYTES})  # type: ignore[union-attr]
        _ndarray = kind
    return _ndarray


def head_of(array: Array, shape: tuple[int, ...]) -> bytes | None:
    """Return the head of arrays with this shape and the array's dtype; None if they must be
    pickled.

    Args:
        shape: The array's own, or that of its rows.
    """
    flags, dtype = array.flags, array.dtype
    contiguous = flags.c_contiguous
    if not contiguous and (flags.f_contiguous or len(shape) > 2):
        return None  # pickle keeps the order of its axes
    # an array that is not contiguous is copied, as by pickle
    writable = flags.writeable or not contiguous
    try:
        return _heads[id(dtype), shape, writable]  # holds only dtypes that live as long as numpy
    except KeyError:
        return _new_head(dtype, shape, writable)


def _new_head(dtype: Any, shape: tuple[int, ...], writable: bool) -> bytes | None:
    char = _chars.get(id(dtype)) or _char_of(dtype)
    if not char or not 0 < len(shape) <= MOST_AXES or not 0 < min(shape) <= max(shape) <= _LONGEST_AXIS:
        return None
    head = struct.pack(f"<BBBB{len(shape)}I", MARK, writable, char, len(shape), *shape)
    if id(dtype) in _chars:
        if len(_heads) >= _MOST_HEADS:
            _heads.clear()
        _heads[id(dtype), shape, writable] = head
    return head


def _char_of(dtype: Any) -> int:
    """Return the character of a dtype that is not one of numpy's own objects; 0 if it is not a
    plain one.
    """
    char = ord(dtype.char)
    return char if char in _ITEM_BYTES and dtype.isnative and dtype.metadata is None else 0


class ArrayHead(NamedTuple):
    """What a head says of an array; `dtype` is the dtype's character."""

    dtype: str
    shape: tuple[int, ...]
    writable: bool
    nbytes: int


@lru_cache(1024)
def read_head(head: bytes) -> ArrayHead:
    """Raises ValueError if these bytes are not a head."""
    if not 4 < len(head) <= LONGEST_HEAD:
        raise ValueError(f"the head of an array has {len(head)} bytes, which is not between 5 and {LONGEST_HEAD}")
    mark, writable, char, axes = head[:4]
    if mark != MARK or writable > 1 or char not in _ITEM_BYTES or len(head) != 4 + 4 * axes:
        raise ValueError(f"these bytes are not the head of an array: {head[:40]!r}")
    shape = struct.unpack(f"<{axes}I", head[4:])
    if not min(shape):
        raise ValueError(f"an array of shape {shape} has no elements")
    return ArrayHead(chr(char), shape, bool(writable), prod(shape) * _ITEM_BYTES[char])


def open_array(head: bytes, elements: Part) -> Array:
    """Return one array, in memory of its own. Raises ValueError if the elements do not belong to
    the head.
    """
    return _make_array(head, (), bytearray(elements))


class Block(Sequence[list[Part]]):
    """Arrays that are alike: one head, and the elements of all `count` in a row. As a sequence it
    gives each with its head.

    Raises:
        ValueError: Head, elements and count do not match.
    """

    __slots__ = ("_count", "elements", "head")

    def __init__(self, head: Part, elements: Part, count: int) -> None:
        self.head = bytes(head)
        self.elements = elements
        self._count = count
        nbytes = read_head(self.head).nbytes
        if not count or nbytes * count != len(elements):
            raise ValueError(f"{count} arrays of {nbytes} bytes each cannot lie in {len(elements)} bytes")

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, i: int) -> list[Part]: ...
    @overload
    def __getitem__(self, i: slice) -> list[list[Part]]: ...
    def __getitem__(self, i: int | slice) -> list[Part] | list[list[Part]]:
        return self.separate()[i]

    def __iter__(self) -> Iterator[list[Part]]:
        return iter(self.separate())

    def separate(self) -> list[list[Part]]:
        """Return each array by itself, in memory of its own: a caller that keeps one does not keep
        the block.
        """
        head, elements = self.head, bytes(self.elements)
        nbytes = len(elements) // self._count
        return [[head, elements[at : at + nbytes]] for at in range(0, len(elements), nbytes)]

    def array(self) -> Array:
        """Return one array with an array of the block in each row. It uses the block's memory if
        that is writable.
        """
        elements = self.elements
        return _make_array(self.head, (self._count,), elements if type(elements) is bytearray else bytearray(elements))


def block_of(payloads: Sequence[Any], most_bytes: int) -> Block | None:
    """Return the payloads as one block; None if they are not arrays that are alike, or have too
    many bytes in all.
    """
    if type(payloads) is Block:
        return payloads
    first = payloads[0] if payloads else None
    if type(first) is not list or len(first) != 2 or first[0][:1] != b"\1":
        return None
    if set(map(type, payloads)) != {list} or set(map(len, payloads)) != {2}:
        return None
    heads, elements = zip(*payloads, strict=True)
    if set(map(type, heads)) | set(map(type, elements)) != {bytes} or len(set(heads)) != 1:
        return None
    if len(heads[0]) + len(elements[0]) * len(elements) > most_bytes or len(set(map(len, elements))) != 1:
        return None
    try:
        return Block(heads[0], b"".join(elements), len(elements))
    except ValueError:  # results of a hostile worker on their way to the next stage
        return None


def block_of_rows(array: Array, *, copy: bool = True) -> Block | None:
    """Return an array's rows as a block; None if they must be pickled. Without `copy` it must be
    sent before the array changes.
    """
    kind: Any = type(array)
    if kind is not array_type() or array.ndim < 2 or not array.flags.c_contiguous:
        return None
    head = head_of(array, array.shape[1:])
    if head is None or not len(array):
        return None
    return Block(head, array.tobytes() if copy else memoryview(array.view("u1")).cast("B"), len(array))


def _make_array(head: bytes, count: tuple[int, ...], elements: bytearray) -> Array:
    import numpy

    char, shape, writable, nbytes = read_head(head)
    if nbytes * prod(count) != len(elements):
        raise ValueError(f"{prod(count)} arrays of {nbytes} bytes each cannot lie in {len(elements)} bytes")
    array = numpy.frombuffer(elements, char)
    if count or len(shape) > 1:
        array = array.reshape(*count, *shape)
    if not writable:
        array.flags.writeable = False
    return array
