"""How many items of a stream are inside a service at a time."""

from __future__ import annotations

from collections.abc import Sequence

from carpool.engine.drive.streams import StreamWindow
from carpool.engine.policy.one_by_one import MOST_IN_A_HOP
from carpool.service.checks import at_least
from carpool.service.stage import Stage

_BATCHES_IN_FLIGHT = 3  # batches of a stream per worker: one at work, one on its way, one forming
_SMALL_BATCHES_IN_FLIGHT = 2 * _BATCHES_IN_FLIGHT  # with small items, so that threads wake one another less often
_LEAST_IN_FLIGHT = 64


def window_of(stages: Sequence[Stage], max_in_flight: int | None) -> StreamWindow:
    """Return how many items of a stream may be inside at a time.

    Args:
        stages: Those of the service.
        max_in_flight: What the user says; None for what keeps every worker busy.

    Raises:
        ValueError: `max_in_flight` is not a whole number of at least 1.
    """
    if max_in_flight is not None:
        max_in_flight = at_least("max_in_flight", max_in_flight, 1)
        return StreamWindow(max_in_flight, max_in_flight)
    least = sum(_BATCHES_IN_FLIGHT * max(1, stage.most_workers) * _most_items(stage, 1) for stage in stages)
    small = _SMALL_BATCHES_IN_FLIGHT
    most = sum(small * max(1, stage.most_workers) * _most_items(stage, MOST_IN_A_HOP) for stage in stages)
    return StreamWindow(least, max(_LEAST_IN_FLIGHT, most))


def _most_items(stage: Stage, single: int) -> int:
    """Return how many items one batch of a stage may hold; `single` if the stage has no batches."""
    return min(stage.max_batch_size or single, stage.max_queue_size)
