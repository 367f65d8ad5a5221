"""Models that answer in parts: they count, so each part says which it must be."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import carpool


class Counting(carpool.Model):
    """Counts from 1 to its item, and cannot go on elsewhere.

    An item is the last number, or a dict with `n` and what goes wrong: `at`, and then `raise` (a text), `kill`, `hang`
    (seconds) or `bytes` (how long each part is).
    """

    def __init__(self, step_s: float = 0.0, log: list[Any] | None = None) -> None:
        self.step_s = step_s
        self.log = log if log is not None else []

    def start(self, xs: list[Any]) -> list[dict[str, Any]]:
        states = [{"n": x, "i": 0} if isinstance(x, int) else {**x, "i": 0} for x in xs]
        self.log += [("start", state["n"]) for state in states]
        return states

    def step(self, states: list[dict[str, Any]]) -> list[Any]:
        time.sleep(self.step_s)
        for state in states:
            if state["i"] == state.get("at"):
                self._misbehave(state)
            state["i"] += 1
        self.log.append(("step", [state["n"] for state in states]))
        return [self._part(state) for state in states]

    def stop(self, state: dict[str, Any]) -> None:
        self.log.append(("stop", state["n"]))

    def _misbehave(self, state: dict[str, Any]) -> None:
        if "raise" in state:
            raise ValueError(state["raise"])
        if "kill" in state:
            os.kill(os.getpid(), signal.SIGKILL)
        if "hang" in state:
            time.sleep(state["hang"])

    def _part(self, state: dict[str, Any]) -> Any:
        part: Any = state["i"] if "bytes" not in state else bytes([state["i"] % 256]) * state["bytes"]
        return carpool.Last(part) if state["i"] >= state["n"] else part


class Resuming(Counting):
    """Counts likewise, and can go on from the numbers that it has said."""

    def resume(self, xs: list[Any], parts: list[list[Any]]) -> list[dict[str, Any]]:
        for said in parts:
            assert [each[0] if isinstance(each, bytes) else each for each in said] == list(range(1, len(said) + 1))
        self.log += [("resume", len(said)) for said in parts]
        states = Counting.start(self, xs)
        for state, said in zip(states, parts, strict=True):
            state["i"] = len(said)
        return states


class Spelling(Resuming):
    """Says its numbers as texts, and sums them up for those who want the whole answer."""

    def postprocess(self, part: int) -> str:
        return f"number {part}"

    def collect(self, parts: list[str]) -> str:
        return "; ".join(parts)


class Once(carpool.Model):
    """A generator for each item."""

    def predict(self, n: int) -> Iterator[int]:  # type: ignore[override]
        yield from range(1, n + 1)


class Together(carpool.Model):
    """A generator for each batch."""

    def predict(self, ns: list[int]) -> Iterator[list[Any]]:  # type: ignore[override]
        for i in range(1, max(ns) + 1):
            yield [carpool.END if i > n else i for n in ns]


class Later(carpool.Model):
    """An asynchronous generator for each item."""

    async def predict(self, n: int) -> AsyncIterator[int]:  # type: ignore[override]
        for i in range(1, n + 1):
            await asyncio.sleep(0)
            yield i


class StepsLater(carpool.Model):
    """Steps that are `async def`."""

    async def start(self, ns: list[int]) -> list[list[int]]:
        return [[n, 0] for n in ns]

    async def step(self, states: list[list[int]]) -> list[int]:
        await asyncio.sleep(0)
        for state in states:
            state[1] += 1
        return [carpool.Last(i) if i == n else i for n, i in states]  # type: ignore[misc]

    async def stop(self, state: list[int]) -> None:
        pass


class Held(carpool.Model):
    """A generator of two parts, of which the second one comes once the file exists that its item names."""

    def predict(self, path: str) -> Iterator[int]:  # type: ignore[override]
        yield 1
        wait_for_file(path)
        yield 2


class HeldSteps(carpool.Model):
    """The same in steps."""

    def start(self, paths: list[str]) -> list[list[Any]]:
        return [[path, 0] for path in paths]

    def step(self, states: list[list[Any]]) -> list[Any]:
        for state in states:
            if state[1]:
                wait_for_file(state[0])
            state[1] += 1
        return [carpool.Last(made) if made == 2 else made for _, made in states]

    def stop(self, state: list[Any]) -> None:
        pass


class HeldLater(carpool.Model):
    """The same as an asynchronous generator."""

    async def predict(self, path: str) -> AsyncIterator[int]:  # type: ignore[override]
        yield 1
        await asyncio.to_thread(wait_for_file, path)
        yield 2


def wait_for_file(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.002)


def up_to(n: int) -> list[int]:
    return list(range(1, n + 1))
