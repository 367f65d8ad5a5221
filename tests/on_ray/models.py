"""Models for services on a cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import carpool


class Place(carpool.Model):
    """Answers with where it runs.

    Args:
        is_broken: Whether it cannot be loaded.
    """

    def __init__(self, is_broken: bool = False) -> None:
        self.is_broken = is_broken

    def setup(self) -> None:
        if self.is_broken:
            raise RuntimeError("there are no weights")
        import ray

        self.node = ray.get_runtime_context().get_node_id()
        self.colour = os.environ.get("COLOUR")

    def predict(self, xs: list[Any]) -> list[dict[str, Any]]:
        if "die" in xs:
            os.kill(os.getpid(), signal.SIGKILL)
        if "hang" in xs:
            time.sleep(60)
        time.sleep(0.001)
        where = {
            "pid": os.getpid(),
            "node": self.node,
            "is_main_thread": threading.current_thread() is threading.main_thread(),
            "colour": self.colour,
            "index": carpool.worker_index(),
            "variable": os.environ["CARPOOL_WORKER"],
        }
        return [{**where, "x": x} for x in xs]


class Doubled(carpool.Model):
    """Doubles numbers."""

    def predict(self, xs: list[float]) -> list[float]:
        return [2 * x for x in xs]


class Later(carpool.Model):
    """Adds one to the id of a row, after a moment."""

    async def predict(self, rows: list[dict[str, Any]]) -> list[int]:
        await asyncio.sleep(0.001)
        return [row["id"] + 1 for row in rows]


class Words(carpool.Model):
    """Counts the words of a row's text."""

    def predict(self, rows: list[dict[str, Any]]) -> list[int]:
        if any(row["text"] == "bad" for row in rows):
            raise ValueError("there is a bad word")
        return [len(row["text"].split()) for row in rows]


class Diary(carpool.Model):
    """Says in files of its process when it has begun, and when it is torn down."""

    def __init__(self, folder: str) -> None:
        self.mine = Path(folder, str(os.getpid()))

    def setup(self) -> None:
        self.mine.write_text("begun")

    def predict(self, rows: list[dict[str, Any]]) -> list[int]:
        if any(row["id"] < 0 for row in rows):
            raise ValueError("there is no such row")
        return [row["id"] for row in rows]

    def teardown(self) -> None:
        self.mine.write_text("torn down")


class Padded(carpool.Model):
    """Answers with the length of a text, and that of the longest in its call, for which it takes its time."""

    def predict(self, texts: list[str]) -> list[dict[str, int]]:
        longest = max(map(len, texts))
        time.sleep(0.0002 + 0.00002 * longest * len(texts))
        return [{"length": len(text), "padded": longest} for text in texts]
