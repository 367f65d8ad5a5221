"""Every fault of an item that does not fit its type, where msgspec tells of the first one.

The item is taken apart along its type: what fits is passed over, what does not is looked into, and where nothing inside
is at fault, the part itself is. That is done only for items that have failed, and within bounds: beyond them a part
tells its first fault only.
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

from carpool.details import MOST, Detail

Convert = Callable[[Any, Any], Any]
"""Makes what a type says of a value of builtins, or raises what msgspec does."""

_DEEPEST = 8
_MOST_LOOKS = 1_000

_LISTS = frozenset(
    {
        *(list, set, frozenset, collections.abc.Sequence, collections.abc.MutableSequence, collections.abc.Collection),
        *(collections.abc.Set, collections.abc.MutableSet),
    }
)
_DICTS = frozenset({dict, collections.abc.Mapping, collections.abc.MutableMapping})

_AT = " - at "  # before the place of a fault
_STEP = re.compile(r"\[(\d+)\]|\[(\.\.\.)\]|\.([^.\[]+)")
_FIELDS = {"Object missing required field `": "missing", "Object contains unknown field `": "unknown_field"}
_WRONG_TYPE = re.compile(r"Expected `[^`]*`, got `")


class Unfit(ValueError):
    """Part of an item does not fit the type of another library, which says so in detail.

    Attributes:
        details: every fault in that part.
    """

    def __init__(self, message: str, details: list[Detail]) -> None:
        super().__init__(message)
        self.details = details


def all_of(value: Any, kind: Any, convert: Convert) -> list[Detail]:
    """What is wrong with a value of builtins that does not fit `kind`, in the order of the type's fields.

    Raises:
        BaseException: what code of the types' own raises, but for what msgspec makes a `ValidationError` of.
    """
    walk = _Walk(convert)
    walk.look(value, kind, [])
    return walk.found


def first_of(error: msgspec.ValidationError, at: list[int | str]) -> list[Detail]:
    """What msgspec says is wrong with a part of an item, which lies `at` this place."""
    text, steps = _told(error)
    loc = [*at, *steps]
    cause = error.__cause__
    if cause is not None:  # a type's own code has said it, or another library
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


def _told(error: msgspec.ValidationError) -> tuple[str, list[int | str]]:
    """What msgspec says, and where that is: a field, a place in a list, or three dots for some value of a dict."""
    text, said = str(error), "" if error.__cause__ is None else str(error.__cause__)
    what, at, place = text[len(said) :].rpartition(_AT)  # what others have said may end like a place, too
    place = place.removeprefix("`key` in ")
    if not (at and place.startswith("`$") and place.endswith("`")):
        return text, []
    steps: list[int | str] = [int(index) if index else rest or name for index, rest, name in _STEP.findall(place[2:-1])]
    return said + what, steps


class _Field(NamedTuple):
    kind: Any
    required: bool


class _Fields(NamedTuple):
    """What an object of some type holds, by the names on the wire."""

    fields: Mapping[str, _Field]
    tag: tuple[str, Any] | None
    forbids_others: bool

    def tags(self, value: dict[Any, Any]) -> bool:
        """Whether an object says that it is of this type, or need not say so."""
        return self.tag is None or value.get(self.tag[0], self.tag[1]) == self.tag[1]


class _Walk:
    def __init__(self, convert: Convert) -> None:
        self.found: list[Detail] = []
        self._convert = convert
        self._looks = _MOST_LOOKS
        self._known: dict[int, tuple[Any, _Fields | None]] = {}

    def look(self, value: Any, kind: Any, at: list[int | str]) -> None:
        """Find what is wrong with a part of the item, if anything."""
        failure = self._failure(value, kind)
        if failure is None:
            return
        before = len(self.found)
        if len(at) < _DEEPEST:
            self._look_inside(value, self._branch(value, kind), at, failure)
        if len(self.found) == before:
            self.found += first_of(failure, at)

    def _failure(self, value: Any, kind: Any) -> msgspec.ValidationError | None:
        """Why a value does not fit; None if it does, or if enough has been said."""
        if len(self.found) >= MOST or self._looks <= 0:
            return None
        self._looks -= 1
        try:
            self._convert(value, kind)
        except msgspec.ValidationError as error:
            return error
        return None

    def _look_inside(self, value: Any, kind: Any, at: list[int | str], failure: msgspec.ValidationError) -> None:
        origin, args = typing.get_origin(kind) or kind, typing.get_args(kind)
        if isinstance(value, list):
            if origin is tuple and args[1:] != (...,):
                if len(args) != len(value):
                    self.found += first_of(failure, at)
                for i, (part, its_kind) in enumerate(zip(value, args, strict=False)):
                    self.look(part, its_kind, [*at, i])
            elif args and (origin in _LISTS or origin is tuple):
                self._look_along(value, args[0], at, failure)
        elif isinstance(value, dict):
            if origin in _DICTS and args:
                for key, part in value.items():
                    self._look_at_key(key, args[0], at)
                    self.look(part, args[1], [*at, key])
            elif (known := self._fields(kind)) is not None and known.tags(value):
                self._look_at_names(value, known, at)
                for name, field in known.fields.items():
                    if name in value:
                        self.look(value[name], field.kind, [*at, name])

    def _look_along(
        self, values: list[Any], kind: Any, at: list[int | str], failure: msgspec.ValidationError | None
    ) -> None:
        """In a list, which may be long, msgspec finds the next one that does not fit."""
        begin = 0
        if failure is not None and not _told(failure)[1]:  # of the list as a whole, its length say
            self.found += first_of(failure, at)
            failure = self._failure(values, list[kind])
        while failure is not None:
            _, steps = _told(failure)
            if not steps or type(steps[0]) is not int:
                return
            begin += steps[0]
            self.look(values[begin], kind, [*at, begin])
            begin += 1
            failure = self._failure(values[begin:], list[kind])

    def _branch(self, value: Any, kind: Any) -> Any:
        """Which member of a union is meant, if the value tells; a type without its annotations."""
        while typing.get_origin(kind) is Annotated:
            kind = typing.get_args(kind)[0]
        if typing.get_origin(kind) not in (Union, types.UnionType):
            return kind
        members = [self._branch(value, member) for member in typing.get_args(kind)]
        if isinstance(value, list):
            meant = [each for each in members if (typing.get_origin(each) or each) in {*_LISTS, tuple}]
        else:
            meant = [each for each in members if self._takes(value, each)]
        return meant[0] if len(meant) == 1 else None

    def _takes(self, value: Any, kind: Any) -> bool:
        """Whether a member of a union is one for such an object."""
        if (typing.get_origin(kind) or kind) in _DICTS:
            return True
        known = self._fields(kind) if isinstance(value, dict) else None
        return known is not None and known.tags(value)

    def _look_at_names(self, value: dict[Any, Any], known: _Fields, at: list[int | str]) -> None:
        for name, field in known.fields.items():
            if field.required and name not in value:
                text = f"Object missing required field `{name}`"
                self._tell({"loc": [*at, name], "msg": text, "type": "missing"})
        if known.forbids_others:
            for name in value:
                if name not in known.fields and (known.tag is None or name != known.tag[0]):
                    text = f"Object contains unknown field `{name}`"
                    self._tell({"loc": [*at, name], "msg": text, "type": "unknown_field"})

    def _look_at_key(self, key: Any, kind: Any, at: list[int | str]) -> None:
        failure = None if kind in (str, Any) else self._failure({key: None}, dict[kind, Any])
        if failure is not None:
            for each in first_of(failure, []):
                self._tell({**each, "loc": [*at, key]})

    def _tell(self, detail: Detail) -> None:
        if len(self.found) < MOST:
            self.found.append(detail)

    def _fields(self, kind: Any) -> _Fields | None:
        """What objects of a type hold; None if it is none that can be taken apart."""
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
        hints = {field.name: field.type for field in msgspec.structs.fields(kind)}
    elif typing.get_args(kind):
        return None  # the hints are of the class, and know nothing of the arguments
    else:
        hints = {name: _stripped(hint) for name, hint in typing.get_type_hints(cls, include_extras=True).items()}
    fields = {each.encode_name: _Field(hints[each.name], each.required) for each in info.fields}
    tag = None if getattr(info, "tag", None) is None else (info.tag_field, info.tag)
    return _Fields(fields, tag, bool(getattr(info, "forbid_unknown_fields", False)))


def _stripped(hint: Any) -> Any:
    """The type of a TypedDict's key."""
    while typing.get_origin(hint) in (Required, NotRequired):
        hint = typing.get_args(hint)[0]
    return hint
