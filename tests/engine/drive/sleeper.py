"""A model that sleeps and keeps notes, for workers that import nothing else."""

from __future__ import annotations

import time

import carpool

LONG = b"long"
"""An item that takes a second."""


class Slow(carpool.Model):
    """Sleeps, and says how long its items are, and how many calls there have been."""

    def __init__(self, seconds: float = 0.01, file: str = "") -> None:
        self.seconds = seconds
        self.file = file

    def note(self, what: str) -> None:
        if self.file:
            with open(self.file, "a") as lines:
                lines.write(f"{what}\n")

    def predict(self, xs: list[bytes]) -> list[int]:
        self.note("ran")
        time.sleep(1.0 if LONG in xs else self.seconds)
        return [len(x) for x in xs]

    def teardown(self) -> None:
        self.note("torn down")
