"""The types of `@carpool.batch`: what it is applied to, what comes of it, and its settings.

Nothing of it runs; type checkers read it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Concatenate, Protocol, TypedDict, TypeVar, overload

from carpool.batch_function.several import SeveralInTasks, SeveralInThreads
from carpool.batch_function.tasks import AsyncBatch
from carpool.batch_function.threads import ThreadBatch
from carpool.engine.call.oom import OomErrors
from carpool.engine.policy import Policy, PolicyName

A = TypeVar("A")
B = TypeVar("B")
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
    """What a function over lists returns: a list, or an array or tensor whose rows are results."""

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


OverLists = Callable[Concatenate[list[Any], list[Any], ...], B]
"""A function of several arguments, with a list for each."""

MethodOverLists = Callable[Concatenate[Any, list[Any], list[Any], ...], B]
"""A method of several arguments, as it stands in its class."""


class Decorator(Protocol):
    """The type of `batch(...)` with settings: it is applied to a function of a list, or a model."""

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
    def __call__(self, function: OverLists[Awaitable[Results[B]]], /) -> SeveralInTasks[B]: ...
    @overload
    def __call__(self, function: OverLists[Results[B]], /) -> SeveralInThreads[B]: ...
    @overload
    def __call__(self, function: MethodOverLists[Awaitable[Results[B]]], /) -> SeveralInTasks[B]: ...
    @overload
    def __call__(self, function: MethodOverLists[Results[B]], /) -> SeveralInThreads[B]: ...
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
    def __call__(self, function: type[PredictsAny], /) -> AsyncBatch[Any, Any]: ...
    @overload
    def __call__(self, function: Predicts[A, B], /) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: PredictsAny, /) -> AsyncBatch[Any, Any]: ...
    @overload
    def __call__(self, function: Callable[[list[A]], Results[B]], /) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: OverLists[Results[B]], /) -> SeveralInTasks[B]: ...
    @overload
    def __call__(self, function: MethodOverLists[Results[B]], /) -> SeveralInTasks[B]: ...
    @overload
    def __call__(self, function: Callable[[Any, list[A]], Results[B]], /) -> AsyncBatch[A, B]: ...


class MergeInThreadDecorator(Protocol):
    """The type of `batch(merge=..., run_in="thread")`."""

    @overload
    def __call__(self, function: TakesLengths[A, B], /) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: MethodTakesLengths[A, B], /) -> AsyncBatch[A, B]: ...
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
        self, function: TakesLengths[A, Awaitable[B]], /
    ) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: TakesLengths[A, B], /
    ) -> ThreadBatch[A, B]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: MethodTakesLengths[A, Awaitable[B]], /
    ) -> AsyncBatch[A, B]: ...
    @overload
    def __call__(self, function: MethodTakesLengths[A, B], /) -> ThreadBatch[A, B]: ...
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
