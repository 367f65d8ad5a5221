"""How many workers a load needs: runs over numbers of workers and batch limits, until it is met."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from carpool.simulate.arrivals import arrivals_of
from carpool.simulate.compare import compare
from carpool.simulate.report import Report
from carpool.simulate.servers import Servers
from carpool.simulate.traffic import Traffic

_MOST_TRIED = 8  # numbers of workers beyond the least that could do
_BEYOND = 1  # numbers of workers that are shown beyond the first that is enough


class Staffing(NamedTuple):
    """Numbers of workers and batch limits, and what they come to.

    Attributes:
        workers: How many workers each stage has.
        limits: The largest batch of each stage.
        capacity: The most requests per second that can be served for ever.
        report: The figures of the runs.
    """

    workers: tuple[int, ...]
    limits: tuple[int, ...]
    capacity: float
    report: Report


def workers_of(cost: Sequence[str], limits: Sequence[int], n: int) -> tuple[int, ...]:
    """Return the workers of each stage: `n` for the slowest, and no more than they need for others.

    Raises ValueError if a cost or a limit makes no sense.
    """
    alone = [Servers.of(each, limit, 1).capacity() for each, limit in zip(cost, limits, strict=True)]
    wanted = n * min(alone)
    return tuple(max(1, math.ceil(wanted / each - 1e-9)) for each in alone)


def staffings(
    cost: Sequence[str],
    arrivals: Any,
    limits: Sequence[Sequence[int]],
    workers: Sequence[int] | None,
    goal: float,
    *,
    policy: str = "adaptive",
    progress: Callable[[str], None] | None = None,
    **settings: Any,
) -> Iterator[Staffing]:
    """Yield what each number of workers comes to, for each choice of batch limits.

    Args:
        cost: The cost of each stage.
        arrivals: As in `run`.
        limits: Batch limits of all stages, each choice of which is tried.
        workers: How many workers the slowest stage has, each of which is tried; None to begin with
            the least that can serve the load, and to end with one more than are enough.
        goal: The share of the requests that should be answered in time.
        policy: As in `run`.
        progress: Called with what is tried next.
        settings: Further settings of `compare`.

    Raises:
        ValueError: A setting makes no sense.
    """
    for limit in limits:
        least = _least(cost, arrivals, limit, settings)
        tried = workers or range(least, least + _MOST_TRIED)
        beyond = 0
        for n in tried:
            each = workers_of(cost, limit, n)
            if progress is not None:
                progress(f"{each} workers, batches of up to {list(limit)}")
            shape: dict[str, Any] = {"max_batch_size": list(limit), "workers": list(each)}
            (report,) = compare([policy], arrivals, list(cost), **shape, **settings)
            yield Staffing(each, tuple(limit), Servers.of(list(cost), list(limit), list(each)).capacity(), report)
            beyond += report.attainment >= goal
            if workers is None and beyond > _BEYOND:
                break


def _least(cost: Sequence[str], arrivals: Any, limits: Sequence[int], settings: dict[str, Any]) -> int:
    """Return the least number of workers that can serve the load, if one worker's load is known."""
    servers = Servers.of(list(cost), list(limits), 1)
    load = Traffic(arrivals_of(arrivals), servers, duration_s=settings["duration_s"]).load
    return 1 if load is None else max(1, math.ceil(load))


def best(found: Sequence[Staffing], goal: float) -> Staffing | None:
    """Return the choice with the fewest workers that meets the goal, the quickest of equals."""
    good = [choice for choice in found if choice.report.attainment >= goal]
    return min(good, key=lambda choice: (sum(choice.workers), choice.report.p99_s), default=None)
