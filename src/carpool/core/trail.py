"""Where a request's time went, for the error of a caller whose deadline has passed.

Nothing is noted while a request is in its first stage, since its own times are enough; each stage
that it leaves adds a link, and requests that leave the first one together share theirs. A stage
begins when the one before ends. The text is made only when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from carpool.request import Request, Trail

AT_THE_DOOR = -1  # `Request.stage` of a caller that waits for room in the first queue


def extend(requests: Sequence[Request], stage: int, started: float, now: float) -> None:
    """Note that requests leave a stage for the next one.

    Args:
        requests: Those that leave together.
        stage: The position of the stage that they leave.
        started: When they were handed to a worker of that stage.
        now: The time.
    """
    if stage:
        for request in requests:
            request.trail = (request.trail, started, now)
    else:
        link = (None, started, now)
        for request in requests:
            request.trail = link


def format_expiry(now: float, request: Request, started: float | None, names: Sequence[str]) -> str:
    """Return the text of a `DeadlineExceeded`: how long each place has kept the request.

    Args:
        now: The time.
        request: Is in a queue, at the door, in a worker, or has just left one of these.
        started: When it was handed to its present worker; None if it is not running.
        names: Of the stages.
    """
    total_s = now - request.admitted
    # parts of a millisecond would all be 0.000 s
    factor, unit = (1.0, "s") if total_s >= 0.001 else (1000.0, "ms")
    spent = [f"{factor * seconds:.3f} {unit} {where}" for where, seconds in _spent(now, request, started, names)]
    return f"no answer within {factor * total_s:.3f} {unit}: {', '.join(spent)}"


def _spent(now: float, request: Request, started: float | None, names: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Yield each place where the request was, in order, and for how many seconds."""
    if request.stage == AT_THE_DOOR:
        yield "waiting for room in the queue", now - request.arrived
        return
    if not request.stage and request.arrived > request.admitted:
        yield "waiting for room in the queue", request.arrived - request.admitted
    since = request.admitted if request.stage else request.arrived
    for name, (start, left) in zip(names, _links(request.trail if request.stage else None), strict=False):
        yield f"waiting for {name}", start - since
        yield f"in {name}", left - start
        since = left
    lost = " after a worker was lost" if request.losses else ""
    yield f"waiting for {names[request.stage]}{lost}", (now if started is None else started) - since
    if started is not None:
        yield f"in {names[request.stage]}", now - started


def _links(trail: Trail | None) -> Iterator[tuple[float, float]]:
    """Yield when each stage handed the request to a worker, and when it left, in order."""
    if trail is not None:
        before, started, left = trail
        yield from _links(before)
        yield started, left
