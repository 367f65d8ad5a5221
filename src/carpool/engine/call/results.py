"""What a call of user code comes to: results, failed items, and the trouble that there was."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import msgspec

from carpool.engine.call.merge import LengthsNeeded
from carpool.engine.hints.plain import elements_of
from carpool.engine.rows import ArrayRows
from carpool.errors import ModelError

T = TypeVar("T")

UNCHANGING: Final = frozenset({int, float, str, bytes, bool, type(None)})
"""Types of values that cannot change, so that nobody needs a copy of them."""


class Own(Protocol):
    """Returns a copy of a value that shares nothing with it that can change; `handed_on` says that
    it only goes from one hook to the next.
    """

    def __call__(self, value: Any, handed_on: bool = False) -> Any:
        """Return the copy."""


Again = Callable[[Sequence[int]], Awaitable[list[Any]]]
"""Returns items of a batch as they came, by their positions: `Failed` for those that cannot be
prepared again.
"""


class Failed:
    """Takes the place of an item's value once the item has failed."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


def none_failed(values: Sequence[Any]) -> bool:
    return Failed not in set(map(type, values))


def as_it_is(value: Any, handed_on: bool = False) -> Any:
    """Return the value itself: an `Own` for callers whose objects are handed on as they are."""
    return value


class Trouble(msgspec.Struct, array_like=True):
    """What happened to one batch besides its results; workers send it only if something did.

    Attributes:
        split: Whether the batch raised and was run again in parts.
        unsplit: Whether it raised and was not, for lack of time.
        out_of_memory: Whether a call ran out of memory.
        ran_out: For each call of several items that ran out of memory, the items' positions in the
            batch.
        fitted: The same for each call that succeeded when the batch was run again.
    """

    split: bool = False
    unsplit: bool = False
    out_of_memory: bool = False
    ran_out: list[list[int]] = []
    fitted: list[list[int]] = []


def run_now(awaitable: Awaitable[T]) -> T:
    """Return what `awaitable` results in, without an event loop. Raises TypeError if it waits for
    something.
    """
    steps = awaitable.__await__()
    try:
        next(steps)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    close = getattr(steps, "close", None)
    if close is not None:
        close()
    raise TypeError('the model waits for something: async models run with run_in="loop" or under @carpool.batch')


class Asked(NamedTuple):
    """The words of the error about a call that returns another number of results than it must: a
    sentence with the places `given` and `wanted`, and the nouns for these.
    """

    text: str
    given: str
    wanted: str


OF_A_CALL: Final = Asked("a call with {given} must return {wanted}", "item", "result")
OF_START: Final = Asked("start of {given} must return {wanted}", "item", "state")
OF_RESUME: Final = Asked("resume of {given} must return {wanted}", "item", "state")
OF_STEP: Final = Asked("step of {given} must return {wanted}, None for each that has made none", "stream", "part")
OF_A_YIELD: Final = Asked(
    "a generator for {given} must yield {wanted}, None for each that has made none", "item", "part"
)


class Miscount(ModelError):
    """A model has returned a wrong number of results, `n`; if that `is_doubted`, in a call before,
    so that the right one of this call may have come by chance.
    """

    def __init__(self, message: str, *, n: int = 0, is_doubted: bool = False) -> None:
        super().__init__(message, code="bad_result")
        self.n = n
        self.is_doubted = is_doubted


def as_results(returned: Any, n: int, asked: Asked = OF_A_CALL) -> list[Any]:
    """Return what a batch call returned as a list of `n` results.

    Raises:
        Miscount: It is a sequence of another length.
        ModelError: It is not a sequence.
    """
    if type(returned) is list and len(returned) == n:
        return returned
    results: Any = returned
    if hasattr(returned, "unbind") and hasattr(returned, "detach"):  # a torch tensor
        tensor = returned.detach().cpu()
        # each row gets memory of its own: pickling a view would take the whole batch along
        results = tensor.tolist() if tensor.ndim <= 1 else [row.clone() for row in tensor]
    elif hasattr(returned, "tolist") and hasattr(returned, "ndim"):  # a numpy array
        results = elements_of(returned) if returned.ndim <= 1 else ArrayRows(returned)
    elif not isinstance(returned, Sequence) or isinstance(returned, str | bytes | bytearray):
        got = f"an object of type {type(returned).__name__}"
        raise ModelError(_misfit(asked, n, "a sequence of ", got), code="bad_result")
    if type(results) is ArrayRows and len(results) == n:
        return results
    if type(results) is not list and isinstance(results, Sequence) and len(results) == n:
        # one of the user's own classes may be endless, whatever its length says
        results = list(islice(results, n + 1))
    if type(results) is not list or len(results) != n:
        if not isinstance(results, Sequence):
            raise ModelError(_misfit(asked, n, "", "a single value"), code="bad_result")
        got = f"{len(results)}"
        if asked is OF_A_CALL and len(results):
            got += ": did you mean " + ("`[[…]]`?" if n == 1 else "`[[…], …]`, with one result for each item?")
        raise Miscount(_misfit(asked, n, "", got), n=len(results))
    return results


def _misfit(asked: Asked, n: int, kind: str, got: str) -> str:
    what = asked.text.format(given=_some(n, asked.given), wanted=kind + _some(n, asked.wanted))
    return f"{what}, but the model returned {got}"


def doubted(n: int, odd_count: int) -> Miscount:
    """Return the error of a call with as many results as items, of a model that has returned a
    wrong number before.
    """
    text = (
        f"the model has returned {_some(odd_count, 'result')} for another number of items, so that its {n} results for"
        f" {n} items may not be one for each"
    )
    return Miscount(text, n=odd_count, is_doubted=True)


def _some(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def is_bad_result(error: BaseException) -> bool:
    """Report whether the model returned the wrong number of results, or padded ones: with fewer
    items it would do so again.
    """
    if type(error) is Miscount:
        return not error.is_doubted
    return type(error) is LengthsNeeded or (type(error) is ModelError and error.code == "bad_result")
