"""`@carpool.batch`: many callers of one function share its calls, inside a program and without a process.

Over a `def`, callers are threads, and one of them runs the batch for the others. Over an `async def`, callers are
tasks, and a batch is a task. What the function takes and gives is a list; what callers see is one item.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import fields
from typing import Any, Literal, Protocol, TypedDict, TypeVar, Unpack, overload

from carpool.batch_function.batched import Settings, invoker_of
from carpool.batch_function.tasks import AsyncBatch
from carpool.batch_function.threads import ThreadBatch
from carpool.call.invoke import is_async
from carpool.call.lock import execution_lock
from carpool.call.merge import Merge, Split
from carpool.call.oom import OomErrors
from carpool.call.padding import Pad
from carpool.call.retry import run_now
from carpool.model import name_of
from carpool.policy import Policy, PolicyName

A = TypeVar("A")
B = TypeVar("B")
A_contra = TypeVar("A_contra", contravariant=True)
B_co = TypeVar("B_co", covariant=True)


class BatchSettings(TypedDict, total=False):
    """The settings of `batch` that have nothing to do with `merge`; see there."""

    max_batch_size: int | None
    size: Callable[[Any], int] | None
    policy: Policy | PolicyName | None
    max_queue_delay_s: float | None
    max_queue_size: int
    max_in_flight_batches: int
    timeout_s: float | None
    slo_s: float | None
    execution_lock: Any
    isolate_errors: bool
    oom_errors: OomErrors | None


class Results(Protocol[B_co]):
    """What a function over lists returns: a list, or an array or tensor whose rows are the results."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[B_co]: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Preprocesses(Protocol):
    """A model whose callers bring something else than what its `predict` takes."""

    def preprocess(self, x: Any, /) -> Any: ...


class Postprocesses(Protocol):
    """A model whose callers get something else than what its `predict` returns."""

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
"""Models whose `predict` does not tell what callers bring and get, as classes and as instances."""

HookedLater = type[PreprocessesLater | PostprocessesLater] | PreprocessesLater | PostprocessesLater


class Decorator(Protocol):
    """`batch(...)` with settings: to be applied to a function or a model."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: HookedLater, /
    ) -> AsyncBatch[Any, Any]: ...
    @overload
    def __call__(self, function: Hooked, /) -> ThreadBatch[Any, Any]: ...
    @overload
    def __call__(self, function: type[PredictsLater[A, B]], /) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: type[PredictsAnyLater], /) -> AsyncBatch[Any, Any]: ...
    @overload
    def __call__(self, function: type[Predicts[A, B]], /) -> ThreadBatch[A, B]: ...
    @overload
    def __call__(self, function: type[PredictsAny], /) -> ThreadBatch[Any, Any]: ...
    @overload
    def __call__(self, function: PredictsLater[A, B], /) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: PredictsAnyLater, /) -> AsyncBatch[Any, Any]: ...
    @overload
    def __call__(self, function: Predicts[A, B], /) -> ThreadBatch[A, B]: ...
    @overload
    def __call__(self, function: PredictsAny, /) -> ThreadBatch[Any, Any]: ...
    @overload
    def __call__(self, function: Callable[[list[A]], Awaitable[Results[B]]], /) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: Callable[[list[A]], Results[B]], /) -> ThreadBatch[A, B]: ...
    @overload
    def __call__(self, function: Callable[[Any, list[A]], Awaitable[Results[B]]], /) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: Callable[[Any, list[A]], Results[B]], /) -> ThreadBatch[A, B]: ...


class Told(Protocol[A_contra, B_co]):
    """A function over padded arrays that is told their lengths."""

    def __call__(self, x: A_contra, /, lengths: Any) -> B_co: ...


class ToldMethod(Protocol[A_contra, B_co]):
    """The same, as it stands in a class."""

    def __call__(self, instance: Any, x: A_contra, /, lengths: Any) -> B_co: ...


class MergeDecorator(Protocol):
    """`batch(merge=...)`: to be applied to a function over whole arrays. An awaitable fits both: it goes first."""

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
    """`batch(merge=carpool.pad())`: to be applied to a function over whole arrays, which may want to know lengths."""

    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Told[A, Awaitable[B]], /
    ) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Told[A, B], /
    ) -> ThreadBatch[A, B]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: ToldMethod[A, Awaitable[B]], /
    ) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: ToldMethod[A, B], /) -> ThreadBatch[A, B]: ...
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


@overload
def batch(function: HookedLater, /) -> AsyncBatch[Any, Any]: ...  # type: ignore[overload-overlap]
@overload
def batch(function: Hooked, /) -> ThreadBatch[Any, Any]: ...
@overload
def batch(function: type[PredictsLater[A, B]], /) -> AsyncBatch[A, B]: ...
@overload
def batch(function: type[PredictsAnyLater], /) -> AsyncBatch[Any, Any]: ...
@overload
def batch(function: type[Predicts[A, B]], /) -> ThreadBatch[A, B]: ...
@overload
def batch(function: type[PredictsAny], /) -> ThreadBatch[Any, Any]: ...
@overload
def batch(function: PredictsLater[A, B], /) -> AsyncBatch[A, B]: ...
@overload
def batch(function: PredictsAnyLater, /) -> AsyncBatch[Any, Any]: ...
@overload
def batch(function: Predicts[A, B], /) -> ThreadBatch[A, B]: ...
@overload
def batch(function: PredictsAny, /) -> ThreadBatch[Any, Any]: ...
@overload
def batch(function: Callable[[list[A]], Awaitable[Results[B]]], /) -> AsyncBatch[A, B]: ...
@overload
def batch(function: Callable[[list[A]], Results[B]], /) -> ThreadBatch[A, B]: ...
@overload
def batch(function: Callable[[Any, list[A]], Awaitable[Results[B]]], /) -> AsyncBatch[A, B]: ...
@overload
def batch(function: Callable[[Any, list[A]], Results[B]], /) -> ThreadBatch[A, B]: ...
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
    """Let the callers of a function share its calls: `@carpool.batch` or `@carpool.batch(max_batch_size=32)`.

    Args:
        function: takes a list of items and returns a sequence of as many results, `def` or `async def`; or a `Model`
            class or instance. A class is constructed and set up here (an async one before its first batch); an
            instance is taken as it is.
        max_batch_size: most items in one call; with `size` or `merge`, most of their sizes or rows. None for no limit:
            a batch takes all who wait, of whom there can be `max_queue_size`.
        size: how much of a batch an item takes up (rows, tokens): a whole number of at least 1 (0 counts for 1).
        merge: True if the function takes one merged chunk and returns one with as many rows; callers then bring chunks
            of any number of rows: lists, numpy arrays, torch tensors, data frames and series of pandas and polars,
            tables, record batches and arrays of pyarrow, and dicts of these. Chunks whose dtypes, columns, names, row
            shapes or devices differ do not share a call. Anything else, subclasses too, is a TypeError for its caller.
            Or `carpool.pad(...)`, for arrays whose rows are of different length. Or a function that merges a list of
            chunks.
        split: with a merge function, cuts its function's output into chunks of the given row counts.
        policy: when to go: a policy object or its name; defaults to "adaptive".
        max_queue_delay_s: longest time an item is held back only to fill a batch.
        max_queue_size: items that may wait; further callers wait for room.
        max_in_flight_batches: batches that may run at a time.
        timeout_s: longest time of a call; None for no limit.
        slo_s: the latency that calls should be answered within. A policy that plans (adaptive, deadline, cork) serves
            what can make it and refuses what cannot, with `Overloaded`; what was not refused and is late is answered.
        execution_lock: held while the function runs, and taken before its batch is made. For a `def` a `carpool.Lock`,
            `threading.Lock` or `RLock`, or anything else that has `acquire` and `release` or can stand in a `with`; for
            an `async def` an `asyncio.Lock`, or anything else for an `async with`. Share one between several functions,
            or with code of your own. One whose `acquire` takes no `timeout` is waited for as long as it takes, and
            given back if time-outs have passed meanwhile.
        isolate_errors: whether a batch that raises is run again in parts, so that only the guilty items fail.
        oom_errors: exception classes, or their full names, that mean "out of memory", besides MemoryError and torch's.
            A batch that raises one is run again in smaller calls, and later batches are smaller. None: it fails as with
            any other error.

    Nothing that callers bring is copied, and nothing that the function returns: as with any call, an array is read when
    the function runs, for `submit` that is later, and with `merge` when the batch is made. Who changes an array before
    the answer is there may get that of the changed one; and parts of one output share its memory.

    Raises:
        ValueError: a setting is out of range.
        TypeError: a setting is of the wrong kind, there is no such setting, or `function` is no function or model that
            can be called in batches, such as a generator.
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
        raise TypeError(f"put @{type(function).__name__} above @carpool.batch, not below it")
    asynchronous = is_async(function)
    _check_lock(settings.execution_lock, name_of(function), asynchronous)
    invoker = invoker_of(function, settings, asynchronous)
    if asynchronous:
        return AsyncBatch(function, settings, invoker, unset=isinstance(function, type))
    if isinstance(function, type):
        run_now(invoker.set_up())
    return ThreadBatch(function, settings, invoker)


def _check_lock(lock: Any, name: str, asynchronous: bool) -> None:
    if lock is None:
        return
    if not asynchronous:
        execution_lock(lock, name)
    elif isinstance(lock, type) or not (hasattr(type(lock), "__aenter__") and hasattr(type(lock), "__aexit__")):
        raise TypeError(
            f"the execution_lock of {name} must be an asyncio.Lock, or anything else that can stand in an async with"
            f" statement, as {name} is async; not {lock!r}"
        )
