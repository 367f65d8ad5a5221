"""What drivers do with what is told of a batch besides its results: the stage learns how much one call can hold."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from carpool.core.batcher import Batcher
from carpool.parts import Trouble

logger = logging.getLogger("carpool")


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
