"""Threads that ask a service without a pause, and count what they get."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from tests.support.waiting import wait_until


class Callers:
    """Callers of a service inside a block.

    Args:
        handle: The running service.
        read: Returns of an answer the process that it comes from, and the item.
        n: How many threads there are.

    Attributes:
        answers: How many answers have come.
        errors: What was raised instead.
        pids: The processes that the answers come from.
        longest_s: How long the longest request has taken; a test may set it to 0.
    """

    def __init__(self, handle: Any, read: Callable[[Any], tuple[int, Any]] = lambda answer: answer, n: int = 8) -> None:
        self.answers = 0
        self.errors: list[BaseException] = []
        self.pids: set[int] = set()
        self.longest_s = 0.0
        self._handle = handle
        self._read = read
        self._is_over = False
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(n)]

    def _ask(self, number: int) -> None:
        x = number
        while not self._is_over:
            asked_at = time.monotonic()
            try:
                pid, answer = self._read(self._handle.predict(x))
                assert answer == x
                self.pids.add(pid)
                self.answers += 1
            except BaseException as error:
                self.errors.append(error)
            self.longest_s = max(self.longest_s, time.monotonic() - asked_at)
            x += 100

    def go_on(self, answers: int = 50) -> None:
        """Wait until so many more have come."""
        until = self.answers + answers
        wait_until(lambda: self.answers >= until or self.errors)

    def stop(self) -> None:
        """Ask nothing more, and wait for the answers."""
        self._is_over = True
        for thread in self._threads:
            thread.join(30)

    def __enter__(self) -> Callers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
