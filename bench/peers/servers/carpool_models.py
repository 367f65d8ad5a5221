"""carpool's services that are measured, over HTTP and as worker processes.

    carpool serve bench.peers.servers.carpool_models:echo

starts one of them over HTTP.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import carpool
from bench.peers.servers.sleeping import double_slowly

Array = np.ndarray[Any, np.dtype[np.float64]]


class DoubleField(carpool.Model):
    """`{"x": 1.5}` -> `{"y": 3.0}`"""

    def predict(self, items: list[dict[str, float]]) -> list[dict[str, float]]:
        return [{"y": 2 * item["x"]} for item in items]


class Identity(carpool.Model):
    """The body comes back as it was."""

    def predict(self, body: bytes) -> bytes:
        return body


class DoubleSlowly(carpool.Model):
    """As `DoubleField`, with a cost that is known."""

    def predict(self, items: list[dict[str, float]]) -> list[dict[str, float]]:
        return double_slowly(items)


class DoubleAll(carpool.Model):
    def predict(self, numbers: list[int]) -> list[int]:
        return [2 * number for number in numbers]


class DoubleOne(carpool.Model):
    def predict(self, number: int) -> int:
        return 2 * number


class Touch(carpool.Model):
    """Writes one element, so that an array that came read-only, or never came, is noticed."""

    def predict(self, array: Array) -> Array:
        array[0] += 1
        return array


echo = carpool.Service(
    carpool.Stage(DoubleField, max_batch_size=64, policy=os.environ.get("BENCH_POLICY")), name="echo"
)
raw = carpool.Service(carpool.Stage(Identity), name="raw")
sleep = carpool.Service(carpool.Stage(DoubleSlowly, max_batch_size=64), name="sleep", slo_s=0.06)
sleep_adaptive = carpool.Service(carpool.Stage(DoubleSlowly, max_batch_size=64), name="sleep")
sleep_greedy = carpool.Service(carpool.Stage(DoubleSlowly, max_batch_size=64, policy="greedy"), name="sleep")
double = carpool.Service(carpool.Stage(DoubleAll, max_batch_size=64), name="double")
double_single = carpool.Service(carpool.Stage(DoubleOne), name="double_single")
RUN_IN: Any = os.environ.get("BENCH_RUN_IN", "process")  # what arrays cost where they cross no process border
arrays = carpool.Service(
    carpool.Stage(Touch, name="first", run_in=RUN_IN), carpool.Stage(Touch, name="second", run_in=RUN_IN), name="arrays"
)
