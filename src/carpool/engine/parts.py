"""What a model that answers in parts puts in the place of a part, to say that its answer has ended.

Nothing else of it crosses a process border: a worker takes the part out of a `Last`, and sends a
mark for the end.
"""

from __future__ import annotations

import enum
from typing import Final, Generic, TypeVar

P = TypeVar("P")


class Last(Generic[P]):
    """A part that is the last of its answer, in the list that `step` returns or a generator yields.

    Args:
        value: The part.

    Attributes:
        value: The part.
    """

    __slots__ = ("value",)

    def __init__(self, value: P) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"carpool.Last({self.value!r})"


class End(enum.Enum):
    """The type of `END`, for type hints."""

    END = enum.auto()

    def __repr__(self) -> str:
        return "carpool.END"


END: Final = End.END
"""Says, in the place of a part, that the answer has ended with the part before."""


def ends_answer(part: object) -> bool:
    """Report whether what a model puts in the place of a part ends its answer."""
    return part is END or type(part) is Last or issubclass(type(part), BaseException)
