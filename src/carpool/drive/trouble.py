"""What drivers do about trouble in batches: they make batches smaller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from carpool.call.results import Trouble
from carpool.core.batcher import Batcher
from carpool.logger import logger

FAILED_FOR_S = 30.0
"""How long callers of a failed stage are asked to wait for the service to be restarted."""

NOTHING_MORE: Final[Mapping[str, str]] = MappingProxyType({})


def learn(
    name: str,
    batcher: Batcher,
    place: int,
    batch_id: int,
    trouble: Sequence[Trouble],
    about: Mapping[str, str] = NOTHING_MORE,
) -> None:
    """Learn from calls for parts of a batch that ran out of memory how much one call can hold.

    The log says so if batches are smaller from now on.

    Args:
        name: Of the stage or the function, for the log.
        batcher: The stage's.
        place: The position of the worker whose batch it is.
        batch_id: The batch, which has not been answered yet.
        trouble: What happened to it.
        about: Further fields of the line in the log.

    Raises:
        ValueError: The trouble is about a batch or items that the worker does not have.
    """
    before = batcher.safe_size.limit
    for each in trouble:
        if each.ran_out:
            batcher.ran_out_of_memory(place, batch_id, each.ran_out, each.fitted)
    if batcher.safe_size.limit < before:
        logger.warning(
            "%s ran out of memory: its batches hold at most %d%s from now on, and more again once that fits",
            name,
            batcher.safe_size.limit,
            " (their count times their longest length)" if batcher.limits_padded else "",
            extra=about,
        )


def learn_from_warm_up(batcher: Batcher, trouble: Sequence[Trouble]) -> None:
    """Learn the same from a worker's warm-up, in which every example counts for one.

    Args:
        batcher: The stage's.
        trouble: What happened during the warm-up.
    """
    for each in trouble:
        if each.ran_out and not batcher.limits_padded:  # else the lengths matter, which it does not say
            tried = min(map(len, each.ran_out))
            batcher.safe_size.ran_out(tried, max([n for n in map(len, each.fitted) if n < tried], default=0))
