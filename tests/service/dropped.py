"""Models that outlive their handles, for workers that import nothing else."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import carpool


class Diary(carpool.Model):
    """A model that writes down its end."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def predict(self, x: Any) -> Any:
        return x

    def teardown(self) -> None:
        self.path.write_text("torn down")


class Slow(carpool.Model):
    def predict(self, x: float) -> float:
        time.sleep(x)
        return x


async def echo(x: Any) -> Any:
    return x
