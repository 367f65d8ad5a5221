"""Settings of a declaration: name, type, default and check stand on one line of its class.

    max_rows: int | None = setting(None, optional_count)
    cpus: Setting[Sequence[int] | None, tuple[int, ...] | None] = setting(None, as_cores)

The class is a frozen dataclass, whose `__init__` is made of these lines, and its docstring has them
under `Args`. Its `__post_init__` calls `keep_checked`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import field, fields
from typing import Any, Generic, TypeVar

Given = TypeVar("Given", contravariant=True)
Kept = TypeVar("Kept", covariant=True)
Declared = TypeVar("Declared")

_CHECK = "check"
_FROM_OUTSIDE = "from_outside"
_NEVER_MADE = "only the types of a Setting are read"


class Setting(Generic[Given, Kept]):
    """The types of a setting that is kept in another form than it is given in.

    Type checkers read it as a descriptor: `__set__` has the type of the argument, and `__get__`
    that of the attribute. No object of it is ever made.
    """

    def __get__(self, declaration: object, kind: type) -> Kept:
        raise TypeError(_NEVER_MADE)

    def __set__(self, declaration: object, value: Given) -> None:
        raise TypeError(_NEVER_MADE)


def setting(default: Any, check: Callable[[str, Any], Any] | None = None, *, from_outside: bool = False) -> Any:
    """Return a field with a default and a check.

    Args:
        default: The value of a setting that is left out.
        check: Takes the name and the value, and returns the value that is kept or raises ValueError
            or TypeError. None where the class checks it together with other settings.
        from_outside: Whether a file, the environment or a flag may change it.
    """
    return field(default=default, metadata={_CHECK: check, _FROM_OUTSIDE: from_outside})


def from_outside(kind: Any) -> tuple[str, ...]:
    """Return the names of the settings of a class that can be changed without its code."""
    return tuple(each.name for each in fields(kind) if each.metadata.get(_FROM_OUTSIDE))


def keep(declaration: object, name: str, value: object) -> None:
    """Set an attribute of a frozen declaration that is being made."""
    object.__setattr__(declaration, name, value)


def keep_checked(declaration: Any) -> None:
    """Check the settings of a declaration in their order. Raises ValueError or TypeError."""
    for each in fields(declaration):
        if check := each.metadata.get(_CHECK):
            keep(declaration, each.name, check(each.name, getattr(declaration, each.name)))


def shown_as_given(kind: type[Declared]) -> type[Declared]:
    """Have the signature of a class show the types in which its settings are given."""
    hints = kind.__init__.__annotations__
    for name, hint in hints.items():
        match ast.parse(str(hint), mode="eval").body:
            case ast.Subscript(value=ast.Name("Setting"), slice=ast.Tuple([given, _])):
                hints[name] = ast.unparse(given)
    return kind
