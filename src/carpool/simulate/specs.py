"""Specs: what is simulated, in a few words, as the command line takes them.

One spec is `kind:name=value,name=value`. Several are joined by `+`, which starts a new one only before a known kind.
Times have units (8ms, 0.25ms, 2s, 300us), shares may be written as percentages, and several values of one parameter are
separated by `/`. The names are those of the object's own parameters; `a_s` may be written `a`. A first value without a
name goes to the first parameter that it suits: `poisson:800`, `static:10ms`, `trace:requests.csv`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, TypeVar

T = TypeVar("T")

UNITS_S = {"us": "1e-6", "µs": "1e-6", "ms": "1e-3", "s": "1", "m": "60"}
_DURATION = re.compile(r"([-+.\de]+)\s*(us|µs|ms|s|m)")


def duration(text: str) -> float:
    """Seconds of `8ms`, `2s` or `300us`. Raises ValueError: there is no unit, or no number."""
    text = text.strip()
    found = _DURATION.fullmatch(text)
    try:
        return float(Decimal(found[1]) * Decimal(UNITS_S[found[2]])) if found else _zero(text)
    except (ValueError, InvalidOperation):
        raise ValueError(f"{text!r} is no duration: write a number and its unit, such as 8ms, 2s or 300us") from None


def number(text: str) -> float:
    """A number, or a percentage. Raises ValueError."""
    text = text.strip()
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is no number") from None


def split(text: str, separator: str, kinds: Iterable[str]) -> list[str]:
    """The specs in `text`: a separator counts only where a known kind follows, so values may contain it."""
    known = "|".join(map(re.escape, kinds))
    ends = rf":|\s*$|\s*{re.escape(separator)}"
    return [part.strip() for part in re.split(rf"{re.escape(separator)}\s*(?=(?:{known})(?:{ends}))", text)]


def listed(text: str) -> list[str]:
    """The specs between commas; one before `name=value` belongs to the spec that it stands in."""
    return [part.strip() for part in re.split(r",(?!\s*\w+\s*=)", text)]


def build(text: str, kinds: Mapping[str, Callable[..., T]], what: str, example: str, **given: Any) -> T:
    """The object that a spec describes.

    Args:
        text: the spec.
        kinds: what there is, by name.
        what: what the kinds are, for error texts; example: one that is right.
        given: further arguments, which the spec cannot set; only those that the kind takes are used.

    Raises:
        ValueError: the kind or a parameter is unknown, or a value is wrong.
    """
    kind, _, rest = (part.strip() for part in text.partition(":"))
    if kind not in kinds:
        raise ValueError(
            f"there is no {what} {kind!r}; choose one of {', '.join(sorted(kinds))}: for example {example}"
        )
    parameters = takes(kinds[kind])
    arguments = {name: value for name, value in given.items() if name in parameters}
    settable = {name: type for name, type in parameters.items() if name not in given}
    for i, entry in enumerate(filter(None, (part.strip() for part in rest.split(",")))):
        name, equals, value = (part.strip() for part in entry.partition("="))
        try:
            if not equals and i:
                raise ValueError("only the first value can go without a name")
            key = _parameter(name, value, settable) if equals else _first_that_suits(name, settable)
            arguments[key] = _value(value if equals else name, key, settable[key])
        except ValueError as error:
            raise ValueError(f"{what} {text!r}: {error}; for example {example}") from None
    try:
        if missing := _required(kinds[kind]) - arguments.keys():
            raise ValueError(f"it needs {' and '.join(name.removesuffix('_s') for name in sorted(missing))} too")
        return kinds[kind](**arguments)
    except ValueError as error:
        raise ValueError(f"{what} {text!r}: {error}; for example {example}") from None


def takes(make: Callable[..., object]) -> dict[str, str]:
    """The parameters of a class or function and their types, as text."""
    parameters = inspect.signature(make).parameters.values()
    return {p.name: str(p.annotation) for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def _required(make: Callable[..., object]) -> set[str]:
    parameters = inspect.signature(make).parameters.values()
    return {p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _zero(text: str) -> float:
    """A duration of nothing needs no unit."""
    if float(text) != 0:
        raise ValueError
    return 0.0


def _parameter(name: str, value: str, settable: Mapping[str, str]) -> str:
    """The parameter that is meant: `think=2ms` is `think_s`, `think=fixed` is `think`."""
    if name in settable and (f"{name}_s" not in settable or not _DURATION.match(value)):
        return name
    if f"{name}_s" in settable:
        return f"{name}_s"
    known = ", ".join(parameter.removesuffix("_s") for parameter in settable)
    raise ValueError(f"there is no parameter {name!r}; it takes {known or 'none'}")


def _first_that_suits(value: str, settable: Mapping[str, str]) -> str:
    """A time goes to the first time, anything else to the first parameter that is none."""
    is_time = _DURATION.fullmatch(value) is not None
    for name in settable:
        if name.endswith("_s") is is_time:
            return name
    raise ValueError(f"it takes no value like {value!r}")


def _value(text: str, name: str, type: str) -> Any:
    if "str" in type:
        return text
    if "bool" in type:
        return _yes_or_no(text)
    read: Callable[[str], float] = duration if name.endswith("_s") else number
    values = tuple(_whole(read(part)) if "int" in type else read(part) for part in text.split("/"))
    if "tuple" in type or "Sequence" in type:
        return values
    if len(values) > 1:
        raise ValueError(f"{name} takes one value, not {text!r}")
    return values[0]


def _yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(f"{text!r} is neither yes nor no")
    return text == "yes"


def _whole(value: float) -> float:
    """An int, if it is one."""
    return int(value) if value.is_integer() else value
