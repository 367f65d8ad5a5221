"""Cut what waits, sorted by length, into the batches that cost least.

A batch of n items, the longest of which has length L, takes t(n, L) = a + n·per(L). With all that
wait in the order of their lengths, a batch is a piece [i, j) of the line. The line of n is cut so
that

    the sum over the batches of  t(j - i, L)·(2n - i)

is least: the time of a batch delays the n - i that have not been served before it, and as many
again as wait now, which come later. That is a shortest path over places to cut, where the cost of
an edge is that of a batch; to batch with sizes that are known beforehand is an old problem of
optimal bucketing, solved by dynamic programming.

Few places need to be looked at. Where t is linear in n, to part two requests of one level of
lengths saves no seconds unless the batch is full, so a cut is at the end of a level or full batches
behind such a place.
As the line goes on, the best beginning of a last batch never moves back. And where there are many
levels, the end of one is left out if it would cost the few requests since the place before next to
nothing to be padded to the length of the next level, and so is the end of a full batch that is just
behind another place.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Protocol

_MANY = 16  # levels; with more of them, some ends are left out
_NEAR = 16  # full batches that end less than this share of a batch behind another place are left out then
_TRIFLE = 0.03  # of what a call costs: what it may cost those before an end that it is left out


class LinearCost(Protocol):
    """A cost that is linear in the count."""

    @property
    def setup_s(self) -> float:
        """Seconds of a batch that do not depend on its count."""

    def item_s_at(self, lengths: Sequence[int]) -> list[float]:
        """Return for each length the seconds of each item where the longest has it."""


def partition(
    lengths: Sequence[int], counts: Sequence[int], limit: int, most_padded: float, cost: LinearCost
) -> list[tuple[int, int]]:
    """Return the pieces of the line, each as where it begins and ends.

    Args:
        lengths: The longest of each level, rising.
        counts: How many requests each level has.
        limit: The most that one batch may hold.
        most_padded: How large the count of a batch times its longest length may be; a request that
            is longer by itself is alone.
        cost: Of a batch.
    """
    twice = 2 * sum(counts)
    setup_s = cost.setup_s
    is_fine = len(lengths) > _MANY
    trifle_s = _TRIFLE * setup_s if is_fine else 0.0
    items_s = cost.item_s_at(lengths)
    # places are counted from 2n, backward: what a second costs behind one is then its negative
    end = last = -twice
    places, least, came_from = [end], [0.0], [0]
    first = follow = 0
    for length, count, item_s, longer_s in zip(lengths, counts, items_s, [*items_s[1:], inf], strict=True):
        most = limit if length * limit <= most_padded else max(1, int(most_padded // length))
        end += count
        if follow < len(places) and places[follow] + most < end:  # a full batch from there ends within these
            full_s = setup_s + most * item_s
            near = most // _NEAR if is_fine else 0
            while follow < len(places) and (place := places[follow] + most) < end:
                if place > last + near:
                    least.append(least[follow] - full_s * places[follow])
                    places.append(place)
                    came_from.append(follow)
                    last = place
                follow += 1
        if (end - last) * (longer_s - item_s) < trifle_s:
            continue  # to go with the next level would cost them next to nothing
        while places[first] < end - most:
            first += 1
        all_s = setup_s + end * item_s  # so a batch from p takes all_s - p * item_s
        place = places[first]
        best = least[first] - place * (all_s - place * item_s)
        for at in range(first + 1, len(places)):  # a few, for which slices would take longer
            place = places[at]
            value = least[at] - place * (all_s - place * item_s)
            if value < best:
                best, first = value, at
        least.append(best)
        places.append(end)
        came_from.append(first)
        last = end
    return _path([place + twice for place in places], came_from)


def _path(places: Sequence[int], came_from: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pieces of the shortest path to the last place."""
    pieces = []
    at = len(places) - 1
    while at:
        before = came_from[at]
        pieces.append((places[before], places[at]))
        at = before
    pieces.reverse()
    return pieces
