"""carpool with the witness as its model.  carpool serve bench.chaos.carpool_service:service"""

from __future__ import annotations

import os
from typing import Any

import carpool
from bench.chaos import limits
from bench.chaos.witness import Witness
from carpool.engine.faults import VARIABLE


class Witnessed(carpool.Model):
    """The witness behind carpool's hooks."""

    def setup(self) -> None:
        self._witness = Witness()

    def predict(self, items: list[Any]) -> list[Any]:
        return self._witness.answer(items)


if os.environ.get("CHAOS_MUTANT"):
    from bench.chaos import mutants

    mutants.apply_from_environment()

service = carpool.Service(
    carpool.Stage(
        Witnessed,
        workers=limits.WORKERS,
        max_batch_size=limits.BATCH,
        max_queue_size=limits.QUEUE,
        max_batch_time_s=limits.HANG_S,
        env={VARIABLE: os.environ.get(limits.WORKER_FAULT, "")},
    ),
    timeout_s=limits.TIMEOUT_S,
    name="witnessed",
)
