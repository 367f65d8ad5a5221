"""A histogram of durations, cheap to add to: a few integer operations for one, or for many."""

from __future__ import annotations

from collections.abc import Sequence

_SMALLEST_S = 0.00025
_DURATION_BUCKETS = 17
DURATION_BOUNDS = tuple(_SMALLEST_S * 2**k for k in range(_DURATION_BUCKETS))
"""The upper bounds of the buckets of duration histograms: from 250 µs, doubling, to 16 s."""


class Durations:
    """A histogram of durations in doubling buckets."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (_DURATION_BUCKETS + 1)
        self.sum_s = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        """Count a duration `times` times."""
        # Bucket k holds (0.25 ms·2^(k-1), 0.25 ms·2^k]. Truncation puts a duration that is just on
        # a bound one bucket too high, which does not matter.
        k = int(seconds / _SMALLEST_S).bit_length()
        self.counts[k if k < _DURATION_BUCKETS else _DURATION_BUCKETS] += times
        self.sum_s += seconds * times

    def add_since(self, now: float, starts: Sequence[float]) -> None:
        """Count the durations from each of `starts` to `now`."""
        before = starts[0]
        times = starts.count(before)
        if times == len(starts):  # as for requests that came in one turn of the loop
            self.add(now - before, times)
            return
        times = 0
        for start in starts:
            if start != before:  # mostly there are few different values
                self.add(now - before, times)
                before = start
                times = 0
            times += 1
        self.add(now - before, times)

    @property
    def count(self) -> int:
        """How many durations were counted."""
        return sum(self.counts)

    @property
    def mean_s(self) -> float:
        """The mean of the durations; 0 if there are none."""
        return self.sum_s / self.count if self.count else 0.0
