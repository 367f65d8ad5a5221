"""What drivers do with trouble: a stage learns how much one call can hold, and one whose policy raises is named."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from carpool.call.retry import Trouble
from carpool.core.batcher import Batcher
from carpool.logger import logger

FAILED_FOR_S = 30.0
"""A failed stage stays so until its service is started anew: what callers are told to wait."""


def learn(name: str, batcher: Batcher, worker: int, batch_id: int, trouble: Sequence[Trouble]) -> None:
    """Calls for parts of a worker's batch ran out of memory; if batches are smaller from now on, the log tells.

    Args:
        name: of the stage or the function, for the log.
        batcher: of the stage.
        worker, batch_id: whose batch it is; it has not been answered yet.
        trouble: what is told of it.

    Raises:
        ValueError: it speaks of what the worker was not given.
    """
    before = batcher.safe_size.limit
    for each in trouble:
        if each.ran_out:
            batcher.ran_out_of_memory(worker, batch_id, each.ran_out, each.fitted)
    if batcher.safe_size.limit < before:
        logger.warning(
            "%s ran out of memory: its batches hold %d at the most from now on, and more again once that works",
            name,
            batcher.safe_size.limit,
        )


def stage_at_fault(error: BaseException) -> str | None:
    """The stage whose policy raised `error`, as far as its traceback tells: policies are called by batchers only."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        caller = frame.f_locals.get("self")
        if isinstance(caller, Batcher):
            return caller.name
    return None
