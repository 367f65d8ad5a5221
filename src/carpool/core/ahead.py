"""When a batch may be handed to a worker that is still busy with another one. Sans-IO.

Such a batch lies in the worker's socket when the worker comes for it. Until then it cannot be taken
back, and a request of it that leaves is run all the same. So the batch goes shortly before the
learned end of the call under way, and later still where it matters what comes meanwhile: where
another worker may be free first and little waits, and where requests have priorities, keys or
buckets.

Requests of different lanes and those in quarantine are kept until a worker is free. So is all that
waits for one of several workers whose ends cannot be foretold, or for a worker that takes too long
already. Where much waits, it hardly matters which worker is free first, so a rough prediction will
do. On cores that are shared with other programs there is no better one, and there an idle worker
waits longest.
"""

from __future__ import annotations

from collections.abc import Collection

from carpool.core.batch import Batch
from carpool.core.batch_times import BatchTimes
from carpool.core.queue import Queue

_LEAD_S = 0.02  # before its worker should be free a batch is handed over: drivers are late by some of it
_SHORT_LEAD_S = 0.002  # at least, where it matters what comes meanwhile; timers tick in milliseconds
_STEADY = 0.25  # of a batch: the deviation up to which ends can be foretold, with several workers
_DEEP = 4  # full batches for each worker are much
_ROUGHLY = 0.7  # the deviation up to which they go ahead where much waits


def lead_allowed_s(queue: Queue, times: BatchTimes, running: int, limit: float) -> float | None:
    """Return how long before its worker should be free a batch may go; None if none may.

    Args:
        queue: What waits.
        times: What the stage's batches take.
        running: How many batches run.
        limit: Most that a batch can hold.
    """
    if queue.lanes > 1 or queue.suspect_lanes or not times.usual_s:
        return None
    has_several = running > 1
    is_deep = has_several and queue.size >= _DEEP * limit * running
    if has_several and times.deviation_s > (_ROUGHLY if is_deep else _STEADY) * times.usual_s:
        return None
    if queue.varied or (has_several and not is_deep):
        return min(_LEAD_S, max(_SHORT_LEAD_S, 0.5 * times.usual_s))
    return _LEAD_S


def next_to_end(
    now: float, running: Collection[Batch], taken: Collection[int], usual_s: float, late_s: float
) -> Batch | None:
    """Return the batch that should end next, of those behind which another batch may go.

    Args:
        now: The time.
        running: The batches under way, in the order of their starts.
        taken: The places of the workers that have a batch ahead already.
        usual_s: What a batch takes.
        late_s: A batch that should have ended more than these seconds ago is passed over.
    """
    for batch in running:
        if batch.place not in taken and not batch.given_up and batch.started + usual_s - now >= -late_s:
            return batch
    return None
