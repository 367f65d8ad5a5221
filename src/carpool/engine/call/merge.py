"""Chunks of rows instead of items: callers' chunks become one merged input, and its output is cut
up again by rows.

`merge=True` joins and cuts up the kinds of chunks that `call/chunks.py` knows, and
`merge=carpool.pad()` arrays of different lengths as well (`call/padding.py`). Anything else needs
`merge=` and `split=` functions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

from carpool.engine.call.chunks import common_count, count_rows, cut, join, likeness

Merge = Callable[[list[Any]], Any]
"""Makes one input of several chunks."""

Split = Callable[[Any, list[int]], Sequence[Any]]
"""Makes one output for each chunk of one merged output and the chunks' row counts."""


class MergedCall(NamedTuple):
    """A call for a batch of chunks that have been merged.

    Attributes:
        call: Calls the function with the merged input.
        share: Cuts the function's output into one part for each chunk.
    """

    call: Callable[[], Any]
    share: Callable[[Any], Sequence[Any]]


class RowMerger:
    """Joins chunks of rows and cuts up outputs. This one is `merge=True`."""

    def likeness(self, x: Any) -> Hashable:
        """Return what is equal in chunks that may share a call.

        Raises:
            TypeError: The chunk is of an unknown kind.
        """
        return likeness(x)

    def wrap(self, function: Callable[..., Any], is_async: bool) -> Callable[[list[Any]], Any]:
        """Return a function over a list of chunks for `function`, which takes one merged input."""

        def prepare(chunks: list[Any]) -> MergedCall:
            return MergedCall(partial(function, join(chunks)), cutter_for(chunks))

        return over_chunks(prepare, is_async)


def merge_with(
    function: Callable[..., Any], is_async: bool, merge: Merge, split: Split, count: Callable[[Any], int]
) -> Callable[[list[Any]], Any]:
    """Return a function over a list of chunks that merges and splits them with the user's own
    functions.

    Args:
        function: Takes one merged input.
        is_async: Whether `function` is `async def`.
        merge: The user's merge function.
        split: The user's split function.
        count: Gives the row count of a chunk.
    """

    def prepare(chunks: list[Any]) -> MergedCall:
        counts = [count(chunk) for chunk in chunks]
        return MergedCall(partial(function, merge(chunks)), lambda output: split(output, counts))

    return over_chunks(prepare, is_async)


def over_chunks(prepare: Callable[[list[Any]], MergedCall], is_async: bool) -> Callable[[list[Any]], Any]:
    """Return a function over chunks that prepares a merged call, makes it and shares its output
    out.

    The shares are settled before the call: a caller or the function that changes the length of a
    list meanwhile does not change which rows belong to whom.
    """

    def call_merged(chunks: list[Any]) -> Any:
        call, share = prepare(chunks)
        return share(call())

    async def call_merged_async(chunks: list[Any]) -> Any:
        call, share = prepare(chunks)
        return share(await call())

    return call_merged_async if is_async else call_merged


def cutter_for(chunks: list[Any]) -> Callable[[Any], list[Any]]:
    """Return a function that cuts an output into parts with as many rows as the chunks have now."""
    counts = [count_rows(chunk) for chunk in chunks]
    return lambda output: split(output, counts)


def length(chunk: Any) -> int:
    """Return how many rows a chunk has that the user's own merge function joins.

    Raises:
        TypeError: The chunk has no length.
        ValueError: It is a dict whose parts have different lengths, or which has no parts.
    """
    if isinstance(chunk, Mapping):
        return common_count({name: length(part) for name, part in chunk.items()})
    try:
        return len(chunk)
    except TypeError:
        kind = type(chunk).__name__
        text = f"an object of type {kind} has no length: with merge= and split=, size= must say how many rows it has"
        raise TypeError(text) from None


def split(output: Any, counts: list[int]) -> list[Any]:
    """Cut a function's output into pieces with the given numbers of rows.

    Raises:
        TypeError: The output is of an unknown kind.
        ValueError: It has more or fewer rows in all.
    """
    try:
        likeness(output)
        found = count_rows(output)
    except TypeError as error:
        raise TypeError(f"what the function returned cannot be shared out among its callers: {error}") from None
    if found != sum(counts):
        raise ValueError(
            f"the merged input had {sum(counts)} rows, but the output has {found}:"
            " return one row for each row of the input"
        )
    return [cut(output, begin, end) for begin, end in pairwise([0, *accumulate(counts)])]


def joined(results: list[Any]) -> Any:
    """Join the results for one caller's pieces to one.

    Raises:
        ValueError: They are not alike.
    """
    if len(results) == 1:
        return results[0]
    kinds = {likeness(result): result for result in results}
    if len(kinds) > 1:
        raise ValueError(
            "a chunk with more rows than one call may have was served by several calls, but their results cannot be"
            f" joined, because they differ in type, names or shape: {_shortened(list(kinds))}"
        )
    return join(results)


def joined_by_caller(results: Iterable[Any], pieces: list[list[Any]]) -> list[Any]:
    """Return one result for each caller's pieces, from the results of all pieces in their order."""
    left = iter(results)
    return [joined(list(islice(left, len(of_caller)))) for of_caller in pieces]


def _shortened(kinds: list[Hashable]) -> str:
    return " and ".join([f"{kind!r:.200}" for kind in kinds[:2]])
