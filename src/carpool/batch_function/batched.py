"""What functions whose callers share their calls have in common: settings, lines per instance, how they are called."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, cast

from carpool.call import chunks
from carpool.call import merge as merging
from carpool.call.invoke import Invoker
from carpool.call.merge import Joint, Merge, Split
from carpool.call.oom import OomErrors, names_of
from carpool.call.padding import Pad
from carpool.call.retry import Retrier
from carpool.core.batcher import Batcher
from carpool.core.queue import Queue
from carpool.errors import Unavailable
from carpool.model import AnyModel, Model, check_takes_a_list, name_of, traits_of, types_of
from carpool.policy import Policy, new_policy
from carpool.request import Lane
from carpool.service.settings import (
    at_least,
    check_held,
    check_policy,
    check_room,
    delay,
    finite,
    flag,
    function,
    held_s,
    positive,
)
from carpool.service.weigh import units

_JOINT = Joint()
_NO_LIMIT = 2**31  # rows, or whatever sizes count: more than any call holds, and policies can reckon with it


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What `batch` was told; see there."""

    max_batch_size: int | None = 64
    size: Callable[[Any], int] | None = None
    merge: bool | Merge | Pad | None = None
    split: Split | None = None
    policy: Policy | str | None = None
    max_queue_delay_s: float | None = None
    max_queue_size: int = 1024
    max_in_flight_batches: int = 1
    timeout_s: float | None = None
    slo_s: float | None = None
    execution_lock: Any = None
    isolate_errors: bool = False
    oom_errors: OomErrors | None = ()

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "max_queue_size": at_least("max_queue_size", self.max_queue_size, 1),
            "max_in_flight_batches": at_least("max_in_flight_batches", self.max_in_flight_batches, 1),
            "timeout_s": positive("timeout_s", self.timeout_s),
            "slo_s": finite("slo_s", self.slo_s),
            "max_queue_delay_s": delay("max_queue_delay_s", self.max_queue_delay_s),
        }
        if self.max_batch_size is not None:
            checked["max_batch_size"] = at_least("max_batch_size", self.max_batch_size, 1)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        check_policy(self.policy)
        flag("isolate_errors", self.isolate_errors)
        if self.oom_errors is not None:
            names_of(self.oom_errors)
        self._check_functions()
        if self.max_batch_size is not None and self.size is None and not self.merge:
            check_room(self.max_batch_size, self.max_queue_size)
        if self.timeout_s is not None:
            check_held(held_s(self.new_policy()), self.timeout_s)

    def _check_functions(self) -> None:
        if self.size is not None:
            function("size", self.size, "an item")
        if self.merge is not None and not isinstance(self.merge, bool | Pad) and not callable(self.merge):
            raise TypeError(
                f"merge must be True, carpool.pad(...) or a function of a list of chunks, not {self.merge!r}"
            )
        if self.split is not None:
            function("split", self.split, "a merged output and the row counts of its chunks")
        if callable(self.merge) != (self.split is not None):
            raise ValueError("a merge function needs a split function, and the other way round")

    @property
    def limit(self) -> int:
        """Most that a batch may hold. If there is no limit, as many as can wait where each item counts for one."""
        if self.max_batch_size is not None:
            return self.max_batch_size
        return self.max_queue_size if self.size is None and not self.merge else _NO_LIMIT

    def new_policy(self) -> Policy:
        """A policy of its own for one line."""
        return new_policy(self.policy, self.limit, max_queue_delay_s=self.max_queue_delay_s, slo_s=self.slo_s)

    def batcher(self, name: str) -> Batcher:
        """A queue and a policy for one line."""
        return Batcher(name, self.new_policy(), Queue(self.max_queue_size))

    def function(self, function: Callable[..., Any], is_async: bool) -> Callable[..., Any]:
        """The function over a list of chunks that a function over one merged input makes; else itself."""
        if not self.merge:
            return function
        if callable(self.merge):
            assert self.split is not None
            return merging.over_own(function, is_async, self.merge, self.split, self.size or merging.length)
        return self._joint.over(function, is_async)

    def pieces(self, x: Any) -> list[Any]:
        """A chunk of more rows than a batch may have, cut up; only where we know how.

        Raises:
            TypeError: the chunk is of no kind that we can join to others.
            ValueError: its parts cannot be.
        """
        if not self.merge or callable(self.merge):
            return [x]
        n, step = chunks.rows(x), self.limit
        if n <= (1 if self.size else step):
            return [x]
        self._joint.likeness(x)  # what cannot be joined is not cut up either
        if self.size is not None:
            return self._halves(x, n)
        return [chunks.cut(x, i, min(i + step, n)) for i in range(0, n, step)]

    def places(self, items: Sequence[Any]) -> tuple[list[int] | None, list[Lane] | None]:
        """How much of a batch each item takes up, None if all count for one; and the lanes they wait in, None if any
        may share a batch, which those of different dtypes, columns or the like may not.

        Raises:
            ModelError: the size function returned no whole number of at least 1.
            Exception: whatever it raises; and what `pieces` does.
        """
        if self.size is None and not self.merge:
            return None, None
        sizes = [self.weigh(item) for item in items]
        if not self.merge or callable(self.merge):
            return sizes, None
        return sizes, [(0, self._joint.likeness(item), 0) for item in items]

    def weigh(self, item: Any) -> int:
        """How much of a batch an item takes up. Raises what `places` does."""
        count = self.size or (merging.length if callable(self.merge) else chunks.rows)
        try:
            return units(count(item), "@carpool.batch")
        except (StopIteration, StopAsyncIteration) as error:  # `map(f, xs)` would take it for the end
            raise RuntimeError(f"size= raised {type(error).__name__}") from error

    @property
    def _joint(self) -> Joint:
        return self.merge if isinstance(self.merge, Joint) else _JOINT

    def _halves(self, x: Any, n: int) -> list[Any]:
        """A chunk of `n` rows in pieces whose sizes are within the limit, or which have one row each."""
        if n <= 1 or self.weigh(x) <= self.limit:
            return [x]
        half = n // 2
        return [*self._halves(chunks.cut(x, 0, half), half), *self._halves(chunks.cut(x, half, n), n - half)]


class CallersSignature:
    """The signature that callers see, of one item: what `inspect.signature` tells, and `help`."""

    def __get__(self, batched: Bindable | None, owner: type) -> inspect.Signature:
        if batched is None:  # the class has none but that of its constructor
            raise AttributeError("__signature__")
        takes, gives = batched._types_of_items()
        parameter = inspect.Parameter("x", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=_as_written(takes))
        return inspect.Signature([parameter], return_annotation=_as_written(gives))


def _as_written(kind: Any) -> Any:
    """A hint, or that there is none."""
    return inspect.Parameter.empty if kind is Any else kind


class Bindable:
    """What both kinds have in common: a name, and one batcher per instance when used on a method."""

    __name__: str
    __signature__ = CallersSignature()

    def __init__(self, function: Any, settings: Settings) -> None:
        functools.update_wrapper(cast(Any, self), function, updated=())  # a class's own attributes stay its own
        self.__name__ = name_of(function)
        self._function = function
        self._settings = settings
        self._bound: dict[int, tuple[weakref.ref[Any], Any]] = {}
        self._attribute = self.__name__  # what instances call it
        self._instance: Any = None  # the one that this is bound to

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def __repr__(self) -> str:
        return f"<carpool.batch of {self.__name__}>"

    def __copy__(self) -> Self:
        """Itself, as with functions."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Itself, as with functions; that of the instance's copy where it is a method."""
        if self._instance is None:
            return self
        return getattr(copy.deepcopy(self._instance, memo), self._attribute)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """By name, as functions are pickled; a method by its instance and its name."""
        if self._instance is None:
            return self._global_name()
        known = getattr(type(self._instance), self._attribute, None)
        if not isinstance(known, Bindable) or known._function is not self._function:
            kind = type(self._instance).__qualname__
            raise TypeError(f"{self!r} cannot be pickled: it is not the attribute {self._attribute} of {kind}")
        return getattr, (self._instance, self._attribute)

    def _types_of_items(self) -> tuple[Any, Any]:
        """What callers bring and get, by the hints of the function."""
        function = self._function
        if self._settings.merge:
            return types_of(function)
        traits = traits_of(type(function) if isinstance(function, Model) else function, batched=True)
        return traits.input_type, traits.output_type

    def start_anew(self) -> None:
        """In a forked child: whoever called before is in the parent."""
        raise NotImplementedError

    def _bind(self, one: Bindable, instance: Any) -> None:
        """`one` is this function as a method of an instance."""
        one._instance, one._attribute = instance, self._attribute

    def _global_name(self) -> str:
        """What leads to it in its module."""
        path = getattr(self, "__qualname__", self.__name__)
        module = sys.modules.get(self.__module__)
        found: Any = module
        for part in path.split("."):
            found = getattr(found, part, None)
        if found is self:
            return path
        for name, value in list(vars(module).items()) if module is not None else ():
            if value is self:
                return name
        raise TypeError(
            f"{self!r} cannot be pickled: it is pickled by its name, and nothing in {self.__module__} leads to it;"
            " assign it to a name of the module, instead of making it inside a function"
        )

    def _closed(self) -> Unavailable:
        return Unavailable(f"{self.__name__} is closed", code="stopped")

    def _line_of(self, instance: Any, new: Callable[[], Any]) -> Any:
        """The line of one instance, which ends with it."""
        key = id(instance)
        found = self._bound.get(key)
        if found is not None and found[0]() is instance:
            return found[1]
        try:
            reference = weakref.ref(instance, lambda _: self._bound.pop(key, None))
        except TypeError:
            kind = type(instance).__name__
            raise TypeError(
                f"{kind} objects cannot be referred to weakly: add '__weakref__' to the __slots__ of {kind}"
            ) from None
        return self._bound.setdefault(key, (reference, new()))[1]


def invoker_of(function: AnyModel | Model, settings: Settings, is_async: bool, like: Invoker | None = None) -> Invoker:
    """What calls a function; `like` that of the same function of another instance, with which it shares a budget."""
    model = function
    if not isinstance(function, type | Model):
        function = settings.function(function, is_async)
    elif settings.merge:
        raise TypeError("merge is for functions; a Model's predict takes a list of items")
    if like is not None:
        return Invoker(function, {}, like.traits, like.caller, batched=True)
    caller = Retrier(
        isolate_errors=settings.isolate_errors,
        oom_errors=None if settings.oom_errors is None else names_of(settings.oom_errors),
        # a thread that is interrupted leaves its batch to others; a task is also cancelled, or thrown away
        through=(GeneratorExit, KeyboardInterrupt, asyncio.CancelledError) if is_async else (KeyboardInterrupt,),
        may_wait=is_async,
    )
    read_off = type(model) if isinstance(model, Model) else model
    traits = traits_of(read_off, batched=True)
    if not settings.merge:
        check_takes_a_list(read_off, "called in batches")
    else:
        traits = replace(traits, takes_array=False)  # it takes chunks, which are merged
    return Invoker(function, {}, traits, caller, batched=True)


alive: weakref.WeakSet[Bindable] = weakref.WeakSet()
"""Those that a forked child has to start anew."""


def _forked() -> None:
    for batched in list(alive):
        batched.start_anew()


os.register_at_fork(after_in_child=_forked)
