"""Chunks of rows instead of items: callers' chunks become one merged input, and its output is cut
up again by rows.

`merge=True` takes the kinds of chunks that `call/chunks.py` has, `merge=carpool.pad(...)` arrays of
different lengths as well; anything else needs `merge=` and `split=` functions.

An output is never cut along another axis. An axis of it that has the padded length may follow the
padded axis, or have that length by chance (ten classes, and the longest text has ten words), and
which is true cannot be seen. A function that takes the lengths can cut its results itself. For any
other an axis of the padded length is an error where some callers' arrays are shorter, because their
results would depend on the other callers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import Any, NamedTuple

from carpool.engine.call.chunks import common_count, count_rows, cut, has_axes, join, likeness
from carpool.engine.type_hints import signature_of

Merge = Callable[[list[Any]], Any]
"""Makes one input of several chunks."""

Split = Callable[[Any, list[int]], Sequence[Any]]
"""Makes one output for each chunk of one merged output and the chunks' row counts."""


class MergedCall(NamedTuple):
    """A call of the function for a batch of merged chunks, and `share`, which cuts its output into
    one part for each.
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
        def prepare(chunks: list[Any]) -> MergedCall:
            return MergedCall(partial(function, join(chunks)), cutter_for(chunks))

        return over_chunks(prepare, is_async)


def merge_with(
    function: Callable[..., Any], is_async: bool, merge: Merge, split: Split, count: Callable[[Any], int]
) -> Callable[[list[Any]], Any]:
    """Return a function over a list of chunks that merges and splits them with the user's own
    functions, and counts their rows with `count`.
    """

    def prepare(chunks: list[Any]) -> MergedCall:
        counts = [count(chunk) for chunk in chunks]
        return MergedCall(partial(function, merge(chunks)), lambda output: split(output, counts))

    return over_chunks(prepare, is_async)


def over_chunks(prepare: Callable[[list[Any]], MergedCall], is_async: bool) -> Callable[[list[Any]], Any]:
    """Return a function over chunks that prepares a merged call, makes it and shares its output
    out.

    The shares are settled before the call, as a list may change its length meanwhile.
    """

    def call_merged(chunks: list[Any]) -> Any:
        call, share = prepare(chunks)
        return share(call())

    async def call_merged_async(chunks: list[Any]) -> Any:
        call, share = prepare(chunks)
        return share(await call())

    return call_merged_async if is_async else call_merged


def cutter_for(chunks: list[Any]) -> Callable[[Any], list[Any]]:
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
    """Join the results for one caller's pieces to one. Raises ValueError if they are not alike."""
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
    left = iter(results)
    return [joined(list(islice(left, len(of_caller)))) for of_caller in pieces]


def _shortened(kinds: list[Hashable]) -> str:
    return " and ".join([f"{kind!r:.200}" for kind in kinds[:2]])


Share = Callable[[Any], Sequence[Any]]

_PARAMETER = "lengths"


@dataclass(frozen=True, slots=True)
class Pad(RowMerger):
    """Pads arrays with `value` on the `side` "right" or "left" before it joins them; see `pad`."""

    value: Any = 0
    side: str = "right"

    def __post_init__(self) -> None:
        if self.side not in ("right", "left"):
            raise ValueError(f"side must be 'right' or 'left', not {self.side!r}")

    def likeness(self, x: Any) -> Hashable:
        """Return what is equal in chunks that may share a call: of the shapes of rows, only the
        number of axes.

        Raises:
            TypeError: The chunk has nothing to pad, or a part of a kind that cannot be joined.
            ValueError: An array cannot hold the value to pad with.
        """
        if not _has_lengths(x):
            raise TypeError(
                "merge=carpool.pad() needs a numpy array or a torch tensor of at least two axes, rows and positions, or"
                f" a dict with one among its parts, not {_described(x)}; for a single row give x[None]"
            )
        return self._likeness(x)

    def wrap(self, function: Callable[..., Any], is_async: bool) -> Callable[[list[Any]], Any]:
        """`function` is given the lengths as well if it has a parameter of that name."""
        takes_lengths = _takes_lengths(function)

        def prepare(chunks: list[Any]) -> MergedCall:
            share = cutter_for(chunks)
            if takes_lengths:
                return MergedCall(partial(function, self._join(chunks), lengths=_lengths(chunks)), share)
            return MergedCall(partial(function, self._join(chunks)), _unless_padded(share, _padded_axes(chunks)))

        return over_chunks(prepare, is_async)

    # -- inside

    def _likeness(self, x: Any) -> Hashable:
        if type(x) is dict:
            return dict, *[(type(name), name, self._likeness(part)) for name, part in x.items()]
        alike = likeness(x)
        if not _has_lengths(x):
            return alike
        _check_fits(self.value, x)
        assert isinstance(alike, tuple)
        return *alike[:-1], x.ndim

    def _join(self, chunks: list[Any]) -> Any:
        first = chunks[0]
        if type(first) is dict:
            return {name: self._join([chunk[name] for chunk in chunks]) for name in first}
        if not _has_lengths(first) or len({chunk.shape[1:] for chunk in chunks}) == 1:
            return join(chunks)
        longest = [max(lengths) for lengths in zip(*[chunk.shape[1:] for chunk in chunks], strict=True)]
        fill = _fill_tensor if type(first).__module__ == "torch" else _fill_array
        return join([fill(chunk, longest, self) for chunk in chunks])


def pad(value: Any = 0, side: str = "right") -> Pad:
    """Make arrays of different lengths share a call, padded to the longest of them; for `merge=`.

    Args:
        value: What numpy arrays and torch tensors are filled up with, along all axes but the first.
            The other parts of a dict are joined as with `merge=True`.
        side: "right" adds the padding after the values, "left" before them.

    A function with a parameter `lengths` is given the length of each row along axis 1, before
    padding: an array (or a tensor, on the same device) with one number for each row, or with one
    for each axis but the first if there are more than two axes. For a dict of arrays it is a dict
    of these, with an entry for each part that is padded.

    Results are cut up by rows only. A function whose results have positions returns a list with one
    entry for each row, cut to its length: `[y[:n] for y, n in zip(ys, lengths)]`. If a function
    that takes no `lengths` returns an array with the padded length along the same axis, while its
    callers' lengths differ, they get a ValueError.

    Raises:
        ValueError: `side` is neither "right" nor "left".
    """
    return Pad(value, side)


def _takes_lengths(function: Callable[..., Any]) -> bool:
    try:
        return _PARAMETER in signature_of(function).parameters
    except (TypeError, ValueError):  # some functions that are written in C have no signature
        return False


def _has_lengths(x: Any) -> bool:
    if type(x) is dict:
        return any(map(_has_lengths, x.values()))
    return has_axes(x) and x.ndim > 1


def _lengths(chunks: list[Any]) -> Any:
    first = chunks[0]
    if type(first) is dict:
        return {name: _lengths([chunk[name] for chunk in chunks]) for name, part in first.items() if _has_lengths(part)}
    numpy = sys.modules["numpy"] if type(first).__module__ == "numpy" else None
    shapes = [chunk.shape[1] if first.ndim == 2 else tuple(chunk.shape[1:]) for chunk in chunks]
    counts = [count_rows(chunk) for chunk in chunks]
    if numpy is not None:
        return numpy.repeat(numpy.array(shapes, dtype=numpy.int64), counts, axis=0)
    torch = sys.modules["torch"]
    lengths = torch.tensor(shapes, dtype=torch.int64).repeat_interleave(torch.tensor(counts), dim=0)
    return lengths.to(first.device)


def _fill_array(chunk: Any, longest: Sequence[int], padding: Pad) -> Any:
    full = sys.modules["numpy"].full((len(chunk), *longest), padding.value, dtype=chunk.dtype)
    places = zip(chunk.shape[1:], longest, strict=True)
    full[:, *[slice(n) if padding.side == "right" else slice(most - n, most) for n, most in places]] = chunk
    return full


def _fill_tensor(chunk: Any, longest: Sequence[int], padding: Pad) -> Any:
    missing = [most - n for n, most in zip(chunk.shape[1:], longest, strict=True)]
    # torch begins with the last axis
    ends = [(0, n) if padding.side == "right" else (n, 0) for n in reversed(missing)]
    return sys.modules["torch"].nn.functional.pad(chunk, [n for pair in ends for n in pair], value=padding.value)


def _check_fits(value: Any, x: Any) -> None:
    """Raise ValueError unless the array can hold the value: libraries silently turn 0.5 into 0 in
    an array of integers.
    """
    try:
        if type(x).__module__ == "torch":
            stored = sys.modules["torch"].tensor(value, dtype=x.dtype).item()
            inexact = x.is_floating_point() or x.is_complex()
        else:
            stored = sys.modules["numpy"].full((), value, dtype=x.dtype)[()]
            inexact = x.dtype.kind in "fcO"
        fits = inexact or stored == value or (stored != stored and value != value)
    except Exception as error:
        raise ValueError(_does_not_fit(value, x)) from error
    if not fits:
        raise ValueError(_does_not_fit(value, x))


def _does_not_fit(value: Any, x: Any) -> str:
    return f"merge=carpool.pad(value={value!r}) cannot pad an array of {x.dtype}: give a value that it can hold"


class LengthsNeeded(ValueError):
    """An output cannot be cut up, since the function does not take the lengths of rows."""


def _unless_padded(share: Share, padded: set[tuple[int, int]]) -> Share:
    """Return `share` with a check: it raises ValueError if an axis of the output has the length of
    a padded axis.
    """

    def checked(output: Any) -> Sequence[Any]:
        shares = share(output)
        for axis, longest in padded:
            if longest in _extents(output, axis):
                raise LengthsNeeded(
                    f"a call was padded to {longest} along axis {axis}, and its output has that length along the"
                    " same axis, perhaps by chance, so it is not known whether to cut it for callers with shorter"
                    f" arrays. Give the function a parameter named {_PARAMETER}, and if its output has positions,"
                    " return a list with one entry for each row, cut to its length"
                )
        return shares

    return checked


def _extents(x: Any, axis: int) -> set[int]:
    """Return the lengths of `x` along an axis: several if its parts or rows differ, none if it has
    no such axis.
    """
    if type(x) is dict:
        return {n for part in x.values() for n in _extents(part, axis)}
    if type(x) is list:
        return {n for row in x for n in _extents(row, axis - 1)} if axis else {len(x)}
    return {x.shape[axis]} if has_axes(x) and axis < x.ndim else set()


def _padded_axes(chunks: list[Any]) -> set[tuple[int, int]]:
    first = chunks[0]
    if type(first) is dict:
        return {found for name in first for found in _padded_axes([chunk[name] for chunk in chunks])}
    if not _has_lengths(first):
        return set()
    shapes = [chunk.shape for chunk in chunks]
    return {
        (axis, max(lengths)) for axis, lengths in enumerate(zip(*shapes, strict=True)) if axis and len({*lengths}) > 1
    }


def _described(x: Any) -> str:
    if has_axes(x):
        return f"an array of {x.ndim} {'axis' if x.ndim == 1 else 'axes'}"
    return f"an object of type {type(x).__name__}"
