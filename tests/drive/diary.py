"""A model that keeps a diary, for workers that import nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import carpool


class KeepsDiary(carpool.Model):
    """Writes down its pid and each item that it is called with, and sleeps for the longest of them."""

    def __init__(self, diary: str, setup_s: float = 0.0) -> None:
        self.diary = Path(diary)
        self.setup_s = setup_s

    def setup(self) -> None:
        time.sleep(self.setup_s)

    def predict(self, xs: list[float]) -> list[int]:
        with self.diary.open("a") as file:
            file.writelines(f"{os.getpid()} {x}\n" for x in xs)
        time.sleep(max(xs))
        return [os.getpid() for _ in xs]
