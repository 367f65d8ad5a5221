"""The requests that are nearest in length to one of them: a batch without a cost to go by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from carpool.engine.request import Request


def nearest(
    levels: Sequence[tuple[int, Iterable[Request], int]], head: Request, most: int, most_padded: float
) -> list[Request]:
    """Return `head` and those nearest to it in length, by the ratio of the lengths.

    Args:
        levels: What waits by length, rising; `head` is among it.
        head: A request that the batch is for.
        most: How many requests the batch may hold.
        most_padded: How large its count times its longest length may be.
    """
    at = next(i for i, (length, _, _) in enumerate(levels) if length >= head.length)
    length = longest = levels[at][0]
    chosen = [head]
    chosen += islice((each for each in levels[at][1] if each is not head), _room(most, most_padded, longest, 1))
    below, above = at - 1, at + 1
    while len(chosen) < most and (below >= 0 or above < len(levels)):
        takes_above = below < 0 or (above < len(levels) and levels[above][0] * levels[below][0] <= length * length)
        if takes_above:
            room = _room(most, most_padded, levels[above][0], len(chosen))
            if not room:  # all that are longer would make the batch too large
                above = len(levels)
                continue
            longest, others = levels[above][:2]
            above += 1
        else:
            room, others = _room(most, most_padded, longest, len(chosen)), levels[below][1]
            below -= 1
            if not room:
                break
        chosen += islice(others, room)
    return chosen


def _room(most: int, most_padded: float, longest: int, n: int) -> int:
    """Return how many more fit into a batch of `n` whose longest length is to be `longest`."""
    return max(0, int(min(most, most_padded // longest)) - n)
