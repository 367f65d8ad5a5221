"""Specs: short texts that say what to simulate, as the command line takes them.

One spec is `kind:name=value,name=value`. Several are joined by `+`, which starts a new spec only
before a known kind. Times have units (8ms, 0.25ms, 2s, 300us), shares may be written as
percentages, and several values of one parameter are separated by `/`.

The names are those of the parameters of the class that the kind stands for; `a_s` may be written
`a`. A first value without a name goes to the first parameter that it suits: `poisson:800`,
`static:10ms`, `trace:requests.csv`.
"""

from __future__ import annotations

import collections.abc
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal, InvalidOperation
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

T = TypeVar("T")

UNITS_S = {"us": "1e-6", "µs": "1e-6", "ms": "1e-3", "s": "1", "m": "60"}
_DURATION = re.compile(r"([-+.\de]+)\s*(us|µs|ms|s|m)")


class ValueForm(NamedTuple):
    """How the value of one parameter is written.

    Attributes:
        type: The type of one value: `str`, `bool`, `int` or `float`.
        is_series: Whether there may be several values, with `/` between them.
    """

    type: type
    is_series: bool


def duration(text: str) -> float:
    """Return the seconds of `8ms`, `2s` or `300us`. Raises ValueError for other texts."""
    text = text.strip()
    found = _DURATION.fullmatch(text)
    try:
        return float(Decimal(found[1]) * Decimal(UNITS_S[found[2]])) if found else _zero(text)
    except (ValueError, InvalidOperation):
        raise ValueError(f"{text!r} is not a duration: write a number and its unit, such as 8ms, 2s or 300us") from None


def number(text: str) -> float:
    """Return a number, which may be written as a percentage. Raises ValueError."""
    text = text.strip()
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None


def split(text: str, separator: str, kinds: Iterable[str]) -> list[str]:
    """Return the specs in `text`.

    A separator counts only where a known kind follows, so that values may contain it.
    """
    known = "|".join(map(re.escape, kinds))
    ends = rf":|\s*$|\s*{re.escape(separator)}"
    return [part.strip() for part in re.split(rf"{re.escape(separator)}\s*(?=(?:{known})(?:{ends}))", text)]


def listed(text: str) -> list[str]:
    """Return the specs between commas; a comma before `name=value` is a part of its spec."""
    return [part.strip() for part in re.split(r",(?!\s*\w+\s*=)", text)]


def build(text: str, kinds: Mapping[str, Callable[..., T]], what: str, example: str, **given: Any) -> T:
    """Make the object that a spec describes.

    Args:
        what: The noun for all kinds, for error texts.
        example: A spec that is right, for error texts.
        given: Further arguments, which the spec cannot set; each kind gets those that it takes.

    Raises:
        ValueError: The kind or a parameter is unknown, or a value is wrong.
    """
    kind, _, rest = (part.strip() for part in text.partition(":"))
    if kind not in kinds:
        raise ValueError(
            f"there is no {what} {kind!r}; choose one of {', '.join(sorted(kinds))}: for example {example}"
        )
    make = kinds[kind]
    forms = _value_forms(make, without=given)
    try:
        arguments = {name: value for name, value in given.items() if name in _parameters(make)}
        for i, entry in enumerate(filter(None, (part.strip() for part in rest.split(",")))):
            name, value = _argument(entry, forms, is_first=not i)
            arguments[name] = value
        if missing := _required(make) - arguments.keys():
            raise ValueError(f"it needs {' and '.join(name.removesuffix('_s') for name in sorted(missing))} too")
        return make(**arguments)
    except ValueError as error:
        raise ValueError(f"{what} {text!r}: {error}; for example {example}") from None


def _parameters(make: Callable[..., object]) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(make, eval_str=True).parameters
    return {name: p for name, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _required(make: Callable[..., object]) -> set[str]:
    return {name for name, p in _parameters(make).items() if p.default is p.empty}


def _value_forms(make: Callable[..., object], without: Iterable[str]) -> dict[str, ValueForm]:
    forms = {name: _value_form(p.annotation) for name, p in _parameters(make).items() if name not in without}
    return {name: form for name, form in forms.items() if form is not None}


def _value_form(hint: Any) -> ValueForm | None:
    """Return how values of a type are written; None if they cannot be written in a spec."""
    if get_origin(hint) is Literal:
        return ValueForm(str, False)
    members = set(get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)) - {NoneType}
    if len(members) != 1:
        return None
    (only,) = members
    is_series = get_origin(only) in (tuple, collections.abc.Sequence)
    each = get_args(only)[0] if is_series else only
    return ValueForm(each, is_series) if each in (str, bool, int, float) else None


def _argument(entry: str, forms: Mapping[str, ValueForm], *, is_first: bool) -> tuple[str, Any]:
    """Return the parameter and the value that one entry of a spec gives. Raises ValueError."""
    name, equals, value = (part.strip() for part in entry.partition("="))
    if not equals and not is_first:
        raise ValueError("only the first value can go without a name")
    parameter = _named_parameter(name, value, forms) if equals else _first_that_suits(entry, forms)
    return parameter, _value(value if equals else entry, parameter, forms[parameter])


def _zero(text: str) -> float:
    """Return a duration without a unit, which only 0 can go without. Raises ValueError."""
    if float(text) != 0:
        raise ValueError
    return 0.0


def _named_parameter(name: str, value: str, forms: Mapping[str, ValueForm]) -> str:
    """Return the parameter that is meant: `think=2ms` is `think_s`, `think=fixed` is `think`."""
    if name in forms and (f"{name}_s" not in forms or not _DURATION.match(value)):
        return name
    if f"{name}_s" in forms:
        return f"{name}_s"
    known = ", ".join(parameter.removesuffix("_s") for parameter in forms)
    raise ValueError(f"there is no parameter {name!r}; it takes {known or 'none'}")


def _first_that_suits(value: str, forms: Mapping[str, ValueForm]) -> str:
    """Return the first parameter in seconds for a time; for other values the first other one."""
    is_time = _DURATION.fullmatch(value) is not None
    for name in forms:
        if name.endswith("_s") is is_time:
            return name
    raise ValueError(f"it takes no value like {value!r}")


def _value(text: str, name: str, form: ValueForm) -> Any:
    if form.type is str:
        return text
    if form.type is bool:
        return _yes_or_no(text)
    read: Callable[[str], float] = duration if name.endswith("_s") else number
    values = tuple(_whole(read(part)) if form.type is int else read(part) for part in text.split("/"))
    if form.is_series:
        return values
    if len(values) > 1:
        raise ValueError(f"{name} takes one value, not {text!r}")
    return values[0]


def _yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(f"{text!r} is neither yes nor no")
    return text == "yes"


def _whole(value: float) -> float:
    """Return an int if the number is whole; the class complains about any other."""
    return int(value) if value.is_integer() else value
