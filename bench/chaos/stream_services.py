"""Services whose every part follows from the item and the part before; for `bench.chaos.streams`.

An item is a seed, how many tokens, and how many bytes each part is padded to. A part is a token, or
a text that begins with it.
"""

from __future__ import annotations

import time
from typing import Any

import carpool

MULTIPLIER, MODULUS = 48271, 2**31 - 1
STEP_S = 0.002
ROWS, WORKERS, HANG_S = 16, 2, 1.0

Part = int | str


def following(token: int) -> int:
    """Return the token that follows another, or a seed."""
    return (token * MULTIPLIER + 1) % MODULUS


def padded(token: int, nbytes: int) -> Part:
    """Return a token as a part."""
    return f"{token} ".ljust(nbytes, ".") if nbytes else token


class Plain(carpool.Model):
    """Says one token after the other."""

    def start(self, xs: list[tuple[int, int, int]]) -> list[list[int]]:
        return [list(x) for x in xs]

    def step(self, states: list[list[int]]) -> list[Any]:
        time.sleep(STEP_S)
        parts: list[Any] = []
        for state in states:
            state[0] = following(state[0])
            state[1] -= 1
            part = padded(state[0], state[2])
            parts.append(part if state[1] else carpool.Last(part))
        return parts

    def stop(self, state: list[int]) -> None:
        state.clear()  # a step after it would fail


class Resuming(Plain):
    """The same, and it goes on from the last token."""

    def resume(self, xs: list[tuple[int, int, int]], parts: list[list[Any]]) -> list[list[int]]:
        return [
            [int(str(said[-1]).split()[0]), n - len(said), nbytes]
            for (_, n, nbytes), said in zip(xs, parts, strict=True)
        ]


def _service(model: type[carpool.Model], name: str) -> carpool.Service:
    stage = carpool.Stage(model, max_batch_size=ROWS, workers=WORKERS, max_batch_time_s=HANG_S)
    return carpool.Service(stage, name=name, timeout_s=30.0)


resuming = _service(Resuming, "resuming")
plain = _service(Plain, "plain")
