"""What the columns of a Parquet file hold: a type that keeps each value of a column as it is, or
JSON text where none does. Sans-IO.

pyarrow would decide by the rows that it sees first, and make 1.0 of `true` among floats, 1 of 1.5
among whole numbers, and nothing of a field that the first object lacks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

NOTHING: Final = "null"
MIXED: Final = "mixed"
_EXACT_IN_FLOATS: Final = 2**53
_LARGEST: Final = 2**63
_INTEGERS: Final = ("small", "int")
_ARROW: Final = {
    NOTHING: "null",
    "bool": "bool_",
    "str": "string",
    "small": "int64",
    "int": "int64",
    "float": "float64",
}


class ListOf(NamedTuple):
    """The kind of a list.

    Attributes:
        kind: What its elements are.
    """

    kind: Kind


class Fields(NamedTuple):
    """The kind of an object.

    Attributes:
        fields: What each of them is, in the order of their names.
    """

    fields: tuple[tuple[str, Kind], ...]


Kind = str | ListOf | Fields
"""What values are: "null", "bool", "small" (a whole number that a float can hold), "int", "float",
"str", a list, a record; or "mixed"."""


def kind_of(value: Any) -> Kind:
    """Return the kind of a value that was read from JSON."""
    if value is None:
        return NOTHING
    kind = type(value)
    if kind is int:
        return _kind_of_integers((value, value))
    if kind is list:
        return _list_kind(value)
    if kind is dict:
        fields = tuple((name, kind_of(value[name])) for name in sorted(value))
        return Fields(fields) if fields and all(each != MIXED for _, each in fields) else MIXED
    return kind.__name__


def _list_kind(values: list[Any]) -> Kind:
    kinds = set(map(type, values))
    if kinds == {int}:
        kind: Kind = _kind_of_integers(values)
    elif len(kinds) == 1 and kinds <= {float, str, bool}:
        kind = kinds.pop().__name__
    else:
        kind = merged(map(kind_of, values))
    return MIXED if kind == MIXED else ListOf(kind)


def _kind_of_integers(values: Iterable[int]) -> Kind:
    least, most = min(values), max(values)
    if least >= -_EXACT_IN_FLOATS and most <= _EXACT_IN_FLOATS:
        return "small"
    return "int" if least >= -_LARGEST and most < _LARGEST else MIXED


def merged(kinds: Iterable[Kind]) -> Kind:
    """Return what values of these kinds are together."""
    together: Kind = NOTHING
    for kind in kinds:
        together = _merged(together, kind)
    return together


def _merged(one: Kind, other: Kind) -> Kind:
    if one == other or other == NOTHING:
        return one
    if one == NOTHING:
        return other
    if one in _INTEGERS and other in _INTEGERS:
        return "int"
    if {"small", "float"} == {one, other}:
        return "float"
    if isinstance(one, ListOf) and isinstance(other, ListOf):
        kind = _merged(one.kind, other.kind)
        return MIXED if kind == MIXED else ListOf(kind)
    if isinstance(one, Fields) and isinstance(other, Fields):
        names = [name for name, _ in one.fields]
        if names == [name for name, _ in other.fields]:  # a field that is not there is not null
            kinds = [_merged(mine, its) for (_, mine), (_, its) in zip(one.fields, other.fields, strict=True)]
            return MIXED if MIXED in kinds else Fields(tuple(zip(names, kinds, strict=True)))
    return MIXED


def arrow_type(kind: Kind, arrow: Any) -> Any:
    """Return the type of pyarrow that holds values of a kind; texts for JSON if it is mixed."""
    if isinstance(kind, ListOf):
        return arrow.list_(arrow_type(kind.kind, arrow))
    if isinstance(kind, Fields):
        return arrow.struct([(name, arrow_type(each, arrow)) for name, each in kind.fields])
    return arrow.string() if kind == MIXED else getattr(arrow, _ARROW[kind])()
