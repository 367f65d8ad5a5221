"""What may be made of one body: each reader counts by an `Allowance` before it makes anything.

A body says how large the things in it are, by shapes, lengths, counts or references, which may be
out of all proportion to its own bytes. So the items, values and bytes that a reader may make follow
from the length of the body and from the limits of their receiver.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, compress
from math import inf
from operator import mul
from typing import Final

from carpool.errors import InvalidRequest, too_large

MOST_EXPANDED: Final = 100
"""How many times its size a body may become, beyond `ALWAYS` and up to its limit."""

ALWAYS: Final = 2**20
"""Bytes that the smallest body may become."""

USUAL_LIMIT: Final = 16 * 2**20
"""Bytes that a body may become by `MOST_EXPANDED`, where the limit of bodies is not at hand."""

_A_BYTE: Final = 8  # values that each byte of a body may become: JSON has one in two bytes, Arrow has eight in one

_MARKS = b'[]{},"'
_NO_MARKS = bytes(set(range(256)) - set(_MARKS))
_STEPS = bytes.maketrans(b"[{]},", b"\x01\x01\xff\xff\x00")  # +1 and -1, as signed bytes
_COMMAS = bytes.maketrans(b"[{]},", b"\x00\x00\x00\x00\x01")
_PIECE: Final = 2**16
_SEVERAL: Final = "send several requests"


class Allowance:
    """What may be made of one body.

    Args:
        nbytes: The length of the body.
        limit: The most bytes that it may become by `MOST_EXPANDED`.

    Attributes:
        items: How many items it may bring.
    """

    def __init__(self, nbytes: int, items: float = inf, limit: int = USUAL_LIMIT) -> None:
        self.items = items
        self.nbytes = max(min(limit, max(ALWAYS, MOST_EXPANDED * nbytes)), _A_BYTE * nbytes)
        self.values = max(_A_BYTE * nbytes, self.nbytes // _A_BYTE)
        self._of, self._most_bytes, self._most_values = nbytes, self.nbytes, self.values

    def check_items(self, n: float, what: str) -> None:
        """Raise `InvalidRequest` (413) if a body brings too many items; `what` holds them."""
        if n > self.items:
            text = f"{what} has more than {self.items:.0f} items, which is all that the queue holds"
            raise too_large(f"{text}: {_SEVERAL}")

    def check_json_list(self, body: bytes | bytearray) -> None:
        """Check the same of a list without making an object of each item; it takes linear time."""
        if body.count(b",") < self.items:
            return
        marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS)
        marks = b"".join(marks.split(b'"')[::2])  # those outside of strings
        level = n = 0
        for at in range(0, len(marks), _PIECE):  # no other thread runs while one piece is looked at
            piece = marks[at : at + _PIECE]
            levels = list(accumulate(memoryview(piece.translate(_STEPS)).cast("b"), initial=level))[1:]
            level = levels[-1]
            n += sum(map((1).__eq__, compress(levels, piece.translate(_COMMAS))))  # commas between items of the list
            if n >= self.items:
                self.check_items(inf, "the list")

    def check_msgpack_list(self, body: bytes | bytearray) -> None:
        """Check the same by the number of items with which a list begins."""
        digits = {b"\xdc": 2, b"\xdd": 4}.get(bytes(body[:1]), 0)
        self.check_items(int.from_bytes(body[1 : 1 + digits], "big"), "the list")

    def take_values(self, n: int, what: str, instead: str = _SEVERAL) -> None:
        """Count values that are about to be made: numbers, texts, lists, cells of a table.

        Args:
            what: What would become them, for the text.
            instead: What a client is to do, for the text.

        Raises:
            InvalidRequest: They are out of proportion to the body (413).
        """
        if n > self.values:
            raise self._out_of_proportion(what, f"{self._most_values} values", instead)
        self.values -= n

    def take_bytes(self, n: int, what: str, instead: str = _SEVERAL) -> None:
        """Count bytes that are about to be made, as `take_values` counts values."""
        if n > self.nbytes:
            raise self._out_of_proportion(what, f"{self._most_bytes} bytes", instead)
        self.nbytes -= n

    def take_array(self, shape: Sequence[int], what: str) -> None:
        """Count the values of an array of a shape, and the lists around them: `[2**40, 0]` has no
        value, and yet so many lists.
        """
        self.take_values(sum(accumulate(shape, mul)), what, "give it fewer axes and rows")

    def _out_of_proportion(self, what: str, most: str, instead: str) -> InvalidRequest:
        return too_large(f"{what} would be more than {most}, the most for a body of {self._of} bytes: {instead}")
