"""The cost of a batch, learned while serving: t(n) = level · shape(n) in its worker, and its way.

The **shape** is a table of relative times by size. At a size that was run it is the mean of what
was measured there, pulled toward a straight line as far as measurements are few and noisy; between
such sizes it is interpolated, as real curves have tiles, caches and knees. It never falls (pools of
adjacent violators: Barlow et al. 1972), since more items never take less time. The **level** and
the noise are what all sizes share.

**How well a size is known** is one number: the batches of that size that were learned from, which
count half as much for each half-life since. As it fades, noisy times give way to the line, a mean
follows its next sample sooner, and times that others contradict give way to these. Below `_KNOWN`
the size counts as not known any more: what it may take at least (`hoped`) is then worked out
without it, so that `policy/size.py` has it run again, and whatever it takes then is believed.

What has held for long may be expected to hold for as long again (Lindy's law). So the half-life is
as many batches of any size as the time has held for, from `_YOUNG` to `_HALF_LIFE`. A size that
suddenly takes `DOUBT` times as much, or as little, has changed: it is known by that alone, and all
others count half, as what has changed it may have changed them, too. So a state of seconds is left
within as many, while a knee that is always there is tried once in a while.

**The way** to the worker and back is a straight line over the size (`HopCost`).

The **level** is the one factor by which all batches are slower or faster than the shape of the cost
says: a model that is throttled, or whose neighbour has woken up. Its gain follows a tracking signal
(Trigg & Leach 1967): small while the residuals scatter around zero, large when they agree in sign.
A residual far outside the noise is a stall and is believed only if it repeats.

Each batch that is learned from measures level and noise, whatever its size: half of the variance is
of the last 14 of them, and a change of speed is followed within some ten.

**First calls.** A worker's first call of a size may take ten times as long as later ones, while
kernels are compiled for it. If that were believed, the size would seem so dear that it is not run
any more, and nothing would show that it is not. So a first call counts only if it took no longer
than expected anyway, or while there has been no other. If a second call of its size shows then that
it was slow, all is forgotten, as the others may have been slow, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from itertools import pairwise
from math import copysign, exp, inf, log, sqrt
from typing import Final

LEARNED: Final = 6
"""Batches before anything is decided by what was learned, and before errors mean something. With
half as many, requests are refused by three batches; with twice as many, a start into an overload
refuses none for twelve, and stalls are believed for as long."""
SURE: Final = 2.5
"""Almost nothing is beyond so many standard deviations. With half as many, one batch of ten is
beyond; with twice as many, little is held back amid noise."""
KEEP: Final = 0.95
"""What a batch still counts for in smoothed figures once the next one has come: half of it after
14, and a mean at one size goes back 20. At half of that time they follow chance more; at twice as
much, clients that have gone are waited for as much longer."""
GAIN: Final = 0.99
"""Of a figure to be made less: what is done for its sake must promise as little. At half the
distance from 1, groups of clients are split, and clients waited for, for next to nothing; at twice
the distance, sizes and waits that gain 2 % are left out."""
NOISE: Final = 0.3
"""Of the noise: by so much better must be whatever is preferred to the usual. With half of it,
chance decides; with twice as much, knees amid noise are passed over."""
DOUBT: Final = 2.0
"""Times what is expected: the first batch of a size that took longer, or a way, may have stalled,
and a first call on a worker teaches nothing then. If later calls show that the very first ones took
as much longer, all is forgotten. A size that takes as much more or less than it did has changed,
and one that is not known may take as much less. With half as much all changes at any noise; with
twice as much, sizes that were three times as slow for a while are run again a hundred batches
later."""
_STALL: Final = 0.25
"""Log-ratio beyond which, and beyond 3.5 sigma, a batch may have stalled. With half of it, changes
of an eighth are believed one batch later; with twice as much, stalls of 1.6 times count."""
_ODD: Final = 0.3
"""How well batches like it are known, up to which a batch is no stall. With half of it, sizes that
were run once are believed slow after one stall; with twice as much, it takes two batches."""
_LEVEL_GAIN: Final = 0.3
"""The level's gain while all residuals agree. With half of it, a drift takes twice as many batches;
with twice as much, three batches that are slow by chance move the level by half of that."""
MOST_KNOTS: Final = 64
"""Entries of a table, of which half are those of the smallest sizes; and batches to learn from
before any is skipped. With half as many, tile ends beyond 32 are missed; with twice as many, a
table takes twice as long to make, and learning its share of short batches for twice as long."""
SLOW_KEEP: Final = 0.985
"""The weight that a batch keeps in a line once the next one has come, half of it after 46 (92 for
four weights), and an answer in the share of answers in time. At half of that time, noise is in the
slope; at twice as much, a knee that has moved stays in it, and lengths that are mostly late gain as
much later."""
_PULL: Final = 1e-4
"""Batches that the former weights of a line count for, so that parts that nothing tells apart share
what they cost. With half or twice as many nothing changes; with five hundred times as many, long
items of the first seconds are refused for a guess."""
NEWS: Final = 0.05
"""By so much, and by more than noise, a batch must differ from what is expected to be news, after
which the tables are made anew, and a try is worth others soon. With half of it, small surprises
are; with twice as much, a knee that is found in small steps is found later."""
EVERY: Final = 8
"""Batches between two looks at what composing saves, and at the weights of lengths, which the first
64 batches change one by one; of all batches by size one in so many has the table made anew, until
that is one in 64. With half as many, learning takes longer; with twice as many, a change is noticed
as much later."""
NOISY_CV: Final = 0.04
"""The noise at which one sample of a size counts as much as the line, and above which no size is
tried. At half of it, a knee amid noise is found in four times as many batches; at twice as much,
one odd batch bends the table."""
_YOUNG: Final = 16.0
"""The half-life of a time that has just been measured for the first time, or has just changed. With
half of it, sizes beyond a knee are tried twice as often at first; with twice as much, a service
that was slow for seconds is slow for as many more."""
_HALF_LIFE: Final = 128.0
"""The same once a time has held for long. With half as many, a size beyond a knee is tried twice as
often, at up to 1 % of the capacity; with twice as many, a size that was slow for a while is run
again after 1,300 batches at the latest."""
_DRIFT: Final = 0.17
"""Change of the logarithm of the level after which it counts half, too: what was measured at
another speed of the machine may be off by as much. With half as much, noise of 0.1 ages all sizes;
with twice as much, sizes that were off for a while are run again some hundred batches later."""
_PROOF: Final = 0.02
"""Batches that a time counts for where a try is weighed, if it is not known any more, or never was:
what seems to take fifty times as much as it may save is not tried before it has got old."""
_KNOWN: Final = 0.5
"""Batches from which on a size is known. With half as many, each is run again a half-life later;
with twice as many, what was run once is not known after the next batch."""


class FirstCalls(ABC):
    """Base of what learns from the times of calls, some of which are first ones."""

    __slots__ = ("_guesses", "_knows_others")

    def __init__(self) -> None:
        self._knows_others = False
        self._guesses: set[Hashable] = set()  # kinds of first calls that were believed, as there was no other

    @abstractmethod
    def forget(self) -> None:
        """Forget all that was learned."""

    def _teaches(self, kind: Hashable, seconds: float, expected: float, is_first: bool) -> bool:
        """Report whether a call is to be learned from.

        Args:
            kind: What calls of about its size have in common.
            seconds: What it took.
            expected: What it was expected to take.
            is_first: Whether it was the first one of its kind on its worker.
        """
        if is_first:
            if self._knows_others:
                return seconds <= DOUBT * expected
            self._guesses.add(kind)
            return True
        self._knows_others = True
        if kind in self._guesses:
            self._guesses.remove(kind)
            if expected > DOUBT * seconds:
                self._guesses.clear()
                self.forget()
        return True


class LeastSquares:
    """Weights of the parts of a cost by least squares of relative errors, none of them negative.

    Args:
        first: The weights of the parts of the very first sample, as shares of its seconds.

    Attributes:
        weights: Seconds of one of each part.
    """

    def __init__(self, first: Sequence[float]) -> None:
        self._first = first
        self._keep = SLOW_KEEP ** (2 / len(first))  # more weights need as many more samples
        self.weights = [0.0] * len(first)
        self._products = [[0.0] * len(first) for _ in first]
        self._sums = [0.0] * len(first)
        self._samples = 0.0

    def add(self, parts: Sequence[float], seconds: float, usual: float) -> None:
        """Learn that a batch of these parts took `seconds`, where `usual` were expected.

        Relative to what it took itself, a batch that happened to be quick would count for more than
        a slow one.
        """
        if not self._samples:
            self.weights = [
                share * seconds / part if part else 0.0 for share, part in zip(self._first, parts, strict=True)
            ]
        keep = self._keep
        self._samples = keep * self._samples + 1.0
        for i, part in enumerate(parts):
            row, scaled = self._products[i], part / usual**2
            self._sums[i] = keep * self._sums[i] + scaled * seconds
            for j, other in enumerate(parts):
                row[j] = keep * row[j] + scaled * other

    def fit(self) -> None:
        """Find the weights anew, near the former ones, without those that would be negative."""
        left = [i for i in range(len(self.weights)) if self._products[i][i]]
        while left:
            found = self._solved(left)
            worst = min(left, key=lambda i: found[i] * sqrt(self._products[i][i]))
            if found[worst] >= 0.0:
                self.weights = [found.get(i, 0.0) for i in range(len(self.weights))]
                return
            left.remove(worst)

    def _solved(self, left: Sequence[int]) -> dict[int, float]:
        pull = _PULL / self._samples
        rows = []
        for i in left:
            own = self._products[i][i] * pull
            row = [self._products[i][j] + (own if i == j else 0.0) for j in left]
            rows.append([*row, self._sums[i] + own * self.weights[i]])
        for p, row in enumerate(rows):
            pivot = row[p] or 1e-300
            rows[p] = row = [value / pivot for value in row]
            for r, other in enumerate(rows):
                if r != p:
                    factor = other[p]
                    rows[r] = [x - factor * y for x, y in zip(other, row, strict=True)]
        return {i: row[-1] for i, row in zip(left, rows, strict=True)}


class CostLevel(FirstCalls):
    """The level and the noise of a learned cost.

    Attributes:
        level: What to multiply the relative times of the shape with.
        samples: How many batches it has learned from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        self.level = 1.0
        self.samples = 0
        self._variance = 0.0  # of the log-ratios
        self._trend = 0.0  # smoothed log-ratio
        self._scatter = 1e-3  # smoothed absolute log-ratio
        self._odd = 0.0  # the sign of the last error, if it was far outside the noise

    @property
    def cv(self) -> float:
        """Coefficient of variation of a batch's time about its expectation."""
        return sqrt(self._variance)

    @property
    def margin(self) -> float:
        """Planned time over expected time: about the 0.7-quantile of what a batch takes."""
        return 1.0 + 0.5 * self.cv

    def _believed(self, seconds: float, expected: float, weight: float) -> float | None:
        """Learn level and noise from a batch; return the seconds that the shape should believe.

        Args:
            seconds: What it took.
            expected: What it was expected to take.
            weight: How well batches like it are known, up to 1; where that is little, it is the
                shape that is wrong.

        Returns:
            None for a stall.
        """
        error = log(min(max(seconds / expected, 0.4), 2.5))
        if weight > _ODD and abs(error) > max(3.5 * self.cv, _STALL):
            before, self._odd = self._odd, copysign(1.0, error)
            if self._odd != before:
                return None
        else:
            self._odd = 0.0
            if weight >= 0.6 and abs(error) < 0.8:
                self._variance += (1.0 - KEEP) * (error * error - self._variance)
        self._trend += 0.2 * weight * (error - self._trend)
        self._scatter += 0.2 * weight * (abs(error) - self._scatter)
        agreement = abs(self._trend) / (self._scatter + 0.01)
        if agreement < 0.8 and weight >= 0.6:
            most = SURE * self.cv + 0.02
            error = min(max(error, -most), most)
        self.level *= exp(weight * (0.02 + (_LEVEL_GAIN - 0.02) * agreement**4) * error)
        return expected * exp(error) if weight > _ODD else seconds


def knots_for(limit: int) -> list[int]:
    """Return at most `MOST_KNOTS` sizes from 1 to `limit`: all, or small ones and likely tile ends.

    Above half of that the knots are multiples of a step that doubles with each octave where it
    must, and the size after each: a tile that ends at a multiple is seen from both sides. Beyond
    two millions they are powers of two alone.
    """
    if limit <= MOST_KNOTS:
        return list(range(1, limit + 1))
    room = start = MOST_KNOTS // 2
    octaves = (limit - 1).bit_length() - (start - 1).bit_length()
    per_octave = 1
    while 4 * per_octave * octaves <= room:
        per_octave *= 2
    has_both_sides = 2 * per_octave * octaves <= room  # else there is room for ends only
    knots = set(range(1, start + 1)) | {limit}
    while start < limit:
        for k in range(per_octave):
            at = start + k * start // per_octave
            knots |= {at, at + 1} if has_both_sides else {at}
        start *= 2
    return sorted(knot for knot in knots if knot <= limit)


class Knots:
    """The sizes from 1 to `limit` that have an entry in a table, and for which of them others are.

    Attributes:
        knots: The sizes that have an entry.
    """

    def __init__(self, limit: int) -> None:
        self.knots = knots_for(limit)
        self._dense = limit if limit <= MOST_KNOTS else MOST_KNOTS // 2  # up to here, every size is a knot

    def index(self, n: int) -> int:
        """Return the position of the knot at `n`, or of the last one below."""
        if n <= self._dense:
            return n - 1
        return bisect_right(self.knots, n) - 1

    def nearest(self, n: int) -> int:
        """Return the position of the knot that samples of size `n` count for."""
        i = self.index(n)
        if i + 1 < len(self.knots) and 2 * n > self.knots[i] + self.knots[i + 1]:
            i += 1
        return i


_WAY_INERTIA: Final = 0.01
"""Pull toward the former slope, as a share of the mean size squared. With half of it, noise is a
slope; with twice as much, it takes two tries of half the size to find one."""
_FADING: Final = 0.998
"""What is left of the way once a batch has gone ahead. With half of the loss, ways that have
become short are noticed after 700 batches; with twice as much, one batch in 150 travels alone."""


class HopCost:
    """Learned seconds of the way to a worker and back, `fixed_s + unit_s · size`.

    A batch that does not go ahead measures the line. Batches of one size say nothing of its slope,
    which then stays as it is; `policy/size.py` sees to it that sizes differ where that matters. A
    batch that goes ahead measures only the part of its way that nothing hides, `ahead_unit_s`. As
    long as all do, the line fades, until one does not go ahead and measures it.

    Attributes:
        fixed_s: Seconds that do not depend on the size.
        unit_s: Seconds per unit of size.
        ahead_unit_s: Seconds per unit of a batch that goes ahead, all in all.
        spread: The variance of the sizes that measured it lately, over the square of their mean.
        samples: How many batches it has learned from.
    """

    def __init__(self) -> None:
        self.fixed_s = self.unit_s = self.ahead_unit_s = self.spread = 0.0
        self.samples = 0
        self._aheads = 0
        self._before_s = inf  # the way of the batch before
        self._n = self._x = self._y = self._xx = self._xy = 0.0  # sums, forgotten

    def seconds(self, n: float) -> float:
        """Return the expected seconds of a batch of `n` that does not go ahead."""
        return self.fixed_s + self.unit_s * n

    def learn(self, size: int, hop_s: float, ahead: bool) -> None:
        """Learn from a batch of `size`, which has spent `hop_s` on its way."""
        if ahead:
            unit_s = hop_s / size
            self._aheads += 1
            if self._aheads > 1:
                unit_s = min(unit_s, DOUBT * max(self.ahead_unit_s, 1e-6))
            self.ahead_unit_s += max(0.1, 1.0 / self._aheads) * (unit_s - self.ahead_unit_s)
            self._fade()
            return
        self.samples += 1
        before_s, self._before_s = self._before_s, hop_s
        if self.samples > 1 and hop_s > (most := DOUBT * max(before_s, self.seconds(size))):
            hop_s = most  # a stall does not come twice
        self._n = KEEP * self._n + 1.0
        self._x = KEEP * self._x + size
        self._y = KEEP * self._y + hop_s
        self._xx = KEEP * self._xx + size * size
        self._xy = KEEP * self._xy + size * hop_s
        mean = self._x / self._n
        variance = max(0.0, self._xx / self._n - mean * mean)
        pull = _WAY_INERTIA * mean * mean
        slope = (self._xy / self._n - mean * self._y / self._n + pull * self.unit_s) / (variance + pull)
        self.spread = variance / (mean * mean)
        self.unit_s = min(max(0.0, slope), self._y / self._x)
        self.fixed_s = max(0.0, self._y / self._n - self.unit_s * mean)

    def _fade(self) -> None:
        self.fixed_s *= _FADING
        self.unit_s *= _FADING
        for name in ("_n", "_x", "_y", "_xx", "_xy"):  # the next ones that measure it count for more
            setattr(self, name, _FADING**10 * getattr(self, name))


class _Measured:
    """The times of one size.

    Attributes:
        mean: Relative seconds.
        count: Batches that it is known by, when the last one was learned from.
        at: When that was, in batches of any size.
        log_level: The logarithm of the level then.
        changes: How many sizes had changed by then.
        changed_at: Since when the time has held: since this size was found to take it.
    """

    def __init__(self, at: int, changed_at: int) -> None:
        self.mean = self.count = self.log_level = 0.0
        self.at, self.changed_at = at, changed_at
        self.changes = 0


class CostModel(CostLevel):
    """Learned seconds of a batch by its size.

    Args:
        limit: Largest size, in units of the requests' sizes.

    Attributes:
        sizes: Those that have an entry in the table, rising.
        at: The expected seconds of each, its way included.
        hoped: The same of sizes that are known, and the least that the others may take.
        version: Counts the refreshes of the table.
        way: To the worker and back.
        largest: The largest size that was ever run.
        longest_s: Expected time of the largest batch.
        shortest_s: That of a batch of 1.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.version = 0
        self.way = HopCost()
        self._knots = Knots(limit)
        self.sizes = self._knots.knots
        super().__init__()

    def forget(self) -> None:
        super().forget()
        entries = len(self.sizes)
        self._line = LeastSquares((0.85, 0.15))
        self._measured = dict[int, _Measured]()  # by the index of the size
        self.changes = 0  # of single sizes, against what had been measured
        self._log_level = 0.0
        self._is_sure = False  # whether a warm-up was learned from
        self._doubted: set[int] = set()  # entries of which a first batch was not believed
        self._was_long = False  # whether the last batch was one of these, or would have been
        self._shape = self.at = self.hoped = [1e-6] * entries
        self._rise = [0.0] * entries  # seconds per unit of size, from each entry to the next
        self.largest = 1
        self.longest_s = self.shortest_s = 1e-6
        self._took_s = self._expected_s = 0.0  # sums of seconds that fade, stalls included
        self._unread = 0
        self._tabled = (1.0, 0.0, 0.0)  # the level and the way that are in the table
        self.version += 1

    @property
    def setup_s(self) -> float:
        """Seconds of a batch that do not depend on its size, its way included."""
        return self._line.weights[0] * self.level + self.way.fixed_s

    @property
    def unit_s(self) -> float:
        """Seconds of each unit of its size besides."""
        return self._line.weights[1] * self.level + self.way.unit_s

    @property
    def bias(self) -> float:
        """Expected over measured time in the long run, at most 1: stalls take the rest."""
        return min(1.0, self._expected_s / self._took_s) if self._took_s else 1.0

    def curve(self) -> list[tuple[int, float]]:
        """Return the expected seconds at each size that has an entry of its own."""
        return list(zip(self.sizes, self.at, strict=True))

    def points(self) -> list[tuple[int, float, float]]:
        """Return the sizes that were run, their mean seconds, and by how much they are known."""
        measured = [(self.sizes[i], self._measured[i].mean) for i in sorted(self._measured)]
        return [(n, self.level * mean + self.way.seconds(n), self.known(n)) for n, mean in measured]

    def seconds(self, n: float) -> float:
        """Return the expected time of a batch of size `n` >= 1, its way included.

        The size may be a fraction, where it is an expectation itself.
        """
        i = self._knots.index(int(n))
        return self.at[i] + self._rise[i] * (n - self.sizes[i])

    def hoped_s(self, n: int) -> float:
        """Return the least seconds of a batch of about `n`; if that is known, the expected ones."""
        return self.hoped[self._knots.nearest(n)]

    def following_s(self, n: int) -> float:
        """Return for how long a worker is taken up by a batch of `n` that has gone ahead."""
        _, fixed_s, unit_s = self._tabled
        return self.seconds(n) - fixed_s - unit_s * n + (self.way.ahead_unit_s or 0.5 * unit_s) * n

    def known(self, n: int) -> float:
        """Return by how many batches about size `n` is known; each fades."""
        return self._known_now(self._knots.nearest(n))

    def proof(self, n: int) -> float:
        """Return by how much what a size seems to take counts against a try of it, in batches."""
        i = self._knots.nearest(n)
        age = self.samples - self._measured[i].at if i in self._measured else 0
        return float(max(self._known_now(i), _PROOF * 0.5 ** (age / _HALF_LIFE)))

    def is_known(self, n: int) -> bool:
        """Report whether about size `n` was run lately."""
        return self._known_now(self._knots.nearest(n)) >= _KNOWN

    def largest_within(self, seconds: float) -> int:
        """Return the largest size expected to take no longer than `seconds`; 0 if there is none."""
        i = bisect_right(self.at, seconds) - 1
        if i < 0 or i == len(self.at) - 1:
            return self.sizes[i] if i >= 0 else 0
        n = self.sizes[i] + int((seconds - self.at[i]) / self._rise[i])
        return min(n, self.sizes[i + 1] - 1)

    def add(self, n: int, seconds: float, sure: bool = False, is_first: bool = False) -> None:
        """Learn from a batch.

        Args:
            n: Its size.
            seconds: How long it took in its worker.
            sure: Whether it was run more than once, and this is the shortest time.
            is_first: Whether it was the first one of about its size on its worker.
        """
        raw_s = seconds = usual = max(seconds, 1e-9)
        i = self._knots.nearest(n)
        if not self._teaches(i, seconds, self._worker_s(n), is_first):
            return
        found = self._measured.get(i)
        if (
            found
            and self.samples < LEARNED
            and not (sure or self._is_sure)
            and found.mean * self.level > DOUBT * seconds
        ):
            self.forget()  # the first calls of all are slow, while memory is touched for the first time
            found = None
        self._is_sure = self._is_sure or sure
        count = found.count * 0.5 ** ((self.samples - found.at) / _HALF_LIFE) if found else 0.0
        is_new = count < 2.0 or self.samples < LEARNED
        is_long = is_new and self.samples > 0 and not sure and seconds > DOUBT * self._worker_s(n)
        was_long, self._was_long = self._was_long, is_long
        if is_long and not was_long and i not in self._doubted:
            self._doubted.add(i)
            return
        self.samples += 1
        self.largest = max(self.largest, n)
        known = self._known_now(i)
        if self.samples > LEARNED:
            usual = self._worker_s(n)
            self._took_s = SLOW_KEEP * self._took_s + seconds
            self._expected_s = SLOW_KEEP * self._expected_s + usual
            weight = min(1.0, count / 3.0)
            believed = self._believed(seconds, usual, weight if known >= _KNOWN else min(weight, _ODD))
            if believed is None:
                return
            seconds = believed
        level = self.level
        relative = seconds / level
        self._line.add((1.0, n), relative, usual / level)
        if n != self.sizes[i]:
            a, b = self._line.weights
            relative *= (a + b * self.sizes[i]) / (a + b * n)
        is_news = abs(log(seconds / usual)) > 2.0 * self.cv + NEWS
        known = self._note(i, known, relative, raw_s / seconds, is_news)
        self._unread += 1
        if is_news or known < 1.5 or self._unread >= min(EVERY**2, self.samples // EVERY) or self._has_moved():
            self._tabulate()

    def learn_way(self, size: int, hop_s: float, ahead: bool) -> None:
        """Learn from the way of a batch."""
        if not hop_s and not self.way.samples:
            return
        self.way.learn(size, hop_s, ahead)
        if self.samples and self._has_moved():
            self._tabulate()

    def _has_moved(self) -> bool:
        """Report whether level or way differ from those in the table by so much that it matters."""
        level, fixed_s, unit_s = self._tabled
        way, limit = self.way, self.limit
        if abs(self.level - level) > 0.04 * level:
            return True
        return (
            abs(way.fixed_s - fixed_s) > 0.04 * self.shortest_s
            or abs(way.unit_s - unit_s) * limit > 0.04 * self.longest_s
        )

    def _note(self, i: int, known: float, relative: float, cut: float, is_news: bool) -> float:
        """Take a time into the mean of its size; return by how many batches that is known now.

        Args:
            i: The index of the size.
            known: By how many batches it was known.
            relative: The time, which counts.
            cut: Times as long the batch has taken.
            is_news: Whether that was not expected. If it was, the time of a new size has held for
                as long as that of the nearest one.
        """
        found = self._measured.get(i)
        if found is None:
            near = min(self._measured, key=lambda j: abs(j - i), default=i)
            since = self.samples if is_news or near == i else self._measured[near].changed_at
            found = self._measured[i] = _Measured(self.samples, since)
        if found.mean and abs(log(cut * relative / found.mean)) > max(log(DOUBT), 2.0 * SURE * self.cv):
            known, found.changed_at = min(known, 1.0), self.samples  # what was known of it is not true any more
            self.changes += 1
        found.count = min(known + 1.0, 1.0 / (1.0 - KEEP))
        found.mean += (relative - found.mean) / found.count
        self._log_level = log(self.level)
        found.at, found.log_level, found.changes = self.samples, self._log_level, self.changes
        return found.count

    def _known_now(self, i: int) -> float:
        found = self._measured.get(i)
        if found is None:
            return 0.0
        half_life = min(max(_YOUNG, found.at - found.changed_at), _HALF_LIFE)
        age = (self.samples - found.at) / half_life + abs(self._log_level - found.log_level) / _DRIFT
        return float(found.count * 0.5 ** (age + self.changes - found.changes))

    def _worker_s(self, n: int) -> float:
        i = self._knots.index(n)
        shape = self._shape
        if i + 1 == len(shape):
            rise = self._line.weights[1]
        else:
            rise = (shape[i + 1] - shape[i]) / (self.sizes[i + 1] - self.sizes[i])
        return (shape[i] + rise * (n - self.sizes[i])) * self.level

    def _pulled(self, line: Sequence[float]) -> list[tuple[int, float, float]]:
        """Return the sizes that were measured: index, time, and by how many batches it is known.

        The time is pulled toward the line as far as it is known badly, but not one that is farther
        away than noise can be (the positive part of James and Stein 1961): there the line is wrong.
        """
        doubt, noise = (self.cv / NOISY_CV) ** 2, (SURE * self.cv) ** 2
        pulled = []
        for i, found in sorted(self._measured.items()):
            w, y = self._known_now(i), line[i]
            off = w * log(found.mean / y) ** 2
            share = max(w / (w + doubt) if w + doubt else 1.0, 1.0 - noise / off if off > noise else 0.0)
            pulled.append((i, y + share * (found.mean - y), w))
        return pulled

    def _hopes(
        self, line: Sequence[float], shape: Sequence[float], pulled: list[tuple[int, float, float]]
    ) -> list[float]:
        """Return the least that each size may take: of those that are known what is expected.

        Of others no less than a smaller one that is known, and than a share of what the rest say,
        which grows from `1 / DOUBT` the nearer a known one is. Below the smallest known one they
        say that each item takes as long, and less if the known ones show that more items are dearer
        each, or show nothing as they are all of about one size.
        """
        fresh = [(self.sizes[i], i, y) for i, y, w in pulled if w >= _KNOWN]
        if not fresh:
            return [*shape]
        may_take = _between([(i, y) for _, i, y in fresh], line, self.sizes)
        (first, before, first_s), (last, _, last_s) = fresh[0], fresh[-1]
        chord = (last_s - first_s) / (last - first) if last >= 1.5 * first else inf
        hoped, least, known = [], 0.0, {i for _, i, _ in fresh}
        for i, (n, y) in enumerate(zip(self.sizes, shape, strict=True)):
            if i in known:
                least = max(least, y)
                hoped.append(y)
                continue
            k = bisect_left(fresh, (n,))
            share = max(1.0 / DOUBT, 1.0 - min([abs(n - size) for size, _, _ in fresh[max(0, k - 1) : k + 1]]) / n)
            if i < before:
                each_s = first_s / first * n
                hoped.append(min(y, max(sqrt(share) * each_s, min(each_s, first_s - chord * (first - n)))))
            else:
                hoped.append(min(y, max(least, share * min(y, may_take[i]))))
        return hoped

    def _tabulate(self) -> None:
        self._unread = 0
        self.version += 1
        self._line.fit()
        a, b = self._line.weights
        line = [max(a + b * n, 1e-9) for n in self.sizes]
        pulled = self._pulled(line)
        weights = [1e-3] * len(line)
        for i, _, w in pulled:
            weights[i] += w
        shape = self._shape = _rising(_between([(i, y) for i, y, _ in pulled], line, self.sizes), weights)
        hoped = self._hopes(line, shape, pulled)
        way, level = self.way, self.level
        self._tabled = level, way.fixed_s, way.unit_s
        fixed_s, unit_s = way.fixed_s, way.unit_s
        self.at = [y * level + fixed_s + unit_s * n for n, y in zip(self.sizes, shape, strict=True)]
        self.hoped = [y * level + fixed_s + unit_s * n for n, y in zip(self.sizes, hoped, strict=True)]
        self.shortest_s, self.longest_s = self.at[0], self.at[-1]
        steps = pairwise(zip(self.sizes, self.at, strict=True))
        self._rise = [(y - x) / (m - n) for (n, x), (m, y) in steps] + [b * level + way.unit_s]


def _between(known: Sequence[tuple[int, float]], line: Sequence[float], sizes: Sequence[int]) -> list[float]:
    """Return the times of all sizes: straight between known ones, else in proportion to a line."""
    if not known:
        return [*line]
    (first, y), (last, z) = known[0], known[-1]
    found = [y / line[first] * each for each in line[:first]] + [z / line[last] * each for each in line[first:]]
    for (i, x), (j, y) in pairwise(known):
        step = (y - x) / (sizes[j] - sizes[i])
        found[i:j] = [x + step * (n - sizes[i]) for n in sizes[i:j]]
    found[last] = z
    return found


def _rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the closest sequence that never falls, by weighted squares."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        n = 1
        while pools and pools[-1][0] > value:
            before, w, k = pools.pop()
            value = (value * weight + before * w) / (weight + w)
            weight += w
            n += k
        pools.append((value, weight, n))
    return [value for value, _, n in pools for _ in range(n)]
