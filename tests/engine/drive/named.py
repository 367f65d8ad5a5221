"""A model that knows its worker's names, for workers that import nothing else."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

import carpool


class Named(carpool.Model):
    """A model that tells which names of its worker it sees in its set-up and in its calls."""

    def setup(self) -> None:
        self.name = multiprocessing.current_process().name

    def predict(self, x: Any) -> list[str]:
        return [self.name, multiprocessing.current_process().name, threading.current_thread().name]
