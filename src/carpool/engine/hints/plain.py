"""Results of other libraries as builtins, or as builtins and arrays of numpy.

What a moment or a duration is written as does not depend on its unit: numpy makes an object of
Python of some, and a whole number of others. Nor does a number depend on how wide its type is. No
library is imported here before an object of it is there.
"""

from __future__ import annotations

import dataclasses
import datetime
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from fractions import Fraction
from typing import Any, Final

import msgspec

from carpool.engine.foreign import text_of

_UNCHANGED: Final = frozenset({int, float, str, bytes, bool, type(None)})
_SECONDS: Final = {
    "W": Fraction(604_800),
    "D": Fraction(86_400),
    "h": Fraction(3600),
    "m": Fraction(60),
    "s": Fraction(1),
    "ms": Fraction(1, 10**3),
    "us": Fraction(1, 10**6),
    "ns": Fraction(1, 10**9),
    "ps": Fraction(1, 10**12),
    "fs": Fraction(1, 10**15),
    "as": Fraction(1, 10**18),
}
_LONGEST_FRACTION: Final = 18
_DEEPEST: Final = 32


def to_builtins(value: Any) -> Any:
    """Return a value that msgspec cannot write, made of builtins: an array or a scalar of numpy or
    torch, a moment of pandas, a pydantic model.

    Raises:
        TypeError: It is nothing of the kind.
    """
    if _is_numpy(value):
        return _of_numpy(value)
    if isinstance(value, datetime.date | datetime.timedelta):
        return _of_subclass(value)
    convert = getattr(value, "tolist", None)
    if convert is not None:
        try:
            return convert()
        except MemoryError:
            raise
        except Exception as error:  # one without elements that could be listed, such as a sparse tensor
            raise TypeError(f"a result of type {type(value).__name__} cannot be written: {text_of(error)}") from error
    dump = getattr(value, "model_dump", None)
    if dump is None:
        raise TypeError(f"a result of type {value.__class__.__name__} cannot be written as JSON or msgpack")
    try:
        return dump(mode="json", by_alias=True)
    except ValueError:  # it holds something that pydantic cannot write but we can: an array, for example
        return dump(by_alias=True)


def elements_of(array: Any) -> list[Any]:
    """Return the elements of an array of one axis, those of numbers as builtins.

    Those that are moments, durations or records stay as they are.
    """
    if array.ndim and _is_numpy(array) and (array.dtype.kind in "mMV" or array.dtype.char in "gG"):
        return list(array)
    found: list[Any] = array.tolist()
    return found


def with_arrays(value: Any) -> Any:
    """Return a result as builtins and arrays of numpy's own numbers: a record is a dict, a moment
    the text that JSON has, and a tensor of any library is such an array.

    Raises:
        Exception: What the value's own library raises, where it has no such array.
    """
    kind = type(value)
    if kind in _UNCHANGED:
        return value
    if isinstance(value, Enum):
        return with_arrays(value.value)
    if isinstance(value, str | bytes | bytearray | memoryview):
        return str(value) if isinstance(value, str) else bytes(value)
    if isinstance(value, list | tuple):
        is_done = kind is list and set(map(type, value)) <= _UNCHANGED
        return value if is_done else [with_arrays(each) for each in value]
    if isinstance(value, Mapping):
        return {with_arrays(key): with_arrays(each) for key, each in value.items()}
    if _is_numpy(value):
        return _array_of(value)
    fields = fields_of(value)
    if fields is not None:
        return {name: with_arrays(each) for name, each in fields.items()}
    if hasattr(value, "detach"):  # a torch tensor, which may belong to a graph and lie on a device
        value = value.detach().cpu()
        if value.is_floating_point() and str(value.dtype) not in ("torch.float16", "torch.float32", "torch.float64"):
            value = value.float()  # of its own kinds, such as bfloat16, numpy has none
        return value.resolve_conj().resolve_neg().numpy()
    if hasattr(value, "__array__"):
        import numpy

        return _array_of(numpy.asarray(value))
    return with_arrays(msgspec.to_builtins(value, enc_hook=to_builtins))


def fields_of(value: Any) -> dict[str, Any] | None:
    """Return the fields of a record by the names that JSON has; None if it is none."""
    if isinstance(value, msgspec.Struct):
        return {field.encode_name: getattr(value, field.name) for field in msgspec.structs.fields(value)}
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if hasattr(value, "model_dump"):
        return value.model_dump(by_alias=True)  # type: ignore[no-any-return]
    return None


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def _of_numpy(value: Any) -> Any:
    dtype = value.dtype
    if dtype.names is not None:
        columns = [_of_numpy(value[name]) for name in dtype.names]
        if not value.ndim:
            return tuple(columns)
        return list(zip(*columns, strict=True)) if value.ndim == 1 else [_of_numpy(row) for row in value]
    if dtype.kind in "mM":
        if value.ndim:
            return [_of_numpy(each) for each in value]
        return _moment(value[()]) if dtype.kind == "M" else _duration(value[()])
    return _narrowed(value).tolist()


def _array_of(value: Any) -> Any:
    """Return an array or a scalar of numpy as an array of numbers or texts, or as builtins."""
    numpy, dtype = sys.modules["numpy"], value.dtype
    if dtype.isbuiltin == 2:  # of another library, such as bfloat16
        return numpy.asarray(value.tolist())
    if dtype.kind == "O":
        return with_arrays(value.tolist())
    if dtype.kind in "mMV" or isinstance(value, numpy.ma.MaskedArray):
        return with_arrays(_of_numpy(value))
    own = _narrowed(value)
    return own if isinstance(own, numpy.generic) else numpy.asarray(own)


def _narrowed(value: Any) -> Any:
    """Return numbers that are wider than those of Python as wide as these."""
    if value.dtype.char not in "gG":
        return value
    with sys.modules["numpy"].errstate(over="ignore"):
        return value.astype("f8" if value.dtype.char == "g" else "c16")


def _moment(value: Any) -> Any:
    """Return a `datetime64` as a date, a datetime, or the text of one that Python does not have."""
    made = value.tolist()
    if type(made) is not int:
        return made
    head, dot, fraction = str(value).partition(".")
    return head + _fraction(fraction) if dot else head


def _fraction(digits: str) -> str:
    """Return the fraction of a second with its point, in as many threes as it needs, from six on;
    empty if it is 0.
    """
    digits = digits.rstrip("0")
    return "." + digits.ljust(max(6, -len(digits) // 3 * -3), "0") if digits else ""


def _duration(value: Any) -> Any:
    """Return a `timedelta64` as a timedelta, or as the text of one that Python does not have; as a
    whole number if it has no unit.
    """
    made = value.tolist()
    if type(made) is not int:
        return made
    unit, step = sys.modules["numpy"].datetime_data(value.dtype)
    count = int(value.astype("i8")) * step
    if unit == "generic":
        return count
    sign = "-" if count < 0 else ""
    if unit in "YM":
        return f"{sign}P{abs(count)}{unit}"
    seconds = abs(count) * _SECONDS[unit]
    micros = seconds * 10**6
    if micros.denominator == 1 and seconds < datetime.timedelta.max // datetime.timedelta(seconds=1):
        return datetime.timedelta(microseconds=int(micros)) * (-1 if sign else 1)
    days, rest = divmod(seconds, 86_400)
    whole, part = divmod(rest, 1)
    fraction = _fraction(str(int(part * 10**_LONGEST_FRACTION)).rjust(_LONGEST_FRACTION, "0"))
    return f"{sign}P{f'{days}D' if days else ''}T{whole}{fraction}S"


def _of_subclass(value: Any) -> Any:
    """Return a date, datetime or timedelta of another library as Python's own, or as its text if it
    is finer; None for the one that is not a time.
    """
    if value != value:
        return None
    if isinstance(value, datetime.timedelta):
        if getattr(value, "nanoseconds", 0):
            return _duration(value.to_timedelta64())  # type: ignore[attr-defined]
        return datetime.timedelta(value.days, value.seconds, value.microseconds)
    if not isinstance(value, datetime.datetime):
        return datetime.date(value.year, value.month, value.day)
    if getattr(value, "nanosecond", 0):
        return value.isoformat()
    time = value.hour, value.minute, value.second, value.microsecond
    return datetime.datetime(value.year, value.month, value.day, *time, value.tzinfo, fold=value.fold)


def why_unwritable(value: Any, check: Callable[[Any], object]) -> str | None:
    """Return why a result cannot be written, and where in it that is; None if it can. `check`
    writes a part of it, or raises.
    """
    reason = _raised(check, value)
    if reason is None:
        return None
    steps: list[str] = []
    while not isinstance(reason, RecursionError) and len(steps) < _DEEPEST:
        found = _unwritable_part(value, check)
        if found is None:
            break
        step, value, reason = found
        steps.append(step)
    return f"{text_of(reason)} - at `${''.join(steps)}`" if steps else text_of(reason)


def _unwritable_part(value: Any, check: Callable[[Any], object]) -> tuple[str, Any, Exception] | None:
    if isinstance(value, list | tuple):
        parts = [(f"[{i}]", each) for i, each in enumerate(value)]
    elif isinstance(value, Mapping):
        for key in value:
            if _raised(check, {key: None}) is not None:
                return f".{key!s:.80}", None, TypeError(f"a key of type {type(key).__name__} cannot be written")
        parts = [(f".{key!s:.80}", each) for key, each in value.items()]
    else:
        parts = [(f".{name}", each) for name, each in (fields_of(value) or {}).items()]
    for step, part in parts:
        reason = _raised(check, part)
        if reason is not None:
            return step, part, reason
    return None


def _raised(check: Callable[[Any], object], value: Any) -> Exception | None:
    try:
        check(value)
    except Exception as error:
        return error
    return None
