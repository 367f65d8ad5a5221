"""All faults of an item that does not fit its type; msgspec itself reports only the first one.

Only items that have failed are taken apart along their type, so reading stays one call of a
compiled reader. A part that does not fit is searched, and if nothing inside it is at fault, the
part itself is. Beyond some bounds a part reports its first fault only.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, NotRequired, Required, Union

import msgspec

from carpool.engine.details import MOST, Detail
from carpool.engine.type_hints import hints_of, meant

Convert = Callable[[Any, Any], Any]
"""Converts a value made of builtins to a type, or raises what msgspec raises."""

_DEEPEST = 8
_MOST_CONVERSIONS = 1_000

_LISTS = frozenset(
    {
        *(list, set, frozenset, collections.abc.Sequence, collections.abc.MutableSequence, collections.abc.Collection),
        *(collections.abc.Set, collections.abc.MutableSet),
    }
)
_DICTS = frozenset({dict, collections.abc.Mapping, collections.abc.MutableMapping})

_AT = " - at "  # stands before the path to a fault
_STEP = re.compile(r"\[(\d+)\]|\[(\.\.\.)\]|\.([^.\[]+)")
_FIELDS = {"Object missing required field `": "missing", "Object contains unknown field `": "unknown_field"}
_WRONG_TYPE = re.compile(r"Expected `[^`]*`, got `")


class Unfit(ValueError):
    """A part of an item does not fit the type of another library, which describes the faults.

    Attributes:
        details: Every fault in that part.
    """

    def __init__(self, message: str, details: list[Detail]) -> None:
        super().__init__(message)
        self.details = details


def all_of(value: Any, kind: Any, convert: Convert) -> list[Detail]:
    """Return all faults of a value made of builtins, in the order of the type's fields.

    Raises:
        BaseException: What code of the types raises, unless msgspec turns it into a
            `ValidationError`.
    """
    search = _Search(convert)
    search.search(value, kind, [])
    return search.found


def first_of(error: msgspec.ValidationError, at: list[int | str]) -> list[Detail]:
    """Return the fault that msgspec reports at the path `at`, or those that another library reports
    through it.
    """
    text, steps = _text_and_path(error)
    loc = [*at, *steps]
    cause = error.__cause__
    if cause is not None:  # code of the type has raised it, or another library
        if type(cause) is Unfit and cause.details:
            return [{**each, "loc": [*loc, *each["loc"]]} for each in cause.details]
        return [{"loc": loc, "msg": text, "type": "value_error"}]
    for beginning, kind in _FIELDS.items():
        if text.startswith(beginning) and text.endswith("`"):
            return [{"loc": [*loc, text[len(beginning) : -1]], "msg": text, "type": kind}]
    kind = "invalid_value"
    if text.startswith("Expected "):
        kind = "wrong_type" if _WRONG_TYPE.match(text) else "out_of_bounds"
    return [{"loc": loc, "msg": text, "type": kind}]


def _text_and_path(error: msgspec.ValidationError) -> tuple[str, list[int | str]]:
    """Return what msgspec reports and the path to it.

    A step of the path is the name of a field, a position in a list, or "..." for some value of a
    dict.
    """
    text, from_cause = str(error), "" if error.__cause__ is None else str(error.__cause__)
    what, at, path = text[len(from_cause) :].rpartition(_AT)  # the text of the cause may end like a path, too
    path = path.removeprefix("`key` in ")
    if not (at and path.startswith("`$") and path.endswith("`")):
        return text, []
    steps: list[int | str] = [int(index) if index else rest or name for index, rest, name in _STEP.findall(path[2:-1])]
    return from_cause + what, steps


class _Field(NamedTuple):
    kind: Any
    required: bool


class _Fields(NamedTuple):
    """The fields of objects of some type.

    Attributes:
        fields: The fields, by their names on the wire.
        tag: The name and value of the field that says which type it is; None if there is none.
        forbids_others: Whether unknown fields are faults.
    """

    fields: Mapping[str, _Field]
    tag: tuple[str, Any] | None
    forbids_others: bool

    def tag_fits(self, value: dict[Any, Any]) -> bool:
        """Report whether an object is tagged as this type, or is not tagged and need not be."""
        return self.tag is None or value.get(self.tag[0], self.tag[1]) == self.tag[1]


class _Search:
    def __init__(self, convert: Convert) -> None:
        self.found: list[Detail] = []
        self._convert = convert
        self._conversions_left = _MOST_CONVERSIONS
        self._known: dict[int, tuple[Any, _Fields | None]] = {}

    def search(self, value: Any, kind: Any, at: list[int | str]) -> None:
        failure = self._failure(value, kind)
        if failure is None:
            return
        before = len(self.found)
        if len(at) < _DEEPEST:
            self._search_inside(value, self._branch(value, kind), at, failure)
        if len(self.found) == before:
            self.found += first_of(failure, at)

    def _failure(self, value: Any, kind: Any) -> msgspec.ValidationError | None:
        """Return why a value does not fit; None if it does, or if the bounds are reached."""
        if len(self.found) >= MOST or self._conversions_left <= 0:
            return None
        self._conversions_left -= 1
        try:
            self._convert(value, kind)
        except msgspec.ValidationError as error:
            return error
        return None

    def _search_inside(self, value: Any, kind: Any, at: list[int | str], failure: msgspec.ValidationError) -> None:
        origin, args = typing.get_origin(kind) or kind, typing.get_args(kind)
        if isinstance(value, list):
            if origin is tuple and args[1:] != (...,):
                if len(args) != len(value):
                    self.found += first_of(failure, at)
                for i, (part, its_kind) in enumerate(zip(value, args, strict=False)):
                    self.search(part, its_kind, [*at, i])
            elif args and (origin in _LISTS or origin is tuple):
                self._search_list(value, args[0], at, failure)
        elif isinstance(value, dict):
            if origin in _DICTS and args:
                for key, part in value.items():
                    self._check_key(key, args[0], at)
                    self.search(part, args[1], [*at, key])
            elif (known := self._fields(kind)) is not None and known.tag_fits(value):
                self._check_names(value, known, at)
                for name, field in known.fields.items():
                    if name in value:
                        self.search(value[name], field.kind, [*at, name])

    def _search_list(
        self, values: list[Any], kind: Any, at: list[int | str], failure: msgspec.ValidationError | None
    ) -> None:
        """Search a list, which may be long: msgspec finds the next item that does not fit."""
        begin = 0
        if failure is not None and not _text_and_path(failure)[1]:  # a fault of the whole list, such as its length
            self.found += first_of(failure, at)
            failure = self._failure(values, list[kind])
        while failure is not None:
            _, steps = _text_and_path(failure)
            if not steps or type(steps[0]) is not int:
                return
            begin += steps[0]
            self.search(values[begin], kind, [*at, begin])
            begin += 1
            failure = self._failure(values[begin:], list[kind])

    def _branch(self, value: Any, kind: Any) -> Any:
        """Return the member of a union that a value is meant to be; None if it does not show.

        A type that is not a union is returned without its annotations.
        """
        while typing.get_origin(kind) is Annotated:
            kind = typing.get_args(kind)[0]
        if typing.get_origin(kind) not in (Union, types.UnionType):
            return kind
        members = [self._branch(value, member) for member in typing.get_args(kind)]
        if isinstance(value, list):
            meant = [each for each in members if (typing.get_origin(each) or each) in {*_LISTS, tuple}]
        else:
            meant = [each for each in members if self._is_for_object(value, each)]
        return meant[0] if len(meant) == 1 else None

    def _is_for_object(self, value: Any, kind: Any) -> bool:
        if (typing.get_origin(kind) or kind) in _DICTS:
            return True
        known = self._fields(kind) if isinstance(value, dict) else None
        return known is not None and known.tag_fits(value)

    def _check_names(self, value: dict[Any, Any], known: _Fields, at: list[int | str]) -> None:
        for name, field in known.fields.items():
            if field.required and name not in value:
                text = f"Object missing required field `{name}`"
                self._add({"loc": [*at, name], "msg": text, "type": "missing"})
        if known.forbids_others:
            for name in value:
                if name not in known.fields and (known.tag is None or name != known.tag[0]):
                    text = f"Object contains unknown field `{name}`"
                    self._add({"loc": [*at, name], "msg": text, "type": "unknown_field"})

    def _check_key(self, key: Any, kind: Any, at: list[int | str]) -> None:
        failure = None if kind in (str, Any) else self._failure({key: None}, dict[kind, Any])
        if failure is not None:
            for each in first_of(failure, []):
                self._add({**each, "loc": [*at, key]})

    def _add(self, detail: Detail) -> None:
        if len(self.found) < MOST:
            self.found.append(detail)

    def _fields(self, kind: Any) -> _Fields | None:
        """Return the fields of a type; None if its objects cannot be taken apart."""
        if id(kind) not in self._known:
            self._known[id(kind)] = kind, _fields_of(kind)
        return self._known[id(kind)][1]


def _fields_of(kind: Any) -> _Fields | None:
    cls = typing.get_origin(kind) or kind
    if not isinstance(cls, type) or not (
        issubclass(cls, msgspec.Struct) or dataclasses.is_dataclass(cls) or typing.is_typeddict(cls)
    ):
        return None
    info: Any = msgspec.inspect.type_info(kind)
    if getattr(info, "array_like", False) or not hasattr(info, "fields"):
        return None
    if issubclass(cls, msgspec.Struct):
        hints = {field.name: meant(field.type) for field in msgspec.structs.fields(kind)}
    elif typing.get_args(kind):
        return None  # the hints of the class hold type variables instead of these arguments
    else:
        hints = {name: _stripped(hint) for name, hint in hints_of(cls).items()}
    fields = {each.encode_name: _Field(hints[each.name], each.required) for each in info.fields}
    tag = None if getattr(info, "tag", None) is None else (info.tag_field, info.tag)
    return _Fields(fields, tag, bool(getattr(info, "forbid_unknown_fields", False)))


def _stripped(hint: Any) -> Any:
    while typing.get_origin(hint) in (Required, NotRequired):
        hint = typing.get_args(hint)[0]
    return hint
