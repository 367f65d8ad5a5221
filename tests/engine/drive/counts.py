"""A model that counts its calls, for workers that import nothing else."""

from __future__ import annotations

import os
import time
from typing import Any

import carpool


class Counts(carpool.Model):
    """Says how often it was called, and in which process; sleeps, waits, raises or dies as it is told."""

    def setup(self) -> None:
        self.calls = 0

    def predict(self, item: Any) -> Any:
        self.calls += 1
        if isinstance(item, float):
            time.sleep(item)
        if isinstance(item, dict):
            while not os.path.exists(item["until"]):
                time.sleep(0.002)
        if item == "raise":
            raise LookupError("no such thing")
        if item == "die":
            os._exit(3)
        if item == "large":
            return bytes(200_000)
        if item == "array":
            import numpy as np

            return np.arange(5.0)
        return item, self.calls, os.getpid()
