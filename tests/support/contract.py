"""The model with which drivers are checked; a worker that runs it imports nothing else."""

from __future__ import annotations

import time
from typing import Any

from carpool.errors import ValidationError
from carpool.model import Model


class Contract(Model):
    """A model that answers a number with its double and the size of the batch.

    Some items ask for other things: `"raise"` makes the whole batch raise an error, `"refuse"`
    fails alone, and `"seen"` is answered with all items that the model has seen before.

    Args:
        cost_s: The seconds that a batch takes.
    """

    def __init__(self, cost_s: float = 0.0) -> None:
        self.cost_s = cost_s
        self.seen: list[Any] = []

    def predict(self, xs: list[Any]) -> list[Any]:
        time.sleep(self.cost_s)
        return self.answer(xs)

    def answer(self, xs: list[Any]) -> list[Any]:
        """Return what `predict` answers, without taking time."""
        self.seen += xs
        if "raise" in xs:
            raise ZeroDivisionError("one item is bad")
        return [self.seen[:-1] if x == "seen" else self._one(x, len(xs)) for x in xs]

    def _one(self, x: Any, n: int) -> Any:
        if x == "refuse":
            return ValidationError("not this item")
        return [2 * x, n]


class AsyncContract(Contract):
    """The same model, for drivers that run `async def` models."""

    async def predict(self, xs: list[Any]) -> list[Any]:  # type: ignore[override]
        import asyncio  # here, since worker processes, which have no loop, import this file

        await asyncio.sleep(self.cost_s)
        return self.answer(xs)
