"""Batches that are one numpy array: its rows are the items, and who wants the array gets it without another copy.

A `predict` whose hint for the batch is a numpy array is called with arrays only, as far as the items are arrays. Those
of other shapes or dtypes do not fit into one, so each kind has a call of its own.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable
from operator import is_
from typing import Any


class Rows(list[Any]):
    """The rows of an array as a list, and the array."""

    __slots__ = ("whole",)

    def __init__(self, whole: Any) -> None:
        super().__init__(whole)
        self.whole = whole


def is_array_type(hint: Any) -> bool:
    """Whether a type hint means numpy arrays."""
    base = typing.get_origin(hint) or hint
    return getattr(base, "__module__", "") == "numpy" and getattr(base, "__name__", "") == "ndarray"


def first(results: list[Any], n: int) -> list[Any]:
    """The first `n` results, in a list of our own."""
    if type(results) is not Rows:
        return results[:n]
    return results if len(results) == n else Rows(results.whole[:n])


def by_kind(items: list[Any]) -> list[list[int]]:
    """The items' places, those together that fit into one array; what is no array is left together."""
    if type(items) is Rows:
        return [list(range(len(items)))]
    kinds: dict[Any, list[int]] = {}
    for place, item in enumerate(items):
        kind = (item.dtype.char, item.dtype, item.shape) if _is_array(item) else None
        kinds.setdefault(kind, []).append(place)
    return list(kinds.values())


def stacking(predict: Callable[[Any], Any], items: list[Any]) -> Callable[[list[Any]], Any]:
    """`predict`, which takes an array, as a function of a list of some of the items, all of one kind."""
    if type(items) is not Rows and not _is_array(items[0]):
        return predict

    def call(part: list[Any]) -> Any:
        if type(items) is Rows and len(part) == len(items) and all(map(is_, part, items)):  # these are all, unpadded
            whole = items.whole  # a copy, for what is run again must be as it was, whatever `predict` does to it
            return predict(whole.copy() if whole.flags.writeable else whole)
        numpy = sys.modules["numpy"]
        whole = numpy.empty((len(part), *part[0].shape), part[0].dtype)
        numpy.stack(part, out=whole)  # by itself it would turn bytes round
        return predict(whole)

    return call


def _is_array(item: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(item) is numpy.ndarray
