"""Type hints as they are meant: an alias is what it stands for.

`type Rows = list[float]`, and `NDArray[np.float32]` since NumPy 2.5, are objects of their own,
which are neither a list nor an array. All hints of users are read here, so no other module meets an
alias.

Here is also the check that the hint of `predict` agrees with its argument, a list of items or one
item. A hint is taken at its word only where there is no doubt: a number, a text or a record is
never a list. What may stand for one (`Any`, sequences, arrays, frames, tensors, type variables,
classes that are unknown here) agrees with both.
"""

from __future__ import annotations

import datetime
import inspect
import numbers
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any


def hints_of(of: Any, *, include_extras: bool = True) -> dict[str, Any]:
    """Return the hints of a function or class by name, without aliases.

    Raises:
        NameError: A hint means nothing where it stands; AttributeError and TypeError likewise.
    """
    return {name: meant(hint) for name, hint in typing.get_type_hints(of, include_extras=include_extras).items()}


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function or class.

    Since Python 3.14 hints are evaluated when they are asked for: one that means nothing at run
    time, since only type checkers import its name, stays as it is written.

    Raises:
        TypeError: It cannot be called, or says nothing of its arguments; ValueError likewise.
    """
    if sys.version_info >= (3, 14):
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)


def meant(hint: Any) -> Any:
    """Return a hint with what its aliases stand for in their place, also inside of it.

    An alias that stands within itself stays there as it is.
    """
    return _meant(hint, {}, ())


def _meant(hint: Any, given: Mapping[Any, Any], opened: tuple[Any, ...]) -> Any:
    """Return a hint without aliases; `given` stands for the type parameters of the alias that it is
    part of, and `opened` has all these aliases.
    """
    if isinstance(hint, typing.TypeVar):
        return given.get(hint, hint)
    base, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if base is typing.Literal:
        return hint
    kinds = inner[:1] if base is typing.Annotated else inner
    found = (*(_meant(each, given, opened) for each in kinds), *inner[len(kinds) :])
    # by name: that of `typing_extensions` is a class of its own
    if type(base).__name__ == "TypeAliasType" and base not in opened:
        return _meant(base.__value__, dict(zip(base.__type_params__, found, strict=False)), (*opened, base))
    if all(map(lambda new, old: new is old, found, inner)):
        return hint
    whole: Any = typing.Union if base is types.UnionType else base
    return whole[found if len(found) > 1 else found[0]]


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
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def is_list(kind: Any) -> bool:
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
