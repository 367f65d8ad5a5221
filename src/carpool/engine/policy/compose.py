"""Batches composed by length: of all that wait, which go together, and which batch goes first.

A model that pads a batch to its longest item wastes what the short ones are padded with. So all who
wait, by length, are cut into the batches that cost least (`partition`), and of these the one goes
that has the greatest

    sum over its requests of u^8, divided by its seconds and by the root of A.

`u` is how much of the time that it can wait a request has used up, or its age where nothing is due.
It can wait until the last moment at which its batch would be in time:

    u = (now - arrived) / (due - arrived - seconds of its batch).

As a share of all the time until it is due, `u` of a long one would still be small at that moment,
since its batch takes long, and batches of short ones would always go before it. Only those count
that would be in time with this batch, noise included. `A` is the smoothed share of requests of
about its longest length that were answered in time, 1 where nothing is due.

The sum of u^p / t is the generalised cµ rule (van Mieghem 1995) for costs of delay that rise as
u^(p+1): with p = 0 it is Smith's rule, which serves the cheapest batch and starves the long ones,
with p = infinity it serves the batch of the oldest. Dividing by the root of A is alpha-fairness
over lengths with alpha = 1/2 (Mo and Walrand 2000), half way between most in time in all (0) and
proportional fairness (1; Kelly 1997): without it the long ones alone pay for an overload.

**Nobody starves.** A request that has waited x is passed over only for a batch with one that has
waited at least x / R. Here R = (B · t(own batch) / t(batch that goes))^(1/8), which is at most
(B · t(own batch) / t(1, shortest))^(1/8), and B is the batch limit. (The sum of the batch that goes
is at most B times its greatest u^8, and that of the other one at least x^8.) It holds in overload,
and no number in it can be set wrong. Where all are due equally soon after their arrival, u stands
in the place of the age; those that would be late anyway do not count.

Where more than one batch waits, plain order has the shorter tail if composing saves little. So the
costs of both are compared, smoothed, and what comes first goes first unless composing takes at most
0.85 of the seconds.

**The cut.** A batch is a piece [i, j) of the line of all n that wait, sorted by length. The line is
cut so that

    the sum over the batches of  t(j - i, L)·(2n - i)

is least: the time of a batch delays the n - i that have not been served before it, and as many
again as wait now, which come later. That is a shortest path over places to cut, where the cost of
an edge is that of a batch; to batch with sizes that are known beforehand is an old problem of
optimal bucketing, solved by dynamic programming.

Few places need to be looked at. Where t is linear in n, to part two requests of one level of
lengths saves no seconds unless the batch is full, so a cut is at the end of a level or full batches
behind such a place. As the line goes on, the best beginning of a last batch never moves back. And
places are left out that bring next to nothing: an end if those before it could be padded to the
next length for little, and the end of a full batch just behind another place.

**Who would be late.** Where more batches of its key wait, a request that would be late with its
batch is left out, since the seconds of the batch are dear and it would be late behind it, too.
(Nothing is gained by smaller batches of the most urgent: they serve fewer, and those left out are
mostly the long ones.) Source: J. M. Moore, "An n job, one machine sequencing algorithm for
minimizing the number of late jobs", 1968, by which the one that takes the longest is given up, here
the one that is due first, as all of a batch take the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import accumulate
from math import inf, log2, sqrt
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from carpool.engine.policy.cost import EVERY, SLOW_KEEP

if TYPE_CHECKING:
    from carpool.engine.policy.base import LevelsView, QueueView
    from carpool.engine.policy.length_cost import LengthCost
    from carpool.engine.request import Request

_POWER = 8
"""Of the share of its time that a request has used up. With half of it, overloads have 1 % more in
time and a mean 9 % less, but a request may be passed over for the square of the ratio in `Nobody
starves`; with twice as much, 1 % fewer are in time, and the mean is 7 % greater."""
_JUST_COME_S = 1e-4
"""Is added to ages, so that those of one moment have some. At half or twice, only what has waited
for about as long counts differently."""
_WORTH = 0.85
"""Share of plain order's seconds up to which composing is worth it. At half, plain order is kept
until composing saves more than half; at twice, it never is."""
_PATIENT_S = 30.0
"""Nothing has more time than this: what is due much later must not wait for ever. With half as
much, what has no due time gains on what is due soon; with twice as much, it waits longer."""
_TRIFLE = 0.06
"""Of a call's setup, which it may cost those before an end to be padded further; half of how far
behind another place, as a share of a batch, a full one ends: such places are left out. With half as
much, decisions take 14 to 25 % more steps; with twice as much, lines are cut 0.4 % worse."""

Rising = Sequence[tuple[int, "Iterable[Request]", int]]
"""What waits, level by level, the shortest first: length, requests, and how many they are."""

_due = attrgetter("due")
_admitted = attrgetter("admitted")


class ChosenGroup(NamedTuple):
    """The batch that goes.

    Attributes:
        requests: Those in it.
        longest: The longest length in it, or a little more.
        seconds: What it is expected to take.
        batches: How many batches wait, with this one.
    """

    requests: Sequence[Request]
    longest: int
    seconds: float
    batches: int


class Composer:
    """Composes the batches of one stage.

    Args:
        cost: Of batches by count and length, learned elsewhere.

    Attributes:
        ratio: Seconds of composed batches over those in plain order, smoothed.
    """

    def __init__(self, cost: LengthCost) -> None:
        self._cost = cost
        self._in_time: dict[int, float] = {}  # by the class of length, the share of answers in time
        self.ratio = 1.0
        self._looks = 0  # how often they were compared
        self._looked_at = 0  # in batches that were learned from

    def answered(self, request: Request, is_in_time: bool) -> None:
        """Note that a request was answered in time, or too late, or was refused."""
        if request.due == inf:
            return
        at = _class_of(request.length)
        share = self._in_time.get(at, 1.0)
        if share < 1.0 or not is_in_time:
            self._in_time[at] = share + (1.0 - SLOW_KEEP) * (is_in_time - share)

    def choose(
        self,
        now: float,
        levels: Sequence[LevelsView],
        limit: int,
        most_padded: float,
        without: Collection[Request] = (),
        warm_keys: Collection[Hashable] = (),
    ) -> ChosenGroup:
        """Return the batch that is to go, of all that wait; without requests if all are gone.

        Args:
            now: The time, and what a request needs after its batch.
            levels: What waits by length, for each key.
            limit: The most that a batch may hold.
            most_padded: How large its count times its longest length may be.
            without: Requests that are as good as gone.
            warm_keys: Keys to which no worker needs to switch.
        """
        cost, batches = self._cost, 0
        most, best = -1.0, ChosenGroup((), 1, 0.0, 0)
        for each in levels:
            rising = _without(each.rising(), without) if without else each.rising()
            line = [request for _, of_level, _ in rising for request in of_level]
            pieces = partition(rising, limit, most_padded, cost)
            earliest, switch_s = each.earliest_due, 0.0 if each.key in warm_keys else cost.switch_s
            batches += len(pieces)
            for begin, end, longest in pieces:
                group = ChosenGroup(line[begin:end], longest, cost.seconds(end - begin, longest) + switch_s, 1)
                if len(levels) == len(pieces) == 1:
                    return group
                score = self._score(now, group, each.allowance_s, earliest)
                if score > most:
                    is_late = len(pieces) > 1 and now + group.seconds > earliest
                    most, best = score, self.without_late(now, group) if is_late else group
        return best._replace(batches=batches)

    def _score(self, now: float, group: ChosenGroup, allowance_s: float, earliest: float) -> float:
        """Return what it is worth to serve a batch now, for each of its seconds.

        Args:
            now: The time.
            group: The batch.
            allowance_s: From the arrival of each request to its due time; 0 if that differs.
            earliest: When the first one is due, or one before.
        """
        cost, (requests, longest, seconds, _) = self._cost, group
        surely_s = seconds * (1.0 + cost.cv)
        until = now + surely_s
        if until > earliest:
            requests = [request for request in requests if request.due >= until]
            seconds += cost.seconds(len(requests) or 1, longest) - cost.seconds(len(group.requests), longest)
        since = now + _JUST_COME_S
        if allowance_s:  # all can wait for as long
            worth = sum([(since - r.admitted) ** _POWER for r in requests])
            seconds *= _can_wait_s(allowance_s, surely_s) ** _POWER
        else:
            used_up = [(since - r.admitted) / _can_wait_s(r.due - r.admitted, surely_s) for r in requests]
            worth = sum([share**_POWER for share in used_up])
        if self._in_time:  # those seldom in time have a larger say
            worth /= sqrt(max(1.0 - SLOW_KEEP, self._in_time.get(_class_of(group.requests[-1].length), 1.0)))
        return worth / seconds

    def without_late(self, now: float, choice: ChosenGroup) -> ChosenGroup:
        """Return a choice less those that would be late with it; all of it if all of them would.

        Each one that is left out makes it shorter for the others. Of several that are due at the
        same time the last ones are left out.
        """
        requests, longest, seconds, _ = choice
        line = sorted(requests, key=_due, reverse=True)
        n = len(line)
        extra_s = seconds - self._cost.seconds(n, longest)
        while n and line[n - 1].due < now + seconds:
            n -= 1
            seconds = self._cost.seconds(n, longest) + extra_s
        return choice if n in (0, len(line)) else choice._replace(requests=line[:n], seconds=seconds)

    def without_padding(self, choice: ChosenGroup, allowed_batch_sizes: Sequence[int]) -> ChosenGroup:
        """Return a choice less those requests for which it would be padded to a larger size.

        That is where a batch of the next smaller size serves more for its seconds; those that came
        last wait.
        """
        n = len(choice.requests)
        smaller = max([size for size in allowed_batch_sizes if size <= n], default=n)
        seconds = self._cost.seconds(smaller, choice.longest)
        if smaller / seconds <= n / choice.seconds:
            return choice
        return choice._replace(requests=sorted(choice.requests, key=_admitted)[:smaller], seconds=seconds)

    def within(self, choice: ChosenGroup, limit: int) -> ChosenGroup:
        """Return a choice less the requests for which a batch has no room by their sizes.

        Those that came last wait, and one that is larger than a batch goes alone.
        """
        in_line = sorted(choice.requests, key=_admitted)
        n = max(1, sum([size <= limit for size in accumulate([request.size for request in in_line])]))
        if n == len(in_line):
            return choice
        return ChosenGroup(in_line[:n], choice.longest, self._cost.seconds(n, choice.longest), choice.batches + 1)

    def saved_by_more_s(self, choice: ChosenGroup, waiting: int) -> Callable[[float], float]:
        """Return what says how many seconds a batch saves if more requests wait beside it.

        What a batch takes beyond its items' own work is setup and padding. Of n requests in k
        batches the setup is a·k and the padding about c·n/k (as the error of a fine quantiser falls
        with its number of steps: Bennett 1948), and their sum, at its least, rises as the root of
        n. So with m more waiting each request has sqrt(n / (n + m)) of the share that it has now.

        Args:
            choice: The batch that would go.
            waiting: How many requests wait, those of the batch included.
        """
        items_s = sum(self._cost.item_s_at([request.length for request in choice.requests]))
        beyond_s = max(0.0, choice.seconds - items_s)
        return lambda more: beyond_s * (1.0 - sqrt(waiting / (waiting + more)))

    def keeps_plain_order(self, queue: QueueView, limit: int) -> bool:
        """Report whether what comes first should go first, as composing would save too little.

        Args:
            queue: What waits, which is more than one batch and of one key.
            limit: The most that a batch may hold.
        """
        cost = self._cost
        if not 0 <= cost.samples - self._looked_at < min(self._looks, EVERY):
            self._looked_at = cost.samples
            self._looks += 1
            pieces = partition(queue.levels[0].rising(), limit, inf, cost)
            composed_s = sum([cost.seconds(end - begin, longest) for begin, end, longest in pieces])
            lengths = [request.length for request in queue.peek(pieces[-1][1])]
            plain = [lengths[begin : begin + limit] for begin in range(0, len(lengths), limit)]
            ratio = composed_s / sum([cost.seconds(len(batch), max(batch)) for batch in plain])
            self.ratio += (ratio - self.ratio) / min(self._looks, 3)
        return self.ratio > _WORTH


def _class_of(length: int) -> int:
    """Return the class of lengths that a length belongs to: two for each doubling.

    With one, a class holds the longest tenth and others, and the longest have 1 point less in time.
    """
    return int(2 * log2(length))


def _can_wait_s(allowance_s: float, surely_s: float) -> float:
    """Return how long a request can wait for a batch that takes so long, and be in time."""
    return max(_JUST_COME_S, min(allowance_s - surely_s, _PATIENT_S))


def in_line(levels: LevelsView) -> list[Request]:
    """Return all that waits in levels, the shortest first."""
    return [request for _, of_level, _ in levels.rising() for request in of_level]


def _without(rising: Rising, gone: Collection[Request]) -> Rising:
    left = [(length, [each for each in of_level if each not in gone]) for length, of_level, _ in rising]
    return [(length, requests, len(requests)) for length, requests in left if requests]


def partition(rising: Rising, limit: int, most_padded: float, cost: LengthCost) -> list[tuple[int, int, int]]:
    """Return the pieces of the line, each as where it begins and ends, and its longest length.

    Args:
        rising: The levels of the line.
        limit: The most that one batch may hold.
        most_padded: How large the count of a batch times its longest length may be; a request that
            is longer by itself is alone.
        cost: Of batches.
    """
    setup_s, items_s = cost.setup_s, cost.item_s_at([length for length, _, _ in rising])
    trifle_s = _TRIFLE * setup_s if rising and rising[-1][0] * limit <= most_padded else 0.0
    # places are counted from 2n, backward: what a second costs behind one is then its negative
    end = last = begin = -2 * sum([count for _, _, count in rising])
    places, least, came_from, longest = [end], [0.0], [0], [0]
    first = follow = 0
    for (length, _, count), item_s, longer_s in zip(rising, items_s, [*items_s[1:], inf], strict=False):
        most = limit if length * limit <= most_padded else max(1, int(most_padded // length))
        near = 2.0 * _TRIFLE * most
        end += count
        while follow < len(places) and (place := places[follow] + most) < end:  # a full batch ends within these
            if place > last + near:
                least.append(least[follow] - (setup_s + most * item_s) * places[follow])
                places.append(place)
                came_from.append(follow)
                longest.append(length)
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
        longest.append(length)
        last = end
    pieces, at = [], len(places) - 1
    while at:
        before = came_from[at]
        pieces.append((places[before] - begin, places[at] - begin, longest[at]))
        at = before
    return pieces[::-1]
