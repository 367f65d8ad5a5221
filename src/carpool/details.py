"""What is wrong with an item, fault by fault: the form in which it is told, and bounds for what is not ours.

Details are made by our readers, by pydantic and by users who raise a `ValidationError` of their own, and they come from
workers. Wherever they leave a process they are made plain and short by `plain`.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, TypedDict

MOST = 100
"""So many faults of one item are told."""

_DEEPEST = 32
_LONGEST_TEXT = 300
_LONGEST_NAME = 100
_LARGEST_INDEX = 2**63


class Detail(TypedDict):
    """One fault of an item.

    Attributes:
        loc: names of fields and places in lists that lead to it; empty for the item itself.
        msg: what is wrong, in a line.
        type: the kind of fault, in a word.
    """

    loc: list[int | str]
    msg: str
    type: str


def plain(details: Any) -> list[Detail]:
    """As many details as may be told, of nothing but short texts and numbers; none where they cannot be read."""
    found: list[Detail] = []
    try:
        given: Iterable[Any] = islice(details, MOST)
        for each in given:
            loc = [_step(step) for step in islice(each["loc"], _DEEPEST)]
            found.append({"loc": loc, "msg": _cut(each["msg"], _LONGEST_TEXT), "type": _cut(each["type"])})
    except BaseException:  # they may be of the user's making
        return found
    return found


def _step(step: Any) -> int | str:
    return step if type(step) is int and abs(step) < _LARGEST_INDEX else _cut(step)


def _cut(text: Any, longest: int = _LONGEST_NAME) -> str:
    """A text of bounded length that UTF-8 can say."""
    return str.__getitem__(str(text), slice(longest)).encode("utf-8", "replace").decode()
