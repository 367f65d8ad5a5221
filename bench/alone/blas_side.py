"""One turn of `bench.alone.blas`: how many requests a service of one model answers per second."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

import numpy as np

import carpool

CALLERS = 256
MAX_BATCH_SIZE = 100
WIDTH = 512
LAYERS = 4
NEIGHBOURS = 5
KNOWN = 2_000
WARM_UP_S = 1.0

Array = np.ndarray[Any, np.dtype[np.float32]]


def weights() -> list[Array]:
    random = np.random.default_rng(1)
    return [random.standard_normal((WIDTH, WIDTH), dtype=np.float32) / WIDTH**0.5 for _ in range(LAYERS)]


class Numpy(carpool.Model):
    """Four layers, by BLAS."""

    def setup(self) -> None:
        self.weights = weights()

    def predict(self, xs: list[Array]) -> Array:
        y = np.stack(xs)
        for layer in self.weights:
            y = np.maximum(y @ layer, 0)
        return y.sum(axis=1)  # type: ignore[no-any-return]


class Torch(carpool.Model):
    """The same four layers, by torch with its own threads."""

    def setup(self) -> None:
        import torch

        self.torch = torch
        self.weights = [torch.from_numpy(layer) for layer in weights()]

    def predict(self, xs: list[Array]) -> Array:
        with self.torch.inference_mode():
            y = self.torch.from_numpy(np.stack(xs))
            for layer in self.weights:
                y = self.torch.relu(y @ layer)
            return y.sum(dim=1).numpy()  # type: ignore[no-any-return]


class Sklearn(carpool.Model):
    """The nearest neighbours of an item, by OpenMP and BLAS together."""

    def setup(self) -> None:
        from sklearn.neighbors import NearestNeighbors

        known = np.random.default_rng(2).standard_normal((KNOWN, WIDTH), dtype=np.float32)
        self.model = NearestNeighbors(n_neighbors=NEIGHBOURS, algorithm="brute").fit(known)

    def predict(self, xs: list[Array]) -> Array:
        return self.model.kneighbors(np.stack(xs))[0].sum(axis=1)  # type: ignore[no-any-return]


MODELS: dict[str, type[carpool.Model]] = {"numpy": Numpy, "torch": Torch, "sklearn": Sklearn}


async def answers_per_second(model: str, workers: int, seconds: float) -> float:
    """A closed loop; what is answered while it warms up is not counted."""
    item = np.random.default_rng(3).standard_normal(WIDTH, dtype=np.float32)
    stage = carpool.Stage(MODELS[model], workers=workers, max_batch_size=MAX_BATCH_SIZE)
    answered = 0
    async with carpool.Service(stage).run_async() as service:
        end = time.perf_counter() + WARM_UP_S + seconds

        async def caller() -> None:
            nonlocal answered
            while time.perf_counter() < end:
                await service.predict(item)
                answered += 1

        callers = [asyncio.ensure_future(caller()) for _ in range(CALLERS)]
        await asyncio.sleep(WARM_UP_S)
        before, began = answered, time.perf_counter()
        await asyncio.gather(*callers)
        return (answered - before) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    asked = parser.parse_args()
    print(json.dumps({"rate": asyncio.run(answers_per_second(asked.model, asked.workers, asked.seconds))}))


if __name__ == "__main__":
    main()
