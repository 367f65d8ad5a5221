"""Models that ask which worker they are. In a module that worker processes import quickly."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import carpool

try:
    AT_IMPORT: int | None = carpool.worker_index()  # a worker process imports this module, too
except RuntimeError:
    AT_IMPORT = None

NAMES = ("CARPOOL_WORKER", "CARPOOL_WORKERS")
NAMES_AT_IMPORT = [os.environ.get(name) for name in NAMES]


class Asks(carpool.Model):
    """Asks for its index in `__init__` and in every hook."""

    torn_down: list[int] = []  # noqa: RUF012 - shared on purpose

    def __init__(self) -> None:
        self.asked = {"__init__": carpool.worker_index()}

    def setup(self) -> None:
        self.asked["setup"] = carpool.worker_index()

    def preprocess(self, x: float) -> float:
        self.asked["preprocess"] = carpool.worker_index()
        return x

    def predict(self, seconds: float) -> dict[str, Any]:
        time.sleep(seconds)
        asked = self.asked | {"predict": carpool.worker_index()}
        return {"pid": os.getpid(), "asked": asked}

    def postprocess(self, y: dict[str, Any]) -> dict[str, Any]:
        return y | {"asked": y["asked"] | {"postprocess": carpool.worker_index()}}

    def teardown(self) -> None:
        self.torn_down.append(carpool.worker_index())


class AsksOnTheLoop(carpool.Model):
    torn_down: list[int] = []  # noqa: RUF012 - shared on purpose

    async def setup(self) -> None:
        self.in_setup = carpool.worker_index()

    async def predict(self, x: int) -> tuple[int, int]:
        return self.in_setup, carpool.worker_index()

    async def teardown(self) -> None:
        self.torn_down.append(carpool.worker_index())


class AsksInThreads(carpool.Model):
    """Asks while its module is imported and in a thread of its own, and looks into the environment."""

    def predict(self, seconds: float) -> dict[str, Any]:
        time.sleep(seconds)
        with ThreadPoolExecutor(1) as pool:
            index = pool.submit(carpool.worker_index).result()
        env = {name: os.environ.get(name) for name in ("FLAVOUR", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")}
        return {"pid": os.getpid(), "index": index, "at import": AT_IMPORT, "names": NAMES_AT_IMPORT, "env": env}
