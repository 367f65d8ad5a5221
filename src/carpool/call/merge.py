"""Arrays instead of items: callers' chunks become one merged input, and its output is cut up again, by rows.

`merge=True` joins and cuts up what `call/chunks.py` knows, `merge=carpool.pad()` arrays of different length besides
(`call/padding.py`). Anything else needs `merge=` and `split=` functions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import Any

from carpool.call.chunks import cut, in_common, join, likeness, rows

Merge = Callable[[list[Any]], Any]
"""Several chunks to one."""

Split = Callable[[Any, list[int]], Sequence[Any]]
"""One merged output and the row counts of the chunks to as many outputs."""


Begun = tuple[Callable[[], Any], Callable[[Any], Sequence[Any]]]
"""What calls a function over the chunks of a batch, and what shares its output out."""


class Joint:
    """What lies between callers' chunks and a function over one merged input. This is `merge=True`."""

    def likeness(self, x: Any) -> Hashable:
        """What is equal in chunks that may share a call. Raises TypeError if a chunk is of no kind that we know."""
        return likeness(x)

    def over(self, function: Callable[..., Any], is_async: bool) -> Callable[[list[Any]], Any]:
        """The function over a list of chunks that a function over one merged input makes."""

        def begin(chunks: list[Any]) -> Begun:
            return partial(function, join(chunks)), sharing(chunks)

        return in_two_steps(begin, is_async)


def over_merge_function(
    function: Callable[..., Any], is_async: bool, merge: Merge, split: Split, count: Callable[[Any], int]
) -> Callable[[list[Any]], Any]:
    """Likewise, with a merge and a split function of the user; `count` returns how many rows a chunk has."""

    def begin(chunks: list[Any]) -> Begun:
        counts = [count(chunk) for chunk in chunks]
        return partial(function, merge(chunks)), lambda output: split(output, counts)

    return in_two_steps(begin, is_async)


def in_two_steps(begin: Callable[[list[Any]], Begun], is_async: bool) -> Callable[[list[Any]], Any]:
    """A function over chunks: begun, called and shared out. What callers or the function change meanwhile, such as a
    list's length, is too late to change who gets what."""

    def together(chunks: list[Any]) -> Any:
        call, share = begin(chunks)
        return share(call())

    async def together_async(chunks: list[Any]) -> Any:
        call, share = begin(chunks)
        return share(await call())

    return together_async if is_async else together


def sharing(chunks: list[Any]) -> Callable[[Any], list[Any]]:
    """What cuts an output into parts with as many rows as the chunks have now."""
    counts = [rows(chunk) for chunk in chunks]
    return lambda output: split(output, counts)


def length(chunk: Any) -> int:
    """How many rows a chunk has that a merge function of the user's own joins.

    Raises:
        TypeError: it has no length.
        ValueError: the parts of a dict have different lengths, or there are none.
    """
    if isinstance(chunk, Mapping):
        return in_common({name: length(part) for name, part in chunk.items()})
    try:
        return len(chunk)
    except TypeError:
        text = f"a {type(chunk).__name__} has no length: with merge= and split=, size= must say how many rows it has"
        raise TypeError(text) from None


def split(output: Any, counts: list[int]) -> list[Any]:
    """A function's output in pieces of so many rows.

    Raises:
        TypeError: it is of no kind that we know.
        ValueError: it has more or fewer rows.
    """
    try:
        likeness(output)
        found = rows(output)
    except TypeError as error:
        raise TypeError(f"what the function returned cannot be shared out: {error}") from None
    if found != sum(counts):
        raise ValueError(f"the merged input had {sum(counts)} rows, but the output has {found}")
    return [cut(output, begin, end) for begin, end in pairwise([0, *accumulate(counts)])]


def joined(results: list[Any]) -> Any:
    """The results for one caller's pieces as one.

    Raises:
        ValueError: they cannot be joined without changing some.
    """
    if len(results) == 1:
        return results[0]
    kinds = {likeness(result): result for result in results}
    if len(kinds) > 1:
        raise ValueError(
            "a caller with more rows than one call may have was served by several, whose results are not alike in"
            f" type, names or shape, so that they cannot be joined: {_in_short(list(kinds))}"
        )
    return join(results)


def joined_by_caller(results: Iterable[Any], pieces: list[list[Any]]) -> list[Any]:
    """One result for each caller's pieces, from the results of all pieces in their order."""
    left = iter(results)
    return [joined(list(islice(left, len(of_one)))) for of_one in pieces]


def _in_short(kinds: list[Hashable]) -> str:
    return " and ".join([f"{kind!r:.200}" for kind in kinds[:2]])
