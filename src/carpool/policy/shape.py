"""How the time of a batch depends on its size: an affine fit, corrected size by size.

The curve is learned, and never falls.

Real curves are not straight: kernels work in tiles, caches and memory have knees. So the estimate
at a size is what the straight line says times a learned ratio. The line is a ridge regression that
forgets (half of it in 46 batches) and is pulled toward its former slope, so that batches of one
size alone do not destroy the split into set-up and per-item cost. The ratio at a size is shrunk
toward 1 as far as the measurements are noisy and few, and pooled with its neighbours under strong
noise. Between sizes that were seen times are interpolated (not ratios: where the line is a bad fit,
these would bend), and all are made monotone by pooling adjacent violators (isotonic regression:
Barlow et al. 1972), since more items never take less time.

What was measured at a size counts for the next `_FRESH` batches of any size. Later it is a guess:
it stands while nothing contradicts it, gives way to what was measured since at other sizes, and the
next batch of that size takes its place. `policy/batch_size.py` has such a size run again.

The table has at most `MOST_KNOTS` knots, so that a refresh costs the same at a limit of 64 and of a
million.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise

MOST_KNOTS = 64
_DENSE = 32  # with more sizes than knots, sizes up to this have one each
_KEEP = 0.985  # weight of the former samples when a new one comes
_RIDGE = 0.05  # pull toward the former slope, as a share of the mean size squared
_SURE_CV = 0.04  # noise at which a size seen once counts as much as the line
_POOLING_CV = 0.12  # above this noise, neighbouring sizes are averaged ...
_POOLING_WIDTH = 0.15  # ... as far as this share of the size
_STEADY_CV = 0.05  # below it, a mean over 16 samples is exact enough and follows sooner
_FRESH = 128  # batches, of any size, for which a sample counts: after that its size is measured anew
_GUESSED = 0.001  # weight of a time that was not measured lately, which gives way to those that were


def knots_for(limit: int) -> list[int]:
    """Return at most `MOST_KNOTS` sizes from 1 to `limit`: all, or small ones and likely tile ends.

    Above `_DENSE` the knots are multiples of a step that doubles with each octave where it must,
    and the size after each: a tile that ends at a multiple is seen from both sides. Beyond two
    millions they are powers of two alone.
    """
    if limit <= MOST_KNOTS:
        return list(range(1, limit + 1))
    octaves = (limit - 1).bit_length() - (_DENSE - 1).bit_length()
    per_octave = 1
    while 4 * per_octave * octaves <= MOST_KNOTS - _DENSE:
        per_octave *= 2
    has_both_sides = 2 * per_octave * octaves <= MOST_KNOTS - _DENSE  # else there is room for ends only
    knots = set(range(1, _DENSE + 1)) | {limit}
    start = _DENSE
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
        self._dense = limit if limit <= MOST_KNOTS else _DENSE  # up to here, every size is a knot

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


class Shape(Knots):
    """Relative time of a batch by its size, 1 to `limit`.

    Attributes:
        at: Their relative times, never falling.
        counts: How often each was sampled, since it was measured anew after a long time without.
        setup: The straight line's time of an empty batch, in the same relative units.
        slope: The straight line's time per unit of size.
        largest: The largest size sampled so far.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(limit)
        self.at = [1e-6] * len(self.knots)
        self.counts = [0.0] * len(self.knots)
        self.setup = self.slope = 0.0
        self.largest = 1
        self._local = [0.0] * len(self.knots)  # mean of what was measured there
        self._added = 0  # how many samples there have been, of all sizes
        self._added_at = [0] * len(self.knots)  # which of them was the last one there
        self._neighbours = [
            (
                bisect_left(self.knots, k - int(_POOLING_WIDTH * k)),
                bisect_right(self.knots, k + int(_POOLING_WIDTH * k)),
            )
            for k in self.knots
        ]
        self._w = self._n = self._nn = self._d = self._nd = 0.0  # sums of 1, n, n², d, n·d, forgotten

    def measured(self) -> list[tuple[int, float, float]]:
        """Return the sizes that were seen, the mean of what was measured there, and how often."""
        return [each for each in zip(self.knots, self._local, self.counts, strict=True) if each[2] > 0]

    def start(self, n: int, seconds: float) -> None:
        """Learn from the very first sample, most of which is taken to be set-up."""
        self.slope = 0.15 * seconds / n
        self.setup = 0.85 * seconds
        self.fit(0.0)

    def add(self, n: int, seconds: float, cv: float) -> None:
        """Learn from a batch.

        Args:
            n: Its size.
            seconds: How long it took, in units of the present level.
            cv: The coefficient of variation of the noise.
        """
        self.largest = max(self.largest, n)
        self._w = _KEEP * self._w + 1.0
        self._n = _KEEP * self._n + n
        self._nn = _KEEP * self._nn + n * n
        self._d = _KEEP * self._d + seconds
        self._nd = _KEEP * self._nd + n * seconds
        i = self.nearest(n)
        if n != self.knots[i]:
            seconds *= (self.setup + self.slope * self.knots[i]) / (self.setup + self.slope * n)
        count = self.known(i)
        self.counts[i] = count + 1.0
        self._added += 1
        self._added_at[i] = self._added
        self._local[i] += (seconds - self._local[i]) / (min(count, _memory(cv) - 1.0) + 1.0)

    def split(self, part: float, fixed: float, slope: float) -> None:
        """Have a part of all times so far depend on the size.

        Args:
            part: What has been in every time, up to now of any size.
            fixed: What takes its place whatever the size.
            slope: What takes its place for each unit.
        """
        more = fixed - part
        self._d = max(self._d + more * self._w, fixed * self._w) + slope * self._n
        self._nd = max(self._nd + more * self._n, fixed * self._n) + slope * self._nn
        self._local = [max(local + more, fixed) + slope * n for n, local in zip(self.knots, self._local, strict=True)]
        self.counts = [min(count, 1.0) for count in self.counts]
        self.slope += slope

    def known(self, i: int) -> float:
        """Return how often a knot was sampled, or 0 if that was too long ago to count.

        A change that came since is found out only if that size is run again.
        """
        return self.counts[i] if self._added - self._added_at[i] < _FRESH else 0.0

    def fit(self, cv: float) -> None:
        """Make the table from what is known now."""
        if self._w:
            self._fit_line()
        line = [self.setup + self.slope * n for n in self.knots]
        long_ago = self._added - _FRESH
        weights = [
            min(count + _GUESSED, 16.0) if at > long_ago else _GUESSED
            for count, at in zip(self.counts, self._added_at, strict=True)
        ]
        values = _interpolated(self._known_ratios(cv), line, self.knots)
        self.at = _rising([max(value, 1e-9) for value in values], weights)

    def _fit_line(self) -> None:
        """Fit the straight line by ridge regression."""
        mean_n, mean_d = self._n / self._w, self._d / self._w
        spread = self._nn - self._w * mean_n * mean_n
        joint = self._nd - self._w * mean_n * mean_d
        ridge = _RIDGE * (mean_n * mean_n + 1.0)
        slope = (joint + ridge * self.slope) / (spread + ridge)
        self.slope = min(max(slope, 0.0), mean_d / mean_n)
        self.setup = max(mean_d - self.slope * mean_n, 0.0)

    def _known_ratios(self, cv: float) -> list[tuple[int, float]]:
        """Return, for each knot that was sampled, what was measured over what the line says."""
        memory = _memory(cv)
        weights = [min(count, memory) for count in self.counts]
        sums = [
            w * local / (self.setup + self.slope * n) if w else 0.0
            for w, local, n in zip(weights, self._local, self.knots, strict=True)
        ]
        if cv + 0.01 > _POOLING_CV:
            weights, sums = ([sum(of[lo:hi]) for lo, hi in self._neighbours] for of in (weights, sums))
        doubt = (cv / _SURE_CV) ** 2
        return [
            (i, 1.0 + w / (w + doubt) * (s / w - 1.0)) for i, (w, s) in enumerate(zip(weights, sums, strict=True)) if w
        ]


def _memory(cv: float) -> float:
    """Return over how many samples a size's mean reaches back."""
    return 16.0 if cv < _STEADY_CV else 64.0


def _interpolated(known: list[tuple[int, float]], line: list[float], knots: list[int]) -> list[float]:
    """Return the values at all knots: the line's times the known ratios.

    Between two known ones they are on a straight line, outside of all in proportion to `line`.
    """
    if not known:
        return line
    ratio = known[0][1]
    last, last_ratio = known[-1]
    values = [ratio * y for y in line]
    for (i, left), (j, right) in pairwise(known):
        begin, end = line[i] * left, line[j] * right
        step = (end - begin) / (knots[j] - knots[i])
        for k in range(i, j):
            values[k] = begin + step * (knots[k] - knots[i])
    values[last:] = [last_ratio * y for y in line[last:]]
    return values


def _rising(values: list[float], weights: list[float]) -> list[float]:
    """Return the closest sequence that never falls, by weighted squares.

    The algorithm is "pool adjacent violators".
    """
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
