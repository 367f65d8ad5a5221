"""Models that answer with their items, for workers that import nothing else."""

from __future__ import annotations

from typing import Any

import carpool


class Told(carpool.Model):
    """Answers with its item, and refuses a few."""

    def predict(self, xs: list[Any]) -> list[Any]:
        return [ValueError("refused") if x == "refuse" else x for x in xs]


class ToldLater(Told):
    """The same on the loop."""

    async def predict(self, xs: list[Any]) -> list[Any]:  # type: ignore[override]
        return super().predict(xs)
