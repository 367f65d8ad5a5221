"""The classes and functions that both sides serve, the documents' designs and carpool.

Where a batch is hinted as an array, carpool hands the stacked array over; the documents' designs
hand over a list.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import carpool
from bench.documents.clocks import Clock

Array = np.ndarray[Any, np.dtype[np.float32]]
WIDTH = 512
CALL_S = 0.005
BURN = 60_000  # turns of a loop: about 2 ms of processor time


def weights() -> list[Array]:
    """Four layers that keep the size of what goes through them."""
    dice = np.random.default_rng(1)
    return [(dice.standard_normal((WIDTH, WIDTH)) * (2 / WIDTH) ** 0.5).astype(np.float32) for _ in range(4)]


def through(layers: list[Array], x: Array) -> Array:
    for layer in layers:
        x = np.maximum(x @ layer, 0)
    return x


class Net(carpool.Model):
    """Real work: four layers over the whole batch."""

    def setup(self) -> None:
        self.layers = weights()
        self.clock = Clock()

    def predict(self, xs: Array) -> Array:
        self.clock.begin()
        ys = through(self.layers, np.asarray(xs))
        self.clock.end(len(xs))
        return ys


class SleepOnArrays(carpool.Model):
    """Leaves the processor alone, as a model on a GPU does; what shows is the way to it."""

    def setup(self) -> None:
        self.clock = Clock()

    def predict(self, xs: Array) -> Array:
        self.clock.begin()
        time.sleep(CALL_S)
        ys: Array = 2 * np.asarray(xs)
        self.clock.end(len(xs))
        return ys


class SleepOnFloats(carpool.Model):
    def setup(self) -> None:
        self.clock = Clock()

    def predict(self, xs: list[float]) -> list[float]:
        self.clock.begin()
        time.sleep(CALL_S)
        ys = [2 * x for x in xs]
        self.clock.end(len(xs))
        return ys


class Floats(carpool.Model):
    """No work at all: nothing but the way there and back."""

    def setup(self) -> None:
        self.clock = Clock()

    def predict(self, xs: list[float]) -> list[float]:
        self.clock.begin()
        ys = [2 * x for x in xs]
        self.clock.end(len(xs))
        return ys


def scale(x: int) -> int:
    return 2 * x


def shift(x: int) -> int:
    return x + 3


def scale_array(x: Array) -> Array:
    return 2 * x


def means(xs: Array) -> list[float]:
    found: list[float] = np.asarray(xs).mean(axis=1).tolist()
    return found


def burn(x: int) -> int:
    """Processor time in Python, with the lock of the interpreter held."""
    total = 0
    for i in range(BURN):
        total += i & 1
    return x + total
