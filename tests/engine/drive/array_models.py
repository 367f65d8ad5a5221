"""Models that take and return arrays. In a module that worker processes import quickly."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import carpool

Array = np.ndarray[Any, Any]


class Told(carpool.Model):
    """Tells what `predict` was given, for each item; and adds one to all that it was given."""

    def predict(self, xs: NDArray[np.float32]) -> list[Any]:
        kind = type(xs).__name__
        shape = xs.shape if isinstance(xs, np.ndarray) else None
        before = [x.tolist() if isinstance(x, np.ndarray) else x for x in xs]
        if isinstance(xs, np.ndarray) and xs.flags.writeable:
            xs += 1
        return [(kind, shape, row) for row in before]


class ToldLater(Told):
    """The same model as `async def`, for the loop."""

    async def predict(self, xs: NDArray[np.float32]) -> list[Any]:  # type: ignore[override]
        return super().predict(xs)


class Half(carpool.Model):
    """Returns one array, or with `rows` a list of arrays."""

    def __init__(self, rows: bool = False) -> None:
        self.rows = rows

    def predict(self, xs: NDArray[np.float32]) -> Any:
        return [x / 2 for x in xs] if self.rows else xs / 2


class Listed(carpool.Model):
    """Takes a list, works in place and answers with what it was given, and all that its batch was."""

    def predict(self, xs: list[Array]) -> list[Array]:
        for x in xs:
            x += 1
        return xs


class Refusing(carpool.Model):
    """A model that raises if one of its numbers is negative."""

    def predict(self, xs: NDArray[np.float64]) -> Array:
        if (xs < 0).any():
            raise ValueError("a negative number")
        return np.sqrt(xs)


class Halved(carpool.Model):
    """Works on items, before and after."""

    def preprocess(self, x: Array) -> Array:
        return x / 2

    def predict(self, xs: NDArray[np.float64]) -> Array:
        return xs + xs.shape[0]

    def postprocess(self, y: Array) -> Array:
        return -y


class Fails:
    """What goes wrong with a batch at first, or with some of its items; `predict` may change what it is given."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.calls = 0

    def predict(self, xs: NDArray[np.float32]) -> NDArray[np.float32]:
        self.calls += 1
        if self.how == "at first" and self.calls == 1:
            raise RuntimeError("planned")
        if self.how == "no memory at first" and self.calls == 1:
            raise MemoryError("planned")
        xs *= 10
        if (xs < 0).any():
            raise RuntimeError("guilty")
        return xs
