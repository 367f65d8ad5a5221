"""What a batch of images costs on its way without a model, step by step: what each step could gain.

    python -m bench.gpu.floor SECONDS

Times are medians for a batch of 64 images of 224 as bytes (9.6 MB). Steps that need torch or a card
are left out where there is none. The rows are printed as JSON.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

import carpool
from bench.gpu.tasks import is_small

Row = dict[str, Any]


def batch_of_images() -> list[np.ndarray[Any, Any]]:
    n, side = (4, 32) if is_small() else (64, 224)
    return [np.full((3, side, side), i, dtype=np.uint8) for i in range(n)]


class Nothing(carpool.Model):
    """Looks at no item: what is left is the way."""

    def predict(self, items: list[Any]) -> list[int]:
        return [len(items)] * len(items)


class Same(carpool.Model):
    """Gives each item back: the way there and back."""

    def predict(self, items: list[Any]) -> list[Any]:
        return items


class Pickled:
    """An item of a class of one's own, whose pickle holds its bytes within."""

    def __init__(self, image: Any) -> None:
        self.image = image

    def __reduce__(self) -> Any:
        return bytes, (self.image.tobytes(),)


def timed(step: str, work: Callable[[], Any], seconds: float, size: int) -> Row:
    """Return the median time of some work."""
    taken, until = [], time.perf_counter() + seconds
    work()
    while time.perf_counter() < until or len(taken) < 3:
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return {"side": step, "batch_s": median(taken), "gb_per_s": size / median(taken) / 1e9, "runs": len(taken)}


def on_the_host(images: list[np.ndarray[Any, Any]], seconds: float) -> list[Row]:
    """Stacking, pickling, and the way through a worker process of carpool."""
    block = np.stack(images)
    kinds: dict[str, list[Any]] = {
        "numpy": images,
        "pickled": [Pickled(image) for image in images],
        "one block": [block],
    }
    if torch := torch_if_there():
        kinds["torch, CPU"] = [torch.from_numpy(image) for image in images]
    found = [
        timed("np.stack", lambda: np.stack(images), seconds, block.nbytes),
        timed("pickle protocol 5, in band", lambda: pickle.dumps(images, protocol=5), seconds, block.nbytes),
    ]
    for model in (Nothing, Same):
        way = "there" if model is Nothing else "there and back"
        for name, items in kinds.items():
            stage = carpool.Stage(model, max_batch_size=len(items), policy="static")
            with carpool.Service(stage).run() as s:
                # As many at once as one batch holds: each call is one batch.
                def work(s: Any = s, items: list[Any] = items) -> None:
                    list(s.stream(items, max_in_flight=len(items)))

                found.append(timed(f"{way}: {name}", work, seconds, block.nbytes))
    return found


def torch_if_there() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch


def on_the_card(images: list[np.ndarray[Any, Any]], seconds: float) -> list[Row]:
    """Copies to and from a card, from memory that can be paged and that cannot."""
    torch = torch_if_there()
    if torch is None or not torch.cuda.is_available():
        return []
    block = torch.from_numpy(np.stack(images))
    pinned, there = block.pin_memory(), block.cuda()
    rows = [torch.from_numpy(image) for image in images]
    size = block.nbytes
    results = torch.zeros((len(images), 1000), device="cuda")
    small = torch.zeros((len(images), 1000)).pin_memory()

    def done(work: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            work()
            torch.cuda.synchronize()

        return run

    def into_pinned() -> None:
        torch.stack(rows, out=pinned)

    def row_by_row() -> None:
        for at, row in enumerate(rows):
            there[at].copy_(row, non_blocking=True)

    stream = torch.cuda.Stream()

    def overlapped() -> None:
        with torch.cuda.stream(stream):
            there.copy_(pinned, non_blocking=True)
        torch.stack(rows)

    steps = {
        "to the card, pageable": lambda: block.to("cuda"),
        "to the card, pinned": lambda: there.copy_(pinned, non_blocking=True),
        "to the card, row by row, pageable": row_by_row,
        "stack into pinned memory": into_pinned,
        "stack and copy, pinned": lambda: (into_pinned(), there.copy_(pinned, non_blocking=True)),
        "stack beside a copy, pinned": overlapped,
        "bytes to bfloat16 on the card": lambda: there.to(torch.bfloat16),
        "64 rows of 1,000 back, pageable": lambda: results.cpu(),
        "64 rows of 1,000 back, pinned": lambda: small.copy_(results, non_blocking=True),
        "an empty kernel and its wait": lambda: results[0, :1].add_(1),
        "pin a block anew": lambda: block.pin_memory(),
    }
    return [timed(step, done(work), seconds, size) for step, work in steps.items()]


def main() -> None:
    seconds, images = float(sys.argv[1]), batch_of_images()
    print(json.dumps(on_the_card(images, seconds) + on_the_host(images, seconds)))


if __name__ == "__main__":
    main()
