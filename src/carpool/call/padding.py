"""Ragged arrays in one call: `merge=carpool.pad(...)` fills shorter ones up, and tells the function how long they were.

A function's output is cut up by rows and never along another axis: whether an axis of it follows the padded one, or has
its length by chance (ten classes, and the longest text has ten words), cannot be seen. A function that is told the
lengths knows what to do. In the hands of one that is not, an output that has the padded length while callers have
others is an error, for it would make a caller's result depend on who else called.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from carpool.call.chunks import has_axes, join, likeness, rows
from carpool.call.merge import Begun, Joint, in_two_steps, sharing

Share = Callable[[Any], Sequence[Any]]

_PARAMETER = "lengths"


@dataclass(frozen=True, slots=True)
class Pad(Joint):
    """How `pad` was told to fill up arrays; see there."""

    value: Any = 0
    side: str = "right"

    def __post_init__(self) -> None:
        if self.side not in ("right", "left"):
            raise ValueError(f"side must be 'right' or 'left', not {self.side!r}")

    def likeness(self, x: Any) -> Hashable:
        """As without padding, but the shapes of rows need only have as many axes.

        Raises:
            TypeError: there is nothing to pad, or a part is of a kind that cannot be joined.
            ValueError: the array cannot hold the value to pad with.
        """
        if not _has_lengths(x):
            raise TypeError(
                "merge=carpool.pad() needs a numpy array or a torch tensor of at least two axes, rows and positions, or"
                f" a dict with one among its parts, not {_told(x)}; a single row is x[None]"
            )
        return self._likeness(x)

    def over(self, function: Callable[..., Any], is_async: bool) -> Callable[[list[Any]], Any]:
        """See `Joint.over`. The function is told the lengths if it has a parameter of that name."""
        told = _takes_lengths(function)

        def begin(chunks: list[Any]) -> Begun:
            share = sharing(chunks)
            if told:
                return partial(function, self._join(chunks), lengths=_lengths(chunks)), share
            return partial(function, self._join(chunks)), _unless_padded(share, _padded_axes(chunks))

        return in_two_steps(begin, is_async)

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
    """For `merge=`: arrays of different length share a call, filled up to the longest of it.

    Args:
        value: what numpy arrays and torch tensors are filled up with, along all axes but the first. The other parts of
            a dict are joined as with `merge=True`.
        side: "right" fills up behind what is there, "left" before it.

    A function with a parameter `lengths` is told how long each row was along axis 1: an array (or a tensor, on the
    same device) of one number for each row; of one for each axis but the first, if there are more than two axes. For a
    dict it is a dict of these, for the parts that have lengths.

    Results are cut up by rows only. A function whose results have positions gives back a list with one entry for each
    row, cut to its length: `[y[:n] for y, n in zip(ys, lengths)]`. If one that takes no `lengths` returns an array
    with the padded length along the same axis, while its callers' lengths differ, they get a ValueError.

    Raises:
        ValueError: there is no such side.
    """
    return Pad(value, side)


def _takes_lengths(function: Callable[..., Any]) -> bool:
    try:
        return _PARAMETER in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some functions that are written in C do not say
        return False


def _has_lengths(x: Any) -> bool:
    """Whether it is an array with more axes than rows, or a dict with one among its parts."""
    if type(x) is dict:
        return any(map(_has_lengths, x.values()))
    return has_axes(x) and x.ndim > 1


def _lengths(chunks: list[Any]) -> Any:
    """How long the rows of all chunks were."""
    first = chunks[0]
    if type(first) is dict:
        return {name: _lengths([chunk[name] for chunk in chunks]) for name, part in first.items() if _has_lengths(part)}
    numpy = sys.modules["numpy"] if type(first).__module__ == "numpy" else None
    shapes = [chunk.shape[1] if first.ndim == 2 else tuple(chunk.shape[1:]) for chunk in chunks]
    counts = [rows(chunk) for chunk in chunks]
    if numpy is not None:
        return numpy.repeat(numpy.array(shapes, dtype=numpy.int64), counts, axis=0)
    torch = sys.modules["torch"]
    lengths = torch.tensor(shapes, dtype=torch.int64).repeat_interleave(torch.tensor(counts), dim=0)
    return lengths.to(first.device)


def _fill_array(chunk: Any, longest: Sequence[int], how: Pad) -> Any:
    full = sys.modules["numpy"].full((len(chunk), *longest), how.value, dtype=chunk.dtype)
    places = zip(chunk.shape[1:], longest, strict=True)
    full[:, *[slice(n) if how.side == "right" else slice(most - n, most) for n, most in places]] = chunk
    return full


def _fill_tensor(chunk: Any, longest: Sequence[int], how: Pad) -> Any:
    missing = [most - n for n, most in zip(chunk.shape[1:], longest, strict=True)]
    ends = [(0, n) if how.side == "right" else (n, 0) for n in reversed(missing)]  # torch begins with the last axis
    return sys.modules["torch"].nn.functional.pad(chunk, [n for pair in ends for n in pair], value=how.value)


def _check_fits(value: Any, x: Any) -> None:
    """Libraries would quietly make 0 of 0.5 in an array of whole numbers. Raises ValueError."""
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
    return f"merge=carpool.pad(value={value!r}) cannot fill up an array of {x.dtype}: give a value that it can hold"


def _unless_padded(share: Share, padded: set[tuple[int, int]]) -> Share:
    """`share`, but a ValueError if an axis of the output has the length of a padded one of the input."""

    def checked(output: Any) -> Sequence[Any]:
        shares = share(output)
        for axis, longest in padded:
            if longest in _extents(output, axis):
                raise ValueError(
                    f"a call was padded to {longest} along axis {axis}, and its output has that length there, too:"
                    " callers with less than that cannot be given theirs, since it may be so by chance. Give the"
                    f" function a parameter named {_PARAMETER}, and return a list with one entry for each row, cut to"
                    " its length, if there are positions in the output"
                )
        return shares

    return checked


def _extents(x: Any, axis: int) -> set[int]:
    """How long it is along an axis; several numbers, if its parts or rows differ, none if there is no such axis."""
    if type(x) is dict:
        return {n for part in x.values() for n in _extents(part, axis)}
    if type(x) is list:
        return {n for row in x for n in _extents(row, axis - 1)} if axis else {len(x)}
    return {x.shape[axis]} if has_axes(x) and axis < x.ndim else set()


def _padded_axes(chunks: list[Any]) -> set[tuple[int, int]]:
    """Which axes differ among the chunks, and how long the longest is."""
    first = chunks[0]
    if type(first) is dict:
        return {found for name in first for found in _padded_axes([chunk[name] for chunk in chunks])}
    if not _has_lengths(first):
        return set()
    shapes = [chunk.shape for chunk in chunks]
    return {(axis, max(lengths)) for axis, lengths in enumerate(zip(*shapes, strict=True)) if axis and _differ(lengths)}


def _differ(lengths: Sequence[int]) -> bool:
    return any(a != b for a, b in pairwise(lengths))


def _told(x: Any) -> str:
    return f"an array of {x.ndim} axis" if has_axes(x) else f"a {type(x).__name__}"
