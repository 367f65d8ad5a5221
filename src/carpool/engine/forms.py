"""The forms of a model: it returns its answer whole, or gives it in parts. Its class says which.

| the class has                                    | it is                            |
|--------------------------------------------------|----------------------------------|
| `predict` that returns                           | `WHOLE`                          |
| `predict` that yields                            | `GENERATOR`, one for each item   |
| `predict` that yields lists, in a batched stage  | `BATCH_GENERATOR`, one for each batch |
| no `predict`, but `start`, `step` and `stop`     | `STEPS`                          |
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
import typing
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Generator, Iterable, Iterator, Sequence
from typing import Any

from carpool.engine.http_response import Response
from carpool.engine.parts import End, Last
from carpool.engine.type_hints import is_union

STEPS_HOOKS = ("start", "step", "stop", "resume", "collect")
"""The methods of a model of steps; the first three are needed, the others may be left out."""

_NEEDED = STEPS_HOOKS[:3]
_YIELDS = (Iterator, Iterable, Generator, AsyncIterator, AsyncIterable, AsyncGenerator)


class Form(enum.Enum):
    """How a model gives its answers."""

    WHOLE = "whole"
    GENERATOR = "a generator for each item"
    BATCH_GENERATOR = "a generator for each batch"
    STEPS = "steps"


def yields(function: Any) -> bool:
    """Report whether calling a function, or what a partial wraps, makes a generator."""
    while isinstance(function, functools.partial):
        function = function.func
    return any(
        is_generator(each)
        for is_generator in (inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        for each in (function, type(function).__call__)
    )


def check_has_steps(owner: type, name: str) -> None:
    """Check that a class without `predict` has all that a model of steps needs.

    Raises:
        TypeError: It has not; the text says what to add.
    """
    has = [hook for hook in _NEEDED if hasattr(owner, hook)]
    missing = [hook for hook in _NEEDED if hook not in has]
    if "step" not in has:
        text = "a model class must define one, or start, step and stop to answer in parts"
        raise TypeError(f"{name} has no predict method: {text}")
    if missing:
        needs = {
            "start": "start(self, xs), which returns a state for each item",
            "stop": "stop(self, state), which lets go of a state however its answer has ended",
        }
        more = " and ".join(needs[hook] for hook in missing)
        raise TypeError(f"{name} has step but no {' and no '.join(missing)}: give it {more}")


def check_is_one_form(owner: type, name: str) -> None:
    """Check that a class with `predict` is no model of steps besides. Raises TypeError."""
    if all(hasattr(owner, hook) for hook in _NEEDED):
        raise TypeError(
            f"{name} has predict and also start, step and stop, so it is not clear how it answers: leave out predict"
            " if it answers in parts, or rename the others"
        )


def yielded_type(returns: Any) -> Any:
    """Return what a generator yields by its hint: `A` of `Iterator[A]`, `Any` without one."""
    if typing.get_origin(returns) in _YIELDS and (args := typing.get_args(returns)):
        return args[0]
    return Any


def part_type(kind: Any) -> Any:
    """Return the type of the parts among what may stand in a list of them; `Any` if none is named.

    `None`, `carpool.END` and exceptions are no parts, and `carpool.Last[A]` is an `A`.
    """
    kinds = typing.get_args(kind) if is_union(kind) else (kind,)
    parts = tuple(_unwrapped(each) for each in kinds if not _is_no_part(each))
    return typing.Union[parts] if parts else Any  # noqa: UP007


def collected_type(part: Any) -> Any:
    """Return the type of a list of such parts, which is the whole answer of a model."""
    return list[part] if part is not Any and _is_plain(part) else list[Any]


def _is_plain(kind: Any) -> bool:
    """Report whether the hint of a list of these can be read like the hint of one of them."""
    return isinstance(kind, type) or is_union(kind) or typing.get_origin(kind) is not None


def _unwrapped(kind: Any) -> Any:
    if kind is Last:
        return Any
    if typing.get_origin(kind) is Last:
        return typing.get_args(kind)[0]
    return kind


def _is_no_part(kind: Any) -> bool:
    if kind is None or kind is types.NoneType:
        return True
    if typing.get_origin(kind) is typing.Literal:
        return all(isinstance(each, End) for each in typing.get_args(kind))
    return isinstance(kind, type) and issubclass(kind, BaseException | End | Response)


def is_sequence(kind: Any) -> bool:
    """Report whether a hint is `list[A]` or the like, with a type for what is in it."""
    origin = typing.get_origin(kind)
    return isinstance(origin, type) and issubclass(origin, Sequence)
