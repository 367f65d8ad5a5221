"""Batches composed by length: of all that wait, which go together, and which batch goes first.

A model that pads a batch to its longest item wastes what the short ones are padded with. So all who
wait, by length, are cut into the batches that cost least (`partition`), and of these the
one goes that has the greatest

    sum over its requests of  (u^8 / sqrt(A))  divided by its seconds.

`u` is how much of the time that it can wait a request has used up, or its age where nothing is due.
It can wait until the last moment at which its batch would be in time:

    u = (now - arrived) / (due - arrived - seconds of its batch).

As a share of all the time until it is due, `u` of a long one would still be small at that moment,
since its batch takes long, and batches of short ones would always go before it. Only those count
that would be in time with this batch, noise included. `A` is the smoothed share of requests of
about its length that were answered in time, 1 where nothing is due.

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

**The cut.** All that wait, sorted by length, are cut into the batches that cost least. A batch is a
piece [i, j) of the line. The line of n is cut so that

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

**Who would be late.** Where other batches wait, a request that would be late with its batch is left
out, since the seconds of the batch are dear and it would be late behind it, too. (Nothing is gained
by smaller batches of the most urgent: they serve fewer, and those left out are mostly the long
ones.) Source: J. M. Moore, "An n job, one machine sequencing algorithm for minimizing the number of
late jobs", 1968, by which the one that takes the longest is given up, here the one that is due
first, as all of a batch take the same time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate, repeat
from math import inf, log2, sqrt
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from carpool.engine.policy.cost import EVERY, KEEP

if TYPE_CHECKING:
    from carpool.engine.policy.base import LevelsView, QueueView
    from carpool.engine.policy.length_cost import LengthCost
    from carpool.engine.request import Request

_POWER = 8
"""Of the share of its time that a request has used up. With half of it, a request may be passed
over for the square of the ratio in `Nobody starves`; with twice as much, for its root."""
_JUST_COME_S = 1e-4
"""Is added to ages, so that those of one moment have some. At half or twice, only what has waited
for about as long counts differently."""
_WORTH = 0.85
"""Share of plain order's seconds up to which composing is worth it. At half, plain order is kept
until composing saves more than half; at twice, it never is."""
_ANSWERED = 0.02
"""Weight of an answer in a share of answers in time, and the least share. With half of it, lengths
that are mostly late get their larger say after twice as many answers; with twice as much, chance
gives it."""
_PATIENT_S = 30.0
"""Nothing has more time than this: what is due much later must not wait for ever. With half as
much, what has no due time gains on what is due soon; with twice as much, it waits longer."""
_MANY = 16
"""Levels; with more of them, some ends are left out: those of full batches that are less than this
part of a batch behind another place, and those that cost little. With half as many, more are left
out; with twice as many, decisions look at more places."""
_TRIFLE = 0.03
"""Of what a call costs: what it may cost those before an end that it is left out. With half as
much, decisions look at more places; with twice as much, more is padded."""


Rising = Sequence[tuple[int, "Iterable[Request]", int]]
"""What waits, level by level, the shortest first: length, requests, and how many they are."""

Seconds = Callable[[int, int], float]
"""Returns the seconds of a batch by its count and its longest length."""

_due = attrgetter("due")
_admitted = attrgetter("admitted")
_arrived = attrgetter("arrived")


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
    """

    def __init__(self, cost: LengthCost) -> None:
        self._cost = cost
        self._in_time: dict[int, float] = {}  # by the class of length, the share of answers in time
        self._ratio = 1.0  # seconds of composed batches over those in plain order, smoothed
        self._looks = 0  # how often they were compared
        self._gone = 0  # batches since then
        self._asked: tuple[object, ...] = ()  # what was cut last, by which cost and limits, ...
        self._pieces: Sequence[tuple[int, int]] = ()  # ... and how

    @property
    def saving(self) -> float:
        """The share of the seconds that composing saves against plain order; 0 while unknown."""
        return 1.0 - self._ratio

    def answered(self, request: Request, is_in_time: bool) -> None:
        """Note that a request was answered in time, or too late, or was refused."""
        if request.due == inf:
            return
        at = _class_of(request.length)
        share = self._in_time.get(at, 1.0)
        if share < 1.0 or not is_in_time:
            self._in_time[at] = share + _ANSWERED * (is_in_time - share)

    def batch_gone(self) -> None:
        """Note that a batch has gone: now and then what composing saves is looked at again."""
        self._gone += 1

    def choose(
        self,
        now: float,
        levels: Sequence[LevelsView],
        limit: int,
        most_padded: float,
        *,
        onward_s: float = 0.0,
        without: Collection[Request] = (),
        extra_s: Sequence[float] = (),
    ) -> ChosenGroup:
        """Return the batch that is to go, of all that wait.

        Args:
            now: The time.
            levels: What waits by length, for each key.
            limit: The most that a batch may hold.
            most_padded: How large its count times its longest length may be.
            onward_s: What a request needs after its batch.
            without: Requests that are as good as gone; of each key one at least is left.
            extra_s: What a batch of each key takes besides; nothing if it is empty.
        """
        most, best, batches = -1.0, ChosenGroup((), 1, 0.0, 0), 0
        for i, each in enumerate(levels):
            rising = each.rising()
            if without:
                rising = _without(rising, without)
            pieces = self._cut(rising, limit, most_padded)
            batches += len(pieces)
            if len(levels) == 1 and len(pieces) == 1:
                return self._whole(rising)
            extra = extra_s[i] if extra_s else 0.0
            score, group = self._best(now + onward_s, rising, pieces, extra, each.allowance_s)
            if score > most:
                most, best = score, group
        return best._replace(batches=batches)

    def without_padding(self, choice: ChosenGroup, allowed_batch_sizes: Sequence[int]) -> ChosenGroup:
        """Return a choice less those requests for which it would be padded to a larger size.

        That is where a batch of the next smaller size serves more for its seconds; those that came
        last wait.
        """
        n, cost = len(choice.requests), self._cost
        smaller = max([size for size in allowed_batch_sizes if size < n], default=n)
        seconds = cost.seconds(smaller, choice.longest)
        if n in allowed_batch_sizes or smaller / seconds <= n / choice.seconds:
            return choice
        oldest = sorted(choice.requests, key=_admitted)[:smaller]
        return choice._replace(requests=oldest, seconds=seconds)

    def within(self, choice: ChosenGroup, limit: int) -> ChosenGroup:
        """Return a choice less the requests for which a batch has no room by their sizes.

        Those that came last wait, and one that is larger than a batch goes alone.
        """
        kept: list[Request] = []
        size = 0
        for request in sorted(choice.requests, key=_admitted):
            size += request.size
            if kept and size > limit:
                break
            kept.append(request)
        if len(kept) == len(choice.requests):
            return choice
        seconds = self._cost.seconds(len(kept), choice.longest)
        return ChosenGroup(kept, choice.longest, seconds, choice.batches + 1)

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
        items_s = self._cost.items_s([request.length for request in choice.requests])
        beyond_s = max(0.0, choice.seconds - items_s)
        return lambda more: beyond_s * (1.0 - sqrt(waiting / (waiting + more)))

    def keeps_plain_order(self, queue: QueueView, limit: int) -> bool:
        """Report whether what comes first should go first, as composing would save too little.

        Args:
            queue: What waits, which is more than one batch.
            limit: The most that a batch may hold.
        """
        if self._gone >= min(self._looks, EVERY):
            self._compare(queue, limit)
        return self._ratio > _WORTH

    def _compare(self, queue: QueueView, limit: int) -> None:
        """Look what composing saves now."""
        cost = self._cost
        composed_s = plain_s = 0.0
        for levels in queue.levels:
            rising = levels.rising()
            pieces = self._cut(rising, limit, inf)
            composed_s += sum(cost.seconds_of(*_shapes(rising, pieces)))
            in_order = queue.peek(len(queue)) if queue.lanes == 1 else sorted(in_line(levels), key=_arrived)
            lengths = [request.length for request in in_order]
            batches = [lengths[begin : begin + limit] for begin in range(0, len(lengths), limit)]
            plain_s += sum(cost.seconds_of([*map(len, batches)], [*map(max, batches)]))
        ratio = composed_s / plain_s
        self._looks += 1
        news = max(1.0 - KEEP**self._gone, 1.0 / self._looks)
        self._ratio += news * (ratio - self._ratio)
        self._gone = 0

    def _cut(self, rising: Rising, limit: int, most_padded: float) -> Sequence[tuple[int, int]]:
        """Return the pieces of the line as `partition` does; the last ones are kept."""
        cost = self._cost
        lengths, counts = [length for length, _, _ in rising], [count for _, _, count in rising]
        asked = (cost.samples, limit, most_padded, lengths, counts)
        if asked != self._asked:
            self._pieces = partition(lengths, counts, limit, most_padded, cost.setup_s, cost.item_s_at(lengths))
            self._asked = asked
        return self._pieces

    def _whole(self, rising: Rising) -> ChosenGroup:
        """Return all that waits as one batch."""
        requests = [request for _, of_level, _ in rising for request in of_level]
        longest = rising[-1][0]
        return ChosenGroup(requests, longest, self._cost.seconds(len(requests), longest), 1)

    def _best(
        self,
        now: float,
        rising: Rising,
        pieces: Sequence[tuple[int, int]],
        extra_s: float,
        allowance_s: float,
    ) -> tuple[float, ChosenGroup]:
        """Return the best of the batches of one key, behind its score."""
        cost = self._cost
        line = [request for _, of_level, _ in rising for request in of_level]
        counts, longest_of = _shapes(rising, pieces)
        seconds_of = [seconds + extra_s for seconds in cost.seconds_of(counts, longest_of)]
        noise = 1.0 + cost.cv
        surely_s = [seconds * noise for seconds in seconds_of]
        earliest, worth = self._worth(now + _JUST_COME_S, rising, line, pieces, surely_s, allowance_s)
        most, best = -1.0, (0, 0, 0, 0.0)
        shapes = zip(pieces, longest_of, seconds_of, surely_s, _units(allowance_s, surely_s), strict=True)
        for (begin, end), longest, seconds, surely, unit in shapes:
            until = now + surely
            if until <= earliest:
                score = sum(worth[begin:end]) / (seconds * unit)
            else:
                in_time = [w for w, r in zip(worth[begin:end], line[begin:end], strict=True) if r.due >= until]
                score = sum(in_time) / ((cost.seconds(len(in_time) or 1, longest) + extra_s) * unit)
            if score > most:
                most, best = score, (begin, end, longest, seconds)
        begin, end, longest, seconds = best
        batch: Sequence[Request] = line[begin:end]
        if now + seconds > earliest and len(pieces) > 1:
            batch = without_late(now, batch, longest, lambda n, length: cost.seconds(n, length) + extra_s)
            seconds = cost.seconds(len(batch), longest) + extra_s
        return most, ChosenGroup(batch, longest, seconds, len(pieces))

    def _worth(
        self,
        since: float,
        rising: Rising,
        line: Sequence[Request],
        pieces: Sequence[tuple[int, int]],
        surely_s: Sequence[float],
        allowance_s: float,
    ) -> tuple[float, list[float]]:
        """Return when the first request is due, and what it is worth to serve each of them now.

        Where all have the same time to their dues that is the age, which `_units` makes a share,
        else its share of the time that the request can wait, to the eighth power.

        Args:
            since: The time, a little later.
            rising: The requests, level by level; `line` has them one by one.
            pieces: The batches; each takes `surely_s`, noise included.
            allowance_s: From the arrival of each request to its due time; 0 if that differs.
        """
        if allowance_s:
            earliest = inf if allowance_s == inf else min([next(iter(of_level)).due for _, of_level, _ in rising])
            # the eighth power by three squares, in half the time
            worth = [(c := (b := (a := since - r.admitted) * a) * b) * c for r in line]
        else:
            earliest = min([r.due for r in line])
            batch_s = [surely for (begin, end), surely in zip(pieces, surely_s, strict=True) for _ in range(begin, end)]
            worth = [_used_up(since, r, surely) ** _POWER for r, surely in zip(line, batch_s, strict=True)]
        if self._in_time:
            says = [say for length, _, count in rising for say in repeat(self._say_of(length), count)]
            worth = [w * say for w, say in zip(worth, says, strict=True)]
        return earliest, worth

    def _say_of(self, length: int) -> float:
        """Return the weight of requests of about this length: more for those seldom in time."""
        return 1.0 / sqrt(max(_ANSWERED, self._in_time.get(_class_of(length), 1.0)))


def _shapes(rising: Rising, pieces: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return the count of each piece of the line, and its longest length."""
    ends = [*accumulate([count for _, _, count in rising])]
    return [end - begin for begin, end in pieces], [rising[bisect_left(ends, end)][0] for _, end in pieces]


def _class_of(length: int) -> int:
    """Return the class of lengths that a length belongs to: two for each doubling.

    With one, a class holds the longest tenth and others, and the longest have 1 point less in time.
    """
    return int(2 * log2(length))


def _units(allowance_s: float, surely_s: Sequence[float]) -> list[float]:
    """Return for each batch by what the eighth powers of ages are divided to be those of shares.

    Args:
        allowance_s: From the arrival of each request to its due time; 0 if that differs, where they
            are shares already.
        surely_s: What each batch takes, noise included.
    """
    if 0.0 < allowance_s < inf:
        return [_can_wait_s(allowance_s, surely) ** _POWER for surely in surely_s]
    return [_PATIENT_S**_POWER if allowance_s else 1.0] * len(surely_s)


def _used_up(since: float, request: Request, surely_s: float) -> float:
    admitted = request.admitted
    return (since - admitted) / _can_wait_s(request.due - admitted, surely_s)


def _can_wait_s(allowance_s: float, surely_s: float) -> float:
    """Return how long a request can wait for a batch that takes so long, and be in time."""
    return max(_JUST_COME_S, min(allowance_s - surely_s, _PATIENT_S))


def in_line(levels: LevelsView) -> list[Request]:
    """Return all that waits in levels, the shortest first."""
    return [request for _, of_level, _ in levels.rising() for request in of_level]


def _without(
    rising: Iterable[tuple[int, Iterable[Request], int]], without: Collection[Request]
) -> list[tuple[int, Iterable[Request], int]]:
    gone = set(without)
    left: list[tuple[int, Iterable[Request], int]] = []
    for length, of_level, _ in rising:
        kept = [request for request in of_level if request not in gone]
        if kept:
            left.append((length, kept, len(kept)))
    return left


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


def partition(
    lengths: Sequence[int],
    counts: Sequence[int],
    limit: int,
    most_padded: float,
    setup_s: float,
    items_s: Sequence[float],
) -> list[tuple[int, int]]:
    """Return the pieces of the line, each as where it begins and ends.

    Args:
        lengths: The longest of each level, rising.
        counts: How many requests each level has.
        limit: The most that one batch may hold.
        most_padded: How large the count of a batch times its longest length may be; a request that
            is longer by itself is alone.
        setup_s: Seconds of a batch that do not depend on its count.
        items_s: Seconds of each item in a batch whose longest is of each level.
    """
    twice = 2 * sum(counts)
    is_fine = len(lengths) > _MANY
    trifle_s = _TRIFLE * setup_s if is_fine else 0.0
    # places are counted from 2n, backward: what a second costs behind one is then its negative
    end = last = -twice
    places, least, came_from = [end], [0.0], [0]
    first = follow = 0
    for length, count, item_s, longer_s in zip(lengths, counts, items_s, [*items_s[1:], inf], strict=True):
        most = limit if length * limit <= most_padded else max(1, int(most_padded // length))
        end += count
        if follow < len(places) and places[follow] + most < end:  # a full batch from there ends within these
            full_s = setup_s + most * item_s
            near = most // _MANY if is_fine else 0
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
    pieces = []
    at = len(places) - 1
    while at:
        before = came_from[at]
        pieces.append((places[before], places[at]))
        at = before
    pieces.reverse()
    return pieces
