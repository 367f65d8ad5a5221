"""Scalars are payloads as they are, since they cannot change. A batch of scalars is one array in
msgpack.

That array is written in one call and read in one call, whereas separate items take three calls
each: to pack, to cut out and to open. Only values of exactly these types count as scalars.
Instances of subclasses (a numpy scalar, an enum) are objects like any other, and so are integers of
more than 64 bits. Texts that are long or not ASCII are packed one by one where they come from,
because their length in bytes is not known without encoding them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

Scalar = float | int | str | bool | None

SCALARS: Final = frozenset({int, float, str, bool, type(None)})
"""The types of scalars; all of them are immutable."""

SHORT_SCALARS: Final = frozenset({int, float, bool, type(None)})
"""The types of scalars that never take more than `BYTES` bytes."""

LONGEST_TEXT: Final = 64 * 1024
"""Characters; longer texts are packed one by one."""

LEAST_INT: Final = -(2**63)
MOST_INT: Final = 2**64 - 1

BYTES: Final = 16
"""The most bytes that a scalar takes in a message, not counting characters but with its part of the
array's head.
"""

_ALWAYS_PLAIN: Final = frozenset({float, bool, type(None)})

pack = msgspec.msgpack.Encoder().encode
"""Returns a scalar, or a list of scalars, as bytes."""

_decode = msgspec.msgpack.Decoder(list[Scalar]).decode


class Scalars(list[Scalar]):
    """Payloads that are all scalars."""

    __slots__ = ()


def are_scalars(payloads: Sequence[Any]) -> bool:
    """Report whether there are payloads, all of them scalars."""
    if type(payloads) is Scalars:
        return True
    return len(payloads) > 0 and type(payloads[0]) in SCALARS and set(map(type, payloads)) <= SCALARS


def as_scalars(values: Sequence[Any], kinds: set[type]) -> Scalars | None:
    """Return values as payloads; None if not all of them are scalars that may stay as they are.

    Args:
        values: At least one.
        kinds: The set of their types.
    """
    if not kinds <= SCALARS:
        return None
    if not kinds <= _ALWAYS_PLAIN:
        if kinds == {int}:
            is_plain = min(values) >= LEAST_INT and max(values) <= MOST_INT
        else:
            is_plain = kinds == {str} and all(map(str.isascii, values)) and max(map(len, values)) < LONGEST_TEXT
        if not is_plain:
            return None
    return Scalars(values)


def unpack(data: bytes | bytearray | memoryview, count: int) -> Scalars:
    """Read what `pack` has made of a list of `count` scalars.

    Raises:
        ValueError: `pack` has not made this.
    """
    try:
        scalars = Scalars(_decode(data))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None
    if len(scalars) != count or pack(scalars) != data:  # each scalar is written in one way only
        raise ValueError(f"the bytes are not {count} scalars in their shortest form")
    return scalars
