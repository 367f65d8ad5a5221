"""Scalars are payloads as they are, since nothing of them can change. A batch of nothing else is one array in msgpack.

That is written and read in one call each, where every item by itself takes one to pack, one to cut out and one to open.
Only exact scalars are meant; what is derived from one (a numpy scalar, an enum) is an object like any other. So are
integers of more than 64 bits; and texts that are long or not in ASCII, of which it is not known at a glance how many
bytes they will be, are packed where they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

Scalar = float | int | str | bool | None

SCALARS: Final = frozenset({int, float, str, bool, type(None)})
"""The types of scalars; nothing of them can change."""

LONGEST_TEXT: Final = 64 * 1024
"""Characters."""

LEAST_INT: Final = -(2**63)
MOST_INT: Final = 2**64 - 1

BYTES: Final = 16
"""No scalar takes more in a message besides its characters, not even with its part of the array's head."""

_HARMLESS: Final = frozenset({float, bool, type(None)})

pack = msgspec.msgpack.Encoder().encode
"""A scalar as bytes, or a list of them."""

_decode = msgspec.msgpack.Decoder(list[Scalar]).decode


class Scalars(list[Scalar]):
    """Payloads of which each is a scalar."""

    __slots__ = ()


def are_scalars(payloads: Sequence[Any]) -> bool:
    """Whether there are payloads, and all of them are scalars."""
    if type(payloads) is Scalars:
        return True
    return len(payloads) > 0 and type(payloads[0]) in SCALARS and set(map(type, payloads)) <= SCALARS


def as_scalars(values: Sequence[Any], kinds: set[type]) -> Scalars | None:
    """Values of such types as payloads, if all are scalars and it is seen at a glance that they are plain."""
    if not kinds <= SCALARS:
        return None
    if not kinds <= _HARMLESS:
        if kinds == {int}:
            plain = min(values) >= LEAST_INT and max(values) <= MOST_INT
        else:
            plain = kinds == {str} and all(map(str.isascii, values)) and max(map(len, values)) < LONGEST_TEXT
        if not plain:
            return None
    return Scalars(values)


def unpack(data: bytes | bytearray | memoryview, count: int) -> Scalars:
    """What `pack` made of a list of so many.

    Raises:
        ValueError: it did not make this.
    """
    try:
        scalars = Scalars(_decode(data))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None
    if len(scalars) != count or pack(scalars) != data:  # there is one way to write it
        raise ValueError(f"no {count} plain scalars")
    return scalars
