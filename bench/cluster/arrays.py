"""Arrays of 6 MB, and a Ray actor that gives them back, asked by its own calls."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import ray

_SHAPE = (3, 1000, 500)  # of float32
_DIFFERENT = 16


class Echo:
    """Gives back what it gets; a call's array and its answer go through Ray's object store."""

    def call(self, x: Any) -> Any:
        return x


def actor(most_at_once: int, **options: Any) -> Any:
    """Start one.

    Args:
        most_at_once: How many of its calls run at a time.
        options: What it needs, in Ray's words.
    """
    return ray.remote(Echo).options(max_concurrency=most_at_once, **options).remote()


def item_of(number: int) -> Any:
    """Return one of a few arrays that differ."""
    return _array(number % _DIFFERENT)


def is_same(answer: Any, x: Any) -> bool:
    """Report whether an answer is its item, by its shape and its ends."""
    return bool(answer.shape == x.shape and answer.flat[0] == x.flat[0] and answer.flat[-1] == x.flat[-1])


@cache
def _array(value: int) -> Any:
    return np.full(_SHAPE, value, np.float32)
