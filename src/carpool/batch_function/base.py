"""The common part of batch functions over `def` and over `async def`.

These are their settings, how they behave as methods, copies and pickles, and how they call the
user's function.

A call of a function over a `def` from a thread that runs an event loop is warned of. It holds up
the loop, so none of its other tasks can join the batch: the function works, and batches nothing.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Final, NamedTuple, Self, cast

from carpool.engine.call import chunks
from carpool.engine.call import merge as merging
from carpool.engine.call.invoke import Invoker
from carpool.engine.call.merge import Merge, Pad, RowMerger, Split
from carpool.engine.call.retry import OomErrors, Retrier, names_of
from carpool.engine.core.batcher import Batcher
from carpool.engine.core.levels import BY_KEY, BY_LENGTH
from carpool.engine.core.queue import Queue
from carpool.engine.logger import logger
from carpool.engine.policy import Policy, new_policy
from carpool.engine.request import Lane
from carpool.errors import Unavailable
from carpool.model import AnyModel, Model, check_takes_a_list, is_model_object, name_of, traits_of, types_of
from carpool.service.checks import (
    Key,
    check_callable,
    check_length,
    check_lone_wait,
    check_policy,
    check_room,
    flag,
    header_of,
    keep,
    keep_checked,
    lone_wait_s,
    optional_count,
    optional_delay,
    optional_finite_seconds,
    optional_flag,
    optional_seconds,
    positive_count,
    setting,
    valid_priority,
    why_never_held_back,
)
from carpool.service.weigh import field_of, units, valid_key

_ROW_MERGER = RowMerger()
_NO_LIMIT = 2**31  # rows, or whatever sizes count: more than any call holds, and still finite for policies

live_functions: weakref.WeakSet[Bindable] = weakref.WeakSet()
"""The batch functions that a forked child has to start anew, without bound methods."""


class ThisProcess:
    """Holds a mark of this process, which a forked child replaces."""

    mark = object()


_RAN_BEFORE_FORK = (
    "this process was forked after {name} had run. Threads that it started then, such as those of torch, OpenMP or"
    " BLAS, are in the parent only, and a call that needs them may hang for ever, whatever timeout_s says. Call it"
    " after the fork only: start gunicorn without --preload, or leave the warm-up out of the module"
)


def _forked() -> None:
    ThisProcess.mark = object()
    for function in list(live_functions):
        function.start_anew()


os.register_at_fork(after_in_child=_forked)


class Shares(NamedTuple):
    """The sizes of the items of one call in batches.

    Attributes:
        sizes: How much of a batch each takes up; None if each counts as one.
        lengths: How long each is; None where that does not matter.
        lanes: Where each waits; None if they may share a batch with any others and have no
            priority.
    """

    sizes: Sequence[int] | None
    lengths: Sequence[int] | None
    lanes: Sequence[Lane] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The checked settings of a batch function; `carpool.batch` describes them."""

    max_batch_size: int | None = setting(64, optional_count)
    size: Callable[[Any], int] | None = None
    length: Callable[[Any], int] | None = None
    max_padded_size: int | None = setting(None, optional_count)
    key: Key | None = None
    merge: bool | Merge | Pad | None = None
    split: Split | None = None
    policy: Policy | str | None = None
    max_queue_delay_s: float | None = setting(None, optional_delay)
    max_queue_size: int = setting(1024, positive_count)
    max_in_flight_batches: int = setting(1, positive_count)
    timeout_s: float | None = setting(None, optional_seconds)
    slo_s: float | None = setting(None, optional_finite_seconds)
    execution_lock: Any = None
    idempotent: bool = setting(True, flag)
    isolate_errors: bool | None = setting(None, optional_flag)
    oom_errors: OomErrors | None = ()
    run_in: str | None = None

    def __post_init__(self) -> None:
        keep_checked(self)
        if self.isolate_errors is None:
            keep(self, "isolate_errors", self.idempotent)
        check_policy(self.policy)
        _check_run_in(self.run_in)
        if self.oom_errors is not None:
            names_of(self.oom_errors)
        self._check_functions()
        if self.max_batch_size is not None and self.size is None and not self.merge:
            check_room(self.max_batch_size, self.max_queue_size)
        if self.timeout_s is not None:
            check_lone_wait(lone_wait_s(self.new_policy()), self.timeout_s)

    def _check_functions(self) -> None:
        if self.size is not None:
            check_callable("size", self.size, "an item")
        check_length(self.length, self.max_padded_size, None, has_size=self.size is not None)
        if self.key is not None and not isinstance(self.key, str):
            check_callable("key", self.key, "an item")
        elif header_of(self.key) is not None:
            raise ValueError("key must be a function of an item or the name of its field: calls have no headers")
        for name, value in (("length", self.length), ("key", self.key)):
            if value is not None and self.merge:
                raise ValueError(f"{name} is for items, and merge joins chunks of rows: leave out one of them")
        if self.merge is not None and not isinstance(self.merge, bool | Pad) and not callable(self.merge):
            raise TypeError(
                f"merge must be True, carpool.pad(...) or a function of a list of chunks, not {self.merge!r}"
            )
        if self.split is not None:
            check_callable("split", self.split, "a merged output and the row counts of its chunks")
        if callable(self.merge) != (self.split is not None):
            raise ValueError("a merge function needs a split function, and the other way round")

    @property
    def limit(self) -> int:
        """The largest sum of sizes that a batch may hold.

        Without a limit it is what the queue can hold, if each item counts as one.
        """
        if self.max_batch_size is not None:
            return self.max_batch_size
        return self.max_queue_size if self.size is None and not self.merge else _NO_LIMIT

    def new_policy(self) -> Policy:
        """Make a policy for one batcher."""
        return new_policy(
            self.policy,
            self.limit,
            max_queue_delay_s=self.max_queue_delay_s,
            max_padded_size=self.max_padded_size,
            slo_s=self.slo_s,
        )

    def new_batcher(self, name: str) -> Batcher:
        policy = self.new_policy()
        why = why_never_held_back(policy)
        if why is not None:
            logger.warning("%s: %s", name, why)
        levels = BY_LENGTH if self.length is not None else BY_KEY if self.key is not None else None
        return Batcher(name, policy, Queue(self.max_queue_size, levels=levels))

    def over_list(self, function: Callable[..., Any], is_async: bool) -> Callable[..., Any]:
        """Return a function of a list of items."""
        if not self.merge:
            return function
        if callable(self.merge):
            assert self.split is not None
            count = self.size or merging.length
            return merging.merge_with(function, is_async, self.merge, self.split, count)
        return self._merger.wrap(function, is_async)

    def pieces(self, x: Any) -> list[Any]:
        """Cut a chunk that has more rows than a batch may hold; all else is one piece.

        Chunks for a merge function of the user's are never cut, as it alone could do that.

        Raises:
            TypeError: The chunk is not of a kind that we can join with others.
            ValueError: Its parts cannot be joined with others.
        """
        if not self.merge or callable(self.merge):
            return [x]
        n, step = chunks.count_rows(x), self.limit
        if n <= (1 if self.size else step):
            return [x]
        self._merger.likeness(x)  # raises for a chunk that cannot be joined, which must not be cut either
        if self.size is not None:
            return self._halves(x, n)
        return [chunks.cut(x, i, min(i + step, n)) for i in range(0, n, step)]

    @property
    def each_counts_as_one(self) -> bool:
        """Whether all items count for one and are alike, so that none need be looked at."""
        return self.size is None and self.length is None and self.key is None and not self.merge

    def shares(self, items: Sequence[Any], priority: int = 0) -> Shares:
        """Return the size of each item in a batch, and with which others it may share one.

        Chunks of different dtypes, columns and the like may not share one.

        Raises:
            ValueError: The priority is not a whole number from -100 to 100.
            ModelError: A size or length function did not return a whole number from 0 on, or a key
                function no key.
            Exception: Such a function, or `pieces`, raised it.
        """
        lanes = [Lane(valid_priority(priority), None, 0)] * len(items) if priority else None
        if self.each_counts_as_one:
            return Shares(None, None, lanes)
        lengths = None if self.length is None else [self._told(self.length, "length", item) for item in items]
        sizes = [self.weigh(item) for item in items] if self.size is not None or self.merge else None
        if self.merge and not callable(self.merge):
            lanes = [Lane(priority, self._merger.likeness(item), 0) for item in items]
        elif self.key is not None:
            lanes = [Lane(valid_priority(priority), self._key_of(item), 0) for item in items]
        return Shares(sizes, lengths, lanes)

    def weigh(self, item: Any) -> int:
        """Return how much of a batch an item takes up. Raises the errors of `shares`."""
        return self._told(self.size or (merging.length if callable(self.merge) else chunks.count_rows), "size", item)

    def _told(self, function: Callable[[Any], int], setting: str, item: Any) -> int:
        try:
            return units(function(item), "@carpool.batch", setting)
        except (StopIteration, StopAsyncIteration) as error:  # `map(f, xs)` would take it for the end of `xs`
            raise RuntimeError(f"{setting}= raised {type(error).__name__}") from error

    def _key_of(self, item: Any) -> Hashable:
        key = field_of(self.key) if isinstance(self.key, str) else self.key
        assert key is not None
        try:
            return valid_key(key(item), "@carpool.batch")
        except (StopIteration, StopAsyncIteration) as error:
            raise RuntimeError(f"key= raised {type(error).__name__}") from error

    @property
    def _merger(self) -> RowMerger:
        return self.merge if isinstance(self.merge, RowMerger) else _ROW_MERGER

    def _halves(self, x: Any, n: int) -> list[Any]:
        """Cut a chunk of `n` rows into pieces that are within the limit or have one row."""
        if n <= 1 or self.weigh(x) <= self.limit:
            return [x]
        half = n // 2
        return [*self._halves(chunks.cut(x, 0, half), half), *self._halves(chunks.cut(x, half, n), n - half)]


def _check_run_in(run_in: Any) -> None:
    if run_in is None or run_in == "thread":
        return
    if run_in == "process":
        raise ValueError(
            'run_in="process" is not for @carpool.batch, whose batches run in this process:'
            " carpool.Service(carpool.Stage(...)) runs a model in worker processes"
        )
    if run_in == "loop":
        raise ValueError(
            'run_in="loop" is not for @carpool.batch: an `async def` runs on its callers\' loop as it is, and a `def`'
            ' would hold it up: leave run_in out, or say run_in="thread"'
        )
    raise ValueError(f'run_in must be "thread" or left out, not {run_in!r}')


class CallersSignature:
    """The signature that callers see, of one item: as `inspect.signature` and `help` show it."""

    def __get__(self, batched: Bindable | None, owner: type) -> inspect.Signature:
        if batched is None:  # the class has none but that of its constructor
            raise AttributeError("__signature__")
        return batched._callers_signature()


def as_written(kind: Any) -> Any:
    """Return a hint as `inspect` has it, for which `Any` stands for none."""
    return inspect.Parameter.empty if kind is Any else kind


class Bindable:
    """Base of both kinds of batch functions: its name, and its use as a method.

    As a method it has callers, and so batches, of its own for each instance of the class.
    """

    __name__: str
    __signature__ = CallersSignature()

    def __init__(self, function: Any, settings: Settings) -> None:
        functools.update_wrapper(cast(Any, self), function, updated=())  # without the attributes of a model class
        self.__name__ = name_of(function)
        self._function = function
        self._settings = settings
        self._bound: dict[int, tuple[weakref.ref[Any], Any]] = {}  # what runs the batches, by the id of an instance
        self._attribute = self.__name__  # the name as an attribute of a class
        self._instance: Any = None  # of a method, the instance that it is bound to
        self._ran_in: list[object] = [None]  # the mark of the process; one list for a function and its bound methods

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    def __repr__(self) -> str:
        return f"<carpool.batch of {self.__name__}>"

    def __copy__(self) -> Self:
        """Return itself, as functions do."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return itself, as functions do; a bound method is that of the instance's copy."""
        if self._instance is None:
            return self
        return getattr(copy.deepcopy(self._instance, memo), self._attribute)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle by name, as functions are; a bound method by its instance and name."""
        if self._instance is None:
            return self._global_name()
        known = getattr(type(self._instance), self._attribute, None)
        if not isinstance(known, Bindable) or known._function is not self._function:
            kind = type(self._instance).__qualname__
            raise TypeError(f"{self!r} cannot be pickled: it is not the attribute {self._attribute} of {kind}")
        return getattr, (self._instance, self._attribute)

    def _types_of_items(self) -> tuple[Any, Any]:
        function = self._function
        if self._settings.merge:
            return types_of(function)
        traits = traits_of(type(function) if is_model_object(function) else function, batched=True)
        return traits.input_type, traits.output_type

    def _callers_signature(self) -> inspect.Signature:
        takes, gives = self._types_of_items()
        parameter = inspect.Parameter("x", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=as_written(takes))
        return inspect.Signature([parameter], return_annotation=as_written(gives))

    def _over_items(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the user's function as a function of one list of items, which it already is."""
        return function

    def start_anew(self) -> None:
        """Forget all callers, in a forked child: they are in the parent."""
        raise NotImplementedError

    def _bind(self, method: Bindable, instance: Any) -> None:
        """Make `method`, of the same function, the bound method of an instance."""
        method._instance, method._attribute = instance, self._attribute
        method._ran_in = self._ran_in

    def _note_process(self) -> None:
        """Note that the function runs in this process, and warn once if it ran before the fork.

        Raises:
            RuntimeWarning: The warning, if filters of the program make it an error.
        """
        before, self._ran_in[0] = self._ran_in[0], ThisProcess.mark
        if before is not None and before is not ThisProcess.mark:
            warnings.warn(_RAN_BEFORE_FORK.format(name=self.__name__), RuntimeWarning, stacklevel=2)

    def _global_name(self) -> str:
        """Return the name, with dots if need be, by which its module has it. Raises TypeError."""
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
            f"{self!r} cannot be pickled: it is pickled by its name, and no name in {self.__module__} leads to it;"
            " assign it to a name of the module, instead of making it inside a function"
        )

    def _closed_error(self) -> Unavailable:
        return Unavailable(f"{self.__name__} is closed", code="stopped")

    def _of_instance(self, instance: Any, new: Callable[[], Any]) -> Any:
        """Return the runner of the batches of an instance's method. It lives as long as the
        instance.

        Raises:
            TypeError: The instance cannot be referred to weakly.
        """
        key = id(instance)
        found = self._bound.get(key)
        if found is not None and found[0]() is instance:
            return found[1]
        try:
            reference = weakref.ref(instance, lambda _: self._bound.pop(key, None))
        except TypeError:
            kind = type(instance).__name__
            raise TypeError(
                f"{kind} objects cannot be weakly referenced: add '__weakref__' to the __slots__ of {kind}"
            ) from None
        return self._bound.setdefault(key, (reference, new()))[1]


def _fatal_errors(settings: Settings, is_async: bool) -> tuple[type[BaseException], ...]:
    """Return the exceptions that end a batch instead of failing an item."""
    if is_async:  # tasks may be cancelled or collected
        return GeneratorExit, KeyboardInterrupt, asyncio.CancelledError
    if settings.run_in == "thread":  # neither signals nor cancellations come to a thread of the executor
        return ()
    return (KeyboardInterrupt,)  # an interrupted thread leaves its batch to others


def invoker_of(
    function: AnyModel | Model, settings: Settings, is_async: bool, sibling: Invoker | None = None
) -> Invoker:
    """Make the caller of a user's function or model.

    Raises:
        TypeError: It cannot be called in batches.
    """
    given: Any = function
    read_off = type(given) if is_model_object(given) else given
    traits = traits_of(read_off, batched=True)
    if traits.in_parts:
        raise TypeError(
            f"{traits.name} answers in parts, and a batched function gives each caller one answer: serve it as"
            f' carpool.Service(carpool.Stage({traits.name}, run_in="thread")), which needs no processes, or collect the'
            " parts in a list and `return` that"
        )
    if not (isinstance(function, type) or is_model_object(function)):
        function = settings.over_list(given, is_async)
    elif settings.merge:
        raise TypeError("merge is for functions: leave it out, as a Model's predict takes a list of items")
    if sibling is not None:
        return Invoker(function, {}, sibling.traits, sibling.retrier, batched=True)
    retrier = Retrier(
        isolate_errors=bool(settings.isolate_errors),
        retry_on_oom=bool(settings.idempotent or settings.isolate_errors),
        oom_errors=None if settings.oom_errors is None else names_of(settings.oom_errors),
        fatal_errors=_fatal_errors(settings, is_async),
        may_wait=is_async,
    )
    if settings.merge:
        traits = replace(traits, takes_array=False)  # the array of its hint is the merged one
    else:
        check_takes_a_list(read_off, "called in batches")
    return Invoker(function, {}, traits, retrier, batched=True)


_EVERY_S: Final = 0.05  # seconds; a check makes a system call, which would slow down each lone call

_TEXT: Final = (
    "{name} was called on a thread whose event loop runs: the loop stands still until the call returns, so no other"
    ' task can share its batch. Batch it with run_in="thread" and await {name}(x), or leave it as it is and await'
    " `asyncio.to_thread({name}, x)`"
)


class LoopCheck:
    """Checks, now and then, whether a function's callers are on a thread whose event loop runs.

    Args:
        depth: How many functions of ours lie between the caller and the method that checks.
    """

    __slots__ = ("_depth", "_name", "due")

    def __init__(self, name: str, depth: int = 0) -> None:
        self._name = name
        self._depth = depth
        self.due = 0.0

    def check(self, now: float) -> None:
        """Warn the caller of the method that calls this, once, if its thread's event loop runs.

        Code at the top of a module or of a notebook's cell is left alone: it runs on the notebook's
        own loop, on which no other call could join.
        """
        self.due = now + _EVERY_S
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        if sys._getframe(2 + self._depth).f_code.co_name == "<module>":
            return
        self.due = inf  # before the warning, which may be raised as an error
        warnings.warn(_TEXT.format(name=self._name), RuntimeWarning, stacklevel=3 + self._depth)
