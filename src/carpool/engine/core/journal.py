"""Where requests have been: the journal of all that happened, and the trail of the stages of each.

The journal is a bounded record of events in their order, for tests and for people who debug. It is
off by default; the core then has none at all, so that it costs one comparison per event.

The trail of a request says where its time went, for the error of a caller whose deadline has
passed. Nothing is noted while a request is in the stage with which its service begins, since its
own times are enough; each stage that it leaves adds a link, and requests that leave the first one
together share theirs. A stage begins when the one before ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from carpool.engine.core.batch import Batch
from carpool.engine.core.graph import Door, Node
from carpool.engine.core.running_set import Order, stream_of
from carpool.engine.request import QUEUED, Request, Trail


@dataclass(frozen=True, slots=True)
class Entry:
    """One event in the life of a request.

    Attributes:
        at: When it happened, by the clock of the service.
        after_s: How many seconds that was after the request came, or after the first of its events
            that is still remembered.
        event: What happened.
        stage: The name of the stage in which it happened; empty where it was in none.
        detail: What else is known.
        branch: The branches in which it happened, with slashes between them; of a list, the number
            of the item. Empty where it was in none.
    """

    at: float
    after_s: float
    event: str
    stage: str
    detail: str
    branch: str = ""

    def __str__(self) -> str:
        where = f"({self.branch})" if self.branch else ""
        words = (f"{self.after_s:.6f}", self.event, self.stage, where, self.detail)
        return " ".join([word for word in words if word])


class Journal:
    """The last `max_entries` events of a service, oldest first."""

    def __init__(self, max_entries: int = 10_000) -> None:
        self._entries: deque[tuple[int, float, str, str, str, str]] = deque(maxlen=max_entries)
        self._parents: dict[int, tuple[int, str]] = {}  # whose story a child's is, and its branch
        self._children: deque[int] = deque(maxlen=max_entries)

    def split(self, now: float, parent: int, children: Sequence[int], names: Sequence[str] | None) -> None:
        """Note that a request goes on as several, whose events are part of its story; without
        `names` their branches are numbers.
        """
        self.record(now, f"goes on as {len(children)}", parent)
        owner, inside = self._parents.get(parent, (parent, ""))
        for i, child in enumerate(children):
            if len(self._children) == self._children.maxlen:
                self._parents.pop(self._children[0], None)
            branch = str(i) if names is None else names[i]
            self._children.append(child)
            self._parents[child] = owner, f"{inside}/{branch}" if inside else branch

    def record(self, now: float, event: str, request_id: int, stage: str = "", detail: str = "") -> None:
        owner, branch = self._parents.get(request_id, (request_id, ""))
        self._entries.append((owner, now, event, stage, detail, branch))

    def story(self, request_id: int | None = None) -> list[Entry]:
        """Return the events of one request, or of the latest, that are still recorded, in order."""
        entries = list(self._entries)
        if request_id is None:
            request_id = max((owner for owner, *_ in entries), default=0)
        found = [each for each in entries if each[0] == request_id]
        return [Entry(at, at - found[0][1], *rest) for _, at, *rest in found]


def parts_so_far(now: float, request: Request) -> str:
    """Return how many parts of its answer a request has had; empty if it has had none."""
    stream = request.stream
    if stream is None or not stream.parts:
        return ""
    silent_s = now - stream.part_at
    ago = f", the last one {silent_s:.3f} s ago" if silent_s >= 0.001 else ""
    return f"after {stream.parts} part{'s' if stream.parts > 1 else ''}{ago}"


def record_batches(journal: Journal, now: float, stage: str, batches: Sequence[Batch]) -> None:
    for batch in batches:
        how = f"{batch.reason}, ahead" if batch.ahead else batch.reason
        detail = f"batch {batch.id} of {len(batch)} on worker {batch.place} ({how})"
        for request in batch.requests:
            journal.record(now, "runs", request.id, stage, detail)


def record_orders(journal: Journal, now: float, stage: str, orders: Sequence[Order]) -> None:
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
    journal: Journal, now: float, stage: str, had_parts: Sequence[Request], returned: Sequence[Request]
) -> None:
    """Write the first parts of streams into the journal, and which ones found no memory."""
    for request in had_parts:
        if stream_of(request).parts == 1:
            journal.record(now, "first part", request.id, stage, f"from worker {stream_of(request).place}")
    for request in returned:
        if request.state == QUEUED:
            journal.record(now, "out of memory, queued again", request.id, stage, parts_so_far(now, request))


_ROOM = "waiting for room in the queue"


def extend_trails(requests: Sequence[Request], node: Node, started: float, now: float) -> None:
    """Note that requests leave a node for the next one, together, and when a worker `started` with
    them.
    """
    name = node.name
    if node.begins:
        link = (None, name, started, now)
        for request in requests:
            request.trail = link
    else:
        for request in requests:
            request.trail = (request.trail, name, started, now)


def format_expiry(now: float, request: Request, started: float | None) -> str:
    """Return the text of a `DeadlineExceeded`: how long each place has kept the request, which a
    worker has had since `started`.
    """
    total_s = now - request.admitted
    # parts of a millisecond would all be 0.000 s
    factor, unit = (1.0, "s") if total_s >= 0.001 else (1000.0, "ms")
    spent = [f"{factor * seconds:.3f} {unit} {where}" for where, seconds in _spent(now, request, started)]
    text, stream = f"no answer within {factor * total_s:.3f} {unit}: {', '.join(spent)}", request.stream
    if stream is None or not stream.parts:
        return text
    return f"{text}; of {stream.parts} parts the last one came {now - stream.part_at:.3f} s ago"


def _spent(now: float, request: Request, started: float | None) -> Iterator[tuple[str, float]]:
    node = request.node
    trail = None if node.begins else request.trail
    since = request.admitted
    if trail is None:
        if request.arrived > since and type(node) is Node:
            yield _ROOM, request.arrived - since
        since = request.arrived
    for name, start, left in _links(trail):
        yield f"waiting for {name}", start - since
        yield f"in {name}", left - start
        since = left
    if type(node) is Door:
        yield _ROOM, now - since
        return
    lost = " after a worker was lost" if request.losses else ""
    yield f"waiting for {node.name}{lost}", (now if started is None else started) - since
    if started is not None:
        yield f"in {node.name}", now - started


def _links(trail: Trail | None) -> Iterator[tuple[str, float, float]]:
    if trail is not None:
        before, name, started, left = trail
        yield from _links(before)
        yield name, started, left
