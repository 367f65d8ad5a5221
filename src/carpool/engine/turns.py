"""What a model returns in the place of a result to say where that goes: `Done` and `To`."""

from __future__ import annotations

import typing
from types import UnionType
from typing import Any, Generic, TypeVar, Union

T = TypeVar("T")


class Done(Generic[T]):
    """The answer of the request, from any stage: nothing that would follow is run.

    A model returns it for an item in the place of its result, such as a small model that is sure of
    its answer. In a branch of a `Parallel`, or in a `ForEach`, it ends the whole request.

    Args:
        answer: What the caller gets. It must be what the service's last stage returns.
    """

    __slots__ = ("answer",)

    def __init__(self, answer: T) -> None:
        self.answer = answer

    def __repr__(self) -> str:
        return f"Done({self.answer!r})"


class To(Generic[T]):
    """A result that goes to one branch of the `Route` that follows.

    Args:
        branch: The name of the branch.
        item: What the branch gets.
    """

    __slots__ = ("branch", "item")

    def __init__(self, branch: str, item: T) -> None:
        self.branch = branch
        self.item = item

    def __repr__(self) -> str:
        return f"To({self.branch!r}, {self.item!r})"


TURNS = frozenset({Done, To})


def split_hint(hint: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """Return what a hint of a model's results says: the type of what goes on, the types of early
    answers, and whether some results name their branch.
    """
    goes_on: list[Any] = []
    early: list[Any] = []
    names = False
    for each in typing.get_args(hint) if typing.get_origin(hint) in (Union, UnionType) else (hint,):
        base, inner = typing.get_origin(each) or each, (*typing.get_args(each), Any)
        if base is Done:
            early.append(inner[0])
        else:
            names = names or base is To
            goes_on.append(inner[0] if base is To else each)
    if not early and not names:
        return hint, (), False
    if Any in goes_on or not goes_on:
        return Any, tuple(early), names
    return Union[tuple(goes_on)], tuple(early), names  # noqa: UP007 - of a number of types
