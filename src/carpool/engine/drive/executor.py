"""What the asyncio driver expects of those that run batches: executors, and who lends a worker."""

from __future__ import annotations

from typing import Protocol

from carpool.engine.core.batch import Batch, Todo
from carpool.engine.core.running_set import Order


class Executor(Protocol):
    """Runs the batches of one stage and reports to the driver."""

    def start(self) -> None:
        """Start the workers that are due; each reports `worker_ready`, or all `stage_failed`."""

    def run(self, batch: Batch) -> None:
        """Hand a batch to its worker, which is idle, or is about to be if the batch goes ahead."""

    def kill(self, place: int) -> None:
        """Give up a worker that hangs: report it as lost at once, and end it."""

    async def stop(self, grace_s: float) -> None:
        """End all workers, by force after `grace_s` seconds."""


class DrainingExecutor(Executor, Protocol):
    """An executor whose workers may go while the service runs."""

    def drained(self, place: int) -> None:
        """End a worker that was to go and has nothing left to do."""


class StepExecutor(Executor, Protocol):
    """Runs the running sets of a stage that answers in parts."""

    def send(self, order: Order) -> None:
        """Send an order to its worker."""


class Lender(Protocol):
    """Lends a worker to callers' threads; see `drive/lending.py`."""

    def polled(self, todo: Todo) -> None:
        """Take note of what the driver has just done; perhaps lend a worker."""

    def settle(self) -> None:
        """Make up the accounts of the calls that were made with it, before others learn of more."""

    def recall(self) -> None:
        """Take back the worker that is lent, if one is."""
