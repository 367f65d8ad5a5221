"""carpool's services of `bench gpu`: the tasks by name, and one without a model for `front`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

import carpool
from bench.gpu.tasks import TASKS, Runner, of_bytes

LIMIT = int(os.environ.get("BENCH_GPU_BATCH", "64"))
WORKERS = int(os.environ.get("BENCH_GPU_WORKERS", "1"))


class _Network(carpool.Model):
    """Runs the network of the task that its class names."""

    task: str

    def setup(self) -> None:
        self.runner = Runner(TASKS[self.task])


class Resnet(_Network):
    """Images of bytes."""

    task = "resnet"
    examples = tuple(TASKS["resnet"].item(n) for n in range(2))

    def predict(self, images: list[NDArray[np.uint8]]) -> NDArray[np.float32]:
        return self.runner.call(images)


class Mlp(_Network):
    """Rows of numbers, which travel as one block."""

    task = "mlp"
    examples = tuple(TASKS["mlp"].item(n) for n in range(2))

    def predict(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        return self.runner.call(rows)


class Minilm(_Network):
    """Texts of token ids."""

    task = "minilm"
    examples = tuple(TASKS["minilm"].item(n) for n in range(8))

    def predict(self, texts: list[NDArray[np.int32]]) -> NDArray[np.float32]:
        return self.runner.call(texts)


class Base(Minilm):
    """The same, four times as large."""

    task = "base"


class _Raw(_Network):
    """The same with raw bytes, as other servers get them: an array's in, float32 out."""

    def predict(self, bodies: list[bytes]) -> list[bytes]:
        return [row.tobytes() for row in self.runner.call([of_bytes(self.task, body) for body in bodies])]


class ResnetRaw(_Raw):
    task = "resnet"
    examples = tuple(item.tobytes() for item in Resnet.examples)


class MlpRaw(_Raw):
    task = "mlp"
    examples = tuple(item.tobytes() for item in Mlp.examples)


class MinilmRaw(_Raw):
    task = "minilm"
    examples = tuple(item.tobytes() for item in Minilm.examples)


class BaseRaw(MinilmRaw):
    task = "base"


class Double(carpool.Model):
    """{"x": 1.5} to {"y": 3.0}."""

    examples = ({"x": 1.5},)

    def predict(self, items: list[dict[str, float]]) -> list[dict[str, float]]:
        return [{"y": 2 * item["x"]} for item in items]


def service_of(model: type[carpool.Model], **settings: Any) -> carpool.Service:
    """Return the service of a model, with the limit and the workers that the environment names."""
    stage = carpool.Stage(model, max_batch_size=LIMIT, workers=WORKERS, **settings)
    return carpool.Service(stage, name=model.__name__.lower(), timeout_s=60)


resnet = service_of(Resnet)
mlp = service_of(Mlp)
minilm = service_of(Minilm, length=len)
base = service_of(Base, length=len)
resnet_raw = service_of(ResnetRaw)
mlp_raw = service_of(MlpRaw)
minilm_raw = service_of(MinilmRaw, length=len)
base_raw = service_of(BaseRaw, length=len)
double = service_of(Double)
SERVICES = {"resnet": resnet, "mlp": mlp, "minilm": minilm, "base": base}
