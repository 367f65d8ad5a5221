"""carpool with the witness as its model.  carpool serve bench.chaos.carpool_service:service"""

from __future__ import annotations

import os
from typing import Any

import carpool
from bench.chaos import mutants, targets
from bench.chaos.witness import Witness
from carpool.faults import VARIABLE


class Witnessed(carpool.Model):
    """The witness behind carpool's hooks."""

    def setup(self) -> None:
        self._witness = Witness()

    def predict(self, items: list[Any]) -> list[Any]:
        return self._witness.answer(items)


mutants.apply_from_environment()

service = carpool.Service(
    carpool.Stage(
        Witnessed,
        workers=targets.WORKERS,
        max_batch_size=targets.BATCH,
        max_queue_size=targets.QUEUE,
        max_batch_time_s=targets.HANG_S,
        env={VARIABLE: os.environ.get(targets.WORKER_FAULT, "")},
    ),
    timeout_s=targets.TIMEOUT_S,
    name="witnessed",
)
