"""Type hints as they are meant: an alias is what it stands for.

`type Rows = list[float]`, and `NDArray[np.float32]` since NumPy 2.5, are objects of their own,
which are neither a list nor an array. All hints of users are read here, so nobody else meets an
alias.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any


def hints_of(of: Any, *, include_extras: bool = True) -> dict[str, Any]:
    """Return the hints of a function or class by name, without aliases.

    Args:
        of: The function or class.
        include_extras: Whether `Annotated`, `Required` and the like stay.

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
    """Return a hint without aliases.

    Args:
        hint: The hint.
        given: What stands for the type parameters of the alias that the hint is part of.
        opened: The aliases that the hint is part of.
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
