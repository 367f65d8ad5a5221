"""Reports whether the results of one stage can be items of the next one, by their hints.

Hints say less than code does, so only a case that can never fit is an error: a text where a number
is wanted, an object of a class that has nothing to do with the one that is wanted.
"""

from __future__ import annotations

import inspect
import typing
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union

_NUMBERS = (bool, int, float, complex)
_NEVER_A_ROW = (str, bytes, bytearray, dict)


def may_fit(gives: Any, takes: Any) -> bool:
    """Report whether a value of one type may be one of the other."""
    for kind in (gives, takes):
        if kind is Any or kind is object or isinstance(kind, TypeVar | str):
            return True
    gives, takes = _plain(gives), _plain(takes)
    if (inner := _members(gives)) is not None:
        return any(may_fit(each, takes) for each in inner)
    if (inner := _members(takes)) is not None:
        return any(may_fit(gives, each) for each in inner)
    given, taken = typing.get_origin(gives) or gives, typing.get_origin(takes) or takes
    given, taken = NoneType if given is None else given, NoneType if taken is None else taken
    if not isinstance(given, type) or not isinstance(taken, type) or getattr(taken, "_is_protocol", False):
        return True
    if given in _NUMBERS and taken in _NUMBERS:
        return _NUMBERS.index(given) <= _NUMBERS.index(taken)
    try:
        is_related = issubclass(given, taken) or issubclass(taken, given)
    except TypeError:  # a class that cannot be asked
        return True
    if not is_related:
        return (_is_row(given) and _is_row(taken)) or _is_record(given, taken)
    return _inner_fit(given, typing.get_args(gives), typing.get_args(takes))


def _plain(kind: Any) -> Any:
    if typing.is_typeddict(kind):
        return dict
    while True:
        if typing.get_origin(kind) is Annotated:
            kind = typing.get_args(kind)[0]
        elif hasattr(kind, "__supertype__"):
            kind = kind.__supertype__
        else:
            return kind


def _members(kind: Any) -> list[Any] | None:
    """Return the types of which one is meant; None if it is one type."""
    origin = typing.get_origin(kind)
    if origin in (Union, UnionType):
        return list(typing.get_args(kind))
    return [type(value) for value in typing.get_args(kind)] if origin is Literal else None


def _inner_fit(given: type, gives: tuple[Any, ...], takes: tuple[Any, ...]) -> bool:
    if not issubclass(given, list | tuple | set | frozenset | dict):
        return True
    if issubclass(given, tuple) and ... not in gives and ... not in takes and gives and takes:
        return len(gives) == len(takes) and all(map(may_fit, gives, takes))
    gives, takes = (tuple(each for each in kinds if each is not ...) for kinds in (gives, takes))
    if len(gives) != len(takes):
        return True
    return all(map(may_fit, gives, takes))


def _is_row(kind: type) -> bool:
    """Report whether objects of a class may be taken for a list or an array."""
    return hasattr(kind, "__getitem__") and hasattr(kind, "__len__") and not issubclass(kind, _NEVER_A_ROW)


def _is_record(given: type, taken: type) -> bool:
    """Report whether one class may stand for the other because of its methods: one is abstract."""
    return inspect.isabstract(taken) or inspect.isabstract(given)
