"""Batches composed by length that would be late for some of their requests.

Where other batches wait, *shed*: a request that would be late with its batch is left out, since the
seconds of the batch are dear and it would be late behind it, too. Where all that waits is one
batch, *tight*: the most urgent go first, in a smaller batch, if more are in time that way. (Nothing
is gained by shrinking batches where many wait: that serves fewer, and those left out are mostly the
long ones.) Source: J. M. Moore, "An n job, one machine sequencing algorithm for minimizing the
number of late jobs", 1968, by which the one that takes the longest is given up, here the one that
is due first, as all of a batch take the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from carpool.engine.request import Request

_due = attrgetter("due")

Seconds = Callable[[int, int], float]
"""Returns the seconds of a batch by its count and its longest length."""


def without_late(now: float, batch: Sequence[Request], longest: int, seconds: Seconds) -> Sequence[Request]:
    """Return a batch less those that would be late with it; all of it if all of them would.

    Each one that is left out makes it shorter for the others. Of several that are due at the same
    time the last ones are left out.

    Args:
        now: The time.
        batch: The requests.
        longest: The longest length that may be among them.
        seconds: Of a batch.
    """
    last_due_first = sorted(batch, key=_due, reverse=True)
    n = len(last_due_first)
    while n and last_due_first[n - 1].due < now + seconds(n, longest):
        n -= 1
    if n in (0, len(batch)):
        return batch
    kept = set(map(id, last_due_first[:n]))
    return [request for request in batch if id(request) in kept]


def urgent_first(now: float, requests: Sequence[Request], seconds: Seconds) -> Sequence[Request]:
    """Return those of a batch that should go before the others, or all of them.

    Args:
        now: The time.
        requests: All that wait, which may go together.
        seconds: Of a batch, with what it may take longer.
    """
    in_line = sorted(requests, key=_due)
    longest_of_all = max([request.length for request in requests])
    all_s = seconds(len(in_line), longest_of_all)
    if in_line[0].due >= now + all_s:
        return requests
    n = longest = 0
    first_s = 0.0
    for request in in_line[:-1]:
        longest = max(longest, request.length)
        taken_s = seconds(n + 1, longest)
        if in_line[0].due < now + taken_s:
            break
        n, first_s = n + 1, taken_s
    if not n:
        return requests
    then = now + first_s + seconds(len(in_line) - n, longest_of_all)
    in_time = n + sum([request.due >= then for request in in_line[n:]])
    return in_line[:n] if in_time > sum([request.due >= now + all_s for request in in_line]) else requests
