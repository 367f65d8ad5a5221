"""What the journal says of the work of a stage: batches, orders, and what workers report."""

from __future__ import annotations

from collections.abc import Sequence

from carpool.core.batch import Batch
from carpool.core.journal import Journal, parts_so_far
from carpool.core.running_set import Order, stream_of
from carpool.request import QUEUED, Request


def record_batch(journal: Journal, now: float, stage: str, batch: Batch) -> None:
    """Write a batch that goes to its worker into the journal."""
    how = f"{batch.reason}, ahead" if batch.ahead else batch.reason
    detail = f"batch {batch.id} of {len(batch)} on worker {batch.place} ({how})"
    for request in batch.requests:
        journal.record(now, "runs", request.id, stage, detail)


def record_orders(journal: Journal, now: float, stage: str, orders: Sequence[Order]) -> None:
    """Write into the journal who joins, rests and goes on by the orders that are sent."""
    for order in orders:
        for request in order.join:
            parts = stream_of(request).parts
            event = f"resumed after {parts} parts" if parts else "runs"
            detail = f"joins worker {order.place} by order {order.number}"
            journal.record(now, event, request.id, stage, detail)
        for event, ids in (("rests", order.pause), ("is stepped again", order.resume)):
            for id in ids:
                detail = f"on worker {order.place} by order {order.number}"
                journal.record(now, event, id, stage, detail)


def record_report(
    journal: Journal, now: float, stage: str, heard: Sequence[Request], returned: Sequence[Request]
) -> None:
    """Write the first parts of streams into the journal, and which ones found no memory."""
    for request in heard:
        if stream_of(request).parts == 1:
            journal.record(now, "first part", request.id, stage, f"from worker {stream_of(request).place}")
    for request in returned:
        if request.state == QUEUED:
            journal.record(now, "out of memory, queued again", request.id, stage, parts_so_far(now, request))
