"""The decorator `@carpool.batch`: the callers of a function share its calls, in their process.

Over a `def`, callers are threads, and one of them runs the batch for the others. Over an `async
def`, callers are tasks, and a batch is a task.

The types at the end are for type checkers. Two lists stand twice, as checkers read them off
declarations only: overloads cannot be inherited or computed, so `batch(f)` and `batch(...)(f)` have
a list each; and a `TypedDict` is no dataclass, so `BatchSettings` repeats names of `Settings`.
tests/test_typing.py compares them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import fields
from typing import Any, Concatenate, Literal, Protocol, TypedDict, TypeVar, Unpack, overload

from carpool.batch_function.base import Settings, invoker_of
from carpool.batch_function.several import Arguments, SeveralInTasks, SeveralInThreads
from carpool.batch_function.tasks import AsyncBatch
from carpool.batch_function.threads import ThreadBatch
from carpool.engine.call.invoke import is_async
from carpool.engine.call.lock import execution_lock, is_async_lock
from carpool.engine.call.merge import Merge, Pad, Split
from carpool.engine.call.results import run_now
from carpool.engine.call.retry import OomErrors
from carpool.engine.policy import Policy, PolicyName
from carpool.model import name_of

A = TypeVar("A")
B = TypeVar("B")


@overload
def batch(function: HookedLater, /) -> AsyncBatch[Any, Any]: ...  # type: ignore[overload-overlap]
@overload
def batch(function: Hooked, /) -> ThreadBatch[Any, Any]: ...
@overload
def batch(function: type[PredictsLater[A, B]], /) -> AsyncBatch[A, B]: ...
@overload
def batch(function: PredictsLater[A, B], /) -> AsyncBatch[A, B]: ...
@overload
def batch(function: type[PredictsAnyLater] | PredictsAnyLater, /) -> AsyncBatch[Any, Any]: ...
@overload
def batch(function: type[Predicts[A, B]], /) -> ThreadBatch[A, B]: ...
@overload
def batch(function: Predicts[A, B], /) -> ThreadBatch[A, B]: ...
@overload
def batch(function: type[PredictsAny] | PredictsAny, /) -> ThreadBatch[Any, Any]: ...
@overload
def batch(function: Callable[[list[A]], Awaitable[Results[B]]], /) -> AsyncBatch[A, B]: ...
@overload
def batch(function: Callable[[list[A]], Results[B]], /) -> ThreadBatch[A, B]: ...
@overload
def batch(function: OverLists[Awaitable[Results[B]]], /) -> SeveralInTasks[B]: ...
@overload
def batch(function: OverLists[Results[B]], /) -> SeveralInThreads[B]: ...
@overload
def batch(function: Callable[[Any, list[A]], Awaitable[Results[B]]], /) -> AsyncBatch[A, B]: ...
@overload
def batch(function: Callable[[Any, list[A]], Results[B]], /) -> ThreadBatch[A, B]: ...
@overload
def batch(
    function: None = None,
    /,
    *,
    run_in: Literal["thread"],
    merge: Literal[True] | Merge | Pad,
    split: Split | None = None,
    **settings: Unpack[BatchSettings],
) -> MergeInThreadDecorator: ...
@overload
def batch(
    function: None = None,
    /,
    *,
    run_in: Literal["thread"],
    **settings: Unpack[BatchSettings],
) -> InThreadDecorator: ...
@overload
def batch(
    function: None = None,
    /,
    *,
    merge: Literal[True] | Merge,
    split: Split | None = None,
    **settings: Unpack[BatchSettings],
) -> MergeDecorator: ...
@overload
def batch(
    function: None = None,
    /,
    *,
    merge: Pad,
    **settings: Unpack[BatchSettings],
) -> PadDecorator: ...
@overload
def batch(function: None = None, /, **settings: Unpack[BatchSettings]) -> Decorator: ...
def batch(function: Any = None, /, **settings: Any) -> Any:
    """Let the callers of a function share its calls.

    Write `@carpool.batch` or `@carpool.batch(max_batch_size=32)` above the function, or call
    `carpool.batch` with a function or model.

    Args:
        function: Takes a list of items and returns a sequence of as many results; or takes several
            lists, one for each argument of its calls, all of the same length. It is a `def`,
            whose callers are threads, or an `async def`, whose callers are tasks. Or a `Model`
            class or instance: a class is constructed and set up here (an async one before its first
            batch), an instance is taken as it is.
        max_batch_size: The largest number of items in one call; with `size` or `merge`, the largest
            sum of their sizes or rows. None for no limit: a batch takes all items that wait, which
            can be `max_queue_size`.
        size: A function that returns how much of a batch an item takes up (rows, tokens): a whole
            number of at least 1; 0 counts as 1. For a function of several arguments it is given
            all of those of one call.
        length: A function that returns how long an item is (tokens, frames, pixels), where a call
            costs as much as if all its items were as long as the longest. Calls are then made of
            items of about the same length; `max_batch_size` stays their number.
        max_padded_size: With `length`, the largest product of a call's number of items and its
            longest length. An item that is longer by itself goes alone.
        key: Only items with the same key share a call: a function of an item that returns text, a
            number, None or a tuple of these, or the name of an item's field.
        merge: True if the function takes one merged chunk and returns one with as many rows.
            Callers then bring chunks of any number of rows: lists, numpy arrays, torch tensors,
            data frames and series of pandas and polars, tables, record batches and arrays of
            pyarrow, and dicts of these. Chunks whose dtypes, columns, names, row shapes or devices
            differ do not share a call. Anything else, subclasses included, is a TypeError for its
            caller. Or `carpool.pad(...)`, for arrays whose rows have different lengths. Or a
            function that merges a list of chunks.
        split: With a merge function: a function that cuts the output into chunks. It gets the
            output and the list of row counts.
        policy: When to run a batch, and of how many items: a policy object or the name of one.
            Defaults to "adaptive".
        max_queue_delay_s: The longest time in seconds that an item is held back only to fill a
            batch. None leaves it to the policy.
        max_queue_size: The largest number of items that wait; further callers wait for room.
        max_in_flight_batches: The largest number of batches that run at a time.
        timeout_s: The longest time of a call, in seconds; None for no limit.
        slo_s: The latency in seconds that calls should be answered within. A policy that plans
            (adaptive, deadline, cork) serves the calls that can be in time and refuses the others,
            with `Overloaded`. A call that was not refused and is late is still answered.
        execution_lock: Held while the function runs, and taken before its batch is made. For a
            `def` it is a `carpool.Lock`, a `threading.Lock` or `RLock`, or any other object that
            has `acquire` and `release` or can stand in a `with`. For an `async def` it is an
            `asyncio.Lock`, or any other object for an `async with`. It can be shared between
            several functions, or with other code. A lock whose `acquire` takes no `timeout` is
            waited for as long as it takes, and released again if callers' time-outs have passed
            meanwhile.
        idempotent: Whether the function may be called again with the same items. If it has effects
            that must not happen twice, False: then a batch that raises fails as a whole.
        isolate_errors: Whether a batch that raises is run again in parts, so that only the guilty
            items fail; each of them costs some 2 log2(n) further calls, of at most half the batch.
            Defaults to `idempotent`.
        oom_errors: Exception classes, or their full names, that mean "out of memory", besides
            MemoryError and torch's. A batch that raises one is run again in smaller calls, and
            later batches are smaller. (If `idempotent` and `isolate_errors` are both False it is
            not run again.) None: running out of memory is like any other error.
        run_in: "thread" makes a `def`, or a model without `async def`, one for tasks: it is
            awaited, and each batch of it, hooks and all, runs in a thread of the event loop's
            default executor, so that the loop is free. Left out, the callers of a `def` are
            threads.

    Returns:
        The function for one item. `f(x)` (or `await f(x)`) returns the result for one item,
        `f.many(xs)` those for several, and `f.close()` ends it. Over a `def`, without `run_in`,
        `f.submit(x)` returns a `carpool.Ticket` without waiting.

    Nothing is copied, neither what callers bring nor what the function returns: it must neither
    keep its output, to fill it again, nor write to its input. As in any call, an array is read when
    the function runs (with `submit` that is later), and with `merge` when the batch is made. So a
    caller that changes an array before the answer is there may get the answer for the changed
    array. Parts of one output share its memory.

    Raises:
        ValueError: A setting is out of range.
        TypeError: A setting is of the wrong kind or does not exist, or `function` cannot be called
            in batches (a generator, for example).
    """
    known = {field.name for field in fields(Settings)}
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise TypeError(f"batch has no setting {unknown[0]!r}; there are {', '.join(sorted(known))}")
    checked = Settings(**settings)
    if function is None:
        return lambda function: _batched(function, checked)
    return _batched(function, checked)


def _batched(function: Any, settings: Settings) -> Any:
    if isinstance(function, staticmethod | classmethod):
        raise TypeError(f"write @{type(function).__name__} above @carpool.batch, not below it")
    asynchronous = is_async(function)
    _check_lock(settings.execution_lock, name_of(function), asynchronous, settings.run_in == "thread")
    if asynchronous and settings.run_in is not None:
        raise TypeError(
            f"{name_of(function)} is async and runs on its callers' event loop:"
            ' leave out run_in="thread", which is for a `def`'
        )
    arguments = None if settings.merge else Arguments.of(function)
    if arguments is not None:
        return _batched_several(function, arguments, settings, asynchronous)
    invoker = invoker_of(function, settings, asynchronous)
    if asynchronous:
        return AsyncBatch(function, settings, invoker, needs_setup=isinstance(function, type))
    if isinstance(function, type):
        run_now(invoker.set_up())
    return (ThreadBatch if settings.run_in is None else AsyncBatch)(function, settings, invoker)


def _batched_several(function: Any, arguments: Arguments, settings: Settings, asynchronous: bool) -> Any:
    settings = arguments.settings(settings)
    invoker = invoker_of(arguments.over_calls(function), settings, asynchronous)
    if asynchronous or settings.run_in is not None:
        return SeveralInTasks(function, settings, invoker)
    return SeveralInThreads(function, settings, invoker)


def _check_lock(lock: Any, name: str, asynchronous: bool, in_thread: bool) -> None:
    if lock is None or (in_thread and is_async_lock(lock)):
        return
    if not asynchronous:
        execution_lock(lock, name)
    elif not is_async_lock(lock):
        raise TypeError(
            f"the execution_lock of {name}, which is async, must be an asyncio.Lock or another object for an"
            f" `async with` statement, not {lock!r}"
        )


A_contra = TypeVar("A_contra", contravariant=True)
B_co = TypeVar("B_co", covariant=True)


class BatchSettings(TypedDict, total=False):
    """The types of the settings of `batch` that do not depend on `merge`."""

    max_batch_size: int | None
    size: Callable[[Any], int] | None
    length: Callable[[Any], int] | None
    max_padded_size: int | None
    key: Callable[[Any], Any] | str | None
    policy: Policy | PolicyName | None
    max_queue_delay_s: float | None
    max_queue_size: int
    max_in_flight_batches: int
    timeout_s: float | None
    slo_s: float | None
    execution_lock: Any
    idempotent: bool
    isolate_errors: bool | None
    oom_errors: OomErrors | None


class Results(Protocol[B_co]):
    """The results of a function over lists: a list, or an array or tensor whose rows are
    results."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[B_co]: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Preprocesses(Protocol):
    """A model whose callers bring other objects than its `predict` takes."""

    def preprocess(self, x: Any, /) -> Any: ...


class Postprocesses(Protocol):
    """A model whose callers get other objects than its `predict` returns."""

    @property
    def postprocess(self) -> Any: ...


class Predicts(Protocol[A, B_co]):
    """A model over lists."""

    def predict(self, xs: list[A], /) -> Results[B_co]: ...


class PredictsLater(Protocol[A, B_co]):
    """A model over lists that is `async def`."""

    def predict(self, xs: list[A], /) -> Awaitable[Results[B_co]]: ...


class PredictsAny(Protocol):
    """A model over something else, such as an array."""

    def predict(self, xs: Any, /) -> Any: ...


class PredictsAnyLater(Protocol):
    """A model over something else that is `async def`."""

    def predict(self, xs: Any, /) -> Awaitable[Any]: ...


class PreprocessesLater(PredictsAnyLater, Preprocesses, Protocol):
    """An `async def` model that preprocesses."""


class PostprocessesLater(PredictsAnyLater, Postprocesses, Protocol):
    """An `async def` model that postprocesses."""


Hooked = type[Preprocesses | Postprocesses] | Preprocesses | Postprocesses
"""Models whose `predict` has no types of items and results, as classes and as instances."""

HookedLater = type[PreprocessesLater | PostprocessesLater] | PreprocessesLater | PostprocessesLater


OverLists = (
    Callable[Concatenate[list[Any], list[Any], ...], B] | Callable[Concatenate[Any, list[Any], list[Any], ...], B]
)
"""A function of several arguments with a list for each, or such a method as a class has it."""


class Decorator(Protocol):
    """The type of `batch(...)` with settings: it is applied to a function of a list, or a model."""

    @overload
    def __call__(self, function: HookedLater, /) -> AsyncBatch[Any, Any]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: Hooked, /) -> ThreadBatch[Any, Any]: ...
    @overload
    def __call__(self, function: type[PredictsLater[A, B]], /) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: PredictsLater[A, B], /) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: type[PredictsAnyLater] | PredictsAnyLater, /) -> AsyncBatch[Any, Any]: ...
    @overload
    def __call__(self, function: type[Predicts[A, B]], /) -> ThreadBatch[A, B]: ...
    @overload
    def __call__(self, function: Predicts[A, B], /) -> ThreadBatch[A, B]: ...
    @overload
    def __call__(self, function: type[PredictsAny] | PredictsAny, /) -> ThreadBatch[Any, Any]: ...
    @overload
    def __call__(self, function: Callable[[list[A]], Awaitable[Results[B]]], /) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: Callable[[list[A]], Results[B]], /) -> ThreadBatch[A, B]: ...
    @overload
    def __call__(self, function: OverLists[Awaitable[Results[B]]], /) -> SeveralInTasks[B]: ...
    @overload
    def __call__(self, function: OverLists[Results[B]], /) -> SeveralInThreads[B]: ...
    @overload
    def __call__(self, function: Callable[[Any, list[A]], Awaitable[Results[B]]], /) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: Callable[[Any, list[A]], Results[B]], /) -> ThreadBatch[A, B]: ...


class InThreadDecorator(Protocol):
    """The type of `batch(run_in="thread")`: a `def` over lists, or a model, becomes awaitable."""

    @overload
    def __call__(self, function: Hooked, /) -> AsyncBatch[Any, Any]: ...
    @overload
    def __call__(self, function: type[Predicts[A, B]], /) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: Predicts[A, B], /) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: type[PredictsAny] | PredictsAny, /) -> AsyncBatch[Any, Any]: ...
    @overload
    def __call__(self, function: Callable[[list[A]], Results[B]], /) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: OverLists[Results[B]], /) -> SeveralInTasks[B]: ...
    @overload
    def __call__(self, function: Callable[[Any, list[A]], Results[B]], /) -> AsyncBatch[A, B]: ...


class MergeInThreadDecorator(Protocol):
    """The type of `batch(merge=..., run_in="thread")`."""

    @overload
    def __call__(self, function: TakesLengths[A, B] | MethodTakesLengths[A, B], /) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: Callable[[A], B], /) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: Callable[[Any, A], B], /) -> AsyncBatch[A, B]: ...


class TakesLengths(Protocol[A_contra, B_co]):
    """The type of a function of a padded array that takes the lengths of its rows, too."""

    def __call__(self, x: A_contra, /, lengths: Any) -> B_co: ...


class MethodTakesLengths(Protocol[A_contra, B_co]):
    """The type of a method that is a `TakesLengths`, as it stands in its class."""

    def __call__(self, instance: Any, x: A_contra, /, lengths: Any) -> B_co: ...


class MergeDecorator(Protocol):
    """The type of `batch(merge=...)`, which is applied to a function of a merged chunk.

    An `async def` fits all overloads, so the ones with awaitables come first.
    """

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[[A], Awaitable[B]], /
    ) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: Callable[[A], B], /) -> ThreadBatch[A, B]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[[Any, A], Awaitable[B]], /
    ) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: Callable[[Any, A], B], /) -> ThreadBatch[A, B]: ...


class PadDecorator(Protocol):
    """The type of `batch(merge=carpool.pad())`: the function may take the rows' lengths, too."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: TakesLengths[A, Awaitable[B]] | MethodTakesLengths[A, Awaitable[B]], /
    ) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: TakesLengths[A, B] | MethodTakesLengths[A, B], /
    ) -> ThreadBatch[A, B]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[[A], Awaitable[B]], /
    ) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: Callable[[A], B], /) -> ThreadBatch[A, B]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[[Any, A], Awaitable[B]], /
    ) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: Callable[[Any, A], B], /) -> ThreadBatch[A, B]: ...
