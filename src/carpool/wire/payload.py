"""Python objects as bytes between our own processes, and the numbers of the formats in which items
are encoded.

A payload is one bytes-like object, or a list `[head, *buffers]` where large contiguous buffers
(such as numpy arrays) travel beside the pickle instead of inside it (pickle protocol 5, PEP 574).
Plain scalars are payloads as they are until a frame is written (`scalars.py`). Small arrays travel
as a head and their elements (`arrays.py`), in a tenth of pickle's time. Only payloads that `dump`
has made in one of our own processes ever reach `load`: bytes from the network are JSON, msgpack or
raw, and never come here.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from carpool.wire import arrays, scalars
from carpool.wire.arrays import Block
from carpool.wire.memory import Memory
from carpool.wire.pickling import dumps, is_record
from carpool.wire.scalars import LEAST_INT, LONGEST_TEXT, MOST_INT, SCALARS, SHORT_SCALARS, Scalar, Scalars

Buffer = bytes | bytearray | memoryview
Payload = Buffer | list[Buffer] | Scalar

# How an item is encoded: `Request.format` on the way in, `Request.accept` on the way out.
OBJECT: Final = 0  # a Python object of one of our processes, as `dump` makes it
JSON: Final = 1
MSGPACK: Final = 2
RAW: Final = 3  # the bytes are the item
ARRAYS: Final = 4  # on the way out: an object of builtins and numpy's arrays, see `hints/plain.py`
# the model's own format, by its `decode` or `encode`; further numbers if it writes several
CUSTOM: Final = 5

OBJECTS: Final = frozenset({OBJECT, ARRAYS})
"""The formats that are read by `load`."""

MOST_ADAPTERS: Final = 64
"""How many adapters of addresses can be told apart on the way in (see `adapted`)."""

LARGE: Final = 64 * 1024
"""Bytes; buffers of at least this size travel by themselves and are received into memory of their
own.
"""

_PICKLE: Final = 0x80  # the first byte of every pickle; no scalar in msgpack starts with it
_BUFFERS: Final = frozenset({bytes, bytearray, memoryview})
_decode_scalar = msgspec.msgpack.Decoder().decode


def adapted(format: int, adapter: int) -> int:
    """Return the number of a format whose value an adapter makes an item of, on the way in.

    Args:
        format: JSON, MSGPACK or RAW.
        adapter: The position of the adapter among those of its service.
    """
    return CUSTOM + format + RAW * adapter


def without_adapter(format: int) -> tuple[int, int]:
    """Return what `adapted` was given, for a format above CUSTOM."""
    adapter, format = divmod(format - CUSTOM - JSON, RAW)
    return format + JSON, adapter


def dump(value: Any) -> Payload:
    """Return `value` as a payload for another of our processes. Raises what pickling raises."""
    kind = type(value)
    if kind is float or (kind is int and LEAST_INT <= value <= MOST_INT):
        return value  # type: ignore[no-any-return]
    if kind in SCALARS:
        if kind is not int and (kind is not str or (len(value) < LONGEST_TEXT and value.isascii())):
            return value  # type: ignore[no-any-return]
        try:
            return scalars.pack(value)
        except (OverflowError, UnicodeError, msgspec.MsgspecError):
            return dumps(value)  # an integer of over 64 bits, or half a surrogate pair
    if kind is dict and is_record(value):
        return pickle.dumps(value, 5)
    if kind is bytes and len(value) >= LARGE:
        return [b"", value]
    if kind is arrays._ndarray or (arrays._ndarray is None and "numpy" in sys.modules and kind is arrays.array_type()):
        packed = _packed_array(value)
        if packed is not None:
            return packed
    buffers: list[Buffer] = []

    def keep_in_pickle(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < LARGE:
            return True
        buffers.append(raw)
        return False

    head = dumps(value, keep_in_pickle)
    return [head, *buffers] if buffers else head


def _packed_array(array: arrays.Array) -> Payload | None:
    """Return a small array as a head and its elements; None if it must be pickled."""
    if array.nbytes >= LARGE:
        return None  # its memory travels as it is, uncopied
    head = arrays.head_of(array, array.shape)
    return None if head is None else [head, array.tobytes()]


def load(payload: Payload) -> object:
    """Read what `dump` has made. Arrays share the memory of the payload's buffers, so a payload is
    read only once; what is to be read again is `detached` before.
    """
    kind: type = type(payload)
    if kind is bytes or kind in _BUFFERS:
        return pickle.loads(payload) if payload[0] == _PICKLE else _decode_scalar(payload)  # type: ignore
    if type(payload) is not list:
        return payload
    head, *buffers = payload
    if not head:
        return bytes(buffers[0])
    if head[0] == arrays.MARK:
        return arrays.open_array(bytes(head), *buffers)
    return pickle.loads(head, buffers=buffers)


def detached(payloads: Sequence[Payload], memory: Memory) -> Sequence[Payload]:
    """Return payloads that share no memory with these, nor with the objects they were made of,
    which may change from now on. What cannot change is not copied.
    """
    if type(payloads) is Block:
        elements = payloads.elements
        own = _copied(elements, memory)
        return payloads if own is elements else Block(payloads.head, own, len(payloads))
    if type(payloads) is Scalars or list not in set(map(type, payloads)):
        return payloads
    return [detach(payload, memory) for payload in payloads]


def detach(payload: Payload, memory: Memory) -> Payload:
    """Return a payload that shares no memory with this one; see `detached`."""
    if type(payload) is not list:  # reading it makes new objects
        return payload
    return [_copied(buffer, memory) for buffer in payload]


def _copied(buffer: Buffer, memory: Memory) -> Buffer:
    if type(buffer) is bytes:
        return buffer
    fresh = memory.buffer(_nbytes(buffer))
    memoryview(fresh)[:] = buffer  # assigning to the bytearray itself would copy twice
    return fresh


def size_of(payload: Payload) -> int:
    """Return how many bytes `payload` holds; for a scalar, the most that it takes in a message."""
    if type(payload) is bytes:
        return len(payload)
    if type(payload) in SHORT_SCALARS:
        return scalars.BYTES
    if type(payload) is str:
        return scalars.BYTES + len(payload)
    if type(payload) is list:
        return sum([_nbytes(part) for part in payload])
    return _nbytes(payload)  # type: ignore[arg-type]


def parts_of(payloads: Sequence[Payload]) -> tuple[list[int], list[Buffer]]:
    """Return how many buffers each payload has (at least one), and all buffers in a row; scalars
    are packed.
    """
    kinds: set[type] = set(map(type, payloads))
    if kinds <= _BUFFERS:
        return [1] * len(payloads), payloads  # type: ignore[return-value]
    counts: list[int] = []
    parts: list[Buffer] = []
    for payload in payloads:
        if type(payload) is list:
            counts.append(len(payload))
            parts += payload
        else:
            counts.append(1)
            parts.append(scalars.pack(payload) if type(payload) in SCALARS else payload)  # type: ignore[arg-type]
    return counts, parts


def _nbytes(part: Buffer) -> int:
    return part.nbytes if type(part) is memoryview else len(part)
