"""Where a request's time went, told to a caller whose deadline has passed: so much waiting for this, so much in that.

Nothing is noted while a request is in its first stage, since its own times tell; each stage that it leaves adds a link.
The text is made only when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from carpool.request import Request, Trail

AT_THE_DOOR = -1  # `Request.stage` of a caller that waits for room in the first queue


def extend(request: Request, started: float, now: float) -> None:
    """The request leaves its stage, where it was handed to a worker at `started`, for the next one."""
    request.trail = (request.trail if request.stage else None, request.arrived, started, now)


def tell(now: float, request: Request, started: float | None, names: Sequence[str]) -> str:
    """What to say at the deadline of `request`.

    Args:
        now: the time.
        request: is in a queue, at the door, in a worker, or has just left it.
        started: when it was handed to its present worker; None if it is not running.
        names: of the stages.
    """
    spent = ", ".join(f"{seconds:.3f} s {where}" for where, seconds in _spent(now, request, started, names))
    return f"no answer within {now - request.admitted:.3f} s: {spent}"


def _spent(now: float, request: Request, started: float | None, names: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Each place where it was, in order, and for how long."""
    if request.stage == AT_THE_DOOR:
        yield "waiting for room in the queue", now - request.arrived
        return
    trail = (request.trail if request.stage else None, request.arrived, started, now)
    links = list(_links(trail))
    let_in = links[0][0]
    if let_in > request.admitted:
        yield "waiting for room in the queue", let_in - request.admitted
    for stage, (arrived, start, left) in enumerate(links):
        name = names[stage]
        lost = " after a worker was lost" if request.losses and stage == request.stage else ""
        yield f"waiting for {name}{lost}", (left if start is None else start) - arrived
        if start is not None:
            yield f"in {name}", left - start


def _links(
    trail: Trail | tuple[Trail | None, float, float | None, float],
) -> Iterator[tuple[float, float | None, float]]:
    """When it arrived in each stage, was handed to a worker and left, first stage first."""
    before, arrived, started, left = trail
    if before is not None:
        yield from _links(before)
    yield arrived, started, left
