"""carpool's services of `bench.protocols.tensors`: what they get comes back as it was."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import carpool


class Same(carpool.Model):
    """The rows of tensors come back as they were."""

    def predict(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        return rows


class SameBytes(carpool.Model):
    """The body comes back as it was."""

    def predict(self, bodies: list[bytes]) -> list[bytes]:
        return bodies


tensors = carpool.Service(carpool.Stage(Same, max_batch_size=64), name="tensors")
raw = carpool.Service(carpool.Stage(SameBytes, max_batch_size=64), name="raw")
