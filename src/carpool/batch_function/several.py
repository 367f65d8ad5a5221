"""Batch functions of several arguments: the function gets one list for each of them.

What waits in the line is the tuple of a call's arguments, in the order of the parameters.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Generic, TypeVar

from carpool.batch_function.base import Bindable, LoopCheck, Settings, as_written
from carpool.batch_function.tasks import AsyncBatch
from carpool.batch_function.threads import ThreadBatch, Ticket
from carpool.engine.type_hints import signature_of
from carpool.model import is_model_object, item_types_of, name_of

B = TypeVar("B")

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_OURS = ("lead", "priority")  # for carpool, and not for the function


class Arguments:
    """The parameters of a function that has more than one to be filled."""

    def __init__(self, name: str, parameters: list[inspect.Parameter]) -> None:
        self._name = name
        self._signature = inspect.Signature(parameters)
        self._n_positional = sum(parameter.kind in _POSITIONAL for parameter in parameters)
        self._keywords = [parameter.name for parameter in parameters[self._n_positional :]]

    @classmethod
    def of(cls, function: Any) -> Arguments | None:
        """Read the parameters off a function; None if it takes a single list, as models do.

        Raises:
            TypeError: There are several, and they cannot be matched one by one or are named like
                settings of a call.
        """
        if isinstance(function, type) or is_model_object(function):
            return None
        try:
            parameters = list(signature_of(function).parameters.values())
        except (TypeError, ValueError):  # a builtin without a signature
            return None
        if parameters and parameters[0].name in ("self", "cls"):
            del parameters[0]
        filled = function.keywords if isinstance(function, functools.partial) else {}
        parameters = [parameter for parameter in parameters if parameter.name not in filled]
        starred = [each for each in parameters if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        to_fill = [each for each in parameters if each.default is each.empty and each not in starred]
        if len(to_fill) < 2:
            return None
        name = name_of(function)
        if starred:
            raise TypeError(
                f"{name} takes *args or **kwargs besides several arguments: name each parameter, since each is to get"
                " a list"
            )
        taken = [parameter.name for parameter in parameters if parameter.name in _OURS]
        if taken:
            raise TypeError(
                f"{name} has a parameter {taken[0]!r}, which is a setting of its calls: give it another name"
            )
        return cls(name, parameters)

    def packed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the arguments of one call, in the order of the parameters.

        Raises:
            TypeError: One is missing, unknown or given twice.
        """
        if len(args) == self._n_positional and not kwargs and not self._keywords:
            return args
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._name}() {error}") from None
        bound.apply_defaults()
        return tuple(bound.arguments.values())

    def over_calls(self, function: Callable[..., Any]) -> Callable[[list[tuple[Any, ...]]], Any]:
        """Return the function as one of a list of calls, each a tuple of arguments."""
        n, keywords = self._n_positional, self._keywords

        def over_calls(calls: list[tuple[Any, ...]]) -> Any:
            columns = [list(column) for column in zip(*calls, strict=True)]
            return function(*columns[:n], **dict(zip(keywords, columns[n:], strict=True)))

        over_calls.__name__ = over_calls.__qualname__ = self._name
        return over_calls

    def settings(self, settings: Settings) -> Settings:
        """Return the settings, with functions of an item that take a tuple of arguments."""
        found = {name: getattr(settings, name) for name in ("size", "length", "key")}
        over_tuples: dict[str, Any] = {
            name: _over_tuple(function) for name, function in found.items() if callable(function)
        }
        if isinstance(settings.key, str):
            over_tuples["key"] = self._argument(settings.key)
        return replace(settings, **over_tuples) if over_tuples else settings

    def _argument(self, name: str) -> Callable[[tuple[Any, ...]], Any]:
        names = list(self._signature.parameters)
        if name not in names:
            raise ValueError(f"key={name!r} is no argument of {self._name}: it has {', '.join(names)}")
        at = names.index(name)
        return lambda arguments: arguments[at]

    def callers_signature(self, function: Callable[..., Any], gives: Any) -> inspect.Signature:
        """Return the signature of a call, with the types of items where the function has lists."""
        kinds = item_types_of(function)
        parameters = [
            parameter.replace(annotation=as_written(kinds.get(name, Any)))
            for name, parameter in self._signature.parameters.items()
        ]
        return inspect.Signature(parameters, return_annotation=as_written(gives))


def _over_tuple(function: Callable[..., Any]) -> Callable[[tuple[Any, ...]], Any]:
    return lambda arguments: function(*arguments)


class _OfSeveral(Bindable):
    """Has the arguments of a function, beside a kind of batch function."""

    def __init__(self, *settings: Any, **others: Any) -> None:
        super().__init__(*settings, **others)
        arguments = Arguments.of(self._function)
        assert arguments is not None
        self._arguments = arguments

    def _over_items(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._arguments.over_calls(function)

    def _callers_signature(self) -> inspect.Signature:
        return self._arguments.callers_signature(self._function, self._types_of_items()[1])


class SeveralInThreads(_OfSeveral, ThreadBatch[tuple[Any, ...], B], Generic[B]):
    """A function of several arguments whose callers are threads."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self._loop_check = LoopCheck(self.__name__, depth=1)

    def __call__(self, *args: Any, priority: int = 0, **kwargs: Any) -> B:
        """Return the function's result for one call; see `ThreadBatch`.

        Raises:
            TypeError: The arguments do not fit the function's parameters.
        """
        return super().__call__(self._arguments.packed(args, kwargs), priority=priority)

    def many(self, xs: Iterable[tuple[Any, ...]], *, priority: int = 0) -> list[B]:
        """Return the results for several calls, each given as a tuple of its arguments."""
        return super().many([self._arguments.packed(tuple(x), {}) for x in xs], priority=priority)

    def submit(self, *args: Any, lead: bool = False, priority: int = 0, **kwargs: Any) -> Ticket[B]:
        """Put a call into the line without waiting for its result; see `ThreadBatch`."""
        return super().submit(self._arguments.packed(args, kwargs), lead=lead, priority=priority)


class SeveralInTasks(_OfSeveral, AsyncBatch[tuple[Any, ...], B], Generic[B]):
    """A function of several arguments whose callers are tasks."""

    async def __call__(self, *args: Any, priority: int = 0, **kwargs: Any) -> B:
        """Return the function's result for one call; see `AsyncBatch`.

        Raises:
            TypeError: The arguments do not fit the function's parameters.
        """
        return await super().__call__(self._arguments.packed(args, kwargs), priority=priority)

    async def many(self, xs: Iterable[tuple[Any, ...]], *, priority: int = 0) -> list[B]:
        """Return the results for several calls, each given as a tuple of its arguments."""
        return await super().many([self._arguments.packed(tuple(x), {}) for x in xs], priority=priority)
