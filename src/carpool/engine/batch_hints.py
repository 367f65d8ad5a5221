"""Whether the hint of `predict` agrees with what it is called with: a list of items, or one item.

A hint is taken at its word only where there is no doubt: a number, a text or a record is never a
list. What may stand for one (`Any`, sequences, arrays, frames, tensors, type variables, classes
that are unknown here) agrees with both.
"""

from __future__ import annotations

import datetime
import numbers
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

_NEVER_LISTS = (numbers.Number, str, bytes, bytearray, Mapping, datetime.date, datetime.time, datetime.timedelta, Enum)
_MARKS_OF_RECORDS = (
    "__dataclass_fields__",
    "__struct_fields__",
    "__pydantic_decorators__",
    "__attrs_attrs__",
    "_fields",
)
_PASSING_ON = ("contextlib", "torch.utils._contextlib")  # decorators from here pass on what they are given


class HintWarning(UserWarning):
    """A hint looks like a slip, but may be meant."""


def is_union(kind: Any) -> bool:
    """Whether a hint is a union, however it is written."""
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def is_list(kind: Any) -> bool:
    """Whether a hint is a list or another sequence of things."""
    base = typing.get_origin(kind) or kind
    return isinstance(base, type) and issubclass(base, Sequence) and not issubclass(base, str | bytes | bytearray)


def is_never_a_list(kind: Any) -> bool:
    """Whether a list certainly cannot be meant by a hint."""
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        return is_never_a_list(typing.get_args(kind)[0])
    if is_union(kind):
        return all(map(is_never_a_list, typing.get_args(kind)))
    if isinstance(kind, typing.NewType):
        return is_never_a_list(kind.__supertype__)
    base = origin or kind
    if base is typing.Literal or base is None:
        return True
    if not isinstance(base, type):
        return False
    if base is types.NoneType or issubclass(base, _NEVER_LISTS):
        return True
    return any(hasattr(base, mark) for mark in _MARKS_OF_RECORDS)


def is_called_as_hinted(function: Callable[..., Any]) -> bool:
    """Report whether a function's hints say what callers bring.

    A decorator may give its function something else than it gets itself.

    Those of `contextlib` and torch, such as `torch.inference_mode()`, do not.
    """
    while hasattr(function, "__wrapped__"):
        if getattr(function, "__globals__", {}).get("__name__") not in _PASSING_ON:
            return False
        function = function.__wrapped__
    return True
