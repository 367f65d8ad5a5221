"""A model that keeps a diary, for workers that import nothing else."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import carpool


class KeepsDiary(carpool.Model):
    """Writes down its pid and each item that it is called with, and sleeps for the longest of them.

    With `stops`, the first process of all that is called stops itself as by SIGSTOP when it has written.
    """

    def __init__(self, diary: str, setup_s: float = 0.0, stops: bool = False) -> None:
        self.diary = Path(diary)
        self.setup_s = setup_s
        self.stops = stops

    def setup(self) -> None:
        time.sleep(self.setup_s)

    def predict(self, xs: list[float]) -> list[int]:
        is_first = not self.diary.exists()
        with self.diary.open("a") as file:
            file.writelines(f"{os.getpid()} {x}\n" for x in xs)
        if is_first and self.stops:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(max(xs))
        return [os.getpid() for _ in xs]
