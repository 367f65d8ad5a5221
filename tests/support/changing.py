"""Models whose version is in a file, so that a test sees which workers answer, and callers that never stop asking."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import carpool


class Versioned(carpool.Model):
    """Adds the version that it has read from a file, and its process, to a list; a text that is no number breaks it."""

    examples = ([],)

    def __init__(self, file: str, cost_s: float = 0.0, load_s: float = 0.0) -> None:
        self.file = Path(file)
        self.cost_s = cost_s
        self.load_s = load_s

    def setup(self) -> None:
        time.sleep(self.load_s)
        self.version = int(self.file.read_text())

    def predict(self, xs: list[list[int]]) -> list[list[int]]:
        time.sleep(self.cost_s)
        return [[*x, self.version] for x in xs]


class Pid(carpool.Model):
    """Answers with the worker's index and its process."""

    def predict(self, xs: list[Any]) -> list[tuple[int, int]]:
        return [(carpool.worker_index(), os.getpid()) for _ in xs]


class Callers:
    """Threads that ask a service one thing after the other, and keep all answers and errors."""

    def __init__(self, service: Any, n: int, item: Any = ()) -> None:
        self.answers: list[Any] = []
        self.errors: list[BaseException] = []
        self._service = service
        self._item = list(item)
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(n)]

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        while not self._is_over.wait(0.002):  # a load without a pause would take the machine from the other tests
            try:
                self.answers.append(self._service.predict(self._item))
            except BaseException as error:
                self.errors.append(error)
