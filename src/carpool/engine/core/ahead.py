"""When a batch may be handed to a worker that is still busy with another one. Sans-IO.

Such a batch lies in the worker's socket when the worker comes for it. A worker that has to ask for
a full batch is idle for the way there and back and while the batch is packed: 0.3 to 0.6 ms a
batch, a tenth of the time with calls of 5 ms. But until then it cannot be taken back, and a request
of it that leaves is run all the same. So the batch goes 20 ms before the learned end of the call
under way; with several workers and less than four full batches waiting for each, where another
worker may be free first, or with priorities, keys or buckets, half a call before it at most (2 ms
at the least, since timers tick in milliseconds). A batch that is not full and takes all that waits
goes as late as it may, since others may still join it. A batch that could go within the next
millisecond goes now, as uvloop fires a shorter timer at once. Where much waits and calls are short,
several batches, four at most, may lie with a worker: beside another program, with calls of 2 ms, 20
% of the calls ended with nothing to do next where one batch could, and 2.5 % where several could.

Requests of different lanes and those in quarantine are kept until a worker is free. So is all that
waits for one of several workers whose ends cannot be foretold, unless much waits, or for a worker
that takes too long already.

Ends are predicted from the times that workers report, since a late service finds two replies at
once. A batch goes ahead only where requests may run twice, as a worker that is given up may still
reach it. It is in flight from the moment when the reply before it arrives: times, hang limits and
blame count from then. If the worker dies before, the batch returns to its place in the queue
without blame.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from carpool.engine.core.batch import Batch
from carpool.engine.core.queue import Queue
from carpool.engine.core.times import Times

_LEAD_S = 0.02  # before its worker should be free a batch is handed over: drivers are late by some of it
_STEADY = 0.25  # of a batch: the deviation up to which ends can be foretold, with several workers
_TICK_S = 0.001  # of a driver's timers
_DEEP = 4  # full batches for each worker are much
_ROUGHLY = 0.7  # the deviation up to which they go ahead where much waits
LEAST_LEAD_S = 0.002
"""So long before its worker should be free a batch may go in any case: timers tick in ms."""
MOST = 4
"""How many batches may lie with one worker where much waits, the one that it runs not counted."""


def is_deep(queue: Queue, running: int, limit: float) -> bool:
    """Report whether so much waits that it hardly matters which worker gets what, where so many
    batches run of `limit` at most.
    """
    return queue.size >= _DEEP * limit * running


def lead_allowed_s(queue: Queue, times: Times, running: int, much_waits: bool) -> float | None:
    """Return how long before its worker should be free a batch may go; None if none may."""
    if queue.lanes > 1 or queue.suspect_lanes or not times.usual_s:
        return None
    has_several = running > 1
    if has_several and times.deviation_s > (_ROUGHLY if much_waits else _STEADY) * times.usual_s:
        return None
    if queue.varied or (has_several and not much_waits):
        return min(_LEAD_S, max(LEAST_LEAD_S, 0.5 * times.usual_s))
    return _LEAD_S


def is_time(now: float, opens_at: float) -> bool:
    """Report whether a batch that may go from `opens_at` on goes now, as no timer would hit that
    moment.
    """
    return opens_at - now < _TICK_S


def next_to_end(
    now: float,
    running: Collection[Batch],
    ahead: Mapping[int, Sequence[Batch]],
    leaving: Collection[int],
    times: Times,
    late_s: float,
    most: int,
) -> Batch | None:
    """Return the batch behind which the next one should go; None if no worker may be handed one.

    It is the batch of the worker that should be done first with all that it has.

    Args:
        ahead: What lies with workers already, by place.
        late_s: A batch that should have ended more than these seconds ago is passed over.
        most: How many batches may lie with one worker.
    """
    found = None
    for batch in running:
        place = batch.place
        behind = len(ahead[place]) if place in ahead else 0
        if behind < most and not batch.given_up and times.usual_end(batch) - now >= -late_s and place not in leaving:
            found, most = batch, behind
            if not behind:
                break
    return found
