"""Copies of what user code has made and may still change: it is copied before the next call of user
code, which may fill the same memory again.

What a model's hooks hand to each other never leaves its worker and may be anything, such as a
document that takes its whole vocabulary along where it is pickled. There only plain data is copied:
containers, arrays, tensors and records.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from carpool.engine.call.results import UNCHANGING
from carpool.engine.parts import Last
from carpool.engine.wire.payload import LARGE, Memory, detach, dump, dumps, load, own_tensor

_local = threading.local()  # the memory of each thread's copies


def own(value: Any, handed_on: bool = False) -> Any:
    """Return a copy of `value` that shares nothing with it that can change.

    What is no plain data is copied as it would be on its way to another process, or else as
    `copy.deepcopy` does it; what cannot be copied in any way is returned as it is. So is an
    exception, with its traceback, but its arguments and attributes are copies from then on.

    Args:
        value: Any object.
        handed_on: Whether it only goes from one hook of a model to the next. Then what is no plain
            data is returned as it is.
    """
    kind = type(value)
    if kind in UNCHANGING:
        return value
    if issubclass(kind, BaseException):
        _own_arguments(value)
        return value
    try:
        return _copied(value, _as_it_is if handed_on else _as_if_sent, {})
    except BaseException:  # copying runs the user's code
        return value if handed_on else _deep_copy(value)


def own_part(part: Any, handed_on: bool = False) -> Any:
    """Return a copy of what a model has put in the place of a part; see `own`."""
    return Last(own(part.value, handed_on)) if type(part) is Last else own(part, handed_on)


def _copied(value: Any, other: Callable[[Any], Any], memo: dict[int, Any]) -> Any:
    """Return a copy of `value`.

    Args:
        value: Any object.
        other: Copies what is no plain data.
        memo: Copies of objects that stand in it more than once, by their ids.
    """
    kind = type(value)
    if kind in UNCHANGING or _is_number(kind):
        return value
    if id(value) in memo:
        return memo[id(value)]
    made: Any
    if kind is list or kind is dict:
        made = memo[id(value)] = value.copy()
        if not UNCHANGING.issuperset(map(type, value if kind is list else value.values())):
            for key, each in enumerate(value) if kind is list else value.items():
                made[key] = _copied(each, other, memo)
        return made
    if issubclass(kind, tuple):
        made = tuple.__new__(kind, [_copied(each, other, memo) for each in value])
    elif kind is set or kind is bytearray:
        made = value.copy()
    elif kind is memoryview:
        made = memoryview(value.tobytes())
    elif _is_array(kind, value):
        made = value.copy()
        made.flags.writeable = value.flags.writeable
    elif _is_tensor(kind):
        made = own_tensor(sys.modules["torch"], value)
    elif (names := _fields(kind)) is not None:
        made = memo[id(value)] = copy.copy(value)
        put = msgspec.structs.force_setattr if issubclass(kind, msgspec.Struct) else object.__setattr__
        for name in names:
            put(made, name, _copied(getattr(value, name), other, memo))
    else:
        made = other(value)
    memo[id(value)] = made
    return made


def _fields(kind: type) -> Sequence[str] | None:
    """Return the names of a record's fields; None if it is no record."""
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else None


def _is_number(kind: type) -> bool:
    """Report whether a type is that of numpy's numbers, which cannot change."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.number)


def _is_array(kind: type, value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.ndarray) and not value.dtype.hasobject


def _is_tensor(kind: type) -> bool:
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and issubclass(kind, tensor)


def _as_it_is(value: Any) -> Any:
    return value


def _as_if_sent(value: Any) -> Any:
    return load(detach(dump(value), _local.__dict__.setdefault("memory", Memory())))


def _deep_copy(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except BaseException:  # likewise
        return value


def _own_arguments(error: BaseException) -> None:
    """Replace what an exception holds by copies, but for large objects, which do not travel."""
    with contextlib.suppress(BaseException):  # its class may be the user's
        if not UNCHANGING.issuperset(map(type, error.args)):
            error.args = tuple(map(_small_copy, error.args))
        for name, value in list(vars(error).items()):
            vars(error)[name] = _small_copy(value)


def _small_copy(value: Any) -> Any:
    if type(value) in UNCHANGING:
        return value
    try:
        return load(dumps(value, longest=LARGE))
    except BaseException:  # it is too large, or cannot be pickled
        return value
