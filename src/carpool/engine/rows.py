"""Batches that are one numpy array, whose rows are the items.

A `predict` whose type hint for the batch is a numpy array is called with arrays only, as far as the
items are arrays. Items of each shape and dtype have a call of their own.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable
from operator import is_
from typing import Any


class ArrayRows(list[Any]):
    """The rows of an array of shape (rows, ...) as a list, together with the array."""

    __slots__ = ("whole",)

    def __init__(self, whole: Any) -> None:
        super().__init__(whole)
        self.whole = whole


def is_array_type(hint: Any) -> bool:
    base = typing.get_origin(hint) or hint
    return getattr(base, "__module__", "") == "numpy" and getattr(base, "__name__", "") == "ndarray"


def as_array(value: Any) -> Any:
    """Return a value as numpy has it, but with texts in lists as objects: numpy gives each text the
    room of the longest one. Raises ValueError if lists have different lengths.
    """
    import numpy as np

    level = value if isinstance(value, list | tuple) else ()
    while level:
        kinds = set(map(type, level))
        if not kinds.isdisjoint((str, bytes)):
            return np.array(value, object)
        level = [each for inner in level if isinstance(inner, list | tuple) for each in inner]
    return np.asarray(value)


def first(results: list[Any], n: int) -> list[Any]:
    """Return the first `n` results, in a list that is not the model's own."""
    if type(results) is not ArrayRows:
        return results[:n]
    return results if len(results) == n else ArrayRows(results.whole[:n])


def by_kind(items: list[Any]) -> list[list[int]]:
    """Group the positions of items that fit into one array; other objects are one group."""
    if type(items) is ArrayRows:
        return [list(range(len(items)))]
    kinds: dict[Any, list[int]] = {}
    for position, item in enumerate(items):
        kind = (item.dtype.char, item.dtype, item.shape) if _is_array(item) else None
        kinds.setdefault(kind, []).append(position)
    return list(kinds.values())


def stacking(predict: Callable[[Any], Any], items: list[Any]) -> Callable[[list[Any]], Any]:
    """Turn a function of an array into a function of a list of some of the items, all of one kind
    (see `by_kind`). If they are no arrays, it gets the list as it is.
    """
    if type(items) is not ArrayRows and not _is_array(items[0]):
        return predict

    def call(part: list[Any]) -> Any:
        if type(items) is ArrayRows and len(part) == len(items) and all(map(is_, part, items)):  # all of them, unpadded
            return predict(items.whole)
        numpy = sys.modules["numpy"]
        whole = numpy.empty((len(part), *part[0].shape), part[0].dtype)
        numpy.stack(part, out=whole)  # without `out`, numpy would change a foreign byte order to the native one
        return predict(whole)

    return call


def _is_array(item: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(item) is numpy.ndarray
