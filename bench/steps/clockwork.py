"""A model of steps of a known time that notes when they began, and the same loop without carpool.

An item is a dict: `{"steps": n}` is a stream of n parts, `{"bare": rows, "seconds": s}` runs the
loop alone, in the worker's own process, and `{"periods": rows}` tells the distances of the steps of
so many rows since the last time that this was asked. Both are answered with one part, a list of
pairs: seconds, and those of them in which the worker's processor worked.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import carpool

STEP_S = 2e-3
Item = dict[str, Any]
State = dict[str, Any]


class Clockwork(carpool.Model):
    """Steps that take no time at all."""

    examples = ({"steps": 3},)

    def setup(self) -> None:
        self.began: list[tuple[float, float, int]] = []

    def start(self, items: list[Item]) -> list[State]:
        return [self._state(item) for item in items]

    def _state(self, item: Item) -> State:
        if "bare" in item:
            return {"i": 0, "n": 1, "answer": self.bare(item["bare"], item["seconds"])}
        if "periods" in item:
            return {"i": 0, "n": 1, "answer": self.periods(item["periods"])}
        return {"i": 0, "n": item["steps"]}

    def bare(self, rows: int, seconds: float) -> list[tuple[float, float]]:
        """Return the distances of steps that follow each other at once."""
        self.began = []
        states: list[State] = [{"i": 0, "n": 10**9} for _ in range(rows)]
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            self.step(states)
        return self.periods(rows)

    def periods(self, rows: int) -> list[tuple[float, float]]:
        """Return the distances of neighbouring steps that had so many rows."""
        began, self.began = self.began, []
        pairs = pairwise(began)
        return [(u - t, later - earlier) for (t, earlier, n), (u, later, m) in pairs if n == m == rows]

    def step(self, states: list[State]) -> list[Any]:
        self.began.append((time.perf_counter(), time.thread_time(), len(states)))
        self.work()
        parts: list[Any] = []
        for state in states:
            state["i"] = i = state["i"] + 1
            parts.append(i if i < state["n"] else carpool.Last(state.get("answer", i)))
        return parts

    def work(self) -> None:
        """Take the time of a step."""

    def stop(self, state: State) -> None:
        """There is nothing to free."""


class Busy(Clockwork):
    """Steps that keep their core busy, as a model on the CPU does."""

    def work(self) -> None:
        until = self.began[-1][0] + STEP_S
        while time.perf_counter() < until:
            pass


class Sleeping(Clockwork):
    """Steps that leave their core free, as a model on a GPU does."""

    def work(self) -> None:
        time.sleep(STEP_S)
