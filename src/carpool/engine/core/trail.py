"""Where a request's time went, for the error of a caller whose deadline has passed.

Nothing is noted while a request is in the stage with which its service begins, since its own times
are enough; each stage that it leaves adds a link, and requests that leave the first one together
share theirs. A stage begins when the one before ends. The text is made only when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from carpool.engine.core.graph import Door, Node
from carpool.engine.request import Request, Trail

_ROOM = "waiting for room in the queue"


def extend(requests: Sequence[Request], node: Node, started: float, now: float) -> None:
    """Note that requests leave a node for the next one.

    Args:
        requests: Those that leave together.
        node: The node.
        started: When they were handed to a worker of its stage.
        now: The time.
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
    """Return the text of a `DeadlineExceeded`: how long each place has kept the request.

    Args:
        now: The time.
        request: Is in a queue, at a door, in a worker, or has just left one of these.
        started: When it was handed to its present worker; None if it is not running.
    """
    total_s = now - request.admitted
    # parts of a millisecond would all be 0.000 s
    factor, unit = (1.0, "s") if total_s >= 0.001 else (1000.0, "ms")
    spent = [f"{factor * seconds:.3f} {unit} {where}" for where, seconds in _spent(now, request, started)]
    text, stream = f"no answer within {factor * total_s:.3f} {unit}: {', '.join(spent)}", request.stream
    if stream is None or not stream.parts:
        return text
    return f"{text}; of {stream.parts} parts the last one came {now - stream.heard:.3f} s ago"


def _spent(now: float, request: Request, started: float | None) -> Iterator[tuple[str, float]]:
    """Yield each place where the request was, in order, and for how many seconds."""
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
    """Yield each stage before, when it handed the request to a worker, and when it left."""
    if trail is not None:
        before, name, started, left = trail
        yield from _links(before)
        yield name, started, left
