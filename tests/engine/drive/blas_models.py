"""Models that tell how many threads their libraries have, for workers that import nothing else."""

from __future__ import annotations

import os
from typing import Any

import carpool
from carpool.engine.worker.place import THREAD_VARIABLES


class Environment(carpool.Model):
    def predict(self, x: Any) -> dict[str, str]:
        return {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ}


class NumpyThreads(carpool.Model):
    def predict(self, x: Any) -> list[int]:
        import numpy  # noqa: F401
        from threadpoolctl import threadpool_info

        return [library["num_threads"] for library in threadpool_info()]


class TorchThreads(carpool.Model):
    def predict(self, x: Any) -> list[int]:
        import torch

        return [torch.get_num_threads()]
