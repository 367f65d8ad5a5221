"""What a scheduler that knows all arrivals beforehand could answer in time: a bound on goodput.

No policy can do better. The bound holds for one worker, for a known cost without noise that does
not fall with the batch size, and for requests that are due in the order in which they arrive (one
SLO for all).

Such a scheduler loses nothing if it serves in order, and leaves out the requests that it drops
before a batch and not inside it: if of two requests the earlier one is served and the later one is
dropped, the later one can take the earlier one's place in any batch that also holds a request after
both. So a schedule is a row of drops and of batches of consecutive requests, and all that matters
of it after i requests is how many it has dropped and when the worker is free. The dynamic programme
keeps, for every i and every number of drops, the earliest such time; this is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

try:
    import numpy as np
except ImportError:
    raise ImportError("the oracles need numpy: pip install 'carpool[simulate]'") from None

_ROUNDING_S = 1e-9  # a request that ends this much after it was due is in time


def clairvoyant_attainment(
    arrivals: Sequence[float], dues: Sequence[float], cost_s: Callable[[int], float], max_batch_size: int
) -> float:
    """Return the largest share of the requests that can be answered by the time they are due.

    Args:
        arrivals: When each request arrives, in seconds and in order.
        dues: When the answer to each request is due, in seconds and in order.
        cost_s: The function from a number of requests to the seconds that a batch of them takes.
        max_batch_size: The most requests that one batch may hold.

    Raises:
        ValueError: Times are not in order, or there are none, or a larger batch costs less than a
            smaller one.
    """
    if not len(arrivals) or len(arrivals) != len(dues):
        raise ValueError(f"arrivals and dues must have the same length, above 0: got {len(arrivals)} and {len(dues)}")
    if np.any(np.diff(arrivals) < 0) or np.any(np.diff(dues) < 0):
        raise ValueError("arrivals and dues must both rise: the bound holds for one SLO for all requests")
    seconds = np.array([cost_s(n) for n in range(1, max_batch_size + 1)])
    if np.any(np.diff(seconds) < 0):
        raise ValueError("the cost must not fall with the batch size: the bound does not hold where padding pays")
    return 1.0 - _fewest_drops(np.asarray(arrivals), np.asarray(dues), seconds) / len(arrivals)


def _fewest_drops(arrivals: np.ndarray, dues: np.ndarray, seconds: np.ndarray) -> int:
    """Return how many of the requests must be dropped at least.

    Row i of `free_at` holds, by the number of drops among the first i requests, when the worker can
    be free at the earliest. A row is used again once no later request refers to it.
    """
    total, rows = len(arrivals), len(seconds) + 1
    free_at = np.full((rows, total + 1), np.inf)
    free_at[0, 0] = -np.inf
    fewest = 0
    for i in range(total):
        row = free_at[i % rows]
        fewest += int(np.argmax(row[fewest:] < np.inf))
        useful = _useful(row[fewest:], arrivals[i])
        drops = slice(fewest, fewest + len(useful))
        n = min(len(seconds), total - i)
        ends = np.maximum(useful, arrivals[i : i + n, None]) + seconds[:n, None]
        ends[ends > dues[i] + _ROUNDING_S] = np.inf
        row[:] = np.inf
        targets = np.arange(i + 1, i + n + 1) % rows
        free_at[targets, drops] = np.minimum(free_at[targets, drops], ends)
        dropped = free_at[(i + 1) % rows, fewest + 1 : fewest + 1 + len(useful)]
        np.minimum(dropped, useful, out=dropped)
    return fewest + int(np.argmax(free_at[total % rows][fewest:] < np.inf))


def _useful(free_at: np.ndarray, next_arrival: float) -> np.ndarray:
    """Return the part of a row that is worth going on from.

    Once the worker is free before the next request arrives, further drops gain nothing.
    """
    enough = free_at <= next_arrival
    end = int(np.argmax(enough)) + 1 if enough.any() else len(free_at)
    useful: np.ndarray = free_at[:end].copy()
    return useful
