"""Arrays instead of items: callers' chunks become one merged input, and its output is cut up again, by rows.

What can be merged without being told how: lists, numpy arrays (along their first axis), and dicts of these. Anything
else needs `merge=` and `split=` functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

Merge = Callable[[list[Any]], Any]
"""Several chunks to one."""

Split = Callable[[Any, list[int]], Sequence[Any]]
"""One merged output and the row counts of the chunks to as many outputs."""


def rows(chunk: Any) -> int:
    """How many rows a chunk has.

    Raises:
        TypeError: it has none.
        ValueError: the parts of a dict have different numbers of rows, or there are none.
    """
    if not isinstance(chunk, Mapping):
        try:
            return len(chunk)
        except TypeError:
            raise TypeError(
                f"a chunk must be a list, an array or a dict of arrays, not {type(chunk).__name__}"
            ) from None
    counts = {name: rows(part) for name, part in chunk.items()}
    if len(set(counts.values())) != 1:
        raise ValueError(f"the parts of a chunk must have equally many rows, not {counts}")
    return next(iter(counts.values()))


def merge(chunks: list[Any]) -> Any:
    """The chunks one after the other, as one of the same kind."""
    first = chunks[0]
    if len(chunks) == 1:
        return first
    if isinstance(first, Mapping):
        if any(chunk.keys() != first.keys() for chunk in chunks):
            raise ValueError("chunks that are merged must have the same keys")
        return {name: merge([chunk[name] for chunk in chunks]) for name in first}
    if isinstance(first, list):
        return [row for chunk in chunks for row in chunk]
    import numpy as np

    return np.concatenate(chunks)


def split(merged: Any, counts: list[int]) -> list[Any]:
    """`merged` in pieces of so many rows.

    Raises:
        ValueError: it has more or fewer rows.
    """
    found = rows(merged)
    if found != sum(counts):
        raise ValueError(f"the merged input had {sum(counts)} rows, but the output has {found}")
    ends = [0, *accumulate(counts)]
    return [cut(merged, begin, end) for begin, end in pairwise(ends)]


def cut(chunk: Any, begin: int, end: int) -> Any:
    """Some rows of a chunk."""
    if isinstance(chunk, Mapping):
        return {name: cut(part, begin, end) for name, part in chunk.items()}
    return chunk[begin:end]
