"""What the servers of these tests serve. Plain models; those that need numpy or pydantic are in `typed.py`."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import msgspec

from carpool import Model, Service, Stage, ValidationError


def wait_at(gate: str) -> None:
    """Knock at a `Gate` of the test and wait until it lets us through."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(gate)
        sock.recv(1)


class Scale(Model):
    """Twice the number; its types make a 422 of anything else."""

    examples = (1.5, 2)

    def predict(self, xs: list[float]) -> list[float]:
        return [2 * x for x in xs]


class Echo(Model):
    """A model that gives back what it gets."""

    def predict(self, xs: list[Any]) -> list[Any]:
        return xs


class Job(msgspec.Struct):
    """Attributes:
    value: comes back; -1 asks for all values seen so far.
    gate: where to wait before the batch is answered.
    """

    value: int
    gate: str = ""


class Done(msgspec.Struct):
    """Attributes:
    value: the job's; batch: how many were in its batch; seen: all values so far, for job -1.
    """

    value: int
    batch: int
    seen: list[int] = []


class Gated(Model):
    """Does not answer before the test says so."""

    def setup(self) -> None:
        self.seen: list[int] = []

    def predict(self, jobs: list[Job]) -> list[Done]:
        self.seen += [job.value for job in jobs]
        for job in jobs:
            if job.gate:
                wait_at(job.gate)
        return [Done(job.value, len(jobs), self.seen if job.value == -1 else []) for job in jobs]


class Moody(Model):
    """Each item says what goes wrong with it."""

    def predict(self, moods: list[str]) -> list[int]:
        if "raise" in moods:
            raise RuntimeError("the secret is 1234")
        return [self._answer(mood) for mood in moods]

    def _answer(self, mood: str) -> Any:
        if mood == "invalid":
            return ValidationError("the mood is not one of ours")
        if mood == "long":
            return ValidationError("x" * 10_000)
        if mood == "fails":
            return RuntimeError("the secret is 1234")
        return "no number" if mood == "wrong" else len(mood)


def sleepy(xs: list[float]) -> list[float]:
    """Takes as long as the largest item says."""
    time.sleep(max(xs))
    return xs


class Csv(Model):
    """Reads and writes text of its own, a batch at a time: the sum of a line of numbers."""

    accepts = ("text/csv",)
    produces = "text/csv; charset=utf-8"

    def decode(self, bodies: list[bytes]) -> list[list[float]]:
        return [[float(x) for x in body.decode().split(",")] for body in bodies]

    def predict(self, rows: list[list[float]]) -> list[tuple[float, int]]:
        return [(sum(row), len(rows)) for row in rows]

    def encode(self, results: list[tuple[float, int]]) -> list[bytes]:
        return [f"{total},{n}".encode() for total, n in results]


class Reverse(Model):
    """A model of bytes that turns them round."""

    def predict(self, bodies: list[bytes]) -> list[bytes]:
        return [body[::-1] for body in bodies]


class Fragile(Model):
    """Works until it is told to break; then its example no longer runs."""

    examples = ("fine",)
    broken = False

    def predict(self, word: str) -> str:
        self.broken = self.broken or word == "break"
        if self.broken:
            raise RuntimeError("broken")
        return word


class Mortal(Model):
    """A model whose process dies when an item asks for it."""

    def predict(self, word: str) -> str:
        if word == "die":
            os._exit(3)
        return word


class SlowToLoad(Model):
    """A model that is loaded when the test says so."""

    def setup(self) -> None:
        wait_at(os.environ["CARPOOL_TEST_GATE"])

    def predict(self, x: float) -> float:
        return x


def cannot_load(x: float) -> float:
    """Its stage has an example that fails."""
    return x


class Broken(Model):
    """A model that cannot be loaded."""

    def setup(self) -> None:
        raise RuntimeError("no weights")

    def predict(self, x: float) -> float:
        return x


def increment(xs: list[int]) -> list[int]:
    """x + 1."""
    return [x + 1 for x in xs]


scale = Service(Stage(Scale, max_batch_size=64), name="scale", slo_s=5.0)
echo = Service(Stage(Echo, max_batch_size=64), name="echo")
gated = Service(Stage(Gated, max_batch_size=8), name="gated")
moody = Service(Stage(Moody, max_batch_size=8), name="moody")
csv = Service(Stage(Csv, max_batch_size=8), name="csv")
reverse = Service(Stage(Reverse, max_batch_size=8), name="reverse")
slow_to_load = Service(SlowToLoad, name="slow")
broken = Service(Broken, name="broken")
two_steps = Service(
    Stage(increment, name="one", max_batch_size=8), Stage(increment, name="two", max_batch_size=8), name="two steps"
)
