"""What a batch of n costs, learned while serving: t(n) = level · shape(n), with noise and margin.

The **shape** (`policy/shape.py`) is slow: it says how the time depends on the size. The **level**
(`policy/level.py`) is fast. Due times are planned with the **margin**. The **bias** corrects the
capacity for the time that stalls take.

A sample of a size hardly known that takes far longer than other sizes let expect is believed only
if it repeats, as a stall is. The first calls of all may take ten times as long as later ones, while
libraries start their threads and memory is touched for the first time. They are forgotten once a
batch of the same size takes far less, unless there have been others meanwhile.
"""

from __future__ import annotations

from bisect import bisect_right
from math import exp, log

from carpool.policy.level import CostLevel
from carpool.policy.shape import Shape

_LEARNED = 8  # batches after which residuals mean something
_REFRESH, _RARELY = 8, 64  # batches between refreshes of the tables, at first and when much is known
_NEWS = 0.04  # a size not run for long that differs by more, and by more than noise, is looked at at once
_STALLED = 2.0  # times the expected time: beyond it, and 3.5 sigma, a size hardly known is measured again
_COLD = 4.0  # times what a batch of the same size takes: the first ones, beyond it, are forgotten
_BIAS_KEEP = 0.985


class CostModel(CostLevel):
    """Learned seconds of a batch by its size.

    Args:
        limit: Largest size, in units of the requests' sizes.

    Attributes:
        samples: How many batches it has learned from.
        version: Counts the refreshes of the tables.
        shape: Relative times by size.
        longest_s: Expected time of the largest batch.
        shortest_s: That of a batch of 1.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.version = 0
        super().__init__()

    def forget(self) -> None:
        super().forget()
        self.samples = 0
        self.version += 1
        self.shape = Shape(self.limit)
        self.longest_s = self.shortest_s = 1e-6
        self._measured = self._expected = 0.0
        self._was_long = False  # whether the last sample of a size hardly known was far longer than expected
        self._doubted: set[int] = set()  # knots at which a sample was doubted, which happens once
        self._first: list[tuple[int, float, bool]] = []  # sizes, seconds and whether they are sure, up to _LEARNED
        self._unfitted = 0
        self._level_fitted = 1.0
        self._knots = self.shape.knots
        self._at = [1e-6] * len(self._knots)
        self._rise = [0.0] * len(self._knots)  # per unit of size, from each knot to the next

    @property
    def largest(self) -> int:
        """The largest size sampled so far."""
        return self.shape.largest

    @property
    def setup_s(self) -> float:
        """Seconds of a batch that do not depend on its size."""
        return self.shape.setup * self.level

    @property
    def bias(self) -> float:
        """Expected over measured time in the long run, at most 1: stalls take the rest."""
        return min(1.0, self._expected / self._measured) if self._measured else 1.0

    def curve(self) -> list[tuple[int, float]]:
        """Return the expected seconds at each size that has an entry of its own."""
        return list(zip(self._knots, self._at, strict=True))

    def points(self) -> list[tuple[int, float, float]]:
        """Return the sizes that were seen, the mean seconds there, and how often lately."""
        return [(n, self.level * mean, count) for n, mean, count in self.shape.measured()]

    def seconds(self, n: float) -> float:
        """Return the expected time of a batch of size `n` >= 1.

        The size may be a fraction, where it is an expectation itself.
        """
        i = self.shape.index(int(n))
        return self._at[i] + self._rise[i] * (n - self._knots[i])

    def measured(self, n: int) -> float:
        """Return how often batches of about size `n` were measured."""
        return self.shape.counts[self.shape.nearest(n)]

    def known(self, n: int) -> float:
        """Return how often that was, or 0 if it is too long ago to count."""
        return self.shape.known(self.shape.nearest(n))

    def largest_within(self, seconds: float) -> int:
        """Return the largest size expected to take no longer than `seconds`; 0 if there is none."""
        i = bisect_right(self._at, seconds) - 1
        if i < 0 or i == len(self._at) - 1:
            return self._knots[i] if i >= 0 else 0
        n = self._knots[i] + int((seconds - self._at[i]) / self._rise[i])
        return min(n, self._knots[i + 1] - 1)

    def add(self, n: int, seconds: float, sure: bool = False, is_first: bool = False) -> None:
        """Learn from a batch.

        Args:
            n: Its size.
            seconds: How long it took.
            sure: Whether it was run more than once, and this is the shortest time.
            is_first: Whether it was the first one of about its size on its worker.
        """
        seconds = max(seconds, 1e-9)
        knot = self.shape.nearest(n)
        if not self._teaches(knot, seconds, self.seconds(n), is_first):
            return
        if not self.samples:
            self.shape.start(n, seconds)
            self._tabulate()
        elif self._first:
            self._forget_cold(n, seconds)
        count = self.shape.known(knot)
        if not sure and (count < 2.0 or self.samples < _LEARNED) and self._doubtful(n, seconds):
            return
        self.samples += 1
        is_news = self.shape.counts[knot] < 1.0
        if self.samples < _LEARNED:
            self._first.append((n, seconds, sure))
        else:
            self._first.clear()
        if self.samples > _LEARNED:
            expected = self.seconds(n) * self.level / self._level_fitted  # the table lags behind a little
            self._measured = _BIAS_KEEP * self._measured + seconds
            self._expected = _BIAS_KEEP * self._expected + expected
            self._learn_margin(seconds / expected)
            believed = self._learn_level(log(min(max(seconds / expected, 0.4), 2.5)), count)
            if believed is None:
                return
            is_news |= not count and abs(believed) > 2.0 * self.cv + _NEWS
            seconds = expected * exp(believed)
        self.shape.add(n, seconds / self.level, self.cv)
        self._unfitted += 1
        moved = abs(self.level - self._level_fitted) > 0.04 * self._level_fitted
        due = self._unfitted >= min(_RARELY, max(_REFRESH, self.samples // 8))
        if due or self.samples < 2 * _LEARNED or is_news or moved:
            self.shape.fit(self.cv)
            self._tabulate()

    def split(self, part_s: float, fixed_s: float, unit_s: float) -> None:
        """Have a part of all times so far depend on the size; see `Shape.split`."""
        if self.samples:
            self._first.clear()  # they were measured as a whole
            self.shape.split(part_s / self.level, fixed_s / self.level, unit_s / self.level)
            self.shape.fit(self.cv)
            self._tabulate()

    def _forget_cold(self, n: int, seconds: float) -> None:
        """Forget the first batches that took far longer than this one, if all were of its size.

        Where there have been others, each size may be slow the first time, as kernels are compiled
        for it, and what is slow once is doubted there.
        """
        warm = [each for each in self._first if each[2] or each[1] <= _COLD * seconds]
        if len(warm) == len(self._first) or any(each[0] != n for each in self._first):
            return
        self._first = warm
        self.shape = Shape(self.limit)
        self.shape.start(*(warm[0][:2] if warm else (n, seconds)))
        for size, measured_s, _ in warm:
            self.shape.add(size, measured_s, self.cv)
        self.shape.fit(self.cv)
        self._tabulate()

    def _doubtful(self, n: int, seconds: float) -> bool:
        """Report whether a size hardly known took so long that the sample is not believed.

        The batch may have stalled, or have been the first of its size, for which kernels are
        compiled. If it were believed, it might keep batches of that size from ever being tried
        again. But two in a row mean a change, of one size or, beyond a knee, of several.
        """
        knot = self.shape.nearest(n)
        is_long = seconds >= max(_STALLED, exp(3.5 * self.cv)) * self.seconds(n)
        is_doubtful = is_long and not self._was_long and knot not in self._doubted
        self._was_long = is_long
        if is_doubtful:
            self._doubted.add(knot)
        return is_doubtful

    def _tabulate(self) -> None:
        """Make the tables of expected times from the shape and the level."""
        self._unfitted = 0
        self.version += 1
        level = self._level_fitted = self.level
        at = self._at = [y * level for y in self.shape.at]
        self.shortest_s, self.longest_s = at[0], at[-1]
        knots = self._knots
        self._rise = [(at[i + 1] - at[i]) / (knots[i + 1] - knots[i]) for i in range(len(at) - 1)]
        self._rise.append(self.shape.slope * level)
