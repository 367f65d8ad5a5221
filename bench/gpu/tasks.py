"""What is asked of the models: the items, the network, and one timed call of it.

All sides run the same `Runner`: the offline loop, carpool's model, and the workers of other
servers.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from bench.gpu.meter import Meter

SMALL = "BENCH_GPU_SMALL"
"""The environment variable of a smoke test: networks and items are small."""


def is_small() -> bool:
    return bool(os.environ.get(SMALL))


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, slots=True)
class Task:
    """One model and its items.

    Attributes:
        name: Of the part.
        item: Makes the item with a number; the same one on each side.
        network: Makes the network.
        batches: The sizes that the offline loop tries; the servers' limit is the best of them.
        by_length: Whether items differ in length and are padded.
        workers: How many processes serve it, a row for each. Texts have one row: the part takes
            150 s at most.
    """

    name: str
    item: Callable[[int], np.ndarray[Any, Any]]
    network: Callable[[], Any]
    batches: tuple[int, ...]
    by_length: bool = False
    workers: tuple[int, ...] = (1, 2)


def _image(number: int) -> np.ndarray[Any, Any]:
    side = 16 if is_small() else 224
    return np.random.default_rng(number).integers(0, 256, (3, side, side), dtype=np.uint8)


def _row(number: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(number).standard_normal(512, dtype=np.float32)


def _text(number: int) -> np.ndarray[Any, Any]:
    """Token ids; lengths are lognormal with a median of 40, of 512 at most."""
    chance = Random(number)
    length = min(32 if is_small() else 512, max(3, round(chance.lognormvariate(3.7, 0.8))))
    return np.array([chance.randrange(30_522) for _ in range(length)], dtype=np.int32)


def _resnet() -> Any:
    from bench.gpu.networks import ResNet50

    return ResNet50((1,) if is_small() else (3, 4, 6, 3))


def _mlp() -> Any:
    from bench.gpu.networks import MLP

    return MLP(256 if is_small() else 4096)


def _minilm() -> Any:
    from bench.gpu.networks import Encoder

    return Encoder(1, 48) if is_small() else Encoder(6, 384)


def _base() -> Any:
    from bench.gpu.networks import Encoder

    return Encoder(1, 96) if is_small() else Encoder(12, 768)


_SIZES: tuple[int, ...] = (32,) if is_small() else (32, 64, 128, 256)
TASKS = {
    task.name: task
    for task in (
        Task("resnet", _image, _resnet, _SIZES),
        Task("mlp", _row, _mlp, (64, 256)),
        Task("minilm", _text, _minilm, _SIZES, by_length=True, workers=(1,)),
        Task("base", _text, _base, _SIZES, by_length=True, workers=(1,)),
    )
}


def of_bytes(name: str, body: bytes) -> np.ndarray[Any, Any]:
    """Return the item whose bytes these are."""
    dtype, shape = _form_of(name)
    return np.frombuffer(body, dtype).reshape(shape)


@functools.cache
def _form_of(name: str) -> tuple[Any, tuple[int, ...]]:
    """Return the dtype and the shape of the items of a task."""
    example = TASKS[name].item(0)
    return example.dtype, (-1,) if TASKS[name].by_length else example.shape


def padded(texts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return texts of different length as one block, with -1 behind their ends.

    Lengths are rounded up to a multiple of 32, since a first call of a shape takes a card 50 ms.
    """
    longest = -(-max(map(len, texts)) // 32) * 32
    block = np.full((len(texts), longest), -1, dtype=np.int32)
    for row, text in zip(block, texts, strict=True):
        row[: len(text)] = text
    return block


class Runner:
    """The network on the device, and calls of it that note how long each of their parts took.

    Times on a card are those of its own events, so the host is not held up between the parts.
    """

    def __init__(self, task: Task) -> None:
        import torch

        torch.manual_seed(7)
        self.torch = torch
        self.task = task
        self.device = device()
        self.is_card = self.device == "cuda"
        kind = torch.bfloat16 if self.is_card else torch.float32
        network = task.network().eval().requires_grad_(False).to(self.device, kind)
        self.network = network.to(memory_format=torch.channels_last) if task.name == "resnet" else network
        self.meter = Meter()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(4)] if self.is_card else []
        self._marks: list[float] = []

    def _mark(self, at: int) -> None:
        if self.is_card:
            self._events[at].record()
        else:
            self._marks.append(time.perf_counter())

    def _between(self, at: int) -> float:
        """Seconds between two marks."""
        if self.is_card:
            return float(self._events[at].elapsed_time(self._events[at + 1])) / 1e3
        return self._marks[at + 1] - self._marks[at]

    def call(self, items: Any) -> np.ndarray[Any, Any]:
        """Return a row of float32 for each item of a batch, a list of arrays or one array."""
        torch, counts = self.torch, self.meter.counts
        self.meter.begin()
        self._marks.clear()
        began = time.perf_counter()
        if self.task.by_length:
            block = padded(items)
        else:
            block = items if isinstance(items, np.ndarray) else np.stack(items)
        host = torch.from_numpy(block)
        counts.stack_s += time.perf_counter() - began
        with torch.inference_mode():
            self._mark(0)
            there = host.to(self.device)
            self._mark(1)
            result = self.network(there)
            self._mark(2)
            back = result.float().cpu()
            self._mark(3)
        if self.is_card:
            self._events[3].synchronize()
        counts.in_s += self._between(0)
        counts.compute_s += self._between(1)
        counts.out_s += self._between(2)
        self.meter.end(len(items), torch.cuda.max_memory_allocated() if self.is_card else 0)
        answer: np.ndarray[Any, Any] = back.numpy()
        return answer
