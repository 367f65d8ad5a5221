"""The models of both sides: a trivial one, one that takes its time, and one of arrays."""

from __future__ import annotations

import time
from typing import Any

import carpool

BATCH = 64
BATCH_S, ITEM_S = 0.008, 0.00025


class Trivial(carpool.Model):
    """Doubles numbers."""

    def predict(self, xs: list[float]) -> list[float]:
        return [2 * x for x in xs]


class Timed(carpool.Model):
    """Does the same, and takes as long as a model would."""

    def predict(self, xs: list[float]) -> list[float]:
        time.sleep(BATCH_S + ITEM_S * len(xs))
        return [2 * x for x in xs]


class Arrays(carpool.Model):
    """Gives back what it gets."""

    def predict(self, xs: list[Any]) -> list[Any]:
        return xs


def service(model: type[carpool.Model], workers: int = 1, **needs: Any) -> carpool.Service:
    """A service of one of them, which asks nothing of the cluster but `needs`."""
    stage = carpool.Stage(model, max_batch_size=BATCH, workers=workers, needs={"num_cpus": 0, **needs})
    return carpool.Service(stage, name=model.__name__.lower())
