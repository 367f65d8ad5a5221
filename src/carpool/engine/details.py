"""The faults of an item: how they are described, and bounds for these descriptions.

Our readers, pydantic and users make details, and they come from workers. Wherever they leave a
process, `sanitized` makes them plain and short.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, TypedDict

MOST = 100
"""The largest number of faults that are reported for one item."""

_DEEPEST = 32
_LONGEST_TEXT = 300
_LONGEST_NAME = 100
_LARGEST_INDEX = 2**63


class Detail(TypedDict):
    """One fault of an item.

    Attributes:
        loc: The names of fields and positions in lists that lead to it; empty for the item itself.
        msg: What is wrong, in one line.
        type: The kind of fault, in one word.
    """

    loc: list[int | str]
    msg: str
    type: str


def sanitized(details: Any) -> list[Detail]:
    """Return the details that may be passed on, made of short texts and numbers only.

    There are at most `MOST` of them, and none from the first one on that cannot be read.
    """
    found: list[Detail] = []
    try:
        given: Iterable[Any] = islice(details, MOST)
        for each in given:
            loc = [_step(step) for step in islice(each["loc"], _DEEPEST)]
            found.append({"loc": loc, "msg": _cut(each["msg"], _LONGEST_TEXT), "type": _cut(each["type"])})
    except BaseException:  # a user's code may have made them
        return found
    return found


def _step(step: Any) -> int | str:
    return step if type(step) is int and abs(step) < _LARGEST_INDEX else _cut(step)


def _cut(text: Any, longest: int = _LONGEST_NAME) -> str:
    return str.__getitem__(str(text), slice(longest)).encode("utf-8", "replace").decode()
