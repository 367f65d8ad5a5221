"""The model that every driver runs in the contract suite."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import carpool


class Contract(carpool.Model):
    """Doubles numbers and tells the size of the batch; some items ask for other things.

    Args:
        cost_s: time that a batch takes.
    """

    def __init__(self, cost_s: float = 0.0) -> None:
        self.cost_s = cost_s
        self.seen: list[Any] = []

    def predict(self, xs: list[Any]) -> list[Any]:
        time.sleep(self.cost_s)
        return self.answer(xs)

    def answer(self, xs: list[Any]) -> list[Any]:
        """What `predict` answers, without the time it takes."""
        self.seen += xs
        if "raise" in xs:
            raise ZeroDivisionError("one item is bad")
        return [self.seen[:-1] if x == "seen" else self._one(x, len(xs)) for x in xs]

    def _one(self, x: Any, n: int) -> Any:
        if x == "refuse":
            return carpool.ValidationError("not this item")
        return [2 * x, n]


class AsyncContract(Contract):
    """The same for drivers that run `async def` models."""

    async def predict(self, xs: list[Any]) -> list[Any]:  # type: ignore[override]
        await asyncio.sleep(self.cost_s)
        return self.answer(xs)
